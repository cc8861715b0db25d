"""Informer's attention against its definition, query by query."""

import pytest
import torch

from schoenbat.baselines import Informer, Softmax
from schoenbat.baselines.selection import spread

# Row 0 has holes, row 1 is left-padded, row 2 right-padded.
MASK = torch.stack([torch.arange(30) % 4 != 1, torch.arange(30) >= 9, torch.arange(30) < 17])


def inputs(num_queries=30, num_keys=30, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 2, n, 6, generator=generator, dtype=dtype) for n in (num_queries, num_keys, num_keys)
    ]


def make(**options):
    return Informer(6, 2, **{"num_queries": 7, "num_samples": 5, **options}).eval()


def sampled_keys(offsets, keys):
    """One key of each of s stretches of the list, by the offset of each."""
    s, count = len(offsets), len(keys)
    stretches = [keys[i * count // s : (i + 1) * count // s] for i in range(s)]
    return [part[int(u * len(part))] for part, u in zip(stretches, offsets, strict=True) if part]


def written_out(attention, query, key, value, key_mask, query_mask, is_causal):
    (batch, heads, num_queries, d), num_keys = query.shape, key.shape[2]
    output = torch.zeros(batch, heads, num_queries, value.shape[-1], dtype=value.dtype)
    for row, head in [(b, h) for b in range(batch) for h in range(heads)]:
        q, k, v = query[row, head], key[row, head], value[row, head]
        keys = [j for j in range(num_keys) if key_mask[row, j]]
        queries = [i for i in range(num_queries) if query_mask[row, i]]
        sample = sampled_keys(attention.offsets[head].tolist(), keys)
        measure = {}
        for i in queries:
            logits = k[sample] @ q[i] / d**0.5
            measure[i] = float(logits.max() - logits.mean())
        chosen = sorted(queries, key=measure.get, reverse=True)[: attention.num_queries]
        for i in queries:
            seen = [j for j in keys if j <= i + num_keys - num_queries] if is_causal else keys
            if seen:
                logits = k[seen] @ q[i] / d**0.5
                weights = logits.softmax(0) if i in chosen else torch.full_like(logits, 1 / len(seen))
                output[row, head, i] = weights @ v[seen]
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_queries", "num_samples"), [(30, 5), (30, 24), (20, 5), (40, 64)])
def test_equals_the_definition(is_causal, masked, num_queries, num_samples):
    tensors = inputs(num_queries)
    attention = make(num_samples=num_samples)
    key_mask = MASK if masked else torch.ones_like(MASK)
    query_mask = torch.arange(num_queries).expand(3, -1) % 5 != (2 if masked else 5)
    masks = {"key_mask": key_mask, "query_mask": query_mask} if masked else {}
    got = attention(*tensors, **masks, is_causal=is_causal)
    expected = written_out(attention, *tensors, key_mask, query_mask, is_causal)
    torch.testing.assert_close(got * query_mask[:, None, :, None], expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_queries", [20, 30, 40])
@pytest.mark.parametrize("key_mask", [None, MASK])
def test_with_enough_queries_it_is_softmax(is_causal, num_queries, key_mask):
    tensors = inputs(num_queries)
    got = make(num_queries=40)(*tensors, key_mask=key_mask, is_causal=is_causal)
    torch.testing.assert_close(got, Softmax(6, 2)(*tensors, key_mask=key_mask, is_causal=is_causal))


def test_chosen_are_the_queries_with_peaked_attention():
    query, key, value = inputs()
    query[:, :, 7:] *= 1e-3
    got = make()(query, key, value)
    exact = Softmax(6, 2)(query, key, value)
    torch.testing.assert_close(got[:, :, :7], exact[:, :, :7])
    torch.testing.assert_close(got[:, :, 7:], value.mean(2, keepdim=True).expand(-1, -1, 23, -1))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    tensors = [x[:2, :, :9].clone().requires_grad_() for x in inputs()]
    attention = make(num_queries=3)
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, key_mask=MASK[:2, :9], is_causal=is_causal), tensors
    )


def test_causal_mixes_nothing_of_the_future():
    query, key, value = inputs()
    changed = value.clone()
    changed[:, :, 20:] += 1
    before, after = (make()(query, key, v, is_causal=True) for v in (value, changed))
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    assert not torch.equal(before[:, :, 20:], after[:, :, 20:])


def test_the_sample_is_drawn_anew_in_training_only():
    tensors = inputs()
    attention = make(num_samples=2)
    first = attention(*tensors)
    torch.manual_seed(1)
    assert torch.equal(first, attention(*tensors))
    assert torch.equal(first, make(num_samples=2, seed=0)(*tensors))
    assert not torch.equal(first, make(num_samples=2, seed=1)(*tensors))
    attention.train()
    assert not torch.equal(attention(*tensors), attention(*tensors))


def test_state_dict_carries_the_sample():
    tensors = inputs()
    attention, other = make(seed=3), make(seed=4)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(attention(*tensors), other(*tensors))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 13, 1000])
def test_spread_draws_distinct_numbers_one_from_each_stretch(count):
    offsets = torch.cat([torch.rand(2000, 5), torch.full((1, 5), 1 - 2.0**-24)])
    drawn, exists = spread(offsets, torch.tensor([count]))
    assert exists.sum(-1).eq(min(count, 5)).all()
    drawn = drawn[exists].view(2001, -1)
    assert ((drawn >= 0) & (drawn < max(count, 1))).all()
    assert (drawn.diff(dim=-1) > 0).all()
    if (
        0 < count < 20
    ):  # all numbers have their turn, and alike: each is drawn with probability min(1, 5/count)
        frequency = drawn.flatten().bincount(minlength=count) / 2001
        assert frequency.min() > 0.25
        assert frequency.min() == 1 if count <= 5 else frequency.max() <= 1
