"""Softmax attention against the formula, written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from oracle import gradients

from schoenbat import SchoenbAt
from schoenbat.baselines import Softmax

KEY_MASK = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
VARIANTS = [{}, {"naive": True}, {"qk_norm": True}, {"naive": True, "qk_norm": True}]


def written_out(query, key, value, visible):
    logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ value


def inputs(num_queries=6, num_keys=6, heads=2, kv_heads=2, value_dim=5):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, num_queries, 4), (kv_heads, num_keys, 4), (kv_heads, num_keys, value_dim)
    return [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def make(**options):
    """An attention with parameters that have left their first values."""
    attention = Softmax(4, 2, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    return attention.double()


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("num_queries", [1, 4, 6, 9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 0, 2])
def test_equals_the_formula(naive, num_queries, is_causal, masked, window):
    query, key, value = inputs(num_queries)
    visible = torch.ones(3, 1, num_queries, 6, dtype=torch.bool)
    ahead = torch.arange(6) - (torch.arange(num_queries)[:, None] + 6 - num_queries)
    if is_causal:  # the last query sees the last key
        visible = visible & (ahead <= 0)
    if window is not None:
        visible = visible & (ahead.abs() <= window)
    if masked:
        visible = visible & KEY_MASK[:, None, None]
    attention = Softmax(4, 2, naive=naive, window=window)
    output = attention(query, key, value, key_mask=KEY_MASK if masked else None, is_causal=is_causal)
    torch.testing.assert_close(output, written_out(query, key, value, visible))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-5, 1e-3, 30.0])
def test_masked_keys_weigh_nothing_at_any_scale(is_causal, scale):
    query, key, value = inputs(6)
    attention = Softmax(4, 2, scale=scale)
    loud = torch.where(KEY_MASK[:, None, :, None], value, 1e6)
    output = attention(query, key, loud, key_mask=KEY_MASK, is_causal=is_causal)
    visible = KEY_MASK[:, None, None] & (torch.ones(6, 6).tril().bool() if is_causal else True)
    logits = (scale * query @ key.mT).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(output, logits.softmax(-1).nan_to_num(0.0) @ value)


@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_get_no_mask(monkeypatch, is_causal):
    """The fastest of them take none, and one for each query and key would be larger than all else."""
    given, attend = [], F.scaled_dot_product_attention

    def noted(*rows, **options):
        given.append(options.get("attn_mask"))
        return attend(*rows, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    query, key, value = inputs(6)
    Softmax(4, 2)(query, key, value, key_mask=KEY_MASK, is_causal=is_causal)
    assert given == [None]


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize(("mode", "scale"), [(True, "auto"), ("l2", "auto"), ("token", 3.0), ("l2", None)])
def test_normalised_equals_the_formula(naive, mode, scale):
    query, key, value = inputs(value_dim=4)
    attention = make(naive=naive, qk_norm=mode, scale=scale)
    assert (attention.rho is not None) == (scale == "auto")

    def unit(x):
        x = x if mode == "l2" else x - x.mean(-1, keepdim=True)
        return x / x.norm(dim=-1, keepdim=True)

    factor = 0.5 if scale is None else scale  # 1/√d
    if attention.rho is not None:
        factor = 4 * (20 * attention.rho).exp()[:, None, None]
    a = (factor * unit(query) @ unit(key).mT).softmax(-1) @ value
    gamma, beta = attention.post.gamma[:, None], attention.post.beta[:, None]
    expected = gamma * a * (a.square() + 1e-6).pow((beta - 1) / 2)
    torch.testing.assert_close(attention(query, key, value), expected)


def test_normalised_is_schoenbat_with_the_exact_kernel():
    """Same parameters by the same names; only what a finite map gets wrong is left between the two."""
    query, key, value = (torch.randn(2, 2, 40, 4) for _ in range(3))
    exact = Softmax(4, 2, qk_norm=True)
    exact.rho.data.copy_(torch.tensor([-0.08, -0.06]))
    exact.post.gamma.data.uniform_(0.5, 2)
    errors = []
    for num_features in (64, 4096):
        approximate = SchoenbAt(4, 2, num_features, seed=0)
        approximate.load_state_dict(approximate.state_dict() | exact.state_dict())
        torch.testing.assert_close(approximate.scale, exact.scale)
        difference = approximate(query, key, value) - exact(query, key, value)
        errors.append(difference.abs().mean() / exact(query, key, value).abs().mean())
    assert errors[1] < errors[0] / 4
    assert errors[1] < 0.05


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_formula(options, is_causal):
    tensors = [x[:, :, :4].requires_grad_() for x in inputs(value_dim=4)]
    attention = make(**options)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)

    def call(*tensors):
        return attention(*tensors, key_mask=mask, is_causal=is_causal)

    assert torch.autograd.gradcheck(call, tensors)


def test_naive_keeps_no_scores_for_the_backward_pass():
    query, key, value = (torch.randn(1, 1, 256, 4, requires_grad=True) for _ in range(3))
    sizes = []

    def note(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = Softmax(4, 1, naive=True)(query, key, value)
    assert max(sizes, default=0) < 256 * 256
    output.sum().backward()
    assert query.grad.abs().sum() > 0


@pytest.mark.parametrize("naive", [False, True])
def test_dropout_thins_out_the_weights_in_training_only(naive):
    query, key, _ = inputs()
    attention = Softmax(4, 2, naive=naive, dropout=0.4)
    one_hot = torch.eye(6, dtype=torch.float64).expand(3, 2, 6, 6)
    weights = Softmax(4, 2)(query, key, one_hot)
    assert torch.equal(attention.eval()(query, key, one_hot), Softmax(4, 2, naive=naive)(query, key, one_hot))
    attention.train()
    thinned = torch.stack([attention(query, key, one_hot) for _ in range(200)])
    kept = thinned != 0
    torch.testing.assert_close(thinned, torch.where(kept, weights / 0.6, 0.0))
    # 43,200 weights: the share has a standard deviation of 0.0024.
    assert abs(kept.double().mean() - 0.6) < 0.01


def test_dropout_is_the_same_when_scores_are_formed_again():
    tensors = [x.requires_grad_() for x in inputs()]
    attention = Softmax(4, 2, naive=True, dropout=0.5)
    identity = torch.eye(6, dtype=torch.float64).expand(3, 2, 6, 6)
    torch.manual_seed(0)
    weights = attention(tensors[0], tensors[1], identity).detach()
    torch.manual_seed(0)
    _, (_, _, value_grad) = gradients(lambda: attention(*tensors), tensors)
    direction = torch.randn(3, 2, 6, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(value_grad, weights.mT @ direction)


@pytest.mark.parametrize("is_causal", [False, True])
def test_query_heads_share_key_heads(is_causal):
    query, key, value = inputs(heads=4, kv_heads=2)
    shared = Softmax(4, 4)(query, key, value, is_causal=is_causal, enable_gqa=True)
    repeated = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    torch.testing.assert_close(shared, Softmax(4, 4)(query, *repeated, is_causal=is_causal))


def test_its_text_names_the_options_that_are_set():
    assert repr(Softmax(4, 2)) == "Softmax(head_dim=4, num_heads=2)"
    assert repr(Softmax(4, 2, naive=True, dropout=0.1)) == (
        "Softmax(head_dim=4, num_heads=2, naive=True, dropout=0.1)"
    )
    assert repr(Softmax(4, 2, window=3)) == "Softmax(head_dim=4, num_heads=2, window=3)"


def test_statistics_of_the_batch_leave_masked_rows_out_and_are_not_for_causal_training():
    query, key, value = inputs(value_dim=4)
    attention = make(qk_norm="batch").train()
    changed = [x.masked_fill(~KEY_MASK[:, None, :, None], 7.0) for x in (query, key, value)]
    masks = {"key_mask": KEY_MASK, "query_mask": KEY_MASK}
    before = attention(query, key, value, **masks)
    after = attention(*changed, **masks)
    real = KEY_MASK[:, None, :, None]
    torch.testing.assert_close(after.masked_fill(~real, 0), before.masked_fill(~real, 0))
    with pytest.raises(ValueError, match="leaks the future"):
        attention(query, key, value, is_causal=True)
