"""What stands around an attention: positions, directions, convolutions, norms."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from schoenbat.adapters import rotate
from schoenbat.registry import build_attention

MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.fixture
def inputs():
    shape = 3, 2, 2, 7, 8
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


def build(text, **changes):
    torch.manual_seed(0)
    options = {"head_dim": 8, "num_heads": 2} | changes
    return build_attention(text, **options).double().eval()


@pytest.mark.parametrize("dim", [2, 7, 8])
def test_turned_rows_meet_by_their_distance_alone(dim):
    query, key = torch.randn(2, dim, dtype=torch.float64).unbind()
    queries, keys = (rotate(x.expand(9, dim)) for x in (query, key))
    logits = queries @ keys.mT
    for distance in range(-8, 9):
        diagonal = logits.diagonal(distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert_close(queries.norm(dim=-1), query.norm().expand(9))
    assert not torch.allclose(logits[0, 0], logits[0, 5])


def test_positions_may_begin_later():
    x, y = torch.randn(2, 2, 10, 8, dtype=torch.float64).unbind()
    assert_close(rotate(x[:, 4:], first=4), rotate(x)[:, 4:])
    assert_close(rotate(x, 1000) @ rotate(y, 1000).mT, rotate(x) @ rotate(y).mT)


@pytest.mark.parametrize("name", ["schoenbat:normalization=l2,seed=1", "softmax:qk_norm=l2"])
def test_rotary_turns_unit_rows(name, inputs):
    query, key, value = inputs
    unit = [rotate(F.normalize(x, dim=-1)) for x in (query, key)]
    expected = build(name)(*unit, value, key_mask=MASK)
    separator = "," if ":" in name else ":"
    assert_close(build(f"{name}{separator}rotary=true")(*inputs, key_mask=MASK), expected)


def test_rotary_puts_the_last_query_beside_the_last_key(inputs):
    query, key, value = inputs
    attention = build("softmax:rotary=true,causal=true")
    assert_close(attention(query[..., -3:, :], key, value), attention(query, key, value)[..., -3:, :])


@pytest.mark.parametrize("name", ["schoenbat", "softmax", "performer"])
@pytest.mark.parametrize("mask", [None, MASK])
def test_half_of_the_heads_look_back_and_half_ahead(name, inputs, mask):
    attention = build(f"{name}:causal=both")
    query, key, value = inputs
    out = attention(*inputs, key_mask=mask)
    changed = value.clone()
    changed[:, :, 3] += 1
    moved = (attention(query, key, changed, key_mask=mask) - out).abs().amax(-1) > 1e-9  # (B, H, n)
    seen = torch.ones(2, 7, dtype=torch.bool) if mask is None else mask
    positions = torch.arange(7)
    assert not moved[:, 0, positions < 3].any()
    assert not moved[:, 1, positions > 3].any()
    assert moved[:, 0, 6].all()
    assert moved[:, 1, 0].all()
    assert seen[:, 3].all()


def test_both_halves_are_one_attention_on_turned_sequences(inputs):
    attention = build("softmax:causal=both")
    out = attention(*inputs, key_mask=MASK)
    turned = [x.flip(-2).flip(-3) for x in inputs]
    assert_close(attention(*turned, key_mask=MASK.flip(-1)), out.flip(-2).flip(-3))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [1, 4, 5])
def test_a_convolution_of_values_is_added(inputs, is_causal, width):
    value = inputs[2]
    attention, plain = build(f"softmax:conv={width}"), build("softmax")
    expected = plain(*inputs, key_mask=MASK, is_causal=is_causal)
    assert_close(attention(*inputs, key_mask=MASK, is_causal=is_causal), expected)  # it starts at zero
    with torch.no_grad():
        attention.weight.normal_()
    weight = attention.weight.view(2, 8, width)
    behind = width - 1 if is_causal else width // 2
    real = value * MASK[:, None, :, None]
    for position in range(7):
        for tap in range(width):
            if 0 <= (neighbour := position + tap - behind) < 7:
                expected[:, :, position] += weight[..., tap] * real[:, :, neighbour]
    assert_close(attention(*inputs, key_mask=MASK, is_causal=is_causal), expected)


def test_head_norm_brings_rows_to_mean_square_one(inputs):
    out = build("softmax:head_norm=true")(*inputs)
    assert_close(out.square().mean(-1), torch.ones(2, 2, 7, dtype=torch.float64), rtol=1e-4, atol=0)
    plain = build("softmax")(*inputs)
    assert_close(F.normalize(out, dim=-1), F.normalize(plain, dim=-1))


@pytest.mark.parametrize(
    "text",
    ["schoenbat:normalization=l2,rotary=true,conv=3,head_norm=true,causal=both", "mean:conv=3"],
)
def test_gradients_reach_every_parameter(text, inputs):
    attention = build(text)
    attention(*inputs, key_mask=MASK).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert attention.get_parameter("attention.weight" if "head_norm" in text else "weight").grad.any()


def test_what_looks_ahead_has_no_causal_form(inputs):
    with pytest.raises(ValueError, match="no causal form"):
        build("mean:causal=both")(*inputs, is_causal=True)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("rotary=true", "rotary positions belong to one sequence, got 3 queries and 7 keys"),
        ("conv=3", "convolutions of values belong to one sequence"),
        ("causal=both", "heads that look both ways belong to one sequence"),
    ],
)
def test_what_belongs_to_one_sequence_is_refused_between_two(inputs, option, problem):
    query, key, value = inputs
    with pytest.raises(ValueError, match=problem):
        build(f"softmax:{option}")(query[..., :3, :], key, value)


@pytest.mark.parametrize("option", ["conv=3", "causal=both"])
def test_grouped_heads_are_refused_where_each_value_head_counts(inputs, option):
    query, key, value = inputs
    with pytest.raises(ValueError, match="values of 2 heads, got 1; repeat grouped heads first"):
        build(f"softmax:{option}")(query, key[:, :1], value[:, :1], enable_gqa=True)


@pytest.mark.parametrize("option", ["conv=3", "head_norm=true"])
def test_values_of_another_width(inputs, option):
    query, key, value = inputs
    attention = build(f"schoenbat:value_dim=5,{option}")
    assert attention(query, key, value[..., :5]).shape == (2, 2, 7, 5)


def test_a_convolution_of_no_values_is_nothing():
    empty = torch.zeros(2, 2, 0, 8, dtype=torch.float64)
    assert build("softmax:conv=5")(empty, empty, empty).shape == empty.shape
