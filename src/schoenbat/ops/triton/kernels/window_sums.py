"""Exact near, linear far: which keys of a sequence are met as sums, which tile by tile.

The axis of positions is cut into chunks of SPAN rows, as in `causal_sums`. Rows of chunk c know the keys before chunk c − REACH
and, unless causal, those after chunk c + REACH as sums: all of them are farther away than WIDTH. Keys of the chunks between are
visited, tile by tile: near ones exactly, far ones by their features. The same holds for keys and the queries that see them.
Sums from the other end are those of the sequence backwards, so that nothing is ever added and taken away again.

Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels import causal_sums
from schoenbat.ops.triton.kernels.causal_sums import shares, vector

LENGTHS = (*causal_sums.LENGTHS, "WIDTH", "REACH", "CHUNKS")


@triton.jit
def is_near(q_start, k_start, WIDTH, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Which pairs of a tile of queries and a tile of keys are near, [BLOCK, BLOCK]."""
    o_n = tl.arange(0, BLOCK)
    b_behind = (q_start - k_start) + o_n[:, None] - o_n[None, :]
    m = tl.abs(b_behind) <= WIDTH
    if IS_CAUSAL:
        m = m & (b_behind >= 0)
    return m


@triton.jit
def is_far(q_start, k_start, WIDTH, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Which pairs are far."""
    o_n = tl.arange(0, BLOCK)
    b_behind = (q_start - k_start) + o_n[:, None] - o_n[None, :]
    if not IS_CAUSAL:
        b_behind = tl.abs(b_behind)
    return b_behind > WIDTH


@triton.jit
def near_rows(start, N, WIDTH, BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """From which row, a tile's first, to which the near ones of the tile at `start` lie."""
    first, end = start, start + BLOCK
    if BEFORE:
        first = tl.maximum(start - WIDTH, 0) // BLOCK * BLOCK
    if AFTER:
        end = start + BLOCK + WIDTH
    return first, tl.minimum(end, N)


@triton.jit
def far_tiles(
    start, N, WIDTH, REACH, BEFORE: tl.constexpr, AFTER: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Visited tiles with rows far from some of the tile at `start`: see `far_tile`.

    Where they begin and how many come before those that are near as a whole; where they go on; how many there are.
    """
    first, end = start, start + BLOCK
    if BEFORE:
        first = tl.maximum(start // SPAN - REACH, 0) * SPAN
    if AFTER:
        end = (start // SPAN + REACH + 1) * SPAN
    end = tl.minimum(end, N)
    before = tl.cdiv(tl.maximum(tl.minimum(start + BLOCK - 1 - WIDTH, end) - first, 0), BLOCK)
    again = tl.maximum(first + before * BLOCK, (start + WIDTH + 1) // BLOCK * BLOCK)
    return first, before, again, before + tl.cdiv(tl.maximum(end - again, 0), BLOCK)


@triton.jit
def far_tile(i, first, before, again, BLOCK: tl.constexpr):
    """Where the i-th of them starts."""
    return tl.where(i < before, first + i * BLOCK, again + (i - before) * BLOCK)


@triton.jit
def far_count(
    p_count, i_b, start, N, WIDTH, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """How many far keys each row of a tile sees."""
    o_n = start + tl.arange(0, BLOCK)
    if HAS_MASK:
        b_count = tl.load(p_count + i_b.to(tl.int64) * N + o_n, mask=o_n < N, other=0)
    else:
        b_count = tl.maximum(o_n - WIDTH, 0)
        if not IS_CAUSAL:
            b_count += tl.maximum(N - 1 - o_n - WIDTH, 0)
    return b_count.to(tl.float32)


@triton.jit
def normaliser(start, N, IS_CAUSAL: tl.constexpr):
    """About how many keys the rows of a tile see: see `causal_sums`."""
    count = N
    if IS_CAUSAL:
        count = tl.maximum(start, 1)
    return count.to(tl.float32)


@triton.jit
def sum_rows(p_sums, o_first, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """ROWS rows of a chunk's mean φ ⊗ row, [ROWS, BLOCK_V]."""
    o = (o_first + tl.arange(0, ROWS))[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(p_sums + o)


@triton.jit(do_not_specialize=LENGTHS)
def combine(
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows,
    p_other_near, p_other_near_totals, p_other_near_x, p_other_near_rows,
    p_other_far, p_other_far_totals, p_other_far_x, p_other_far_rows,
    p_sums, p_totals, p_x, p_rows, p_share,
    FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, REACH, num_features,
    TWO_SIDED: tl.constexpr, HAS_FAR: tl.constexpr, AFTER: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What of the sums each chunk meets: the mean φ ⊗ row and what it is multiplied by, Σφ, Σx and Σrow.

    For chunks of queries those of the keys before it, for chunks of keys (AFTER) those of the queries behind it; TWO_SIDED:
    and those of the same sequence backwards (`other`).
    """
    num_chunks = NUM_ROW_TILES // CHUNK
    i_chunk, i_bh = tl.program_id(0) % num_chunks, tl.program_id(0) // num_chunks
    o_f = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_f = o_f < num_features
    b_sums, b_totals, b_x, b_rows, share = _met(
        p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows, i_bh, i_chunk, o_f, m_f,
        FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, REACH, num_features, HAS_FAR, AFTER, CHUNK, BLOCK_D, BLOCK_V, BLOCK,
    )  # fmt: skip
    if TWO_SIDED:
        b_more, b_more_totals, b_more_x, b_more_rows, more = _met(
            p_other_near, p_other_near_totals, p_other_near_x, p_other_near_rows, p_other_far, p_other_far_totals,
            p_other_far_x, p_other_far_rows, i_bh, num_chunks - 1 - i_chunk, o_f, m_f, FIRST_KEY, TILES, SEGMENTS,
            NUM_ROW_TILES, REACH, num_features, HAS_FAR, AFTER, CHUNK, BLOCK_D, BLOCK_V, BLOCK,
        )  # fmt: skip
        both = share + more
        divisor = tl.where(both > 0.0, both, 1.0)
        b_sums = b_sums * (share / divisor) + b_more * (more / divisor)
        b_totals += b_more_totals
        b_x += b_more_x
        b_rows += b_more_rows
        share = both
    i_out = tl.program_id(0).to(tl.int64)
    o_sums = o_f[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    tl.store(
        p_sums + i_out * num_features * BLOCK_V + o_sums,
        b_sums.to(p_sums.dtype.element_ty),
        mask=m_f[:, None],
    )
    tl.store(p_totals + i_out * num_features + o_f, b_totals, mask=m_f)
    if tl.program_id(1) == 0:
        tl.store(p_x + i_out * BLOCK_D + tl.arange(0, BLOCK_D), b_x)
        tl.store(p_rows + i_out * BLOCK_V + tl.arange(0, BLOCK_V), b_rows)
        tl.store(p_share + i_out, share)


@triton.jit
def _met(
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows, i_bh, i_chunk, o_f, m_f,
    FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, REACH, num_features,
    HAS_FAR: tl.constexpr, AFTER: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums before chunk i_chunk − REACH, or after chunk i_chunk + REACH; beyond the ends there is nothing."""
    num_chunks = NUM_ROW_TILES // CHUNK
    if AFTER:
        i_chunk = tl.minimum(i_chunk + REACH, num_chunks - 1)
        i_tile = (i_chunk + 1) * CHUNK - 1
    else:
        i_chunk = tl.maximum(i_chunk - REACH, 0)
        i_tile = i_chunk * CHUNK
    near, far, both = shares(i_tile, FIRST_KEY, 0, TILES, NUM_ROW_TILES, AFTER, CHUNK, BLOCK)
    i_near = (i_bh * num_chunks + i_chunk).to(tl.int64)
    i_far = (i_bh * SEGMENTS + i_tile // TILES).to(tl.int64)
    i_row = (i_bh * NUM_ROW_TILES + i_tile).to(tl.int64)
    o_sums, m_sums = o_f[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :], m_f[:, None]
    b_sums = tl.load(p_near + i_near * num_features * BLOCK_V + o_sums, mask=m_sums, other=0.0).to(tl.float32)
    b_totals = tl.load(p_near_totals + i_near * num_features + o_f, mask=m_f, other=0.0)
    if HAS_FAR:
        b_far = tl.load(p_far + i_far * num_features * BLOCK_V + o_sums, mask=m_sums, other=0.0)
        b_sums = b_sums * near + b_far.to(tl.float32) * far
        b_totals += tl.load(p_far_totals + i_far * num_features + o_f, mask=m_f, other=0.0)
    b_x = vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, HAS_FAR, BLOCK_D)
    b_rows = vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, HAS_FAR, BLOCK_V)
    return b_sums, b_totals, b_x, b_rows, both
