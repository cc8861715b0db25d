"""Launch the kernels of post-SBN's power; rows are ``(..., H, n, d)``, γ and β ``(H, d)``."""

import math

import torch
from torch import Tensor

from schoenbat.ops.triton.call import cdiv
from schoenbat.ops.triton.kernels import odd_power
from schoenbat.ops.triton.tiles import FUSED

# Numbers a tile, 16 to a thread of four warps: of twice as many, registers have room for two programs alone.
_TILE, _COLUMNS = 2048, 128
# Eight programs for each of a large GPU's 132 multiprocessors wait for memory at a time.
_PROGRAMS = 1056


def forward(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """What `odd_power` gives."""
    rows = _as_heads(x)
    out = x.new_empty(x.shape)
    if out.numel():
        sizes, tiles, heads, across = _sizes(rows, epsilon)
        odd_power.forward[(tiles * heads, across)](
            *(rows, gamma.contiguous(), beta.contiguous(), out, *rows.stride()[:3], rows.shape[2], tiles),
            **sizes,
        )
    return out


def backward(
    grad: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, γ and β, the same to the last bit in every run."""
    rows, grads = _as_heads(x), _as_heads(grad)
    to_x = x.new_empty(x.shape)
    if not to_x.numel():
        return to_x, torch.zeros_like(gamma), torch.zeros_like(beta)
    sizes, tiles, heads, across = _sizes(rows, epsilon)
    each = cdiv(tiles, max(1, min(tiles, _PROGRAMS // (heads * across))))
    splits = cdiv(tiles, each)
    parts = [x.new_empty(*rows.shape[:2], splits, x.shape[-1], dtype=torch.float32) for _ in range(2)]
    odd_power.backward[(splits * heads, across)](
        *(rows, gamma.contiguous(), beta.contiguous(), grads, to_x, *parts),
        *(*rows.stride()[:3], *grads.stride()[:3], rows.shape[2], each, splits),
        **sizes,
    )
    to_gamma, to_beta = (part.sum((0, 2)) for part in parts)
    return to_x, to_gamma.to(gamma.dtype), (to_beta * gamma * beta.sign()).to(beta.dtype)


def _as_heads(x: Tensor) -> Tensor:
    """``(..., H, n, d) -> (B, H, n, d)`` with unit column stride."""
    x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(rows: Tensor, epsilon: float) -> tuple[dict[str, float | int | bool], int, int, int]:
    """What a kernel is compiled for; how many tiles a head has, how many heads, and tiles side by side."""
    batch, heads, n, width = rows.shape
    columns = min(_COLUMNS, 1 << (width - 1).bit_length())
    block = _TILE // columns
    sizes = {"EPSILON": epsilon, "HEADS": heads, "WIDTH": width, "BLOCK": block, "COLUMNS": columns}
    return sizes | FUSED, cdiv(n, block), batch * heads, cdiv(width, columns)
