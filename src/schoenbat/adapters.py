"""What any attention with the call of `SchoenbAt` can be given besides its own options.

Each is a module around an attention, or around one for each half of the heads, and has the same call.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schoenbat.options import check_count
from schoenbat.precision import at_least_float32

_LONGEST_WAVE = 10_000.0


def _check_one_sequence(what: str, query: Tensor, key: Tensor) -> None:
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{what} belong to one sequence, got {query.shape[-2]} queries and {key.shape[-2]} keys; use an "
            "attention without them between two sequences"
        )


def _check_heads(what: str, num_heads: int, value: Tensor) -> None:
    if value.shape[-3] != num_heads:
        raise ValueError(
            f"{what} were made for values of {num_heads} heads, got {value.shape[-3]}; repeat grouped heads "
            "first"
        )


def rotate(x: Tensor, first: int = 0) -> Tensor:
    """Turn the rows ``(..., n, d)`` by their positions ``first, first + 1, …`` (RoPE).

    Channels i and i + d/2 turn together, by position · 10,000^(−2i/d); an odd last channel stays. A
    rotation keeps norms, and ⟨rotate(q)ᵢ, rotate(k)ⱼ⟩ depends on where two rows stand by i − j alone.

    Example:
        >>> rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """
    pairs = x.shape[-1] // 2
    dtype = at_least_float32(x.dtype)
    speeds = _LONGEST_WAVE ** (-torch.arange(pairs, device=x.device, dtype=dtype) / pairs)
    angles = torch.arange(first, first + x.shape[-2], device=x.device, dtype=dtype)[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x.to(dtype).split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1).to(x.dtype)


class Rotary(nn.Module):
    """Queries and keys of one sequence are turned by their positions.

    Where a causal call has fewer queries than keys, the last query stands where the last key does. An
    attention that normalises rows by their norms alone (``normalization=l2``, ``qk_norm=l2``) sees unit rows,
    turned.

    Args:
        attention: what attends.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **options: Any
    ) -> Tensor:
        first = key.shape[-2] - query.shape[-2]
        if not is_causal:
            _check_one_sequence("rotary positions", query, key)
        return self.attention(rotate(query, first), rotate(key), value, is_causal=is_causal, **options)


class BothWays(nn.Module):
    """The first half of the heads sees what came before each position, the second half what comes after.

    Args:
        back: a causal attention of half the heads.
        ahead: another one.
    """

    def __init__(self, back: nn.Module, ahead: nn.Module) -> None:
        super().__init__()
        self.back, self.ahead = back, ahead

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if is_causal:
            raise ValueError("heads that see what comes after have no causal form; use causal=true instead")
        _check_one_sequence("heads that look both ways", query, key)
        _check_heads("heads that look both ways", query.shape[-3], value)
        halves = [x.chunk(2, dim=-3) for x in (query, key, value)]
        masks = key_mask, query_mask
        before = self._attend(self.back, [half[0] for half in halves], masks, options)
        turned = [None if mask is None else mask.flip(-1) for mask in masks]
        after = self._attend(self.ahead, [half[1].flip(-2) for half in halves], turned, options)
        return torch.cat([before, after.flip(-2)], dim=-3)

    def _attend(self, attention: nn.Module, inputs: Any, masks: Any, options: dict[str, Any]) -> Tensor:
        return attention(*inputs, key_mask=masks[0], query_mask=masks[1], is_causal=True, **options)


class Convolved(nn.Module):
    """To what attention gives, each channel adds a convolution of its values; it starts at zero.

    Args:
        attention: what attends.
        num_heads: of the values.
        value_dim: their width.
        width: how many neighbouring positions each sees, itself in the middle (causal: at the end).
    """

    def __init__(self, attention: nn.Module, num_heads: int, value_dim: int, width: int) -> None:
        super().__init__()
        self.attention, self.num_heads = attention, num_heads
        self.width = check_count("conv", width, most=1024)
        self.weight = nn.Parameter(torch.zeros(num_heads * value_dim, 1, width))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        _check_one_sequence("convolutions of values", query, key)
        _check_heads("convolutions of values", self.num_heads, value)
        out = self.attention(query, key, value, key_mask=key_mask, is_causal=is_causal, **options)
        if not value.shape[-2]:  # of which no convolution is defined
            return out
        if key_mask is not None:
            value = value.masked_fill(~key_mask[..., None, :, None], 0)
        channels = value.transpose(-2, -1).flatten(-3, -2)  # (B, H·d, n)
        behind = self.width - 1 if is_causal else self.width // 2
        padded = F.pad(channels, (behind, self.width - 1 - behind))
        mixed = F.conv1d(padded, self.weight.to(padded.dtype), groups=len(self.weight))
        return out + mixed.unflatten(-2, value.shape[-3:-2] + value.shape[-1:]).transpose(-2, -1)


class HeadNorm(nn.Module):
    """Every row of every head is brought to mean square 1, times a weight for each channel.

    Args:
        attention: what attends.
        num_heads: of the outputs.
        value_dim: their width.
    """

    def __init__(self, attention: nn.Module, num_heads: int, value_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.weight = nn.Parameter(torch.ones(num_heads, 1, value_dim))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out = self.attention(query, key, value, **options)
        precise = out.to(at_least_float32(out.dtype))
        return (F.rms_norm(precise, out.shape[-1:], eps=1e-6) * self.weight).to(out.dtype)
