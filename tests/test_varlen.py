"""Packed sequences and jagged tensors against one call for each sequence, outputs and all gradients."""

import re
from functools import partial

import pytest
import torch
from oracle import Largest, gradients, make_map, rows

from schoenbat import MultiheadSchoenbAt, SchoenbAt, rmfa, rmfa_varlen

LENGTHS = (3, 0, 17, 1, 16, 70, 5)


def starts(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def packed(lengths=LENGTHS, heads=4, seed=0, width=6):
    return rows(sum(lengths), heads, width, seed=seed)


def one_by_one(call, query, key, value, lengths_q, lengths_k):
    """`call` on each sequence as (H, n, d)."""
    parts = (x.split(list(n)) for x, n in ((query, lengths_q), (key, lengths_k), (value, lengths_k)))
    return torch.cat(
        [call(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in zip(*parts, strict=True)]
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths_k", [LENGTHS, (9, 4, 17, 0, 30, 2, 5)], ids=["self", "cross"])
def test_equals_separate_calls(is_causal, kv_heads, lengths_k):
    features = make_map("unbiased", trainable=True)
    query, key = packed(seed=1), packed(lengths_k, kv_heads, seed=2)
    value = packed(lengths_k, kv_heads, seed=3, width=5)
    scale = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value, scale, *features.parameters())]
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": kv_heads != 4}
    got, got_grads = gradients(
        lambda: rmfa_varlen(query, key, value, features, starts(LENGTHS), starts(lengths_k), **options),
        leaves,
    )
    expected, expected_grads = gradients(
        lambda: one_by_one(
            lambda q, k, v: rmfa(q, k, v, features, **options), query, key, value, LENGTHS, lengths_k
        ),
        leaves,
    )
    torch.testing.assert_close(got, expected)
    for a, b in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_packed_on_a_gpu(where):
    """With lengths on either side."""
    features, query = make_map("unbiased", dtype=torch.float32), packed().float()
    expected = rmfa_varlen(query, query, query, features, starts(LENGTHS))
    there = query.cuda()
    got = rmfa_varlen(there, there, there, features.cuda(), starts(LENGTHS).to(where))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_other_sequences_leave_no_trace():
    features, query = make_map("exact-low"), packed()
    key, value = packed(seed=2), packed(seed=3)
    before = rmfa_varlen(query, key, value, features, starts(LENGTHS))
    key[20:], value[20:] = torch.nan, torch.inf
    after = rmfa_varlen(query, key, value, features, starts(LENGTHS))
    assert torch.equal(after[:20], before[:20])


def test_memory_follows_the_tokens_and_not_the_longest_sequence():
    """Padded to one batch, these would be 1.3 million rows."""
    lengths = (4096, *(300 * (5,)))
    features, query = make_map("exact-low", dtype=torch.float32), packed(lengths, heads=1).float()
    with Largest() as largest:
        rmfa_varlen(query, query, query, features, starts(lengths))
    assert largest.numel < 2**20


def test_calls_are_few():
    calls, original = [], SchoenbAt.attend
    lengths = tuple(range(1, 64))
    module = SchoenbAt(6, 4, 20, seed=0, dtype=torch.float64)
    module.attend = lambda *x, **options: calls.append(x[0].shape) or original(module, *x, **options)
    nested = jagged(packed(lengths), lengths)
    module(nested, nested, nested)
    assert len(calls) == 6
    assert sum(shape[0] * shape[2] for shape in calls) <= 2 * sum(lengths)


def jagged(x, lengths):
    return torch.nested.nested_tensor_from_jagged(x, starts(lengths)).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rmfa_takes_jagged_tensors(is_causal):
    features, lengths = make_map("unbiased"), (3, 17, 1, 70)
    tensors = [packed(lengths, seed=i).requires_grad_() for i in range(3)]

    def nested():
        first = jagged(tensors[0], lengths)
        out = rmfa(first, *(jagged(x, lengths) for x in tensors[1:]), features, is_causal=is_causal)
        assert out.is_nested
        assert out.layout == torch.jagged
        assert out.shape[:2] == (4, 4)
        return out.transpose(1, 2).values()

    def plain():
        return one_by_one(
            lambda q, k, v: rmfa(q, k, v, features, is_causal=is_causal), *tensors, lengths, lengths
        )

    got, expected = gradients(nested, tensors), gradients(plain, tensors)
    torch.testing.assert_close(got[0], expected[0])
    for a, b in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"window": 4, "center_keys": "learned"}, {"normalization": "batch"}, {"post": False}],
    ids=str,
)
def test_a_module_takes_jagged_tensors(options):
    lengths = (3, 17, 1, 40)
    module = SchoenbAt(6, 4, 20, seed=0, dtype=torch.float64, **options)
    query, key, value = (packed(lengths, seed=i) for i in range(3))
    out = module(*(jagged(x, lengths) for x in (query, key, value)))
    if options.get("normalization") == "batch":  # whose statistics are those of all tokens
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        dense = [pad(x.split(lengths)) for x in (query, key, value)]
        fresh = SchoenbAt(6, 4, 20, seed=0, dtype=torch.float64, **options)
        expected = fresh(*(x.transpose(1, 2) for x in dense), key_mask=mask, query_mask=mask).transpose(1, 2)[
            mask
        ]
        torch.testing.assert_close(module.key_norm.running_mean, fresh.key_norm.running_mean)
    else:
        expected = one_by_one(
            lambda q, k, v: module(q[None], k[None], v[None])[0], query, key, value, lengths, lengths
        )
    torch.testing.assert_close(out.transpose(1, 2).values(), expected)
    residual = jagged(query, lengths)
    assert (module(residual, residual, residual) + residual).is_nested, "it can be added to what it came from"


