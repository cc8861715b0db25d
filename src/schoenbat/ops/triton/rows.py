"""Tiles of rows inside a kernel: how they are loaded and stored, and what kernels of both directions agree on.

Names: i_ indices, o_ offsets, p_ pointers, b_ blocks, m_ masks.
"""

import triton
import triton.language as tl

LOWEST_EXPONENT = tl.constexpr(-80.0)
# The narrowest product that tensor cores do.
NARROW = tl.constexpr(16)


@triton.jit
def load_tile(p, start, stride, m_n, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """BLOCK rows from `start` of a matrix with unit column stride; zeros where m_n is false."""
    o_n, o_c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    # 64 bits for the tile's place, 32 for places inside of it: fewer registers.
    p = p + tl.full([], start, tl.int64) * stride + (o_n[:, None] * stride + o_c[None, :])
    mask = m_n[:, None]
    if C != BLOCK_C:
        mask = mask & (o_c[None, :] < C)
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def store_tile(p, start, b, m_n, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """The same, into a contiguous matrix."""
    o_n, o_c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    p = p + tl.full([], start, tl.int64) * C + (o_n[:, None] * C + o_c[None, :])
    mask = m_n[:, None]
    if C != BLOCK_C:
        mask = mask & (o_c[None, :] < C)
    tl.store(p, b.to(p.dtype.element_ty), mask=mask)


@triton.jit
def visible(p_mask, start, N, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which rows of a tile exist and take part; a tile may begin before the first row."""
    o_n = start + tl.arange(0, BLOCK)
    m_n = (o_n >= 0) & (o_n < N)
    if HAS_MASK:
        m_n = m_n & (tl.load(p_mask + o_n, mask=m_n, other=0) != 0)
    return m_n
