"""Bad input gets an error that says what was wrong, with which value."""

import pytest
import torch
from oracle import make_map

from schoenbat import kernelized_attention, rmfa


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


def test_head_dim_of_the_map():
    with pytest.raises(ValueError, match="head_dim = 5, query and key have 4"):
        rmfa(*inputs(), make_map("exact-low", 5, 12))


def test_number_of_maps():
    with pytest.raises(ValueError, match="num_heads = 2 maps, but there are 3 key heads"):
        rmfa(*inputs(), make_map("exact-low", 4, 12, num_heads=2))
