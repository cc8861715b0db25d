"""Bad input gets an error that says what was wrong, with which value."""

import pytest
import torch
from oracle import make_map

from schoenbat import MaclaurinFeatures, RMFAState, kernelized_attention, rmfa


@pytest.fixture(params=["rmfa", "exact"])
def attend(request):
    if request.param == "exact":
        return kernelized_attention
    features = make_map("exact-low", 4, 12)
    return lambda *inputs, **options: rmfa(*inputs, features, **options)


def inputs(query=(2, 3, 5, 4), key=(2, 3, 6, 4), value=(2, 3, 6, 4), dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in (query, key, value)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"key": (2, 3, 6, 5)}, "same head dimension, got 4 and 5"),
        ({"value": (2, 3, 7, 4)}, "same length, got 6 and 7"),
        ({"key": (1, 3, 6, 4)}, r"key has leading dimensions \(1,\), query has \(2,\)"),
        ({"key": (3, 6, 4)}, "as many dimensions as query"),
        ({"query": (4,), "key": (4,), "value": (4,)}, r"\(\.\.\., heads, length, dim\)"),
        ({"value": (2, 1, 6, 4)}, "key has 3 heads and value 1"),
        ({"query": (2, 6, 5, 4)}, "enable_gqa=True"),
    ],
)
def test_shapes(attend, shapes, message):
    with pytest.raises(ValueError, match=message):
        attend(*inputs(**shapes))


def test_uneven_groups(attend):
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads evenly"):
        attend(*inputs(query=(2, 4, 5, 4)), enable_gqa=True)
    with pytest.raises(
        ValueError, match="cannot share 3 key heads evenly"
    ):  # nor would it help to ask for it
        attend(*inputs(query=(2, 2, 5, 4)))


def test_dtypes(attend):
    query, key, value = inputs()
    with pytest.raises(TypeError, match=r"key is torch\.float64 but query is torch\.float32"):
        attend(query, key.double(), value)
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int64"):
        attend(query.long(), key.long(), value.long())


@pytest.mark.parametrize("shape", [(2, 5), (6,), (2, 3, 6), (3, 6)])
def test_mask_shape(attend, shape):
    with pytest.raises(ValueError, match=r"key_mask must have shape \(2, 6\), got"):
        attend(*inputs(), key_mask=torch.ones(shape, dtype=torch.bool))


def test_mask_dtype(attend):
    with pytest.raises(TypeError, match=r"bool with True = takes part, got torch\.float32"):
        attend(*inputs(), key_mask=torch.ones(2, 6))


def test_one_mask_for_all_batch_rows(attend):
    query, key, value = inputs()
    mask = torch.arange(6)[None] < 4
    torch.testing.assert_close(
        attend(query, key, value, key_mask=mask), attend(query, key, value, key_mask=mask.expand(2, 6))
    )


def test_scale_shape(attend):
    with pytest.raises(ValueError, match=r"one value per query head \(3,\), got shape \(2,\)"):
        attend(*inputs(), scale=torch.ones(2))


def test_a_scale_for_each_of_heads_that_were_compiled_as_any_number(attend):
    query, key, value = inputs()
    for rows in (query, key, value):
        torch._dynamo.maybe_mark_dynamic(rows, 1)
    scale = torch.tensor([0.1, 0.2, 0.3])
    out = torch.compile(attend, fullgraph=True, backend="eager")(query, key, value, scale=scale)
    torch.testing.assert_close(out, attend(query, key, value, scale=scale))


def test_head_dim_of_the_map():
    with pytest.raises(ValueError, match="head_dim = 5, query and key have 4"):
        rmfa(*inputs(), make_map("exact-low", 5, 12))


def test_number_of_maps():
    with pytest.raises(ValueError, match="num_heads = 2 maps, but there are 3 key heads"):
        rmfa(*inputs(), make_map("exact-low", 4, 12, num_heads=2))


@pytest.mark.parametrize(
    "wrong", [None, 1.0, [[1.0]], "query", torch.eye(4).to_sparse(), torch.ones(4, 4).bool()]
)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_tensor_of_numbers_is_named(attend, wrong, name):
    good = dict(zip(("query", "key", "value"), inputs(), strict=True))
    with pytest.raises(
        TypeError, match=f"{name} must be a (tensor|dense tensor|floating-point tensor), got "
    ):
        attend(*(good | {name: wrong}).values())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "2", 1j])
def test_a_scale_is_a_finite_number(attend, scale):
    with pytest.raises((ValueError, TypeError), match="scale must be"):
        attend(*inputs(), scale=scale)


def test_an_overflow_is_an_error_and_not_nan(attend):
    query, key, value = inputs()
    for x in (query, key):
        x[1] *= 1e30
    with pytest.raises(ValueError, match=r"batch row 1 is beyond the range of torch\.float32"):
        attend(query, key, value)


def test_infinite_inputs_are_no_overflow(attend):
    query, key, value = inputs()
    clean = attend(query, key, value)
    value[1, 0, 0, 0] = torch.inf
    assert torch.equal(attend(query, key, value)[0], clean[0])


def test_numbers_whose_sum_overflows_are_no_overflow(attend):
    query, key, _ = inputs()
    value = torch.full((2, 3, 6, 4), 1e37)
    torch.testing.assert_close(attend(query, key, value, scale=1e-3), torch.full((2, 3, 5, 4), 1e37))


def test_a_state_refuses_another_map_and_batch():
    features, other = make_map("exact-low", 4, 12), make_map("exact-low", 4, 13)
    key, value = inputs(dtype=torch.float64)[1:]
    state = RMFAState.zeros(features, 2, 3, 4, dtype=torch.float64).update(key, value, features)
    for call in (lambda: state.read(key, other), lambda: state.update(key, value, other)):
        with pytest.raises(ValueError, match="use the map that it was begun with"):
            call()
    with pytest.raises(ValueError, match="holds 2 batch rows, query has 1"):
        state.read(key[:1], features)
    with pytest.raises(ValueError, match=r"batch rows from 0 to 1, got \[2\]"):
        state.reorder(torch.tensor([2]))
    with pytest.raises(TypeError, match="index must be a tensor of batch rows"):
        state.reorder([0])


@pytest.mark.parametrize("flag", ["is_causal", "enable_gqa"])
def test_a_word_is_no_flag(attend, flag):
    with pytest.raises(ValueError, match=f"{flag} must be True or False, got 'no'"):
        attend(*inputs(), **{flag: "no"})


def test_what_lies_elsewhere_is_named(attend):
    with pytest.raises(ValueError, match="scale is on meta but query is on cpu"):
        attend(*inputs(), scale=torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match=r"the map is on meta, but query is on cpu; move the map"):
        rmfa(*inputs(), MaclaurinFeatures(4, 12, device="meta"))


def test_a_state_is_of_a_map():
    with pytest.raises(TypeError, match="features must be a MaclaurinFeatures"):
        RMFAState.zeros("exp", 1, 1, 4)
