"""MultiheadSchoenbAt in the place of nn.MultiheadAttention: its interface, its masks, torch's own layers."""

import copy
import inspect
import io
import math
import pickle
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from schoenbat import MultiheadSchoenbAt, SchoenbAt

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 7, 3
causal_mask = nn.Transformer.generate_square_subsequent_mask


def make(**options) -> MultiheadSchoenbAt:
    """In float64, with biases and ppSBN that are not where they started."""
    options = {"batch_first": True, "num_features": 32, "seed": 0, "dtype": torch.float64, **options}
    module = MultiheadSchoenbAt(WIDTH, HEADS, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name or "post" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return module


def inputs(batch=BATCH, length=LENGTH, width=WIDTH, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, width, dtype=dtype)


def padding(*lengths) -> torch.Tensor:
    """True = ignore."""
    return torch.arange(LENGTH) >= torch.tensor(lengths)[:, None]


def as_float(mask) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


def projected(module, query, key, value) -> tuple[torch.Tensor, ...]:
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(WIDTH)
    else:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    biases = (
        torch.zeros(3, WIDTH).double() if module.in_proj_bias is None else module.in_proj_bias.split(WIDTH)
    )
    return tuple(x @ w.T + b for x, w, b in zip((query, key, value), weights, biases, strict=True))


def by_hand(module, query, key, value, *, is_causal=False, ignored=None) -> torch.Tensor:
    """Projections written out and one attention call for each sequence and query, over just the keys it sees.

    Bias and zero keys stand last, as in nn.MultiheadAttention, and every query sees them.
    """
    q, k, v = projected(module, query, key, value)
    rows = []
    for b in range(len(q)):
        for i in range(q.shape[1]):
            seen = torch.ones(k.shape[1], dtype=torch.bool) if ignored is None else ~ignored[b]
            if is_causal:
                seen = seen & (torch.arange(k.shape[1]) <= i + k.shape[1] - q.shape[1])
            own_k, own_v = k[b, seen], v[b, seen]
            if module.bias_k is not None:
                own_k, own_v = torch.cat([own_k, module.bias_k[0]]), torch.cat([own_v, module.bias_v[0]])
            if module.add_zero_attn:
                zero = torch.zeros(1, WIDTH, dtype=own_k.dtype)
                own_k, own_v = torch.cat([own_k, zero]), torch.cat([own_v, zero])
            heads = (
                x.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None] for x in (q[b, i : i + 1], own_k, own_v)
            )
            rows.append(module.attention(*heads).transpose(1, 2).flatten(2)[0, 0])
    out = torch.stack(rows).view(q.shape[0], q.shape[1], WIDTH)
    return module.out_proj(out)


def close(out, expected) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-9)


def gradients(out, weight, leaves):
    return torch.autograd.grad((out * weight).sum(), leaves)


def counted():
    """Calls go through to the real forward. A hook would do, but torch's fast path gives way to hooks."""
    original = MultiheadSchoenbAt.forward
    return mock.patch.object(MultiheadSchoenbAt, "forward", autospec=True, side_effect=original)


def swapped(layer, *names, **options):
    """Put a MultiheadSchoenbAt with the same weights in the place of each attention named."""
    for name in names or ("self_attn",):
        old = getattr(layer, name)
        new = MultiheadSchoenbAt(
            WIDTH, HEADS, dropout=old.dropout, batch_first=old.batch_first, num_features=32, seed=0, **options
        )
        new.load_state_dict(old.state_dict())
        setattr(layer, name, new)
    return layer


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    options = {"dropout": 0.0, "batch_first": True, **options}
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, **options)


def decoder_layer(**options) -> nn.TransformerDecoderLayer:
    options = {"dropout": 0.0, "batch_first": True, **options}
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 32, **options)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_signature_is_that_of_torch_s_own(method):
    ours, theirs = (
        inspect.signature(getattr(cls, method)).parameters
        for cls in (MultiheadSchoenbAt, nn.MultiheadAttention)
    )
    shared = [name for name, p in ours.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert shared == list(theirs)
    for name in shared:
        if name == "need_weights":
            assert ours[name].default is False, "weights are quadratic"
        else:
            assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 5, "vdim": 6},
        {"kdim": 5},
        {"add_bias_kv": True},
        {"bias": False, "vdim": 6},
    ],
    ids=str,
)
def test_an_nn_multiheadattention_s_weights_load_strictly(options):
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours = MultiheadSchoenbAt(WIDTH, HEADS, num_features=32, seed=0, **options)
    names = {name for name in ours.state_dict() if not name.startswith("attention.")}
    assert names == set(theirs.state_dict())
    own = copy.deepcopy(ours.attention.state_dict())
    state = theirs.state_dict()
    ours.load_state_dict(state, strict=True)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
    assert all(torch.equal(own[name], tensor) for name, tensor in ours.attention.state_dict().items())
    assert set(state) == names, "the caller's state dict is left as it was"


