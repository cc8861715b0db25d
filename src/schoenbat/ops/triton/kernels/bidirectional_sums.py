"""Sums over a sequence, for bidirectional attention.

`summarize` adds up φ(x) ⊗ row over parts of the sequence, of keys and values in the forward pass, of queries and
output gradients in the backward pass; `finish` and `finish_backward` add up the parts.

A program works on some row tiles of one head. d and d_v are padded to powers of two; what is padded in the sums is
zero. The sums of a head are rows: first those of the identity features (BLOCK_D of them, if there are any), then
group after group. Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import evaluate, first_directions, pair_directions, projected
from schoenbat.ops.triton.kernels.rows import (
    NARROW,
    load_tile,
    load_unit_tile,
    visible,
    wait_for_the_one_before,
)

# What depends on the length of a sequence: no kernel is compiled again for another length.
LENGTHS = ("N", "TILES", "SPLITS", "NUM_PARTS")
# Parts that are loaded before the first of them is needed.
AT_ONCE = tl.constexpr(4)


@triton.jit(do_not_specialize=LENGTHS)
def summarize(
    p_x, p_rows, p_mask, p_scale, p_row_scale, p_row_weight, p_mean_weight,
    p_sums, p_totals, p_x_sum, p_row_sum,
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn, N, TILES, SPLITS, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr,
    IS_QUERY: tl.constexpr, IDENTITY: tl.constexpr, PARTS: tl.constexpr, SEPARATE: tl.constexpr, QUADRATIC: tl.constexpr,
    UNIT: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of TILES tiles: Σφ(x) rowᵀ, Σφ(x) w, Σx u, Σrow; w and u are 1 for keys.

    For queries (IS_QUERY) row is the output's gradient divided by the denominator, w the gradient of the
    denominator and u that of the mean logit. A part is one group. What has no group, identity features and rows, is a part of
    its own if SEPARATE, else the first group's.
    """
    # The highest degrees, which take longest, begin first.
    i_part = 0 if PARTS == 1 else PARTS - 1 - tl.program_id(0) % PARTS
    i_split = tl.program_id(0) // PARTS % SPLITS
    i_bh = tl.program_id(0) // (PARTS * SPLITS)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_row, i_out = tl.full([], i_bh, tl.int64) * N, (i_bh * SPLITS + i_split).to(tl.int64)
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    p_x += i_b.to(tl.int64) * stride_xb + i_h.to(tl.int64) * stride_xh
    p_rows += i_b.to(tl.int64) * stride_rb + i_h.to(tl.int64) * stride_rh
    p_mask += i_b.to(tl.int64) * N
    p_row_scale += i_row
    p_row_weight += i_row
    p_mean_weight += i_row
    p_sums += i_out * num_features * BLOCK_V
    p_totals += i_out * num_features
    p_x_sum += i_out * BLOCK_D
    p_row_sum += i_out * BLOCK_V
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = KEY_SCALE
    if IS_QUERY:
        scale = tl.load(p_scale + i_h)
    first, last = i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))
    if i_part == 0:
        _sum_tiles(
            first, last, 0, True, not SEPARATE, p_x, p_rows, p_mask, p_row_scale, p_row_weight, p_mean_weight, p_sums, p_totals,
            p_x_sum, p_row_sum, stride_xn, stride_rn, N, scale, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, HAS_MASK,
            IS_QUERY, IDENTITY, QUADRATIC, UNIT, DIM, DV, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
        )  # fmt: skip
    elif PARTS > 1:
        _sum_tiles(
            first, last, i_part - SEPARATE, False, True, p_x, p_rows, p_mask, p_row_scale, p_row_weight, p_mean_weight, p_sums,
            p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, N, scale, EPS, p_tiles, p_root, p_linear, p_degrees, p_first,
            HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, UNIT, DIM, DV, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
        )  # fmt: skip


