"""rmfa, RMFAState and rmfa_step as a user calls them."""

import copy

import pytest
import torch
from oracle import Largest, gradients, make_map, rows

import schoenbat
from schoenbat import MaclaurinFeatures, RMFAState, kernelized_attention, rmfa, rmfa_step


def batch(n=20, heads=2, kv_heads=2, seed=0):
    query = rows(3, heads, n, 6, seed=seed + 1)
    return query, rows(3, kv_heads, n, 6, seed=seed + 2), rows(3, kv_heads, n, 5, seed=seed + 3)


@pytest.fixture
def features():
    return make_map("exact-low")


def test_approximates_the_exact_kernel():
    """exact-low is what design and documentation say: within a few per cent at scale 1/√d."""
    query, key, value = (rows(4, 2, 100, 64, seed=i) for i in range(3))
    exact = kernelized_attention(query, key, value)
    got = rmfa(query, key, value, MaclaurinFeatures(64, 128, seed=0))
    signal = (exact - value.mean(-2, keepdim=True)).abs().mean()
    assert (got - exact).abs().mean() / signal < 0.03


@pytest.mark.parametrize("kernel", ["exp", "inv", "logi", "trigh", "sqrt"])
def test_every_kernel_converges_to_the_exact_one(kernel):
    query, key, value = (rows(2, 2, 50, 4, seed=i) for i in range(3))
    exact = kernelized_attention(query, key, value, kernel)
    few, many = (
        (rmfa(query, key, value, MaclaurinFeatures(4, D, kernel, construction="unbiased", seed=1)) - exact)
        .abs()
        .mean()
        for D in (16, 1024)
    )
    assert many < few / 3


def test_key_mask_is_true_for_keys_that_take_part(features):
    query, key, value = batch()
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[:, 4] = True
    out = rmfa(query, key, value, features, key_mask=mask)
    torch.testing.assert_close(out, value[..., 4:5, :].expand_as(out))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("garbage", [1e3, float("nan"), float("inf")])
def test_padded_equals_truncated(features, is_causal, garbage):
    query, key, value = batch()
    full = [x.clone() for x in (query, key, value)]
    for x in full[1:]:
        x[..., 12:, :] = garbage
    short = [x[..., :12, :].clone() for x in (query, key, value)]
    mask = torch.arange(20).expand(3, 20) < 12
    full, short = ([x.requires_grad_() for x in xs] for xs in (full, short))
    padded, padded_grads = gradients(
        lambda: rmfa(*full, features, key_mask=mask, is_causal=is_causal)[..., :12, :], full
    )
    truncated, truncated_grads = gradients(lambda: rmfa(*short, features, is_causal=is_causal), short)
    torch.testing.assert_close(padded, truncated)
    for a, b in zip(padded_grads, truncated_grads, strict=True):
        torch.testing.assert_close(a[..., :12, :], b)
        assert (a[..., 12:, :] == 0).all()


def test_nan_stays_in_its_batch_row(features):
    query, key, value = batch()
    key[1, 0, 3, 2] = float("nan")
    out = rmfa(query, key, value, features)
    clean = rmfa(*batch(), features)
    assert out[1, 0].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert torch.equal(out[1, 1], clean[1, 1])


def test_causal_does_not_see_the_future(features):
    query, key, value = batch(200)
    out = rmfa(query, key, value, features, is_causal=True)
    key[..., 150:, :] += 1
    value[..., 150:, :] += 1
    changed = rmfa(query, key, value, features, is_causal=True)
    assert torch.equal(out[..., :150, :], changed[..., :150, :])
    assert not torch.equal(out[..., 150:, :], changed[..., 150:, :])