def test_weights_load_inside_a_larger_model():
    plain, ours = nn.Sequential(encoder_layer()), nn.Sequential(swapped(encoder_layer()))
    ours.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(ours[0].self_attn.in_proj_weight, plain[0].self_attn.in_proj_weight)


def test_a_state_dict_with_part_of_an_attention_is_an_error():
    module = make()
    state = module.state_dict()
    del state["attention.post.gamma"]
    with pytest.raises(RuntimeError, match=r"Missing.*attention\.post\.gamma"):
        make().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected.*something"):
        make().load_state_dict(
            {**nn.MultiheadAttention(WIDTH, HEADS).state_dict(), "something": torch.ones(1)}
        )


def test_loading_into_a_copy_keeps_the_copy_s_attention():
    module = make()
    other = copy.deepcopy(module)
    other.attention.features.resample(5)
    module.load_state_dict(nn.MultiheadAttention(WIDTH, HEADS).double().state_dict())
    before = copy.deepcopy(other.attention.state_dict())
    other.load_state_dict(nn.MultiheadAttention(WIDTH, HEADS).double().state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in other.attention.state_dict().items())


@pytest.mark.parametrize("construction", ["unbiased", "exact-low", "paper"])
def test_a_saved_module_gives_the_same_outputs_after_loading(construction):
    module, x = make(construction=construction), inputs()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = make(construction=construction, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate):
    module, x = make(), inputs()
    expected = module(x, x, x)[0]
    other = duplicate(module)
    with torch.no_grad():
        module.in_proj_weight.zero_()
    assert torch.equal(other(x, x, x)[0], expected)
    assert other._qkv_same_embed_dim is False


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 5, "vdim": 6},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"construction": "exact-low", "scale": 1.0, "post": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_against_one_query_at_a_time(options, is_causal, padded):
    module, x = make(**options), inputs()
    key, value = inputs(width=options.get("kdim", WIDTH)), inputs(width=options.get("vdim", WIDTH))
    ignored = padding(LENGTH, 4, 0) if padded else None
    out, weights = module(x, key, value, key_padding_mask=ignored, is_causal=is_causal)
    assert weights is None
    assert out.shape == x.shape
    close(out, by_hand(module, x, key, value, is_causal=is_causal, ignored=ignored))


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"kdim": 5, "vdim": 6}, {"window": 3}], ids=str
)
def test_steps_continue_what_one_causal_call_does(options):
    layer = MultiheadSchoenbAt(16, 4, construction="exact-low", seed=0, **options).eval()
    rows = [torch.randn(9, 2, width) for width in (16, options.get("kdim", 16), options.get("vdim", 16))]
    ignored = torch.zeros(2, 9, dtype=torch.bool)
    ignored[1, :2] = True
    state, outputs = None, []
    lengthwise = 1 if layer.batch_first else 0
    if layer.batch_first:
        rows = [x.transpose(0, 1) for x in rows]
    with torch.no_grad():
        whole, _ = layer(*rows, key_padding_mask=ignored, is_causal=True)
        for start, end in ((0, 4), (4, 5), (5, 9)):
            piece = [x.narrow(lengthwise, start, end - start) for x in rows]
            out, state = layer.step(*piece, state, key_padding_mask=ignored[:, start:end])
            outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, lengthwise), whole, rtol=1e-4, atol=1e-5)
    assert state.count.tolist() == [9, 7]


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_a_layer_that_adds_keys_does_not_decode(option):
    x = torch.randn(1, 2, 16)
    with pytest.raises(ValueError, match="added keys are no tokens"):
        MultiheadSchoenbAt(16, 4, **{option: True}).step(x, x, x)


def test_a_step_takes_a_batch():
    x = torch.randn(3, 16)
    with pytest.raises(ValueError, match="a batch of tokens"):
        MultiheadSchoenbAt(16, 4).step(x, x, x)


