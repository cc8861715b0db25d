"""The Transformer of "Attention Is All You Need", small, with any attention of the registry in each place."""

import math

import torch
from torch import Tensor, nn

from schoenbat.registry import build_attention, with_seed
from schoenbat.translation.tokenizer import PAD


class Translator(nn.Module):
    """Encoder and decoder with pre-norm layers and fixed positions; embeddings and output share one matrix.

    The attention stands in the encoder, causally in the decoder, and between the two. Its own weights are
    never dropped, since most attentions form none; dropout is on the embeddings and on what each part adds.

    Args:
        attention: a name with options, as ``schoenbat.build_attention`` takes it.
        vocab_size: of both languages together; token 0 is padding.
        max_length: the longest sequence.
        dim: the width of the model.
        num_heads: attention heads of ``dim / num_heads`` channels each.
        hidden_dim: the width inside the feed-forward parts.
        num_layers: of the encoder, and of the decoder.
        dropout: its rate.

    >>> sizes = {"max_length": 16, "dim": 32, "num_heads": 2, "hidden_dim": 64, "num_layers": 1}
    >>> model = Translator("softmax", vocab_size=20, dropout=0.1, **sizes)
    >>> model(torch.randint(1, 20, (3, 7)), torch.randint(1, 20, (3, 5))).shape
    torch.Size([3, 5, 20])
    """

    positions: Tensor

    def __init__(
        self,
        attention: str,
        *,
        vocab_size: int,
        max_length: int,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        num_layers: int,
        dropout: float,
    ) -> None:
        super().__init__()

        def attend() -> MultiHead:
            own = build_attention(with_seed(attention), dim // num_heads, num_heads, max_length)
            return MultiHead(own, dim, num_heads)

        def feed_forward() -> nn.Module:
            return nn.Sequential(
                nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden_dim, dim)
            )

        self.tokens = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.register_buffer("positions", sinusoids(max_length, dim), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            EncoderLayer(attend(), feed_forward(), dim, dropout) for _ in range(num_layers)
        )
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(
            DecoderLayer(attend(), attend(), feed_forward(), dim, dropout) for _ in range(num_layers)
        )
        self.decoder_norm = nn.LayerNorm(dim)
        # Logits then start near 1; as embeddings the rows are scaled up, to be of the size of positions.
        nn.init.normal_(self.tokens.weight, std=dim**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits ``(B, m, vocab_size)`` of what follows each prefix of ``target`` ``(B, m)``.

        ``source`` is ``(B, n)``; both are padded with 0 behind the sentence.
        """
        mask = source != PAD
        return self.logits(self.decode(target, self.encode(source, mask), mask))

    def encode(self, source: Tensor, mask: Tensor) -> Tensor:
        """What the encoder makes of a source: ``(B, n, dim)``; ``mask`` is True where a token is real."""
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    def decode(self, target: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """What the decoder makes of prefixes ``(B, m)`` beside an encoded source: ``(B, m, dim)``."""
        mask = target != PAD
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, mask, memory, memory_mask)
        return self.decoder_norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """``(..., dim) -> (..., vocab_size)``."""
        return nn.functional.linear(states, self.tokens.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings with positions, ``(B, n) -> (B, n, dim)``."""
        length, longest = tokens.shape[-1], len(self.positions)
        if length > longest:
            raise ValueError(f"sequences of {length} tokens, but max_length is {longest}")
        return self.dropout(
            math.sqrt(self.tokens.embedding_dim) * self.tokens(tokens) + self.positions[:length]
        )


class MultiHead(nn.Module):
    """An attention between its projections."""

    def __init__(self, attention: nn.Module, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.attention = attention
        self.output = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, mask: Tensor, context: Tensor, context_mask: Tensor, *, is_causal: bool = False
    ) -> Tensor:
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, n_q, d)
        heads = self.key_value(context).unflatten(-1, (2, self.num_heads, -1))  # (B, n_k, 2, H, d)
        key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, n_k, d)
        mixed = self.attention(query, key, value, key_mask=context_mask, query_mask=mask, is_causal=is_causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward part, each added to its input and taking it through a LayerNorm."""

    def __init__(self, attention: MultiHead, feed_forward: nn.Module, dim: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.attention_norm(x)
        x = x + self.dropout(self.attention(rows, mask, rows, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoded source, and a feed-forward part."""

    def __init__(
        self, attention: MultiHead, cross: MultiHead, feed_forward: nn.Module, dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward
        self.attention_norm, self.cross_norm, self.feed_forward_norm = (nn.LayerNorm(dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        rows = self.attention_norm(x)
        x = x + self.dropout(self.attention(rows, mask, rows, mask, is_causal=True))
        x = x + self.dropout(self.cross(self.cross_norm(x), mask, memory, memory_mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def sinusoids(length: int, dim: int) -> Tensor:
    """Sines and cosines of wavelengths from 2π to 20,000π, ``(length, dim)``.

    >>> sinusoids(4, 6)[0].tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """
    rates = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1).float()