@triton.jit
def _sum_tiles(
    first, last, i_group, OF_ROWS: tl.constexpr, OF_GROUP: tl.constexpr,
    p_x, p_rows, p_mask, p_row_scale, p_row_weight, p_mean_weight, p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, N,
    scale, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr,
    IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of a group (OF_GROUP), and those of identity features and rows (OF_ROWS).

    What is summed over rows alone is a product with a narrow tile, (w, u, 1, 0 ...): sums across warps would
    make them wait for one another at every tile.
    """
    o_d, o_v, o_g = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, GROUP)
    o_narrow = tl.arange(0, NARROW)[None, :]
    if OF_GROUP:
        b_sums = tl.zeros([GROUP, BLOCK_V], tl.float32)
        b_totals = tl.zeros([GROUP, NARROW], tl.float32)
    if OF_ROWS:
        b_identity = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        b_x_totals = tl.zeros([BLOCK_D, NARROW], tl.float32)
        b_row_totals = tl.zeros([BLOCK_V, NARROW], tl.float32)
    if OF_GROUP and QUADRATIC > 0:
        b_first = first_directions(p_tiles, QUADRATIC, BLOCK_D, GROUP)
        b_left, b_right = pair_directions(p_tiles, i_group, QUADRATIC, BLOCK_D, GROUP)
        b_weight = tl.load(p_root + i_group * GROUP + o_g) * (scale * scale)
    for i_tile in range(first, last):
        start = i_tile * BLOCK
        m_n = visible(p_mask, start, N, BLOCK, HAS_MASK)
        b_x, _ = load_unit_tile(p_x, start, stride_xn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_rows = load_tile(p_rows, start, stride_rn, m_n, DV, BLOCK, BLOCK_V)
        dtype = b_x.dtype
        b_narrow = tl.full([BLOCK, NARROW], 1.0, tl.float32)
        if IS_QUERY:
            o_row = start + tl.arange(0, BLOCK)
            b_w = tl.load(p_row_weight + o_row, mask=m_n, other=0.0)[:, None]
            b_u = tl.load(p_mean_weight + o_row, mask=m_n, other=0.0)[:, None]
            b_narrow = tl.where(o_narrow == 0, b_w, tl.where(o_narrow == 1, b_u, 1.0))
        b_narrow = tl.where(m_n[:, None], b_narrow, 0.0).to(dtype)
        if OF_ROWS:
            b_x_totals += tl.dot(tl.trans(b_x), b_narrow, input_precision=PRECISION)
            b_row_totals += tl.dot(tl.trans(b_rows), b_narrow, input_precision=PRECISION)
        if IS_QUERY:
            b_row_scale = tl.load(p_row_scale + o_row, mask=m_n, other=0.0)
            b_rows = (b_rows.to(tl.float32) * b_row_scale[:, None]).to(dtype)
        if OF_ROWS and IDENTITY:
            b_identity += tl.dot(tl.trans(b_x), b_rows, input_precision=PRECISION)
        if OF_GROUP:
            if QUADRATIC:
                b_y = projected(b_x, b_first, QUADRATIC, PRECISION)
                b_phi = tl.dot(b_y, b_left, input_precision=PRECISION)
                b_phi = b_phi * tl.dot(b_y, b_right, input_precision=PRECISION) * b_weight[None, :]
            else:
                b_phi = evaluate(
                    b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
                )  # fmt: skip
            b_phi = tl.trans(b_phi.to(dtype))
            b_sums += tl.dot(b_phi, b_rows, input_precision=PRECISION)
            b_totals += tl.dot(b_phi, b_narrow, input_precision=PRECISION)
    if OF_GROUP:
        o_f = IDENTITY * BLOCK_D + i_group * GROUP + o_g
        tl.store(p_sums + o_f[:, None] * BLOCK_V + o_v[None, :], b_sums)
        tl.store(p_totals + o_f, _column(b_totals, 0, NARROW))
    if OF_ROWS:
        tl.store(p_x_sum + o_d, _column(b_x_totals, 1, NARROW) * scale)
        tl.store(p_row_sum + o_v, _column(b_row_totals, 2, NARROW))
        if IDENTITY:
            b_root = tl.load(p_linear + o_d) * scale
            tl.store(p_sums + o_d[:, None] * BLOCK_V + o_v[None, :], b_identity * b_root[:, None])
            tl.store(p_totals + o_d, _column(b_x_totals, 0, NARROW) * b_root)


@triton.jit
def _column(b, i_column: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == i_column, b, 0.0), axis=1)


@triton.jit
def _divisor(p_count, i_b, N, HAS_MASK: tl.constexpr):
    """How many keys of a sequence take part, at least 1."""
    count = N.to(tl.float32)
    if HAS_MASK:
        count = tl.load(p_count + i_b).to(tl.float32)
    return tl.maximum(count, 1.0)


@triton.jit(do_not_specialize=LENGTHS)
def finish(
    p_partial_sums, p_partial_totals, p_partial_x, p_partial_rows, p_count, p_sums, p_totals, p_key_mean,
    p_value_mean, N, SPLITS, num_features,
    HEADS: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Add up the parts of `summarize` for keys: means, and sums as if every value had been centred.

    Sums and totals are divided by the count, so that they stay in the range of float16 for any length.
    """
    wait_for_the_one_before(OVERLAPS)
    i_rows, i_bh = tl.program_id(1), tl.program_id(0)
    o_d, o_v, o_f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), i_rows * ROWS + tl.arange(0, ROWS)
    b_value = tl.zeros([BLOCK_V], tl.float32)
    b_key = tl.zeros([BLOCK_D], tl.float32)
    b_sums = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_totals = tl.zeros([ROWS], tl.float32)
    m_f = o_f < num_features
    for i_split in tl.range(SPLITS, loop_unroll_factor=AT_ONCE):
        i_part = (i_bh * SPLITS + i_split).to(tl.int64)
        b_value += tl.load(p_partial_rows + i_part * BLOCK_V + o_v)
        b_key += tl.load(p_partial_x + i_part * BLOCK_D + o_d)
        o_part = (i_part * num_features + o_f) * BLOCK_V
        b_sums += tl.load(p_partial_sums + o_part[:, None] + o_v[None, :], mask=m_f[:, None], other=0.0)
        b_totals += tl.load(p_partial_totals + i_part * num_features + o_f, mask=m_f, other=0.0)
    divisor = _divisor(p_count, i_bh // HEADS, N, HAS_MASK)
    b_value = b_value / divisor
    b_totals = b_totals / divisor
    b_sums = b_sums / divisor - b_totals[:, None] * b_value[None, :]
    o_f = i_bh.to(tl.int64) * num_features + o_f
    tl.store(
        p_sums + o_f[:, None] * BLOCK_V + o_v[None, :], b_sums.to(p_sums.dtype.element_ty), mask=m_f[:, None]
    )
    tl.store(p_totals + o_f, b_totals, mask=m_f)
    if i_rows == 0:
        tl.store(p_value_mean + i_bh * BLOCK_V + o_v, b_value)
        tl.store(p_key_mean + i_bh * BLOCK_D + o_d, b_key / divisor)


@triton.jit(do_not_specialize=LENGTHS)
def finish_backward(
    p_partial_sums, p_partial_totals, p_partial_x, p_partial_rows, p_count, p_totals, p_dsums, p_dtotals, p_dkey,
    p_dvalue, N, NUM_PARTS, num_features,
    HEADS: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add up the parts of `summarize` for queries, over the query heads that share a key head, too.

    Gives the gradients of the sums, and those that every key and every value gets through the means.
    """
    i_bh = tl.program_id(0)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    divisor = _divisor(p_count, i_bh // HEADS, N, HAS_MASK)
    b_value = tl.zeros([COLUMNS], tl.float32)
    b_key = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.range(NUM_PARTS, loop_unroll_factor=AT_ONCE):
        i_part = (i_bh * NUM_PARTS + i).to(tl.int64)
        b_value += tl.load(p_partial_rows + i_part * BLOCK_V + o_v)
        b_key += tl.load(p_partial_x + i_part * BLOCK_D + o_d)
    for i_rows in range(tl.cdiv(num_features, ROWS)):
        o_f = i_rows * ROWS + tl.arange(0, ROWS)
        m_f = o_f < num_features
        b_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        b_dtotals = tl.zeros([ROWS], tl.float32)
        for i in tl.range(NUM_PARTS, loop_unroll_factor=AT_ONCE):
            i_part = (i_bh * NUM_PARTS + i).to(tl.int64)
            o_part = (i_part * num_features + o_f) * BLOCK_V
            b_sums += tl.load(p_partial_sums + o_part[:, None] + o_v[None, :], mask=m_f[:, None], other=0.0)
            b_dtotals += tl.load(p_partial_totals + i_part * num_features + o_f, mask=m_f, other=0.0)
        o_f = i_bh.to(tl.int64) * num_features + o_f
        b_totals = tl.load(p_totals + o_f, mask=m_f, other=0.0)
        b_value -= tl.sum(b_totals[:, None] * b_sums, axis=0)
        p_out = p_dsums + o_f[:, None] * BLOCK_V + o_v[None, :]
        tl.store(p_out, (b_sums / divisor).to(p_dsums.dtype.element_ty), mask=m_f[:, None])
        if tl.program_id(1) == 0:
            tl.store(p_dtotals + o_f, b_dtotals / divisor, mask=m_f)
    tl.store(p_dvalue + i_bh * BLOCK_V + o_v, b_value / divisor)
    if tl.program_id(1) == 0:
        tl.store(p_dkey + i_bh * BLOCK_D + o_d, b_key / divisor)