def test_cross_attention_to_another_length():
    module, query, key = make(add_zero_attn=True), inputs(length=3), inputs()
    close(module(query, key, key)[0], by_hand(module, query, key, key))
    close(module(query, key, key, is_causal=True)[0], by_hand(module, query, key, key, is_causal=True))


@pytest.mark.parametrize("padded", [False, True])
def test_a_query_before_the_first_key_sees_the_keys_that_are_added(padded):
    module, query, key = make(add_bias_kv=True, add_zero_attn=True), inputs(length=LENGTH + 3), inputs()
    ignored = padding(LENGTH, 4, 0) if padded else None
    out, weights = module(query, key, key, ignored, need_weights=True, is_causal=True)
    close(out, by_hand(module, query, key, key, is_causal=True, ignored=ignored))
    assert weights.shape == (BATCH, LENGTH + 3, LENGTH + 2)
    assert not weights[:, :3, :LENGTH].any()
    close(weights.sum(-1), torch.ones(BATCH, LENGTH + 3).double())


def test_it_is_close_to_softmax_where_the_map_is():
    """exact-low with all of degree 2, small logits, no normalisation: softmax to third order."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    ours = make(construction="exact-low", normalization=None, scale=None, post=False)
    ours.load_state_dict(theirs.state_dict())
    query, key, value = inputs() * 0.1, inputs() * 0.1, inputs()
    out = theirs(query, key, value, need_weights=False)[0]
    mean = theirs(0 * query, key, value, need_weights=False)[0]
    error, signal = (ours(query, key, value)[0] - out).norm(), (out - mean).norm()
    assert error < 1e-3 * signal


def test_layouts():
    first, second = make(batch_first=True), make(batch_first=False)
    second.load_state_dict(first.state_dict())
    x, ignored = inputs(), padding(LENGTH, 4, 2)
    expected, weights = first(x, x, x, ignored, need_weights=True)
    out, other = second(*(3 * [x.transpose(0, 1)]), ignored, need_weights=True)
    close(out.transpose(0, 1), expected)
    close(other, weights)
    for module in (first, second):
        out, own = module(x[1], x[1], x[1], ignored[1], need_weights=True)
        close(out, expected[1])
        close(own, weights[1])
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        first(*(3 * [x[None]]))
    with pytest.raises(ValueError, match=r"a query of width 16 .* got \(3, 7, 6\)$"):
        first(*(3 * [x[..., :6]]))


@pytest.mark.parametrize("dtype", ["bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_equals_truncated(dtype, is_causal):
    """Outputs and gradients, with garbage in the padding; True is ignored, and so is −inf."""
    module, short = make(), inputs(length=4).requires_grad_()
    long = torch.cat([short.detach(), 9 * inputs(length=LENGTH - 4)], dim=1).requires_grad_()
    ignored = padding(4, 4, 4)
    mask = ignored if dtype == "bool" else as_float(ignored)
    expected = module(short, short, short, is_causal=is_causal)[0]
    out = module(long, long, long, key_padding_mask=mask, is_causal=is_causal)[0][:, :4]
    close(out, expected)
    weight, parameters = torch.randn_like(out), list(module.parameters())
    wanted = gradients(expected, weight, [short, *parameters])
    got = gradients(out, weight, [long, *parameters])
    close(got[0][:, :4], wanted[0])
    assert not got[0][:, 4:].any()
    for one, other in zip(got[1:], wanted[1:], strict=True):
        close(one, other)


def test_the_polarity_of_a_padding_mask():
    """The other way round it would be the attention to the padding."""
    module, x = make(), inputs()
    ignored = padding(4, 4, 4)
    keep, drop = module(x, x[:, :4], x[:, :4])[0], module(x, x[:, 4:], x[:, 4:])[0]
    close(module(x, x, x, key_padding_mask=ignored)[0], keep)
    close(module(x, x, x, key_padding_mask=~ignored)[0], drop)
    assert not torch.allclose(keep, drop)


def test_padding_stays_out_of_batch_statistics_in_self_attention():
    """Queries are padded where the keys are: outputs and running averages of the truncated batch."""
    short, long = make(normalization="batch"), make(normalization="batch")
    long.load_state_dict(short.state_dict())
    x = inputs(length=4)
    padded = torch.cat([x, 50 + inputs(length=LENGTH - 4)], dim=1)
    close(long(padded, padded, padded, padding(4, 4, 4), need_weights=True)[0][:, :4], short(x, x, x)[0])
    for name, buffer in short.named_buffers():
        close(dict(long.named_buffers())[name], buffer)


@pytest.mark.parametrize("queries", [3, LENGTH])
def test_the_keys_padding_is_not_that_of_other_queries(queries):
    module, query, key = make(normalization="batch"), inputs(length=queries), inputs()
    module(query, key, key, key_padding_mask=padding(4, 4, 4))
    for norm, x, part in (("query", query, 0), ("key", key[:, :4], 1)):
        rows = projected(module, query, key, key)[part][:, : x.shape[1]].unflatten(-1, (HEADS, -1))
        mean = getattr(module.attention, f"{norm}_norm").running_mean
        close(mean, 0.1 * rows.mean((0, 1))[:, None].detach())


def test_batch_statistics_move_once_with_the_weights_too():
    first, second = make(normalization="batch"), make(normalization="batch")
    x = inputs()
    second.load_state_dict(first.state_dict())
    first(x, x, x)
    second(x, x, x, need_weights=True)
    for name, buffer in first.named_buffers():
        close(dict(second.named_buffers())[name], buffer)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_sequences_of_padding_give_the_output_s_bias_and_no_nan(is_causal, need_weights):
    module, x = make(), inputs().requires_grad_()
    out, weights = module(x, x, x, padding(LENGTH, 0, 3), need_weights=need_weights, is_causal=is_causal)
    close(out[1], module.out_proj.bias.expand(LENGTH, -1))
    if need_weights:
        assert not weights[1].any()
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("options", [{}, {"scale": 1.0, "construction": "exact-low"}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_weights(options, is_causal, added):
    """weights @ v is the output before post-SBN; rows sum to 1, whether the floor acts or not."""
    module, x = make(post=False, **options, **added), inputs()
    ignored = padding(LENGTH, 4, 1)
    out, weights = module(
        x, x, x, ignored, need_weights=True, average_attn_weights=False, is_causal=is_causal
    )
    extra = 2 * bool(added)
    assert weights.shape == (BATCH, HEADS, LENGTH, LENGTH + extra)
    v = torch.nn.functional.linear(x, module.in_proj_weight[2 * WIDTH :], module.in_proj_bias[2 * WIDTH :])
    if added:  # last and in this order, as in nn.MultiheadAttention
        last = torch.cat([module.bias_v, torch.zeros_like(module.bias_v)], dim=1).expand(BATCH, -1, -1)
        v = torch.cat([v, last], dim=1)
    values = v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    close(module.out_proj((weights @ values).transpose(1, 2).flatten(2)), out)
    close(weights.sum(-1), torch.ones(BATCH, HEADS, LENGTH).double())
    keys = weights[..., :LENGTH]
    assert not keys.masked_select(ignored[:, None, None]).any(), "masked keys have no weight"
    if is_causal:
        assert not keys.triu(1).any(), "nor has the future"
    average = module(x, x, x, ignored, need_weights=True, is_causal=is_causal)[1]
    close(average, weights.mean(1))


@pytest.mark.parametrize(
    ("options", "acts"), [({}, True), ({"scale": 0.3, "construction": "exact-low"}, False)], ids=str
)
def test_weights_are_the_plain_ratio_where_the_floor_does_not_act(options, acts):
    """A sampled map at scale 4 has rows with too small a denominator for that; a tame one has none."""
    module, x = make(**options), inputs()
    weights = module(x, x, x, need_weights=True, average_attn_weights=False)[1]
    q, k, _ = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected(module, x, x, x))
    attention = module.attention
    features, root = attention.features, math.sqrt(attention.features.scale)
    scores = features(root * attention.query_norm(q)) @ features(root * attention.key_norm(k)).mT
    total = scores.sum(-1, keepdim=True)
    plain = torch.isclose(weights, scores / total, rtol=1e-6, atol=1e-9).all(-1)
    assert plain.double().mean() > 0.5
    assert plain.all() != acts


@pytest.mark.parametrize(
    "mask",
    [
        causal_mask(LENGTH),
        causal_mask(LENGTH) < 0,
        causal_mask(LENGTH).double(),
        (causal_mask(LENGTH) < 0).expand(BATCH * HEADS, -1, -1),
    ],
    ids=["float", "bool", "double", "per head"],
)
def test_a_causal_mask_is_recognised(mask):
    module, x = make(), inputs()
    causal, both_ways = module(x, x, x, is_causal=True)[0], module(x, x, x)[0]
    assert not torch.allclose(causal, both_ways)
    assert torch.equal(module(x, x, x, attn_mask=mask)[0], causal)
    assert torch.equal(module(x, x, x, attn_mask=mask, is_causal=True)[0], causal)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_a_mask_that_masks_nothing_is_none(dtype):
    module, x = make(), inputs()
    expected = module(x, x, x)[0]
    assert torch.equal(module(x, x, x, attn_mask=torch.zeros(LENGTH, LENGTH, dtype=dtype))[0], expected)
    memory = inputs(length=4)
    out = module(x, memory, memory, attn_mask=torch.zeros(LENGTH, 4, dtype=dtype))[0]
    assert torch.equal(out, module(x, memory, memory)[0])


def band() -> torch.Tensor:
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return ones.triu(2) | ones.tril(-2)


def one_hole_less() -> torch.Tensor:
    mask = causal_mask(LENGTH) < 0
    mask[0, 1] = False
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        band(),
        as_float(band()),
        one_hole_less(),
        torch.ones(LENGTH, LENGTH, dtype=torch.bool),
        (causal_mask(LENGTH) < 0).mT,
        torch.full((LENGTH, LENGTH), 0.5),
        causal_mask(LENGTH).masked_fill(causal_mask(LENGTH) < 0, -1e9),
        -0.1 * torch.arange(LENGTH).expand(LENGTH, -1),
        torch.ones(LENGTH, LENGTH),
    ],
    ids=["band", "float band", "hole", "all", "anticausal", "bias", "-1e9", "alibi", "SDPA's polarity"],
)
def test_a_dense_mask_is_an_error_that_says_so(mask):
    module, x = make(), inputs()
    with pytest.raises(ValueError, match=r"is not causal, and a dense mask cannot be applied in linear time"):
        module(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("shape", [(5, 5), (LENGTH, LENGTH + 1), (BATCH, LENGTH, LENGTH), (LENGTH,)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_the_wrong_size_is_an_error(shape, is_causal):
    module, x = make(), inputs()
    mask = torch.zeros(shape)
    if shape == (5, 5):
        mask = causal_mask(5)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(7, 7\) or \(12, 7, 7\)"):
        module(x, x, x, attn_mask=mask, is_causal=is_causal)


def test_a_batch_that_comes_first_without_being_told_is_named():
    x = torch.randn(2, 7, 16)
    with pytest.raises(ValueError, match=r"got \(7, 7\); a batch is \(n, B, E\), unless .* batch_first=True"):
        MultiheadSchoenbAt(16, 4)(x, x, x, attn_mask=causal_mask(7))


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("wrong", ["no", torch.zeros(BATCH, LENGTH, dtype=torch.int64)])
def test_masks_are_of_bool_or_float(name, wrong):
    module, x = make(), inputs()
    with pytest.raises(TypeError, match=f"{name} must be a tensor of bool, or of 0 and -inf, got"):
        module(x, x, x, **{name: wrong})


@pytest.mark.parametrize("name", ["bias", "add_bias_kv", "add_zero_attn", "batch_first"])
def test_a_word_is_no_flag(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        make(**{name: "no"})


def test_weights_are_wanted_or_not():
    module, x = make(), inputs()
    with pytest.raises(ValueError, match="need_weights must be True or False"):
        module(x, x, x, need_weights="no")


def test_heads_are_counted():
    with pytest.raises(ValueError, match="num_heads must be an integer of at least 1, got None"):
        MultiheadSchoenbAt(WIDTH, None)


@pytest.mark.parametrize("name", ["value_dim", "num_key_heads"])
def test_widths_and_heads_follow_from_the_embedding(name):
    with pytest.raises(ValueError, match=f"{name} follows from embed_dim and num_heads here, got 2"):
        make(**{name: 2})


@pytest.mark.parametrize("least", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_what_softmax_makes_zero_of_is_ignored_whether_a_padding_mask_is_looked_at_or_not(least):
    module, x, ignored = make(), inputs(), padding(4, 7, 5)
    expected, _ = module(x, x, x, key_padding_mask=ignored)
    mask = torch.zeros(ignored.shape).masked_fill(ignored, least)
    assert torch.equal(module(x, x, x, key_padding_mask=mask)[0], expected)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    out, _ = compiled(x, x, x, key_padding_mask=mask)
    torch.testing.assert_close(out, expected)


def test_a_mask_of_biases_is_told_why_it_is_refused():
    module, x = make(), inputs()
    mask = causal_mask(LENGTH).masked_fill(causal_mask(LENGTH) < 0, -1e9)
    with pytest.raises(ValueError, match=r"nor can biases other than 0 and -inf"):
        module(x, x, x, attn_mask=mask)


def test_bad_padding_masks_are_errors():
    module, x = make(), inputs()
    with pytest.raises(ValueError, match=r"0 and -inf only, got 0\.5"):
        module(x, x, x, key_padding_mask=torch.full((BATCH, LENGTH), 0.5))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(B, n_k\) = "):
        module(x, x, x, key_padding_mask=padding(4, 4, 4)[:, 1:])
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(B, n_k\) = "):
        module(x, x, x, key_padding_mask=padding(4, 4))


def test_options_reach_the_attention_and_wrong_ones_are_errors():
    module = make(kernel="inv", construction="paper", scale=0.5, num_features=20, normalization="l2")
    attention = module.attention
    assert isinstance(attention, SchoenbAt)
    assert (attention.kernel.name, attention.features.construction, attention.scale) == ("inv", "paper", 0.5)
    assert (attention.features.num_features, attention.query_norm.mode) == (20, "l2")
    assert attention.features.head_dim == WIDTH // HEADS
    with pytest.raises(TypeError, match="colour"):
        make(colour="red")
    with pytest.raises(ValueError, match="unknown construction"):
        make(construction="none")


def test_dropout_acts_in_training_only():
    module, x = make(dropout=0.5), inputs()
    plain = make()
    plain.load_state_dict(module.state_dict())
    expected = plain(x, x, x)[0]
    torch.manual_seed(1)
    out = module(x, x, x)[0]
    assert not torch.allclose(out, expected)
    torch.manual_seed(1)
    assert torch.equal(module(x, x, x)[0], out)
    module.eval()
    assert torch.equal(module(x, x, x)[0], expected)
    with torch.no_grad():
        module.out_proj.weight.copy_(torch.eye(WIDTH))
        module.out_proj.bias.zero_()
    kept = module(x, x, x)[0]
    out = module.train()(x, x, x)[0]
    assert 0.3 < (out == 0).double().mean() < 0.7, "half of the outputs are dropped"
    close(out[out != 0], 2 * kept[out != 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_half_precision(dtype, is_causal):
    module = make(dtype=torch.float32, scale=1.0, construction="exact-low")
    half, x = copy.deepcopy(module).to(dtype), inputs(dtype=torch.float32)
    assert half.attention.features.quadratic.dtype == torch.float32
    out, weights = half(*(3 * [x.to(dtype)]), need_weights=True, is_causal=is_causal)
    assert out.dtype == weights.dtype == dtype
    expected = module(x, x, x, is_causal=is_causal)[0]
    # Inputs, weights, q/k/v, the attention's output and the result are rounded: about five times ε/2.
    assert (out.float() - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, x, x, is_causal=is_causal)[0]
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_calls_it(training, grad, norm_first, batch_first):
    layer = swapped(encoder_layer(norm_first=norm_first, batch_first=batch_first)).train(training)
    x = inputs(dtype=torch.float32)
    with counted() as forward, torch.set_grad_enabled(grad):
        out = layer(x)
    assert forward.call_count == 1
    attend = lambda y: layer.self_attn(y, y, y)[0]  # noqa: E731
    feed = lambda y: layer.linear2(torch.relu(layer.linear1(y)))  # noqa: E731
    if norm_first:
        expected = x + attend(layer.norm1(x))
        expected = expected + feed(layer.norm2(expected))
    else:
        expected = layer.norm1(x + attend(x))
        expected = layer.norm2(expected + feed(expected))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "float"])
def test_masks_through_an_encoder_layer(training, causal, dtype):
    layer = swapped(encoder_layer()).train(training)
    x = inputs(dtype=torch.float32)
    short = x[:, :4]
    ignored = padding(4, 4, 4)
    mask = causal_mask(LENGTH) if causal else None
    if dtype == "float":
        ignored = as_float(ignored).float()
    elif causal:
        mask = mask < 0
    with torch.no_grad():
        out = layer(x, src_mask=mask, src_key_padding_mask=ignored)[:, :4]
        expected = layer(short, src_mask=causal_mask(4) if causal else None)
        if causal:
            earlier = layer(short[:, :2], src_mask=causal_mask(2))
            torch.testing.assert_close(expected[:, :2], earlier, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("masks", ["none", "padding", "ragged", "causal", "both"])
def test_an_encoder_calls_it_in_every_layer(training, when, masks):
    """Whether the attention was swapped before the encoder was built or after, when torch packs padded
    batches into nested tensors in eval mode."""
    layer = encoder_layer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nested tensors
        encoder = nn.TransformerEncoder(swapped(layer) if when == "before" else layer, 2)
        if when == "after":
            for each in encoder.layers:
                swapped(each)
        encoder.train(training)
        x = inputs(dtype=torch.float32)
        lengths = {"padding": (LENGTH, 4, 4), "both": (LENGTH, 4, 2), "ragged": (5, 4, 2)}.get(masks)
        ignored = None if lengths is None else padding(*lengths)
        causal = masks in ("causal", "both")
        mask = causal_mask(LENGTH) if causal else None
        with counted() as forward, torch.no_grad():
            out = encoder(x, mask=mask, src_key_padding_mask=ignored)
        assert forward.call_count >= 2
        assert {id(call.args[0]) for call in forward.call_args_list} == {
            id(m.self_attn) for m in encoder.layers
        }
        with torch.no_grad():
            for b, length in enumerate(lengths or BATCH * (LENGTH,)):
                row = x[b : b + 1, :length]
                for each in encoder.layers:
                    row = each(row, src_mask=causal_mask(length) if causal else None)
                torch.testing.assert_close(out[b : b + 1, :length], row, rtol=1e-4, atol=1e-5)


def test_nested_tensors_are_for_self_attention():
    module = make(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
        out, _ = module(nested, nested, nested)
    for row, x in zip(out.unbind(), nested.unbind(), strict=True):
        torch.testing.assert_close(row, module(x, x, x)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="self-attention only"):
        module(nested, nested.clone(), nested)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("names", [("self_attn",), ("self_attn", "multihead_attn")])
def test_a_decoder_layer_calls_it_causally(training, norm_first, names):
    """torch passes the dense causal mask with is_causal=False."""
    layer = swapped(decoder_layer(norm_first=norm_first), *names).train(training)
    target, memory = inputs(dtype=torch.float32), inputs(length=5, dtype=torch.float32)
    mask = causal_mask(LENGTH)
    with counted() as forward, torch.no_grad():
        out = layer(target, memory, tgt_mask=mask)
        assert forward.call_count == len(names)
        changed = torch.cat([target[:, :4], torch.randn_like(target[:, 4:])], dim=1)
        other = layer(changed, memory, tgt_mask=mask)
        torch.testing.assert_close(other[:, :4], out[:, :4], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(other[:, 4:], out[:, 4:])
        assert not torch.allclose(layer(target, memory)[:, :4], out[:, :4]), "without a mask it is not causal"
        assert not torch.allclose(layer(target, memory + 1, tgt_mask=mask), out)


@pytest.mark.parametrize("training", [True, False])
def test_masks_through_a_decoder_layer(training):
    layer = swapped(decoder_layer(), "self_attn", "multihead_attn").train(training)
    target, memory = inputs(dtype=torch.float32), inputs(dtype=torch.float32)
    with torch.no_grad():
        out = layer(
            target,
            memory,
            tgt_mask=causal_mask(LENGTH),
            tgt_key_padding_mask=as_float(padding(5, 5, 5)).float(),
            memory_key_padding_mask=padding(4, 4, 4),
            tgt_is_causal=True,
        )[:, :5]
        expected = layer(target[:, :5], memory[:, :4], tgt_mask=causal_mask(5))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_whole_transformer_trains():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 32, dropout=0.1, batch_first=True)
    for layer in model.encoder.layers:
        swapped(layer)
    for layer in model.decoder.layers:
        swapped(layer, "self_attn", "multihead_attn")
    source, target = inputs(dtype=torch.float32), inputs(dtype=torch.float32)
    ignored = padding(LENGTH, 4, 2)
    out = model(source, target, tgt_mask=causal_mask(LENGTH), src_key_padding_mask=ignored)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled(is_causal):
    """fullgraph, forward and backward; the causal mask comes with its hint, since values cannot be read."""
    module, x = make(), inputs()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    mask = causal_mask(LENGTH) if is_causal else None
    ignored, results = as_float(padding(LENGTH, 4, 2)), []
    for call in (module, compiled):
        leaf = x.clone().requires_grad_()
        out = call(leaf, leaf, leaf, key_padding_mask=ignored, attn_mask=mask, is_causal=is_causal)[0]
        out.square().sum().backward()
        results.append([out, leaf.grad, *(p.grad for p in call.parameters())])
    for eager, other in zip(*results, strict=True):
        close(other, eager)


@pytest.mark.parametrize(
    "masks",
    [
        {"attn_mask": causal_mask(LENGTH), "is_causal": True},
        {"key_padding_mask": padding(7, 4, 1)},
        {"key_padding_mask": padding(4)},
    ],
)
def test_masks_of_a_length_that_was_compiled_as_any_length(masks):
    """As in a model that was compiled for sequences without masks first."""
    module, x = make(), inputs()
    torch._dynamo.maybe_mark_dynamic(x, 1)
    out, _ = torch.compile(module, fullgraph=True, backend="eager")(x, x, x, **masks)
    torch.testing.assert_close(out, module(x, x, x, **masks)[0])


def test_a_mask_without_its_hint_cannot_be_compiled():
    compiled = torch.compile(make(), fullgraph=True, backend="aot_eager")
    x = inputs()
    with pytest.raises(Exception, match=r"attn_mask cannot be looked at under torch\.compile"):
        compiled(x, x, x, attn_mask=causal_mask(LENGTH))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_an_added_key_and_a_split_sequence_exclude_each_other(option):
    with pytest.raises(ValueError, match="each rank of a process_group"):
        MultiheadSchoenbAt(16, 2, process_group=object(), **{option: True})


def test_a_causal_mask_of_the_last_queries_is_recognised():
    module, x = make(), inputs()
    mask = torch.ones(3, LENGTH, dtype=torch.bool).triu(1 + LENGTH - 3)
    last = module(x[:, -3:], x, x, attn_mask=mask)[0]
    torch.testing.assert_close(last, module(x, x, x, is_causal=True)[0][:, -3:])
    for hint in (False, True):
        with pytest.raises(ValueError, match="is not causal with the last query aligned with the last key"):
            module(x[:, :3], x, x, attn_mask=torch.ones(3, LENGTH, dtype=torch.bool).triu(1), is_causal=hint)


def test_a_mask_that_is_not_causal_is_an_error_beside_the_hint_too():
    module, x = make(), inputs()
    mask = causal_mask(LENGTH)
    mask[0] = 0.0
    with pytest.raises(ValueError, match="is not causal"):
        module(x, x, x, attn_mask=mask, is_causal=True)


def test_nested_tensors_take_no_masks():
    module = make(dtype=torch.float32)
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged)
    for mask in (
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)},
    ):
        with pytest.raises(ValueError, match="leave the masks out, and pass is_causal=True"):
            module(nested, nested, nested, **mask)


@pytest.mark.parametrize("options", [{}, {"kdim": 6}])
def test_parameters_may_be_drawn_again(options):
    module = make(dtype=torch.float32, **options)
    before = [parameter.clone() for parameter in module.parameters()]
    module._reset_parameters()
    assert any(not torch.equal(x, y) for x, y in zip(before, module.parameters(), strict=True))
    assert not module._qkv_same_embed_dim


def test_a_window_and_a_key_without_a_place_are_refused_together():
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="a key that has no place in the sequence"):
            MultiheadSchoenbAt(16, 4, window=3, **{option: True})


def test_gradients_of_each_example_where_a_layer_makes_padding_a_float_mask():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadSchoenbAt(16, 4, batch_first=True)
    parameters = {name: x.detach() for name, x in layer.named_parameters()}
    rows, mask = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    mask[:, -1] = True

    def loss(parameters, x, ignored):
        options = {"src_key_padding_mask": ignored[None]}
        return torch.func.functional_call(layer, parameters, (x[None],), options)[0, :-1].square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, rows, mask)
    one = torch.func.grad(loss)(parameters, rows[1], mask[1])
    for name, grad in one.items():
        torch.testing.assert_close(grads[name][1], grad, rtol=1e-4, atol=1e-5)
