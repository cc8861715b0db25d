"""Tiles of rows inside a kernel: how they are loaded and stored, and what kernels of both directions agree on.

Names: i_ indices, o_ offsets, p_ pointers, b_ blocks, m_ masks.
"""

import triton
import triton.language as tl

LOWEST_EXPONENT = tl.constexpr(-80.0)
# The narrowest product that tensor cores do.
NARROW = tl.constexpr(16)


@triton.jit
def wait_for_the_one_before(OVERLAPS: tl.constexpr):
    """Of a kernel that may start before the one before it has ended (OVERLAPS): wait for all that this one stores."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


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
def load_unit_tile(
    p, start, stride, m_n, EPS, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The same as `unit_tile` makes it, and what its rows were multiplied by."""
    b_x = load_tile(p, start, stride, m_n, DIM, BLOCK, BLOCK_D)
    return unit_tile(b_x, EPS, UNIT, DIM, BLOCK, BLOCK_D)


@triton.jit
def unit_tile(b_x, EPS, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows as they are (UNIT = 0), of norm 1 (1), centred and of norm 1 (2), and what they were multiplied by."""
    b_factor = tl.full([BLOCK], 1.0, tl.float32)
    if UNIT > 0:
        b_rows = b_x.to(tl.float32)
        if UNIT > 1:
            b_rows = _centred(b_rows, DIM, BLOCK_D)
            if b_x.dtype == tl.float32:  # else the mean of a row of constants is not rounded: see `unit_rows`
                b_rows = _centred(b_rows, DIM, BLOCK_D)
        b_factor = tl.rsqrt(tl.maximum(tl.sum(b_rows * b_rows, axis=1), DIM * EPS))
        b_x = (b_rows * b_factor[:, None]).to(b_x.dtype)
    return b_x, b_factor


@triton.jit
def unit_backward(b_dx, b_x, b_factor, EPS, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The gradient of the rows as they were loaded, from that of the unit rows b_x."""
    if UNIT > 0:
        b_unit = b_x.to(tl.float32)
        # Rows shorter than the least norm were multiplied by a constant.
        b_along = tl.where(b_factor < tl.rsqrt(DIM * EPS), tl.sum(b_dx * b_unit, axis=1), 0.0)
        b_dx = (b_dx - b_along[:, None] * b_unit) * b_factor[:, None]
        if UNIT > 1:
            b_dx = _centred(b_dx, DIM, BLOCK_D)
    return b_dx


@triton.jit
def _centred(b_rows, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Less the mean of each row; what is padded is zero and stays so."""
    b_centred = b_rows - (tl.sum(b_rows, axis=1) / DIM)[:, None]
    if DIM != BLOCK_D:
        b_centred = tl.where(tl.arange(0, BLOCK_D)[None, :] < DIM, b_centred, 0.0)
    return b_centred


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
