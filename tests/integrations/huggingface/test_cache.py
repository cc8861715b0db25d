import pytest
import torch
from integrations.huggingface.tiny import (
    DECODERS,
    FAMILIES,
    diff_llama,
    make,
    qwen2_with_sliding_layer,
    tokens,
)
from transformers import DynamicCache, StaticCache

from schoenbat import SchoenbAt
from schoenbat.integrations.huggingface import RMFALayer, calibrate, convert

GENERATIVE = [*DECODERS, "bart"]


def converted(build, **options):
    model = make(build)
    convert(model, num_features=45, **options)
    return model


def inputs_for(family, batch):
    """A prompt with padding in its first row: on the left, or where an encoder reads it on the right."""
    ids = tokens(batch, 9)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, slice(-3, None) if family == "bart" else slice(3)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, **options):
    settings = {"max_new_tokens": 15, "min_new_tokens": 15, "do_sample": False}
    return model.generate(**inputs, **settings | options)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", GENERATIVE)
def test_generation_is_recomputation_token_for_token(family, batch):
    model = converted(FAMILIES[family])
    inputs = inputs_for(family, batch)
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


@pytest.mark.parametrize("family", ["llama", "bart"])
@pytest.mark.parametrize(
    "options", [{"window": 4}, {"normalization": "l2", "scale": "learned", "post": True}]
)
def test_generation_with_other_options(family, options):
    model = converted(FAMILIES[family], **options)
    inputs = inputs_for(family, 2)
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


@pytest.mark.parametrize("family", GENERATIVE)
def test_beam_search_reorders_the_state(family):
    model = converted(FAMILIES[family])
    inputs = inputs_for(family, 3)
    beams = generate(model, inputs, num_beams=4)
    assert torch.equal(beams, generate(model, inputs, num_beams=4, use_cache=False))
    assert not torch.equal(beams, generate(model, inputs)), (
        "beams that are never reordered would show nothing"
    )


def test_beam_search_with_a_window():
    model = converted(FAMILIES["llama"], window=4)
    inputs = inputs_for("llama", 2)
    assert torch.equal(
        generate(model, inputs, num_beams=4), generate(model, inputs, num_beams=4, use_cache=False)
    )


def test_a_model_set_back_to_its_softmax_has_its_cache_back():
    model = make(FAMILIES["llama"])
    inputs = inputs_for("llama", 2)
    expected = generate(model, inputs)
    convert(model, num_features=45)
    assert not torch.equal(generate(model, inputs), expected)
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model, inputs), expected)


def test_layers_that_keep_their_softmax_keep_their_cache():
    model = converted(qwen2_with_sliding_layer)
    inputs = inputs_for("qwen2", 2)
    cached = generate(model, inputs, return_dict_in_generate=True)
    assert torch.equal(cached.sequences, generate(model, inputs, use_cache=False))
    kinds = [type(layer).__name__ for layer in cached.past_key_values.layers]
    assert kinds == ["RMFALayer", "DynamicSlidingWindowLayer"]


