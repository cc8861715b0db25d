import json

import pytest
import torch
from integrations.huggingface.tiny import (
    FAMILIES,
    NUM_LAYERS,
    deberta,
    gemma2,
    gpt_oss,
    inputs_for,
    make,
    outputs_of,
    qwen2_with_sliding_layer,
    t5,
    tokens,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DynamicCache,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaModel,
)

from schoenbat import SchoenbAt, kernel, reseed, rmfa
from schoenbat.integrations.huggingface import convert, record_attention, register

TRAINABLE = {"scale": "learned", "post": True, "trainable_features": True}


def maps_of(model):
    return [module.features for module in model.modules() if isinstance(module, SchoenbAt)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_converted_and_no_weight_is_touched(family):
    model = make(FAMILIES[family])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    conversion = convert(model, num_features=45)
    assert len(conversion.converted) == NUM_LAYERS[family]
    assert not conversion.left
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(".schoenbat." in name for name in after.keys() - before.keys())


@pytest.mark.parametrize(("head_dim", "num_features"), [(16, 128), (64, 128), (80, 160), (128, 256)])
def test_wide_heads_get_as_many_features_as_leave_room_for_pairs(head_dim, num_features, tmp_path):
    sizes = {"hidden_size": 2 * head_dim, "intermediate_size": 16, "num_attention_heads": 2}
    model = BertModel(BertConfig(**sizes, num_hidden_layers=1, vocab_size=20))
    convert(model)
    model.save_pretrained(tmp_path)
    for found in (model, BertModel.from_pretrained(tmp_path)):
        assert [(f.num_features, max(f.degrees)) for f in maps_of(found)] == [(num_features, 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_what_the_specification_says(family):
    model = make(FAMILIES[family]).double()
    convert(model, num_features=40, center_keys=False)
    with record_attention() as calls:
        outputs_of(model, **inputs_for(family, torch.float64))
    assert len(calls) == NUM_LAYERS[family]
    for call in calls:
        expected = rmfa(
            call.query, call.key, call.value, call.module.schoenbat.features,
            is_causal=call.is_causal, enable_gqa=True, implementation="reference",
        )  # fmt: skip
        torch.testing.assert_close(call.output, expected.transpose(1, 2), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_small_logits_stays_what_it_was(family):
    """The series is cut off, so conversion is exact in the limit of small logits: wrong scales show here."""
    model = make(FAMILIES[family])
    for module in model.modules():
        for name in {"scaling", "scale"} & vars(module).keys():
            setattr(module, name, 0.1 * getattr(module, name))
    inputs = inputs_for(family)
    expected = outputs_of(model, **inputs)
    convert(model, num_features=80)
    error = (outputs_of(model, **inputs) - expected).norm() / expected.norm()
    assert error < 1e-3
    for module in model.modules():
        if isinstance(module, SchoenbAt):
            module.features.feature_weights[1:] = 0  # plain averaging
    assert (outputs_of(model, **inputs) - expected).norm() / expected.norm() > 5 * error


def test_batch_size_one_and_dropout_in_training():
    model = make(FAMILIES["bert"])
    convert(model, num_features=45)
    ids = tokens()
    torch.testing.assert_close(
        outputs_of(model, input_ids=ids[:1]), outputs_of(model, input_ids=ids)[:1], rtol=1e-4, atol=1e-5
    )
    model.train()
    assert not torch.equal(outputs_of(model, input_ids=ids), outputs_of(model, input_ids=ids))


@pytest.mark.parametrize("model", ["bert-base-uncased", torch.nn.TransformerEncoderLayer(8, 2)], ids=type)
def test_what_is_no_model_of_transformers_is_named(model):
    with pytest.raises(TypeError, match=f"model must be a model of transformers, got {type(model).__name__}"):
        convert(model)


def test_what_cannot_be_converted_is_named_and_left_alone():
    model = make(t5)
    inputs = inputs_for("bart")
    expected = outputs_of(model, **inputs)
    conversion = convert(model)
    assert not conversion.converted
    assert len(conversion.left) == 6
    assert set(conversion.left.values()) == {"adds a position bias to its scores"}
    assert "EncDecAttention: adds a position bias" in str(conversion)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(outputs_of(model, **inputs), expected)


def test_attention_of_another_make_is_named():
    conversion = convert(make(deberta))
    assert not conversion.converted
    assert set(conversion.left.values()) == {"does not go through transformers' AttentionInterface"}
    assert list(conversion.left) == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def test_a_sliding_layer_keeps_its_window():
    model = make(qwen2_with_sliding_layer)
    ids = tokens()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    conversion = convert(model, num_features=45)
    assert conversion.converted == ("model.layers.0.self_attn",)
    assert conversion.left == {
        "model.layers.1.self_attn": "attends within a sliding window of 4 tokens, in linear time already"
    }
    # The second layer, given what it was given before, gives what it gave before: softmax in its window.
    model.model.layers[0].self_attn.__delattr__("schoenbat")
    with torch.no_grad():
        got = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(got[-1], expected[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded(family, tmp_path):
    model = make(FAMILIES[family])
    convert(model, num_features=50, construction="unbiased", **TRAINABLE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SchoenbAt):  # as if it had been trained
                for parameter in module.parameters():
                    parameter += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["schoenbat"]["num_features"] == 50
    torch.manual_seed(99)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    inputs = inputs_for(family)
    torch.testing.assert_close(
        outputs_of(loaded.eval(), **inputs), outputs_of(model, **inputs), rtol=0, atol=0
    )


@pytest.mark.parametrize(("num_features", "redraw"), [(50, False), (45, True)])
def test_maps_of_another_seed_are_loaded_with_their_degrees(num_features, redraw, tmp_path):
    """Beyond the complete degree 2 the degrees are drawn too; 45 features of 8 dimensions are complete."""
    model = make(FAMILIES["llama"])
    convert(model, num_features=num_features, seed=7)
    if redraw:
        reseed(model, 100)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert [f.degrees for f in maps_of(loaded)] == [f.degrees for f in maps_of(model)]
    inputs = inputs_for("llama")
    torch.testing.assert_close(outputs_of(loaded, **inputs), outputs_of(model, **inputs), rtol=0, atol=0)


def test_loaded_in_half_precision_the_maps_stay_whole(tmp_path):
    model = make(FAMILIES["llama"])
    convert(model, num_features=50, **TRAINABLE)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {f.quadratic.dtype for f in maps_of(loaded)} == {torch.float32}
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    inputs = inputs_for("llama")
    expected = outputs_of(model, **inputs)
    assert (outputs_of(loaded, **inputs) - expected).norm() < 0.05 * expected.norm()


def test_loaded_with_its_softmax_and_into_another_head(tmp_path):
    model = make(FAMILIES["bert"])
    inputs = inputs_for("bert")
    softmax = outputs_of(model, **inputs)
    convert(model, num_features=45)
    model.save_pretrained(tmp_path)
    for options in ({"schoenbat": None}, {"attn_implementation": "sdpa"}):
        loaded = AutoModel.from_pretrained(tmp_path, **options).eval()
        loaded.save_pretrained(tmp_path / "again")
        for softmax_model in (loaded, AutoModel.from_pretrained(tmp_path / "again").eval()):
            assert not maps_of(softmax_model)
            torch.testing.assert_close(outputs_of(softmax_model, **inputs), softmax)
    inner = BertForMaskedLM.from_pretrained(tmp_path).eval().bert
    torch.testing.assert_close(outputs_of(inner, **inputs), outputs_of(model, **inputs), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["bert", "llama", "vit", "bart"])
def test_registered_models_are_built_and_loaded_with_it(family, tmp_path):
    """Without `convert`: the same as with it, and the same every time."""
    plain = make(FAMILIES[family])
    plain.save_pretrained(tmp_path)
    register()
    models = [type(plain).from_pretrained(tmp_path, attn_implementation="schoenbat").eval() for _ in range(2)]
    convert(plain)
    inputs = inputs_for(family)
    for model in models:
        torch.testing.assert_close(outputs_of(model, **inputs), outputs_of(plain, **inputs), rtol=0, atol=0)
    built = type(plain)._from_config(plain.config, attn_implementation="schoenbat").eval()
    assert len(maps_of(built)) == NUM_LAYERS[family]
    built.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(outputs_of(loaded, **inputs), outputs_of(built, **inputs), rtol=0, atol=0)
    directions = [features.quadratic for features in maps_of(models[0])]
    pairs = [(i, j) for i in range(len(directions)) for j in range(i)]
    assert not any(torch.equal(directions[i], directions[j]) for i, j in pairs)


def test_registered_options_come_from_the_config(tmp_path):
    register()
    plain = make(FAMILIES["bert"])
    plain.save_pretrained(tmp_path)
    options = {"num_features": 33, "construction": "unbiased"}
    config = AutoConfig.from_pretrained(tmp_path, schoenbat=options)
    for model in (AutoModel.from_config(config), AutoModel.from_pretrained(tmp_path, schoenbat=options)):
        assert [(f.num_features, f.construction) for f in maps_of(model)] == [(33, "unbiased")] * 2


def test_registered_options_reach_the_parts_of_a_model(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vision = {**sizes, "image_size": 16, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=sizes, vision_config=vision)).save_pretrained(tmp_path)
    register()
    model = CLIPModel.from_pretrained(tmp_path, schoenbat={"num_features": 33})
    assert [features.num_features for features in maps_of(model)] == [33, 33]
    with pytest.raises(TypeError, match="must be options by name, or None, got True"):
        CLIPModel.from_pretrained(tmp_path, schoenbat=True)


@pytest.mark.parametrize("build", [gemma2, gpt_oss])
@pytest.mark.parametrize("padded", [False, True])
def test_what_sdpa_cannot_do_is_kept_where_softmax_is(build, padded):
    model = make(build)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, 3.0)
    inputs = {"input_ids": tokens()}
    if padded:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :3] = 0
        inputs["attention_mask"] = mask
    model.set_attn_implementation("eager")
    expected = outputs_of(model, **inputs)
    register()
    model.set_attn_implementation("schoenbat")
    torch.testing.assert_close(outputs_of(model, **inputs)[:, 3:], expected[:, 3:], rtol=1e-4, atol=1e-5)


def test_a_model_without_attention_is_said_to_have_none(caplog):
    config = MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=4)
    assert not convert(MambaModel(config)).converted
    assert "0 attention layers converted" in caplog.text


def test_options_are_checked_before_anything_changes():
    model = make(FAMILIES["bert"])
    with pytest.raises(TypeError, match="kernel must be a name"):
        convert(model, kernel=kernel("exp"))
    with pytest.raises(ValueError, match="which queries are padding"):
        convert(model, normalization="batch")
    with pytest.raises(TypeError, match="modules decide them: dtype"):
        convert(model, dtype=torch.float16)
    with pytest.raises(ValueError, match="unknown construction"):
        convert(model, construction="none such")
    assert not maps_of(model)
    assert model.config._attn_implementation == "sdpa"


def test_converting_again_takes_the_new_options():
    model = make(FAMILIES["bert"])
    convert(model, num_features=45)
    convert(model, num_features=60)
    assert [features.num_features for features in maps_of(model)] == [60, 60]
    assert model.config.schoenbat["num_features"] == 60


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_compiles_in_one_graph(family):
    model = make(FAMILIES[family])
    convert(model, num_features=45)
    inputs = inputs_for(family) | ({"use_cache": False} if family == "llama" else {})
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, -3:] = 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = outputs_of(model, attention_mask=mask, **inputs)
    torch.testing.assert_close(outputs_of(compiled, attention_mask=mask, **inputs), expected)


def test_compiled_without_a_mask_it_is_said_to_pass_one():
    """A compiled graph cannot look whether positions begin anew."""
    model, inputs = make(FAMILIES["llama"]), inputs_for("llama")
    convert(model, num_features=45)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="unless it gets an attention_mask"):
        outputs_of(compiled, use_cache=False, **inputs)
    mask = torch.ones_like(inputs["input_ids"])
    expected = outputs_of(model, use_cache=False, **inputs)
    torch.testing.assert_close(outputs_of(compiled, use_cache=False, attention_mask=mask, **inputs), expected)


def test_layers_of_chunks_keep_them():
    """As many keys as a chunk has may lie in two: one by one, tokens see what they see at once."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8}
    counts = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
    }
    text = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    chunks = {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]}
    config = Llama4TextConfig(**sizes, **counts, **text, **chunks, initializer_range=0.2)
    model = make(lambda: Llama4ForCausalLM(config))
    conversion = convert(model, num_features=45)
    assert conversion.converted == ("model.layers.1.self_attn",)
    assert list(conversion.left.values()) == ["attends within chunks, in linear time already"]
    ids, cache = tokens(1, 8), DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(8)]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_model_of_which_a_part_is_converted_is_loaded_as_what_it_is(part, tmp_path):
    """Encoder and decoder share a config, which alone says nothing of which of them it was."""
    model, inputs = make(FAMILIES["bart"]), inputs_for("bart")
    convert(getattr(model.model, part), num_features=45)
    model.save_pretrained(tmp_path / "with its head")
    loaded = type(model).from_pretrained(tmp_path / "with its head").eval()
    loaded.model.save_pretrained(tmp_path / "alone")
    again = type(model.model).from_pretrained(tmp_path / "alone").eval()
    for inner in (loaded.model, again):
        assert len(maps_of(inner)) == len(maps_of(model)) == len(maps_of(getattr(inner, part)))
        got, expected = (x(**inputs).last_hidden_state for x in (inner, model.model))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_model_set_back_to_its_softmax_is_loaded_with_it(tmp_path):
    model, inputs = make(FAMILIES["bert"]), inputs_for("bert")
    softmax = outputs_of(model, **inputs)
    convert(model, num_features=45)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert not maps_of(loaded)
    torch.testing.assert_close(outputs_of(loaded, **inputs), softmax)
    model.set_attn_implementation("schoenbat")  # the model itself has not forgotten
    assert model.config.schoenbat["num_features"] == 45