def test_causal_aligns_the_last_query_with_the_last_key(features):
    query, key, value = batch()
    whole = rmfa(query, key, value, features, is_causal=True)
    torch.testing.assert_close(
        rmfa(query[..., 15:, :], key, value, features, is_causal=True), whole[..., 15:, :]
    )
    more_queries = rmfa(query, key[..., :8, :], value[..., :8, :], features, is_causal=True)
    assert (more_queries[..., :12, :] == 0).all()
    torch.testing.assert_close(more_queries[..., 12, :], value[..., 0, :])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
def test_leading_dimensions_are_free(features, shape):
    query, key, value = rows(*shape, 9, 6, seed=1), rows(*shape, 9, 6, seed=2), rows(*shape, 9, 5, seed=3)
    got = rmfa(query, key, value, features)
    flat = rmfa(*(x.reshape(-1, 1, 9, x.shape[-1]) for x in (query, key, value)), features)
    torch.testing.assert_close(got, flat.reshape(*shape, 9, 5))
    mask = torch.rand(*shape[:-1], 9) > 0.5
    assert rmfa(query, key, value, features, key_mask=mask).shape == (*shape, 9, 5)


def test_inputs_need_not_be_contiguous(features):
    query, key, value = (rows(3, 20, 2, 6, seed=i).transpose(1, 2) for i in range(3))
    expected = rmfa(query.contiguous(), key.contiguous(), value.contiguous(), features)
    torch.testing.assert_close(rmfa(query, key, value, features), expected)


def test_scale_goes_to_the_queries(features):
    """One state serves every scale: scaling the queries is the same as passing a scale."""
    query, key, value = batch()
    got = rmfa(query, key, value, features, scale=3 * features.scale)
    torch.testing.assert_close(got, rmfa(3 * query, key, value, features))


def test_eval_is_deterministic_whatever_the_global_generator_does(features):
    inputs = batch()
    torch.manual_seed(0)
    first = rmfa(*inputs, features)
    torch.manual_seed(1)
    assert torch.equal(first, rmfa(*inputs, features))


@pytest.mark.parametrize("implementation", ["eager", "reference"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_prefill_and_steps_equal_one_causal_call(features, implementation, kv_heads):
    query, key, value = batch(150, kv_heads=kv_heads)
    options = {"scale": 1.3, "enable_gqa": True}
    whole = rmfa(query, key, value, features, is_causal=True, **options)
    state = RMFAState.zeros(features, 3, kv_heads, 5, dtype=torch.float64)
    pieces = []
    for span in (slice(0, 140), slice(140, 141), slice(141, 141), slice(141, 150)):
        part = (x[..., span, :] for x in (query, key, value))
        before = copy.deepcopy(state)
        out, after = rmfa_step(*part, features, state, implementation=implementation, **options)
        assert torch.equal(before.feature_value, state.feature_value), "a step must leave its state alone"
        state = after
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=-2), whole)
    assert state.count.dtype == torch.int64
    assert state.count.tolist() == [150] * 3


def test_left_padding_in_steps(features):
    query, key, value = batch()
    mask = torch.arange(20) >= torch.tensor([[0], [5], [20]])
    whole = rmfa(query, key, value, features, is_causal=True, key_mask=mask)
    state = RMFAState.zeros(features, 3, 2, 5, dtype=torch.float64)
    pieces = []
    for span in (slice(0, 7), slice(7, 20)):
        part = (x[..., span, :] for x in (query, key, value))
        out, state = rmfa_step(*part, features, state, key_mask=mask[:, span])
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=-2), whole)
    assert state.count.tolist() == [20, 15, 0]
    assert (pieces[1][2] == 0).all()


