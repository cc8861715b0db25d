"""Bidirectional attention, given the sums of `bidirectional_sums`.

`read` gives each query row its output, `read_backward` its gradient and what `summarize` needs from it,
`key_backward` the gradients of keys and values.

A program works on some row tiles of one head. WHOLE is how many groups of pairs stay at hand beside identity features, 0 for
none: then the map and a head's sums are loaded once for all tiles. Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.bidirectional_sums import LENGTHS
from schoenbat.ops.triton.kernels.bidirectional_whole import read_whole, twice, whole_backward, whole_tiles
from schoenbat.ops.triton.kernels.features import evaluate, evaluate_backward, monomials, monomials_backward
from schoenbat.ops.triton.kernels.rows import (
    LOWEST_EXPONENT,
    load_tile,
    load_unit_tile,
    store_tile,
    unit_backward,
    visible,
    wait_for_the_one_before,
)


@triton.jit
def _group_sums(p_sums, p_totals, o_first, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """ROWS rows of the sums and of the totals."""
    o_f = o_first + tl.arange(0, ROWS)
    b_sums = tl.load(p_sums + o_f[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :])
    return b_sums, tl.load(p_totals + o_f)


@triton.jit
def _read_rows(
    b_x, scale, p_sums, p_totals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Numerator [BLOCK, BLOCK_V] and total of query rows, less the constant; divided by the count, as the sums are."""
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_numerator = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    b_total = tl.zeros([BLOCK], tl.float32)
    if IDENTITY:
        # The scale last: the backward pass takes the same tile of sums again.
        b_s1, b_z1 = _group_sums(p_sums, p_totals, 0, BLOCK_D, BLOCK_V)
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_s1 = (b_s1 * b_root[:, None]).to(b_x.dtype)
        b_numerator = tl.dot(b_x, b_s1, input_precision=PRECISION) * scale
        b_total += tl.sum(b_x.to(tl.float32) * (b_z1 * b_root)[None, :], axis=1) * scale
    for i_group in range(num_groups):
        b_phi = evaluate(
            b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_s, b_z = _group_sums(p_sums, p_totals, first + i_group * GROUP, GROUP, BLOCK_V)
        b_numerator += tl.dot(b_phi.to(b_x.dtype), b_s.to(b_x.dtype), input_precision=PRECISION)
        b_total += tl.sum(b_phi * b_z[None, :], axis=1)
    return b_numerator, b_total


@triton.jit
def _mean_logit(b_x, scale, p_key_mean, BLOCK_D: tl.constexpr):
    b_key_mean = tl.load(p_key_mean + tl.arange(0, BLOCK_D))
    return scale * tl.sum(b_x.to(tl.float32) * b_key_mean[None, :], axis=1)


@triton.jit
def _floor(b_logit, zeroth, slope):
    """The floor of the denominator, divided by the count, and its exponent; above zero without keys, too."""
    b_exponent = slope * b_logit
    return zeroth * tl.exp(tl.minimum(tl.maximum(b_exponent, LOWEST_EXPONENT), 0.0)), b_exponent


@triton.jit
def _above(b_total, b_floor, m_below):
    """The floored denominator; one that overflows shows as NaN, where a quotient of zero would pass for v̄."""
    b_floored = tl.where(m_below, b_floor, b_total)
    return tl.where(b_floored == float("inf"), float("nan"), b_floored)


@triton.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_out, p_scale, p_sums, p_totals, p_key_mean, p_value_mean, p_coefficients,
    stride_qb, stride_qh, stride_qn, N, TILES, SPLITS, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Some tiles of outputs: ``v̄ + numerator / max(total, floor)``."""
    wait_for_the_one_before(OVERLAPS)
    i_split, i_bh = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = (i_bh // GROUPS).to(tl.int64)
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_out += tl.full([], i_bh, tl.int64) * N * DV
    p_sums += i_state * num_features * BLOCK_V
    p_totals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    p_key_mean += i_state * BLOCK_D
    dtype = p_query.dtype.element_ty
    scale = tl.load(p_scale + i_h)
    constant, zeroth = tl.load(p_coefficients + 3 * i_map), tl.load(p_coefficients + 3 * i_map + 1)
    slope = tl.load(p_coefficients + 3 * i_map + 2)
    b_value_mean = tl.load(p_value_mean + i_state * BLOCK_V + tl.arange(0, BLOCK_V))
    if WHOLE:
        b_tiles = whole_tiles(
            p_sums, p_totals, p_key_mean, p_tiles, p_linear, dtype, WHOLE, QUADRATIC, BLOCK_D, BLOCK_V, GROUP
        )  # fmt: skip
    for i_tile in range(i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))):
        start = i_tile * BLOCK
        m_n = start + tl.arange(0, BLOCK) < N
        b_x, _ = load_unit_tile(p_query, start, stride_qn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        if WHOLE:
            b_numerator, b_total, b_logit = read_whole(
                b_x, scale, b_tiles, p_root, WHOLE, QUADRATIC, GROUP, PRECISION
            )
        else:
            b_numerator, b_total = _read_rows(
                b_x, scale, p_sums, p_totals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY, QUADRATIC,
                BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
            b_logit = _mean_logit(b_x, scale, p_key_mean, BLOCK_D)
        b_total += constant
        b_floor, _ = _floor(b_logit, zeroth, slope)
        b_floored = _above(b_total, b_floor, b_total < b_floor)
        b_out = b_value_mean[None, :] + b_numerator / b_floored[:, None]
        store_tile(p_out, start, b_out, m_n, DV, BLOCK, BLOCK_V)


@triton.jit(do_not_specialize=LENGTHS)
def read_backward(
    p_query, p_grad, p_dquery, p_inverse, p_dtotal, p_dmean, p_dfloored, p_dscale,
    p_scale, p_sums, p_totals, p_key_mean, p_coefficients,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, N, TILES, SPLITS, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr,
    UNIT: tl.constexpr, WHOLE: tl.constexpr, TRAINED: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some tiles of query gradients; also 1/f and the gradients of denominator and mean logit by row, that of the scale.

    For a map that is TRAINED also the gradient of the denominator with its floor.
    """
    i_split, i_bh = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = (i_bh // GROUPS).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64) * N
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_sums += i_state * num_features * BLOCK_V
    p_totals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    dtype = p_query.dtype.element_ty
    scale = tl.load(p_scale + i_h)
    constant, zeroth = tl.load(p_coefficients + 3 * i_map), tl.load(p_coefficients + 3 * i_map + 1)
    slope = tl.load(p_coefficients + 3 * i_map + 2)
    p_key_mean += i_state * BLOCK_D
    if WHOLE:
        b_tiles = whole_tiles(
            p_sums, p_totals, p_key_mean, p_tiles, p_linear, dtype, WHOLE, QUADRATIC, BLOCK_D, BLOCK_V, GROUP
        )  # fmt: skip
    b_dscale = tl.zeros([BLOCK], tl.float32)
    first, last = i_split, i_split + 1
    if WHOLE:  # only then is there something that tiles share
        first, last = i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))
    for i_tile in range(first, last):
        start = i_tile * BLOCK
        m_n = start + tl.arange(0, BLOCK) < N
        b_x, b_factor = load_unit_tile(p_query, start, stride_qn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_loaded = load_tile(p_grad, start, stride_gn, m_n, DV, BLOCK, BLOCK_V)
        if WHOLE:
            b_numerator, b_total, b_logit = read_whole(
                b_x, scale, b_tiles, p_root, WHOLE, QUADRATIC, GROUP, PRECISION
            )
        else:
            b_numerator, b_total = _read_rows(
                b_x, scale, p_sums, p_totals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY, QUADRATIC,
                BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
            b_logit = _mean_logit(b_x, scale, p_key_mean, BLOCK_D)
        b_total += constant
        b_floor, b_exponent = _floor(b_logit, zeroth, slope)
        m_below = b_total < b_floor
        b_inverse = 1.0 / _above(b_total, b_floor, m_below)
        b_grad = b_loaded.to(tl.float32) * b_inverse[:, None]
        b_dfloored = -tl.sum(b_grad * b_numerator, axis=1) * b_inverse
        b_dtotal = tl.where(m_below, 0.0, b_dfloored)
        m_falling = m_below & (b_exponent < 0.0) & (b_exponent > LOWEST_EXPONENT)
        b_dmean = tl.where(m_falling, b_dfloored * b_floor * slope, 0.0)
        o_row = i_out + start + tl.arange(0, BLOCK)
        tl.store(p_inverse + o_row, b_inverse, mask=m_n)
        tl.store(p_dtotal + o_row, b_dtotal, mask=m_n)
        tl.store(p_dmean + o_row, b_dmean, mask=m_n)
        if TRAINED:
            tl.store(p_dfloored + o_row, b_dfloored, mask=m_n)

        if WHOLE:
            b_dx = whole_backward(
                b_grad.to(dtype), twice(b_dtotal, b_dmean, dtype), b_x, scale, b_tiles, p_tiles, p_root, WHOLE, QUADRATIC,
                BLOCK_D, GROUP, PRECISION,
            )  # fmt: skip
        else:
            b_dx = b_dmean[:, None] * tl.load(p_key_mean + tl.arange(0, BLOCK_D))[None, :]
            b_dx += _read_rows_backward(
                b_loaded, b_inverse, b_dtotal, b_x, scale, p_sums, p_totals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
                IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
        # b_dx is the gradient of scale · query, on which alone everything depends.
        b_dscale += tl.sum(b_dx * b_x.to(tl.float32), axis=1)
        b_dx = unit_backward(b_dx * scale, b_x, b_factor, EPS, UNIT, DIM, BLOCK_D)
        store_tile(p_dquery + i_out * DIM, start, b_dx, m_n, DIM, BLOCK, BLOCK_D)
    tl.store(p_dscale + tl.program_id(0), tl.sum(b_dscale, axis=0))


@triton.jit
def _read_rows_backward(
    b_rows, b_inverse, b_dtotal, b_x, scale, p_sums, p_totals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of scaled rows from those of numerator (b_rows · b_inverse) and total.

    Of rows as they were loaded: a product takes those from shared memory. From registers, its operand would be lost in the loop
    over groups of 64 (see docs/kernels.md).
    """
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if IDENTITY:
        b_s1, b_z1 = _group_sums(p_sums, p_totals, 0, BLOCK_D, BLOCK_V)
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_s1 = (b_s1 * b_root[:, None]).to(b_x.dtype)
        b_dx += tl.dot(b_rows, tl.trans(b_s1), input_precision=PRECISION) * b_inverse[:, None]
        b_dx += b_dtotal[:, None] * (b_z1 * b_root)[None, :]
    for i_group in range(num_groups):
        b_s, b_z = _group_sums(p_sums, p_totals, first + i_group * GROUP, GROUP, BLOCK_V)
        b_dphi = tl.dot(b_rows, tl.trans(b_s.to(b_x.dtype)), input_precision=PRECISION) * b_inverse[:, None]
        b_dx += evaluate_backward(
            b_dphi + b_dtotal[:, None] * b_z[None, :], b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first,
            QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION,
        )  # fmt: skip
    return b_dx


@triton.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_key, p_value, p_mask, p_dkey, p_dvalue, p_dsums, p_dtotals, p_dkey_mean, p_value_mean, p_to_mean,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, N, TILES, SPLITS, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr,
    UNIT: tl.constexpr, WHOLE: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some tiles of key and value gradients, from those of the sums; what all of them get is in `p_dkey_mean`, `p_to_mean`."""
    i_split, i_bh = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h
    i_state = i_bh.to(tl.int64)
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_key += i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N
    p_dsums += i_state * num_features * BLOCK_V
    p_dtotals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    dtype = p_key.dtype.element_ty
    scale = KEY_SCALE
    p_dkey_mean += i_state * BLOCK_D
    p_value_mean += i_state * BLOCK_V
    p_to_mean += i_state * BLOCK_V
    if WHOLE:
        b_tiles = whole_tiles(
            p_dsums, p_dtotals, p_dkey_mean, p_tiles, p_linear, dtype, WHOLE, QUADRATIC, BLOCK_D, BLOCK_V, GROUP
        )  # fmt: skip
    first, last = i_split, i_split + 1
    if WHOLE:  # only then is there something that tiles share
        first, last = i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))
    for i_tile in range(first, last):
        start = i_tile * BLOCK
        m_n = visible(p_mask, start, N, BLOCK, HAS_MASK)
        b_x, b_factor = load_unit_tile(p_key, start, stride_kn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        # What is masked gets zeros; what lies behind the end gets nothing.
        m_in = start + tl.arange(0, BLOCK) < N
        if WHOLE:
            b_dv, _, _ = read_whole(b_x, scale, b_tiles, p_root, WHOLE, QUADRATIC, GROUP, PRECISION)
            b_dv = tl.where(m_n[:, None], b_dv + tl.load(p_to_mean + o_v)[None, :], 0.0)
            store_tile(p_dvalue + i_state * N * DV, start, b_dv, m_in, DV, BLOCK, BLOCK_V)
            b_value = load_tile(p_value, start, stride_vn, m_n, DV, BLOCK, BLOCK_V).to(tl.float32)
            b_rows = (b_value - tl.load(p_value_mean + o_v)[None, :]).to(dtype)
            # Not of ones alone: an operand that is the same in every turn of a loop may be lost, see docs/kernels.md.
            b_seen = m_n.to(tl.float32)
            b_dx = whole_backward(
                b_rows, twice(b_seen, b_seen, dtype), b_x, scale, b_tiles, p_tiles, p_root, WHOLE, QUADRATIC, BLOCK_D, GROUP,
                PRECISION,
            )  # fmt: skip
        else:
            b_value = load_tile(p_value, start, stride_vn, m_n, DV, BLOCK, BLOCK_V).to(tl.float32)
            b_rows = (b_value - tl.load(p_value_mean + o_v)[None, :]).to(dtype)
            b_dx, b_dv = _key_rows(
                b_rows, b_x, scale, p_dsums, p_dtotals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
                IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
            b_dx += tl.load(p_dkey_mean + o_d)[None, :]
            b_dv = tl.where(m_n[:, None], b_dv + tl.load(p_to_mean + o_v)[None, :], 0.0)
            store_tile(p_dvalue + i_state * N * DV, start, b_dv, m_in, DV, BLOCK, BLOCK_V)
        b_dx = unit_backward(b_dx * scale, b_x, b_factor, EPS, UNIT, DIM, BLOCK_D)
        b_dx = tl.where(m_n[:, None], b_dx, 0.0)
        store_tile(p_dkey + i_state * N * DIM, start, b_dx, m_in, DIM, BLOCK, BLOCK_D)


@triton.jit
def _key_rows(
    b_rows, b_x, scale, p_dsums, p_dtotals, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of scaled keys and of values from those of sums and totals; b_rows are centred values."""
    dtype = b_x.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    if IDENTITY:
        b_s1, b_z1 = _group_sums(p_dsums, p_dtotals, 0, BLOCK_D, BLOCK_V)
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_s1 = (b_s1 * b_root[:, None]).to(dtype)
        b_dv = tl.dot(b_x, b_s1, input_precision=PRECISION) * scale
        b_dx += tl.dot(b_rows, tl.trans(b_s1), input_precision=PRECISION) + (b_z1 * b_root)[None, :]
    for i_group in range(num_groups):
        b_s, b_z = _group_sums(p_dsums, p_dtotals, first + i_group * GROUP, GROUP, BLOCK_V)
        b_s = b_s.to(dtype)
        b_product, b_weight = monomials(
            b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_phi = b_product * (b_weight * scale)[None, :]
        b_dv += tl.dot(b_phi.to(dtype), b_s, input_precision=PRECISION)
        b_dphi = tl.dot(b_rows, tl.trans(b_s), input_precision=PRECISION) + b_z[None, :]
        b_dx += monomials_backward(
            b_dphi, b_product, b_weight, b_x, i_group, p_tiles, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP,
            PRECISION,
        )  # fmt: skip
    return b_dx, b_dv
