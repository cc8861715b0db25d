import pytest
import torch
from integrations.huggingface.tiny import FAMILIES, albert, inputs_for, make, outputs_of, tokens
from transformers import Wav2Vec2Config, Wav2Vec2Model

from schoenbat import SchoenbAt
from schoenbat.integrations.huggingface import calibrate, convert, distill
from schoenbat.integrations.huggingface.distillation import token_outputs

TRAINABLE = {"scale": "learned", "post": True, "trainable_features": True}


def batches(count=20):
    return [{"input_ids": tokens(4, 16, seed=seed)} for seed in range(10, 10 + count)]


def error_of(model, expected, **inputs):
    return float((outputs_of(model, **inputs) - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_both_stages_bring_the_model_back(family):
    model = make(FAMILIES[family])
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 3  # far from averaging
    held_out = inputs_for(family)
    expected = outputs_of(model, **held_out)
    convert(model, num_features=24, map_per_head=True, separate_maps=True, **TRAINABLE)
    errors = [error_of(model, expected, **held_out)]
    for steps in ((40, 0), (0, 40)):
        losses = distill(model, batches(), steps=steps, progress=False)
        assert (len(losses.attention), len(losses.model)) == steps
        of_stage = losses.attention or losses.model
        assert sum(of_stage[-10:]) < sum(of_stage[:10])
        errors.append(error_of(model, expected, **held_out))
    assert errors[-1] < 0.9 * errors[0]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_first_stage_trains_attention_alone_and_the_second_no_embeddings():
    model = make(FAMILIES["bert"])
    convert(model, num_features=24, **TRAINABLE)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}

    def changed():
        return {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}

    distill(model, batches(), steps=(3, 0), progress=False)
    assert changed()
    assert all(".schoenbat." in name for name in changed())
    distill(model, batches(), steps=(0, 3), progress=False)
    assert "encoder.layer.0.attention.self.query.weight" in changed()
    assert not any("embeddings.word" in name or "embeddings.position" in name for name in changed())


def test_what_is_wrong_with_the_arguments_is_said():
    model = make(FAMILIES["bert"])
    convert(model, num_features=24, **TRAINABLE)
    with pytest.raises(TypeError, match="two numbers, one for each stage, got 5"):
        distill(model, batches(), steps=5)
    with pytest.raises(TypeError, match="by name, got Tensor"):
        distill(model, [tokens()], steps=(1, 0), progress=False)


def test_embeddings_of_images_are_not_trained():
    model = make(FAMILIES["vit"])
    convert(model, num_features=24, **TRAINABLE)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():  # which is the caller's affair
        distill(model, [inputs_for("vit")], steps=(0, 3), progress=False)
    changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed
    assert not any(name.startswith("embeddings.") for name in changed)


def test_models_without_input_embeddings_distil_too():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    layers = {"conv_dim": (16,), "conv_stride": (10,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    position = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    model = Wav2Vec2Model(Wav2Vec2Config(**sizes, **layers, **position)).eval()
    convert(model, num_features=24, **TRAINABLE)
    sound = {"input_values": torch.randn(2, 300, generator=torch.Generator().manual_seed(0))}
    assert len(distill(model, [sound], steps=(1, 2), progress=False).model) == 2


@pytest.mark.parametrize("family", ["vit", "bart", "gpt2"])
def test_other_families_distil_too(family):
    model = make(FAMILIES[family])
    convert(model, num_features=24, **TRAINABLE)
    losses = distill(model, [inputs_for(family)], steps=(10, 10), progress=False)
    assert losses.attention[-1] < losses.attention[0]
    assert losses.model[-1] < losses.model[0]


def padded():
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_a_layer_called_several_times_is_matched_call_by_call():
    model = make(albert)
    convert(model, num_features=24, window=len(tokens()[0]), **TRAINABLE)  # all keys are near: exact
    losses = distill(model, [padded()], steps=(0, 1), progress=False)
    assert losses.model[0] < 1e-5


@pytest.mark.parametrize("method", ["forward", "calibrate"])
def test_all_calls_of_a_layer_are_learned_from(method, monkeypatch):
    model = make(albert)
    convert(model, num_features=24, **TRAINABLE)
    rows, original = [], getattr(SchoenbAt, method)

    def counted(self, query, *args, **options):
        if not rows or not torch.equal(rows[-1], query):
            rows.append(query)
        return original(self, query, *args, **options)

    monkeypatch.setattr(SchoenbAt, method, counted)
    if method == "forward":
        distill(model, [padded()], steps=(1, 0), progress=False)
    else:
        calibrate(model, padded())
    assert sum(map(len, rows)) == 3 * 2, "three calls, two sequences"


def test_a_layer_under_a_dense_mask_is_left_out():
    model = make(FAMILIES["bart"])
    convert(model, num_features=24, **TRAINABLE)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    batch = inputs_for("bart")
    length = batch["decoder_input_ids"].shape[1]
    batch["decoder_attention_mask"] = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    calibrate(model, batch)
    distill(model, [batch], steps=(2, 0), progress=False)
    changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    assert any("encoder_attn" in name for name in changed)
    assert not any("decoder" in name and "self_attn" in name for name in changed)


def test_a_batch_that_teaches_nothing_is_refused():
    model = make(FAMILIES["llama"])
    convert(model, num_features=24, **TRAINABLE)
    batch = {"input_ids": tokens(1, 8), "attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()}
    with pytest.raises(ValueError, match="dense mask"):
        distill(model, [batch], steps=(1, 0), progress=False)
    with pytest.raises(ValueError, match="dense mask"):
        calibrate(model, batch)


def test_calibration_needs_no_training():
    model = make(FAMILIES["llama"])
    held_out = inputs_for("llama")
    expected = outputs_of(model, **held_out)
    convert(model, num_features=24)
    before = error_of(model, expected, **held_out)
    calibrate(model, {"input_ids": tokens(4, 24, seed=30)})
    assert error_of(model, expected, **held_out) < before


def test_what_is_missing_is_said():
    model = make(FAMILIES["bert"])
    with pytest.raises(ValueError, match="call convert"):
        distill(model, batches(), progress=False)
    convert(model, num_features=24)
    with pytest.raises(ValueError, match='scale="learned"'):
        distill(model, batches(), progress=False)
    convert(model, num_features=24, **TRAINABLE)
    with pytest.raises(ValueError, match="no batches"):
        distill(model, [], progress=False)


def test_float16_is_refused_before_anything_changes():
    """Adam divides by zero where its eps is one."""
    model = make(FAMILIES["bert"]).half()
    convert(model, num_features=45, scale="learned", post=True, trainable_features=True)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(TypeError, match="distil in float32 or bfloat16"):
        distill(model, [{"input_ids": tokens()}], steps=(1, 1), progress=False)
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


def test_outputs_of_a_decoder_are_those_of_its_own_tokens():
    model, ids = make(FAMILIES["bart"]), tokens(2, 6)
    of_encoder, of_decoder = torch.ones_like(ids), torch.ones_like(ids)
    of_encoder[:, 2:] = 0
    of_decoder[0, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": of_encoder, "decoder_input_ids": ids}
    outputs = model(**batch, decoder_attention_mask=of_decoder)
    assert len(token_outputs(outputs, {**batch, "decoder_attention_mask": of_decoder})) == 10
    assert len(token_outputs(outputs, batch)) == 12