def test_gradients_flow_through_a_state(features):
    """Training in segments: cutting a sequence in two changes neither outputs nor gradients."""
    tensors = [x.requires_grad_() for x in batch(150)]

    def in_two():
        first, state = rmfa_step(
            *(x[..., :60, :] for x in tensors),
            features,
            RMFAState.zeros(features, 3, 2, 5, dtype=torch.float64),
        )
        second, _ = rmfa_step(*(x[..., 60:, :] for x in tensors), features, state)
        return torch.cat([first, second], dim=-2)

    got, got_grads = gradients(in_two, tensors)
    expected, expected_grads = gradients(lambda: rmfa(*tensors, features, is_causal=True), tensors)
    torch.testing.assert_close(got, expected)
    for a, b in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_reading_without_writing_is_cross_attention(features):
    query, key, value = batch(heads=4)
    state = RMFAState.zeros(features, 3, 2, 5, dtype=torch.float64)
    state.update(key[..., :9, :], value[..., :9, :], features)
    mask = torch.arange(11).expand(3, 11) < 6
    state.update(key[..., 9:, :], value[..., 9:, :], features, key_mask=mask)
    scale = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    expected = rmfa(query, key[..., :15, :], value[..., :15, :], features, scale=scale, enable_gqa=True)
    for _ in range(2):
        torch.testing.assert_close(state.read(query, features, scale=scale), expected)
    assert state.count.tolist() == [15] * 3


def test_reordering_follows_beams(features):
    query, key, value = batch()
    state = RMFAState.zeros(features, 3, 2, 5, dtype=torch.float64).update(key, value, features)
    whole = state.read(query, features)
    beams = torch.tensor([2, 0, 0])
    torch.testing.assert_close(state.reorder(beams).read(query[beams], features), whole[beams])


def test_state_of_half_precision_inputs_is_float32(features):
    state = RMFAState.zeros(features, 1, 1, 6, dtype=torch.bfloat16)
    assert state.feature_value.dtype == torch.float32
    x = rows(1, 1, 4, 6, dtype=torch.bfloat16)
    out, state = rmfa_step(x, x, x, features, state)
    assert out.dtype == torch.bfloat16
    assert state.feature_value.dtype == torch.float32


def test_a_long_running_sum_keeps_its_mass():
    """A bfloat16 sum of 4,096 ones stops at 256; the state does not."""
    features = make_map("exact-low", dtype=torch.float32)
    x = rows(1, 1, 1, 6, dtype=torch.bfloat16).expand(1, 1, 4096, 6)
    state = RMFAState.zeros(features, 1, 1, 6, dtype=torch.bfloat16)
    state.update(x, torch.ones_like(x), features)
    torch.testing.assert_close(state.value_sum, torch.full((1, 1, 6), 4096.0))


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_is_larger_than_the_sequence_asks_for(is_causal, monkeypatch):
    """Neither n·n nor n·D·d_v nor n·D numbers are ever made, in forward or backward."""
    # Inside a custom operator the mode sees nothing: let the same functions run as they are.
    from schoenbat.ops import library

    for name in ("summarize", "summarize_backward", "read", "read_backward", "scan", "scan_backward"):
        operator = getattr(library, name)
        monkeypatch.setattr(library, name, operator._init_fn)
    features = MaclaurinFeatures(32, 128, seed=0)
    n, heads = 8192, 8
    tensors = [rows(1, heads, n, 32, seed=i, dtype=torch.float32) for i in range(3)]
    with Largest() as largest, torch.no_grad():
        rmfa(*tensors, features, is_causal=is_causal)
        arranged = [x[:, :, None] for x in tensors]
        run_backward(arranged, features, is_causal)
    assert largest.numel <= heads * n * 32


def run_backward(arranged, features, is_causal):
    from schoenbat.ops import eager, eager_causal
    from schoenbat.ops.blocks import Evaluator
    from schoenbat.ops.sums import Sums, key_count

    query, key, value = arranged
    feature_map = features.map(torch.float32)
    blocks, scale = feature_map.blocks, torch.ones(query.shape[1], 1, 1, 1)
    evaluator = Evaluator(blocks, True)
    count = key_count(key, None)
    summary = eager.summarize(key, value, None, blocks, 1.0)
    if not is_causal:
        eager.summarize_backward(summary, summary, key, value, None, evaluator, 1.0)
        eager.read_backward(
            value, query, summary, count.float(), feature_map.coefficients, scale, evaluator, True
        )
        return
    zeros = Sums(*(torch.zeros_like(s) for s in summary))
    inputs = eager_causal.Inputs(query, key, value, None, 0 * count, *feature_map[:3], scale, 1.0)
    eager_causal.scan_backward(value, zeros, inputs, zeros, evaluator)


