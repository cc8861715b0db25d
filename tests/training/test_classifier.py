"""The small classifier: shapes, padding, and that the attention is the one asked for."""

import pytest
import torch

from schoenbat.registry import attention_names, attention_options
from schoenbat.training.classifier import Classifier, embed

SIZES = {"vocab_size": 16, "num_classes": 10, "max_length": 24}


def tokens(length=24):
    padded = torch.randint(1, 16, (3, length), generator=torch.Generator().manual_seed(0))
    padded[0, 9:] = padded[1, 5:] = padded[2, 9:] = 0
    return padded


@pytest.mark.parametrize("attention", attention_names())
def test_padding_changes_nothing(attention):
    model = Classifier(attention, **SIZES).eval()
    logits = model(tokens())
    assert logits.shape == (3, 10)
    torch.testing.assert_close(logits, model(tokens()[:, :9]), rtol=1e-4, atol=1e-5)
    # What stands in a masked position is not seen either.
    changed = torch.where(tokens() == 0, 7, tokens())
    torch.testing.assert_close(logits, model(changed, tokens() != 0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, model(changed))


@pytest.mark.parametrize("attention", attention_names())
def test_every_parameter_learns(attention):
    torch.manual_seed(0)
    model = Classifier(attention, **SIZES)
    model(tokens()).square().sum().backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert not idle


@pytest.mark.parametrize("attention", [*attention_names(), "schoenbat:construction=exact-low,window=4"])
def test_weights_are_loaded_into_the_memory_that_a_graph_reads(attention):
    """The best weights are put back before the test, which replays a CUDA graph."""
    model, other = (Classifier(attention, **SIZES) for _ in range(2))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    model.load_state_dict(model.state_dict())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    model.load_state_dict(other.state_dict())
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("attention", attention_names())
def test_what_is_drawn_at_random_differs_by_layer_and_by_seed(attention):
    def drawn(seed):
        torch.manual_seed(seed)
        layers = Classifier(attention, **SIZES).layers
        return [dict(layer.attention.named_buffers()) for layer in layers]

    (first, second), (other, _) = drawn(0), drawn(1)
    again, _ = drawn(0)
    assert all(buffer.equal(again[name]) for name, buffer in first.items())
    if "seed" in attention_options(attention):
        for layer in (second, other):
            assert any(not buffer.equal(layer[name]) for name, buffer in first.items())


def test_the_published_sizes():
    model = Classifier("softmax", **SIZES)
    assert model.tokens.weight.shape == (16, 64)
    assert 0.015 < model.tokens.weight.std() < 0.025
    assert len(model.layers) == 2
    assert model.layers[0].attention.head_dim == 32
    # 64·(16 + 24) embeddings; 2 layers of 4·64² + 2·64·128 weights and their biases and norms; norm; head.
    layer = 4 * 64 * 64 + 4 * 64 + 2 * 64 * 128 + 128 + 64 + 4 * 64
    head = 64 * 128 + 128 + 128 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == 64 * 40 + 2 * layer + 2 * 64 + head


def test_no_mixing_keeps_tokens_apart_until_they_are_pooled():
    """Then the pooled sum is additive over positions."""
    model = Classifier("none", **SIZES).eval()
    model.head = torch.nn.Identity()
    row = tokens()[:1, :9]
    positions = torch.arange(9)
    first = model(row, (positions < 4).expand(1, 9))
    rest = model(row, (positions >= 4).expand(1, 9))
    torch.testing.assert_close(model(row), first + rest)


@pytest.mark.parametrize("copies", [1, 5, 32])
def test_copies_of_the_embedding_change_neither_rows_nor_gradients(copies):
    weight, incoming = torch.randn(16, 8, dtype=torch.float64), torch.randn(3, 24, 8, dtype=torch.float64)
    plain, copied = (weight.clone().requires_grad_() for _ in range(2))
    rows, expected = embed(tokens(), copied, copies), torch.nn.functional.embedding(tokens(), plain)
    assert torch.equal(rows, expected)
    rows.backward(incoming)
    expected.backward(incoming)
    torch.testing.assert_close(copied.grad, plain.grad)


def test_too_long_a_sequence_is_an_error():
    with pytest.raises(ValueError, match="25 tokens, but max_length is 24"):
        Classifier("mean", **SIZES)(torch.ones(1, 25, dtype=torch.long))
