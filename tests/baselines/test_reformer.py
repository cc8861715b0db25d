"""Reformer's attention against its definition, token by token."""

import functools
import math

import pytest
import torch

from schoenbat.baselines.reformer import Reformer

# Row 0 has holes, row 1 is left-padded, row 2 right-padded.
KEY_MASK = torch.stack([torch.arange(30) % 4 != 1, torch.arange(30) >= 9, torch.arange(30) < 17])


def inputs(n=30, batch=3, head_dim=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 2, n, head_dim, generator=generator, dtype=dtype) for _ in range(3)]


def make(head_dim=6, **options):
    return Reformer(head_dim, 2, **{"chunk_size": 4, **options}).eval()


def one_round(query, value, rotation, chunk_size, is_causal):
    """Output and log Σ exp of each token of one head, ``(n, d)`` each."""
    n, d = query.shape
    half = math.ceil(n / chunk_size) // 2
    rotated = query @ rotation[:, :half].to(query)
    bucket = torch.cat([rotated, -rotated], -1).argmax(-1).tolist() if half else [0] * n
    ranking = sorted(range(n), key=lambda i: (bucket[i], i))
    chunk = {token: rank // chunk_size for rank, token in enumerate(ranking)}
    outputs, log_sums = [], []
    for i in range(n):
        met = [j for j in range(n) if chunk[i] - 1 <= chunk[j] <= chunk[i] and j != i]
        met = [j for j in met if j < i] if is_causal else met
        if not met:
            outputs.append(value[i])
            log_sums.append(torch.tensor(-1e5, dtype=torch.float64))
            continue
        logits = torch.stack([query[i] @ query[j] / query[j].norm() / d**0.5 for j in met])
        outputs.append(logits.softmax(0) @ value[met])
        log_sums.append(logits.logsumexp(0))
    return torch.stack(outputs), torch.stack(log_sums)


def written_out(attention, query, value, is_causal):
    output = torch.empty_like(value)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            rounds = [
                one_round(query[row, head], value[row, head], rotation, attention.chunk_size, is_causal)
                for rotation in attention.rotations[head]
            ]
            outputs, log_sums = (torch.stack(x) for x in zip(*rounds, strict=True))
            output[row, head] = (log_sums.softmax(0)[..., None] * outputs).sum(0)
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [1, 4, 5, 13, 30])
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_equals_the_definition(is_causal, n, num_rounds):
    query, key, value = inputs(n, batch=2)
    attention = make(num_rounds=num_rounds)
    got = attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(got, written_out(attention, query, value, is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_chunk_is_softmax_over_normalised_shared_keys_without_oneself(is_causal):
    query, key, value = inputs()
    logits = query @ torch.nn.functional.normalize(query, dim=-1).mT / 6**0.5
    hidden = torch.eye(30, dtype=torch.bool)
    if is_causal:
        hidden = torch.ones(30, 30, dtype=torch.bool).triu()
        hidden[0, 0] = False  # the first token has nothing but itself
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    got = make(chunk_size=64)(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(got, expected)


def test_a_token_alone_gets_its_own_value():
    query, key, value = inputs()
    mask = torch.zeros(3, 30, dtype=torch.bool)
    mask[:, 11] = True
    output = make()(query, key, value, key_mask=mask)
    torch.testing.assert_close(output[:, :, 11], value[:, :, 11])
    assert (output[:, :, :11] == 0).all()


def test_the_key_is_not_used():
    query, key, value = inputs()
    assert torch.equal(make()(query, key, value), make()(query, key + 1, value))


def test_like_tokens_find_each_other_in_a_long_sequence():
    """What hashing is for: each token occurs twice, and attends to its other self wherever that stands."""
    half = 20 * torch.nn.functional.normalize(torch.randn(1, 2, 512, 32), dim=-1)
    query = torch.cat([half, half.flip(2)], 2)
    value = torch.randn(1, 2, 512, 1)
    value = torch.cat([value, value.flip(2)], 2)
    found = Reformer(32, 2, num_rounds=8).eval()(query * 32**0.5, query, value)
    assert ((found - value).abs() < 1e-2).double().mean() > 0.95


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    query, _, value = (x[:2, :, :9].clone().requires_grad_() for x in inputs())
    attention = make(chunk_size=2)
    assert torch.autograd.gradcheck(
        lambda q, v: attention(q, q.detach(), v, key_mask=KEY_MASK[:2, :9], is_causal=is_causal),
        (query, value),
    )


def test_causal_mixes_nothing_of_the_future():
    query, key, value = inputs()
    changed = value.clone()
    changed[:, :, 20:] += 1
    before, after = (make()(query, key, v, is_causal=True) for v in (value, changed))
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    assert not torch.equal(before[:, :, 20:], after[:, :, 20:])
    changed = query.clone()
    changed[:, :, 20:] += 1
    before, after = (make(chunk_size=64)(q, key, value, is_causal=True) for q in (query, changed))
    torch.testing.assert_close(before[:, :, :20], after[:, :, :20])


def test_rotations_are_drawn_anew_in_training_only():
    tensors = inputs()
    attention = make()
    first = attention(*tensors)
    torch.manual_seed(1)
    assert torch.equal(first, attention(*tensors))
    assert torch.equal(first, make(seed=0)(*tensors))
    assert not torch.equal(first, make(seed=1)(*tensors))
    attention.train()
    assert not torch.equal(attention(*tensors), attention(*tensors))


def test_state_dict_carries_the_rotations_to_any_length():
    tensors = inputs()
    attention, other = make(seed=3), make(seed=4)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(attention(*tensors), other(*tensors))


def test_heads_share_values():
    query, key, value = inputs()
    shared = make()(query, key[:, :1], value[:, :1], enable_gqa=True)
    assert torch.equal(shared, make()(query, key, value[:, :1].expand(-1, 2, -1, -1)))


def test_is_self_attention_only():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="as many queries as keys, got 10 and 30"):
        make()(query[:, :, :10], key, value)


@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_transformers(is_causal):
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        hidden_size=12,
        num_attention_heads=2,
        attention_head_size=6,
        lsh_attn_chunk_length=4,
        num_buckets=8,
        num_hashes=2,
        hash_seed=5,
        is_decoder=is_causal,
    )
    layer = transformers.models.reformer.modeling_reformer.LSHSelfAttention(config).double().eval()
    # The package adds 1e-6 to a key's mean square; here nothing is added.
    layer._len_norm = functools.partial(layer._len_norm, epsilon=0.0)
    x = 4 * torch.randn(3, 32, 12, dtype=torch.float64)
    expected = layer(x)
    query, value = (f(x).unflatten(-1, (2, 6)).transpose(1, 2) for f in (layer.query_key, layer.value))

    attention = make().double()
    torch.manual_seed(5)  # the package's rotations: (heads, d, rounds, buckets / 2)
    attention.rotations[..., :4] = torch.randn(2, 6, 2, 4, dtype=torch.float64).transpose(1, 2)
    # The package does not divide by √d.
    got = attention(query * 6**0.5, query, value, is_causal=is_causal)
    # There, the first chunk of a round sees the last one of another, causal or not; here, only itself.
    rank = expected.buckets.argsort(stable=True).argsort()  # (B, H, rounds, n)
    same = (rank >= 4).all(2)
    assert same.double().mean() > 0.5
    expected = expected.hidden_states.unflatten(-1, (2, 6)).transpose(1, 2)
    torch.testing.assert_close(got[same], expected[same])