def test_unknown_implementation_is_named_and_triton_is_not_replaced(features):
    inputs = batch()
    with pytest.raises(ValueError, match=r"'fast'.*'auto', 'reference', 'eager', 'triton'"):
        rmfa(*inputs, features, implementation="fast")
    with pytest.raises(NotImplementedError, match="triton"):
        rmfa(*inputs, features, implementation="triton")


def test_state_of_another_shape_is_an_error(features):
    query, key, value = batch()
    state = RMFAState.zeros(features, 2, 2, 5)
    with pytest.raises(ValueError, match=r"\(2, 2, 5\).*\(3, 2, 5\)"):
        rmfa_step(query, key, value, features, state)
    with pytest.raises(ValueError, match="one query for each key"):
        rmfa_step(query[..., :3, :], key, value, features, RMFAState.zeros(features, 3, 2, 5))


def test_errors_of_an_update_name_what_it_was_given(features):
    _, key, value = batch()
    state = RMFAState.zeros(features, 3, 2, 5)
    with pytest.raises(TypeError, match=r"value is torch\.float16 but key is torch\.float"):
        state.update(key, value.half(), features)
    with pytest.raises(ValueError, match=r"value has leading dimensions \(1,\), key has \(3,\)"):
        state.update(key, value[:1], features)


def test_import_needs_torch_alone():
    """The registry, the data and everything with a command line stay unloaded."""
    import subprocess
    import sys

    code = (
        "import sys, schoenbat; extra = {'typer', 'rich', 'matplotlib', 'transformers', 'triton'}; "
        "loaded = extra & set(sys.modules); assert not loaded, loaded; "
        "assert not any(m.startswith(('schoenbat.data', 'schoenbat.registry')) for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert schoenbat.__version__


@pytest.mark.parametrize(
    ("of_state", "of_rows"), [(torch.float32, torch.float64), (torch.float64, torch.float32)]
)
@pytest.mark.parametrize("implementation", ["eager", "reference"])
def test_a_state_takes_rows_of_another_precision(of_state, of_rows, implementation):
    features = MaclaurinFeatures(6, 16, seed=0)
    query, key, value = (x.to(of_rows) for x in batch())
    state = RMFAState.zeros(features, 3, 2, 5, dtype=of_state)
    out, after = rmfa_step(query, key, value, features, state, implementation=implementation)
    assert out.dtype == of_rows
    assert after.key_sum.dtype == torch.float64
    torch.testing.assert_close(out, rmfa(query, key, value, features, is_causal=True))
    read = state.update(key, value, features).read(query, features)
    assert read.dtype == of_rows
    torch.testing.assert_close(read, rmfa(query, key, value, features))


def test_what_is_no_map_and_what_is_no_state_is_named(features):
    tensors = batch()
    state = RMFAState.zeros(features, 3, 2, 5)
    for call in (
        lambda: rmfa(*tensors, "exp"),
        lambda: rmfa_step(*tensors, "exp", state),
        lambda: state.read(tensors[0], "exp"),
    ):
        with pytest.raises(TypeError, match="features must be a MaclaurinFeatures, got 'exp'"):
            call()
    with pytest.raises(
        TypeError, match=r"state must be an RMFAState, got tuple; begin with RMFAState\.zeros"
    ):
        rmfa_step(*tensors, features, (tensors[0], state))


def test_a_compiled_map_is_a_map(features):
    tensors = batch()
    assert torch.equal(rmfa(*tensors, torch.compile(features)), rmfa(*tensors, features))
