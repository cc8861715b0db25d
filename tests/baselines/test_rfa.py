"""RFA against its features and its recurrence, written out in float64, and against its Gaussian kernel."""

import pytest
import torch
import torch.nn.functional as F

from schoenbat.baselines.rfa import RFA


def inputs(n=9, num_queries=None, batch=3, dtype=torch.float64):
    shapes = (num_queries or n, 4), (n, 4), (n, 5)
    return [torch.randn(batch, 2, *shape, dtype=dtype) for shape in shapes]


def build(**options):
    """With parameters that are not where they start, in float64."""
    attention = RFA(4, 2, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn_like(parameter) / 4
    return attention


def similarity(attention, query, key):
    """``mean_r cos(⟨ω_r, q − k⟩ / σ)``: what the sines and cosines come to. ``(B, H, n_q, n_k)``."""
    query, key = (x / x.square().sum(-1, keepdim=True).sqrt() for x in (query, key))
    difference = query[..., :, None, :] - key[..., None, :, :]
    sigma = attention.log_sigma.exp()[:, None, None, None]
    phase = torch.einsum("bhijd,hrd->bhijr", difference, attention.frequencies) / sigma
    return phase.cos().mean(-1)


def written_out(attention, query, key, value, is_causal):
    """Sequences without padding."""
    weights = similarity(attention, query, key)
    seen = torch.ones_like(weights)
    seen = seen.tril(key.shape[-2] - query.shape[-2]) if is_causal else seen
    floor = seen.sum(-1, keepdim=True) * torch.exp(-2 / attention.log_sigma.exp() ** 2)[:, None, None]
    denominator = torch.maximum((weights * seen).sum(-1, keepdim=True), floor)
    return ((weights * seen) @ value / denominator).nan_to_num(0.0)


def recurrence(attention, query, key, value):
    """With a gate, token after token."""
    sigma = attention.log_sigma.exp()[:, None]
    weights = similarity(attention, query, key)
    entered = torch.zeros(*query.shape[:2], 0, dtype=query.dtype)  # how much of each past key is left
    outputs = []
    for t in range(query.shape[-2]):
        gate = torch.sigmoid((key[:, :, t] * attention.gate_weight).sum(-1) + attention.gate_bias)[..., None]
        entered = torch.cat([gate * entered, 1 - gate], dim=-1)
        now = entered * weights[:, :, t, : t + 1]
        floor = entered.sum(-1, keepdim=True) * torch.exp(-2 / sigma**2)
        sums = (now[..., None] * value[:, :, : t + 1]).sum(-2)
        outputs.append(sums / torch.maximum(now.sum(-1, keepdim=True), floor))
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("n", [1, 9, 64, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_formula(n, is_causal):
    attention, tensors = build(num_features=10), inputs(n)
    output = attention(*tensors, is_causal=is_causal)
    torch.testing.assert_close(output, written_out(attention, *tensors, is_causal))


@pytest.mark.parametrize("n", [1, 9, 150])
def test_the_gate_is_a_recurrence(n):
    attention, tensors = build(num_features=10, gate=True), inputs(n)
    output = attention(*tensors, is_causal=True)
    torch.testing.assert_close(output, recurrence(attention, *tensors))


def test_the_gate_forgets():
    """An open gate keeps all that was, a shut one has the present token alone."""
    attention, (query, key, value) = RFA(4, 2, gate=True).double(), inputs(150)
    with torch.no_grad():
        attention.gate_bias.fill_(-50.0)
    torch.testing.assert_close(attention(query, query, value, is_causal=True), value)
    with torch.no_grad():
        attention.gate_bias.fill_(50.0)
    plain = RFA(4, 2).double()(query, key, value, is_causal=True)
    torch.testing.assert_close(attention(query, key, value, is_causal=True), plain)


def test_a_gate_needs_a_direction():
    with pytest.raises(ValueError, match="use is_causal=True or gate=False"):
        RFA(4, 2, gate=True)(*inputs())


@pytest.mark.parametrize("is_causal", [False, True])
def test_error_against_the_exact_kernel_falls_like_one_over_the_root_of_the_features(is_causal):
    """On unit rows softmax with the scale 1/σ² is the Gaussian kernel, normalised."""
    query, key, value = inputs(32)
    units = [F.normalize(x, dim=-1) for x in (query, key)]
    sigma = 1.2
    exact = F.scaled_dot_product_attention(*units, value, is_causal=is_causal, scale=sigma**-2)

    def error(num_features):
        outputs = []
        for seed in range(20):
            attention = RFA(4, 2, num_features=num_features, seed=seed)
            torch.nn.init.constant_(attention.log_sigma, torch.tensor(sigma).log().item())
            outputs.append(attention.double()(query, key, value, is_causal=is_causal).detach())
        return (torch.stack(outputs) - exact).square().mean().sqrt()

    few, more, many = error(64), error(512), error(4096)
    # Eight times the features: the error divided by √8.
    assert 2 < few / more < 4
    assert 2 < more / many < 4
    assert many < 0.02 * value.std()


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_no_denominator_is_near_zero(sigma):
    """Two features and opposite rows: the estimate of a small weight is far off, and its sum negative."""
    attention = RFA(4, 2, num_features=2).double()
    torch.nn.init.constant_(attention.log_sigma, torch.tensor(sigma).log().item())
    query, key, value = [x.requires_grad_() for x in inputs(200)]
    output = attention(query, key, value)
    similarities = similarity(attention, query, key)
    assert (similarities.sum(-1) < 0).any()
    # |Σ w v| ≤ n · max |v|, divided by n · the floor.
    floor = torch.tensor(-2 / sigma**2).clamp(min=-10.0).exp()
    assert (output.abs().amax() <= value.abs().amax() / floor).all()
    output.sum().backward()
    assert query.grad.isfinite().all()
    assert attention.log_sigma.grad.isfinite().all()


@pytest.mark.parametrize("num_queries", [1, 4, 12])
def test_the_last_query_is_aligned_with_the_last_key(num_queries):
    attention = build()
    tensors = inputs(num_queries=num_queries)
    expected = written_out(attention, *tensors, True)
    torch.testing.assert_close(attention(*tensors, is_causal=True), expected)


@pytest.mark.parametrize("gate", [False, True])
def test_a_query_does_not_see_the_future(gate):
    attention = build(gate=gate)
    query, key, value = inputs(150)
    before = attention(query, key, value, is_causal=True)
    key[:, :, 100:], value[:, :, 100:] = torch.randn_like(key[:, :, 100:]), 1e6
    after = attention(query, key, value, is_causal=True)
    assert torch.equal(before[:, :, :100], after[:, :, :100])


@pytest.mark.parametrize(("is_causal", "gate"), [(False, False), (True, False), (True, True)])
def test_gradients(is_causal, gate):
    attention = build(num_features=8, gate=gate)
    names, parameters = zip(*attention.named_parameters(), strict=True)

    def call(query, key, value, *parameters):
        state = dict(zip(names, parameters, strict=True))
        options = {"is_causal": is_causal}
        return torch.func.functional_call(attention, state, (query, key, value), options)

    tensors = [x.requires_grad_() for x in inputs(4, batch=1)]
    assert torch.autograd.gradcheck(call, (*tensors, *parameters))


def test_the_frequencies_are_drawn_from_the_seed_and_saved():
    first, other = RFA(4, 2, seed=0), RFA(4, 2, seed=1)
    tensors = inputs()
    assert torch.equal(first.train()(*tensors), first.eval()(*tensors))
    assert torch.equal(first(*tensors), RFA(4, 2, seed=0)(*tensors))
    assert not torch.allclose(first(*tensors), other(*tensors))
    assert first.frequencies.shape == (2, 64, 4)
    assert not torch.equal(*first.frequencies)
    other.load_state_dict(first.state_dict())
    assert torch.equal(first(*tensors), other(*tensors))


@pytest.mark.parametrize(("num_features", "problem"), [(0, "at least 2, got 0"), (7, "must be even.*got 7")])
def test_features_come_in_pairs(num_features, problem):
    with pytest.raises(ValueError, match=problem):
        RFA(4, 2, num_features=num_features)
