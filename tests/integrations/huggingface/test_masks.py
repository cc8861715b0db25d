import pytest
import torch
from integrations.huggingface.tiny import DECODERS, ENCODERS, FAMILIES, make, outputs_of, tokens

from schoenbat.integrations.huggingface import convert
from schoenbat.integrations.huggingface.masks import compact_mask, dense_mask, read_mask

OPTIONS = [{}, {"window": 3}]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def converted(build, **options):
    model = make(build)
    convert(model, num_features=45, **options)
    return model


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ENCODERS)
def test_padding_changes_no_real_token(family, options):
    model = converted(ENCODERS[family], **options)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    padded = outputs_of(
        model, input_ids=ids.masked_fill(mask == 0, model.config.pad_token_id), attention_mask=mask
    )
    torch.testing.assert_close(padded[:1, :7], outputs_of(model, input_ids=ids[:1, :7]), **CLOSE)
    torch.testing.assert_close(padded[1:], outputs_of(model, input_ids=ids[1:]), **CLOSE)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", DECODERS)
def test_padding_changes_no_real_token_of_a_decoder(family, side, options):
    model = converted(DECODERS[family], **options)
    ids = tokens()
    real = slice(4, None) if side == "left" else slice(None, 7)
    mask = torch.zeros_like(ids)
    mask[0, real] = 1
    mask[1] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = outputs_of(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(padded[:1, real], outputs_of(model, input_ids=ids[:1, real]), **CLOSE)
    torch.testing.assert_close(padded[1:], outputs_of(model, input_ids=ids[1:]), **CLOSE)


def test_padding_of_an_encoder_reaches_cross_attention():
    model = converted(FAMILIES["bart"])
    source, target = tokens(length=9), tokens(seed=2)
    mask = torch.ones_like(source)
    mask[0, 6:] = 0
    padded = outputs_of(model, input_ids=source, attention_mask=mask, decoder_input_ids=target)
    alone = outputs_of(model, input_ids=source[:1, :6], decoder_input_ids=target[:1])
    torch.testing.assert_close(padded[:1], alone, **CLOSE)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", [*DECODERS, "bart", "clip"])
def test_the_future_is_not_seen(family, padded, batch, options):
    model = converted(FAMILIES[family], **options)
    ids = tokens(batch)
    other = torch.cat([ids[:, :6], tokens(batch, seed=5)[:, 6:]], dim=1)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 0] = 0
    name = "decoder_" if family == "bart" else ""
    more = {"input_ids": tokens(batch, 9)} if family == "bart" else {}
    outputs = [
        outputs_of(model, **more, **{f"{name}input_ids": x, f"{name}attention_mask": mask})
        for x in (ids, other)
    ]
    torch.testing.assert_close(outputs[0][:, :6], outputs[1][:, :6], rtol=0, atol=1e-6)
    assert (outputs[0][:, 6:] - outputs[1][:, 6:]).abs().max() > 1e-2


def test_packed_sequences_and_custom_masks_are_refused():
    model = converted(DECODERS["llama"])
    ids = tokens(1, 8)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="cannot follow a mask of shape"):
        model(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="custom 4-d masks"):
        model(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), use_cache=False)


def test_compact_and_dense_say_the_same():
    padding = torch.tensor([[False, True, True, True, True], [True] * 5])
    mask = compact_mask(2, 3, 5, q_offset=2, attention_mask=padding)
    key_mask, is_causal = read_mask(mask, False, 5)
    assert is_causal
    assert torch.equal(key_mask, padding)
    expected = torch.ones(3, 5).tril(2).bool() & padding[:, None, None]
    assert torch.equal(dense_mask(mask, True, 3, 5, padding.device), expected)
    assert compact_mask(2, 3, 5, q_offset=2, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    assert dense_mask(None, True, 3, 5, padding.device).tolist() == [
        [torch.ones(3, 5).tril(2).bool().tolist()]
    ]
