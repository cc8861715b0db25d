"""Attentions by name with options."""

import pickle

import pytest
import torch

from schoenbat.modules import SchoenbAt
from schoenbat.registry import attention_names, build_attention, parse_attentions

CAUSAL = [name for name in attention_names() if name not in ("nystromformer", "skyformer")]


@pytest.fixture
def inputs():
    return torch.randn(3, 2, 2, 7, 8, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize("name", attention_names())
def test_every_attention_has_the_same_call(name, inputs):
    attention = build_attention(name, head_dim=8, num_heads=2, max_length=16)
    mask = torch.ones(2, 7, dtype=torch.bool)
    is_causal = name in CAUSAL
    output = attention(*inputs, key_mask=mask, query_mask=mask, is_causal=is_causal, enable_gqa=False)
    assert output.shape == inputs[2].shape
    assert output.isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_makes_every_call_causal(name, inputs):
    torch.manual_seed(0)
    attention = build_attention(f"{name}:causal=true", head_dim=8, num_heads=2).eval()
    query, key, value = inputs
    changed = value.clone()
    changed[:, :, 4:] += 1
    before, after = attention(query, key, value), attention(query, key, changed)
    torch.testing.assert_close(before[:, :, :4], after[:, :, :4])
    assert not torch.allclose(before[:, :, 4:], after[:, :, 4:])
    copy = pickle.loads(pickle.dumps(attention))
    assert torch.equal(copy(query, key, value), before)


@pytest.mark.parametrize("name", attention_names())
@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (torch.ones(2, 9, dtype=torch.bool), r"query_mask must have shape \(2, 7\)"),
        (torch.ones(2, 7), "bool"),
    ],
)
def test_a_query_mask_is_checked(name, mask, problem, inputs):
    with pytest.raises((ValueError, TypeError), match=problem):
        build_attention(name, head_dim=8, num_heads=2)(*inputs, query_mask=mask)


@pytest.mark.parametrize("name", sorted({*attention_names()} - {*CAUSAL}))
def test_what_has_no_causal_form_says_so(name, inputs):
    for option in ("true", "both"):
        with pytest.raises(ValueError, match="no causal form"):
            build_attention(f"{name}:causal={option}", head_dim=8, num_heads=2)
    with pytest.raises(ValueError, match="no causal form"):
        build_attention(name, head_dim=8, num_heads=2)(*inputs, is_causal=True)


def test_without_causal_the_future_is_seen(inputs):
    query, key, value = inputs
    changed = value.clone()
    changed[:, :, 4:] += 1
    attention = build_attention("mean:causal=false", head_dim=8, num_heads=2)
    assert not torch.allclose(attention(query, key, value), attention(query, key, changed))


def test_options_reach_the_class_with_their_types():
    text = (
        "schoenbat:kernel=inv, construction=paper, num_features=32, post=false, scale=none, eps=1e-6, seed=3"
    )
    attention = build_attention(text, head_dim=8, num_heads=2)
    assert isinstance(attention, SchoenbAt)
    expected = SchoenbAt(8, 2, 32, "inv", construction="paper", post=False, scale=None, eps=1e-6, seed=3)
    assert repr(attention) == repr(expected)
    query, key, value = torch.randn(3, 2, 2, 7, 8).unbind()
    assert torch.equal(attention(query, key, value), expected(query, key, value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sofmax", "unknown attention 'sofmax'; known are softmax, reformer, .*, none"),
        ("", "unknown attention ''"),
        (
            "softmax:temperature=2",
            "unknown option 'temperature' of attention 'softmax'; known are naive, qk_norm, scale, .*causal",
        ),
        ("schoenbat:head_dim=4", "unknown option 'head_dim' .* num_features, kernel, construction"),
        ("schoenbat:kernel", "has no value; write kernel=value"),
        ("mean:causal=yes", "causal of attention 'mean' is one of false, true, both; got 'yes'"),
        ("mean:causal=1", "causal of attention 'mean' is one of false, true, both; got 1"),
        ("mean:rotary=both", "rotary of attention 'mean' is one of false, true; got 'both'"),
        ("mean:conv=0", "conv must be an integer of at least 1, got 0"),
        ("softmax:qk_norm=rows", "qk_norm is True, False, 'token', 'l2' or 'batch', got 'rows'"),
        ("softmax:naive=no", "attention 'softmax:naive=no': naive must be True or False, got 'no'"),
        ("schoenbat:rotary=true", "rotary=true needs normalization=l2"),
        ("softmax:rotary=true,qk_norm=true", "rotary=true needs qk_norm=l2"),
        ("softmax:scale=learned", "scale is 'auto', a float or None, got 'learned'"),
        ("schoenbat:kernel=1-x", "attention 'schoenbat:kernel=1-x': .*must not be negative"),
        ("schoenbat:kernel=foo", "unknown kernel 'foo': .* a name, or a formula that needs no radius"),
        ("schoenbat:kernel=polynomial(2)", r"a formula .* as in kernel=\(2\+x\)\*\*2"),
        ("schoenbat:kernel=1/(2-x)", r"too large for '1/\(2-x\)': .* needs no radius, .*: give any other to"),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_known(text, problem):
    with pytest.raises(ValueError, match=problem):
        build_attention(text, head_dim=8, num_heads=2)


def test_causal_both_needs_an_even_number_of_heads():
    with pytest.raises(ValueError, match="halves the heads, but there are 3"):
        build_attention("softmax:causal=both", head_dim=8, num_heads=3)


def test_an_option_is_given_once():
    with pytest.raises(ValueError, match="option 'kernel' of attention 'schoenbat' is given twice"):
        build_attention("schoenbat:kernel=inv,kernel=exp", head_dim=8, num_heads=2)


def test_attentions_of_a_command_line():
    assert parse_attentions(["all"]) == attention_names()
    assert parse_attentions(["softmax, rfa", "softmax"]) == ("softmax", "rfa")
    assert parse_attentions(["schoenbat:kernel=inv, post=false,rfa:gate=false"]) == (
        "schoenbat:kernel=inv, post=false",
        "rfa:gate=false",
    )
    assert parse_attentions(["all", "rfa:seed=1"]) == (*attention_names(), "rfa:seed=1")


def test_a_kernel_may_be_a_formula():
    attention = build_attention("schoenbat:kernel=(2+x)**2,num_features=32", head_dim=8, num_heads=2)
    assert attention.kernel.coefficients(3).tolist() == pytest.approx([4, 4, 1, 0], abs=1e-12)
    assert build_attention("schoenbat:kernel=exp", head_dim=8, num_heads=2).kernel.name == "exp"


def test_layers_that_draw_something_draw_their_own():
    from schoenbat.registry import with_seed

    texts = [with_seed("performer:num_features=16") for _ in range(2)]
    first, second = (build_attention(text, 8, 2) for text in texts)
    assert not torch.equal(first.directions, second.directions)