def test_a_multihead_module_takes_jagged_tensors():
    lengths = (3, 17, 1, 40)
    module = MultiheadSchoenbAt(12, 2, batch_first=True, num_features=20, seed=0, dtype=torch.float64)
    x = rows(sum(lengths), 12, seed=1).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(x, starts(lengths))
    out, _ = module(nested, nested, nested)
    assert out.layout == torch.jagged
    expected = torch.cat([module(part, part, part)[0] for part in x.split(lengths)])
    torch.testing.assert_close(out.values(), expected)
    (got,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (out.values(), expected))
    torch.testing.assert_close(got, wanted)


def test_errors_name_the_problem():
    features, query = make_map("exact-low"), packed((3, 5))
    good = starts((3, 5))
    with pytest.raises(ValueError, match="must rise from 0 to the number of rows, 8, got"):
        rmfa_varlen(query, query, query, features, starts((3, 4)))
    with pytest.raises(ValueError, match="1-d tensor of integers"):
        rmfa_varlen(query, query, query, features, good.float())
    with pytest.raises(ValueError, match="2 sequences and cu_seqlens_k 1"):
        rmfa_varlen(query, query, query, features, good, starts((8,)))
    with pytest.raises(ValueError, match=r"query must be packed, \(total, heads, dim\)"):
        rmfa_varlen(query[None], query, query, features, good)
    nested = jagged(query, (3, 5))
    with pytest.raises(ValueError, match="leave the masks out"):
        rmfa(nested, nested, nested, features, key_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"key has torch\.strided"):
        rmfa(nested, query, query, features)


@pytest.mark.parametrize("rows_of_value", [7, 9])
def test_each_key_needs_its_value(rows_of_value):
    features, query = make_map("exact-low"), packed((3, 5))
    with pytest.raises(ValueError, match=f"key has 8 rows and value {rows_of_value}"):
        rmfa_varlen(query, query, packed((rows_of_value,)), features, starts((3, 5)))


@pytest.mark.parametrize("lengths", [(4, 4), (8,)])
@pytest.mark.parametrize(
    "attend",
    [partial(rmfa, features=make_map("exact-low")), SchoenbAt(6, 4, 20, dtype=torch.float64)],
    ids=["rmfa", "module"],
)
def test_jagged_values_of_other_lengths_than_the_keys_are_an_error(attend, lengths):
    """As many rows in all, so that nothing else would notice."""
    query = jagged(packed((5, 3)), (5, 3))
    offsets = re.escape(f"offsets [0, 5, 8] and {starts(lengths).tolist()}")
    with pytest.raises(ValueError, match=offsets):
        attend(query, query, jagged(packed((5, 3)), lengths))


def test_the_default_device_does_not_matter():
    features, (q, k, v), ends = make_map("exact-low"), (packed(seed=i) for i in range(3)), starts(LENGTHS)
    expected = rmfa_varlen(q, k, v, features, ends)
    with torch.device("meta"):
        assert torch.equal(rmfa_varlen(q, k, v, features, ends), expected)


def test_autocast_gives_the_dtype_of_the_dense_call():
    features, query = make_map("exact-low"), packed((3, 5)).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = rmfa_varlen(query, query, query, features, starts((3, 5)))
        dense = rmfa(*(query.transpose(0, 1)[None] for _ in range(3)), features)
    assert out.dtype == dense.dtype == torch.bfloat16


def test_without_any_query_gradients_are_zero_and_inputs_are_checked():
    features = make_map("exact-low")
    nothing = torch.tensor([0, 0, 0])
    query = torch.randn(0, 4, 6, dtype=torch.float64, requires_grad=True)
    key = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    out = rmfa_varlen(query, key, key, features, nothing, torch.tensor([0, 1, 3]))
    assert out.shape == query.shape
    grads = torch.autograd.grad(out.sum(), (query, key))
    assert not grads[1].any()
    with pytest.raises(TypeError, match="features must be a MaclaurinFeatures"):
        rmfa_varlen(query, query, query, "exp", nothing)
    with pytest.raises(TypeError, match="query must be a tensor, got list"):
        rmfa_varlen([1], key, key, features, nothing)


def test_a_multihead_module_takes_jagged_tensors_with_holes():
    dense = torch.randn(3, 6, 32)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 4])
    nested = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    attention = MultiheadSchoenbAt(32, 4, batch_first=True)
    out, _ = attention(nested, nested, nested)
    for row, x, start, length in zip(out.unbind(), dense, starts, lengths, strict=True):
        alone = x[None, start : start + length]
        torch.testing.assert_close(row, attention(alone, alone, alone)[0][0], rtol=1e-3, atol=1e-3)