def memory_of(cache):
    """Bytes that the tensors of a cache hold on to, storages that they are slices of included."""
    states = [value for layer in cache.layers for value in [vars(layer), *map(vars, held(layer.state))]]
    tensors = [tensor for values in states for tensor in values.values() if isinstance(tensor, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(state):
    return [state, state.far] if hasattr(state, "far") else [state]


@pytest.mark.parametrize("options", [{}, {"window": 4}])
def test_the_cache_grows_neither_with_the_prompt_nor_with_what_is_generated(options):
    model = converted(FAMILIES["llama"], **options)

    def memory(prompt, new_tokens):
        ids = tokens(2, prompt)
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        cache = generate(model, inputs, return_dict_in_generate=True, **lengths).past_key_values
        assert all(isinstance(layer, RMFALayer) for layer in cache.layers)
        assert cache.get_seq_length() == prompt + new_tokens - 1
        return memory_of(cache)

    assert memory(9, 3) == memory(9, 40) == memory(80, 3)


@torch.no_grad()
def test_a_token_costs_the_same_however_many_came_before():
    """Operations and the sizes of what they make, over a whole decoding step."""
    model = converted(FAMILIES["llama"])

    def work(seen):
        cache = DynamicCache(config=model.config)
        model(tokens(2, seen), past_key_values=cache)
        with Work() as done:
            model(tokens(2, 1), past_key_values=cache)
        return done.made

    assert work(10) == work(1000)


class Work(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements that each operation makes, one after the other."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(out)
        self.made += [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return out


def test_the_encoder_is_summed_up_once(monkeypatch):
    model = converted(FAMILIES["bart"])
    seen = []
    forward = SchoenbAt.forward
    monkeypatch.setattr(
        SchoenbAt, "forward", lambda self, *args, **kw: seen.append(1) or forward(self, *args, **kw)
    )
    cache = generate(model, inputs_for("bart", 2), return_dict_in_generate=True).past_key_values
    assert len(seen) == 2, "the encoder's own layers, once each; decoding works on states"
    cross = cache.cross_attention_cache.layers[0]
    assert cross.keys.shape == (2, 4, 0, 8)
    assert cross.state.count.tolist() == [6, 9]


def test_padding_of_an_encoder_is_generated_around():
    model = converted(FAMILIES["bart"], separate_maps=True)
    inputs = inputs_for("bart", 2)
    whole = inputs["input_ids"][:1]

    def logits(**inputs):
        got = generate(model, inputs, return_dict_in_generate=True, output_logits=True).logits
        return torch.stack(got)[:, :1]

    padded = logits(**inputs)
    torch.testing.assert_close(padded, logits(input_ids=whole[:, :-3]), rtol=1e-4, atol=1e-5)
    assert (padded - logits(input_ids=whole)).abs().amax((1, 2)).min() > 1e-2, "every step hears the encoder"


def test_a_prompt_in_pieces_is_the_prompt():
    model = converted(FAMILIES["llama"])
    ids = tokens(2, 12)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([5, 4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_with_gradients_the_ordinary_cache_stays_and_gives_the_same():
    model = converted(FAMILIES["llama"])
    ids = tokens(2, 12)
    cached = model(ids[:, :7])
    assert not any(isinstance(layer, RMFALayer) for layer in cached.past_key_values.layers)
    rest = model(ids[:, 7:], past_key_values=cached.past_key_values).logits
    torch.testing.assert_close(rest, model(ids, use_cache=False).logits[:, 7:], rtol=1e-4, atol=1e-5)
    rest.sum().backward()
    assert all(
        parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None
    )


def test_with_gradients_and_a_window_it_is_said_how_to_decode():
    model = converted(FAMILIES["llama"], window=3)
    cached = model(tokens(2, 7))
    with pytest.raises(ValueError, match=r"begin a new one under torch.no_grad\(\)"):
        model(tokens(2, 1), past_key_values=cached.past_key_values)


def test_a_calibrated_centre_is_decoded_with():
    model = converted(FAMILIES["llama"])
    calibrate(model, {"input_ids": tokens(4, 20, seed=8)})
    assert model.model.layers[0].self_attn.schoenbat.key_center.abs().max() > 0.01
    inputs = inputs_for("llama", 2)
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


def test_rows_can_be_repeated_selected_and_forgotten():
    model = converted(FAMILIES["llama"])
    ids = tokens(2, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        got = model(ids[:, :1], past_key_values=cache).logits
        expected = model(torch.cat([ids.flip(0), ids[:, :1]], dim=1), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        cache.reset()
        assert cache.get_seq_length() == 0
        again = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(again, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_a_layer_that_was_reset_is_a_new_one():
    layer = RMFALayer()
    layer.update(*torch.zeros(2, 1, 4, 6, 8))
    layer.state = object()
    layer.reset()
    assert vars(RMFALayer()).items() <= vars(layer).items()


@torch.no_grad()
def test_a_call_that_raised_leaves_nothing_to_the_next():
    model = converted(FAMILIES["llama"])
    ids = tokens(1, 6)
    expected = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="custom 4-d masks"):
        model(ids, past_key_values=cache, attention_mask=torch.ones(1, 1, 6, 12, dtype=torch.bool))
    assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_what_a_state_cannot_do_is_said():
    model = converted(FAMILIES["llama"])
    ids = tokens(1, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot take 2 tokens back"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="leave cache_implementation at None"):
        generate(
            model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache_implementation="static"
        )


@pytest.mark.parametrize("padding", [0, 2])
def test_a_static_cache_is_refused_at_its_first_call(padding):
    """Its empty positions would be keys like any other."""
    model, ids = converted(FAMILIES["llama"]), tokens(1, 6)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad(), pytest.raises(ValueError, match="leave cache_implementation at None"):
        model(ids, attention_mask=mask, past_key_values=cache)


def test_attention_called_twice_a_forward_generates_without_a_cache():
    """The second call would see the new keys alone."""
    model, inputs = converted(diff_llama), inputs_for("diff_llama", 2)
    with pytest.raises(ValueError, match="generate with use_cache=False"):
        generate(model, inputs)
    assert generate(model, inputs, use_cache=False).shape == (2, 9 + 15)


def test_a_step_with_a_dense_mask_is_refused():
    """A mask for one query looks like that of an encoder: the new key would not be seen."""
    model, ids = converted(FAMILIES["llama"]), tokens(1, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
        with pytest.raises(ValueError, match=r"pass attention_mask as \(batch, length\)"):
            model(ids[:, 5:], attention_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool), past_key_values=cache)
