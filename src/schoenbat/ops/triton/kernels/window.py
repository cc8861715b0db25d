"""Exact near, linear far: each query row's output.

A row's far keys are one more key to its softmax: with the value u = (Σ φ(q)·φ(k) v + e Σ v) / f and the logit log g + log f, where
f is the floored denominator of the far keys, T what the features give of it and e = (f − T) / count, which is the constant's
weight unless the floor acts. So the far keys come first, and the near ones go on from there under a running maximum. With L the
logarithm of the whole denominator and c = g exp(−L),

    out_i = Σ_near exp(l_ij − L_i) v_j + c_i Σ_far (φ(q_i)·φ(k_j) + e_i) v_j,

as in `causal_sums`, but for c instead of 1/f. What is a sum and what is visited is in `window_sums`. The far rows may be others
than the near ones (SEPARATE). Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import evaluate, linear_scores
from schoenbat.ops.triton.kernels.rows import LOWEST_EXPONENT, load_tile, store_tile, visible
from schoenbat.ops.triton.kernels.window_sums import (
    LENGTHS,
    far_count,
    far_tile,
    far_tiles,
    is_far,
    is_near,
    near_rows,
    sum_rows,
)

# A logit that stands for no key.
NOTHING = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_key, p_far_query, p_far_key, p_value, p_mask, p_count, p_scale, p_log_weight, p_coefficients,
    p_out, p_log_total, p_inverse, p_constant, p_slope, p_sums, p_totals, p_keys, p_values, p_share,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_fqb, stride_fqh, stride_fqn,
    stride_fkb, stride_fkh, stride_fkn, stride_vb, stride_vh, stride_vn,
    N, WIDTH, REACH, CHUNKS, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SEPARATE: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of outputs; by row also L, c, e, and the derivative of f with respect to the mean logit."""
    num_row_tiles = tl.cdiv(N, BLOCK)
    i_tile, i_bh = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    first: tl.constexpr = IDENTITY * BLOCK_D
    num_features = first + num_groups * GROUP
    o_d, o_v, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_far_query += i_b.to(tl.int64) * stride_fqb + i_h.to(tl.int64) * stride_fqh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_far_key += i_b.to(tl.int64) * stride_fkb + (i_h // GROUPS).to(tl.int64) * stride_fkh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N
    start = i_tile * BLOCK
    i_state = (i_bh // GROUPS * CHUNKS + start // SPAN).to(tl.int64)
    p_sums += i_state * num_features * BLOCK_V
    p_totals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale, share, log_weight = tl.load(p_scale + i_h), tl.load(p_share + i_state), tl.load(p_log_weight + i_h)
    constant, zeroth = tl.load(p_coefficients + 3 * i_map), tl.load(p_coefficients + 3 * i_map + 1)
    slope = tl.load(p_coefficients + 3 * i_map + 2)
    before, num_before, after, num_far = far_tiles(start, N, WIDTH, REACH, True, not IS_CAUSAL, SPAN, BLOCK)

    # Far keys: the mean logit, which makes the floor, the constant and identity features.
    m_q = visible(p_mask, start, N, BLOCK, False)
    b_q = load_tile(p_far_query, start, stride_fqn, m_q, DIM, BLOCK, BLOCK_D)
    dtype = b_q.dtype
    b_q32 = b_q.to(tl.float32)
    b_logit = tl.sum(b_q32 * tl.load(p_keys + i_state * BLOCK_D + o_d)[None, :], axis=1)
    b_values = tl.load(p_values + i_state * BLOCK_V + o_v)
    b_out = tl.zeros([BLOCK, BLOCK_V], tl.float32) + constant * b_values[None, :]
    b_total = tl.zeros([BLOCK], tl.float32)
    if IDENTITY:
        b_root = tl.load(p_linear + o_d) * scale
        b_s1 = sum_rows(p_sums, 0, BLOCK_D, BLOCK_V).to(tl.float32) * b_root[:, None]
        b_out += tl.dot(b_q, b_s1.to(dtype), input_precision=PRECISION) * share
        b_total += tl.sum(b_q32 * (tl.load(p_totals + o_d) * b_root)[None, :], axis=1)
    for i in range(num_far):
        k_start = far_tile(i, before, num_before, after, BLOCK)
        m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
        m_far = is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK) & m_k[None, :]
        b_k = load_tile(p_far_key, k_start, stride_fkn, m_k, DIM, BLOCK, BLOCK_D)
        b_logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_logit += tl.sum(tl.where(m_far, b_logits, 0.0), axis=1) * KEY_SCALE
        b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
        if IDENTITY:
            b_scores += linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
            b_total += tl.sum(tl.where(m_far, b_scores, 0.0), axis=1)
        b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
        b_scores = tl.where(m_far, b_scores + constant, 0.0).to(dtype)
        b_out += tl.dot(b_scores, b_v, input_precision=PRECISION)

    # All other features, a group at a time.
    for i_group in range(num_groups):
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        o_f = first + i_group * GROUP
        b_total += tl.sum(b_phi_q * tl.load(p_totals + o_f + tl.arange(0, GROUP))[None, :], axis=1)
        b_phi_q = b_phi_q.to(dtype)
        b_s = sum_rows(p_sums, o_f, GROUP, BLOCK_V).to(dtype)
        b_out += tl.dot(b_phi_q, b_s, input_precision=PRECISION) * share
        for i in range(num_far):
            k_start = far_tile(i, before, num_before, after, BLOCK)
            m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
            b_k = load_tile(p_far_key, k_start, stride_fkn, m_k, DIM, BLOCK, BLOCK_D)
            b_phi_k = evaluate(
                b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
            )  # fmt: skip
            b_scores = tl.dot(b_phi_q, tl.trans(b_phi_k.to(dtype)), input_precision=PRECISION)
            b_scores = tl.where(is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK), b_scores, 0.0)
            b_total += tl.sum(b_scores, axis=1)
            b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
            b_out += tl.dot(b_scores.to(dtype), b_v, input_precision=PRECISION)

    b_count = far_count(p_count, i_b, start, N, WIDTH, HAS_MASK, IS_CAUSAL, BLOCK)
    divisor = tl.maximum(b_count, 1.0)
    b_exponent = slope * b_logit * scale / divisor
    b_floor = b_count * zeroth * tl.exp(tl.minimum(tl.maximum(b_exponent, LOWEST_EXPONENT), 0.0))
    m_some = b_count > 0.0
    m_below = m_some & (b_total + constant * b_count < b_floor)
    b_floored = tl.where(m_some, tl.where(m_below, b_floor, b_total + constant * b_count), 1.0)
    # What the floor adds weighs all far values alike.
    b_more = tl.where(m_below, (b_floor - b_total) / divisor - constant, 0.0)
    if tl.max(b_more, axis=0) > 0.0:
        b_sum = tl.zeros([BLOCK, BLOCK_V], tl.float32) + b_values[None, :]
        for i in range(num_far):
            k_start = far_tile(i, before, num_before, after, BLOCK)
            m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
            b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
            b_ones = tl.where(is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK), 1.0, 0.0).to(dtype)
            b_sum += tl.dot(b_ones, b_v, input_precision=PRECISION)
        b_out += b_more[:, None] * b_sum

    # Near keys, after the one that stands for all far ones.
    b_top = tl.where(m_some, log_weight + tl.log(b_floored), NOTHING)
    b_out = b_out / b_floored[:, None]
    b_weight = tl.where(m_some, 1.0, 0.0)
    if SEPARATE:
        b_q = load_tile(p_query, start, stride_qn, m_q, DIM, BLOCK, BLOCK_D)
    near, end = near_rows(start, N, WIDTH, True, not IS_CAUSAL, BLOCK)
    for k_start in range(near, end, BLOCK):
        m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
        b_k = load_tile(p_key, k_start, stride_kn, m_k, DIM, BLOCK, BLOCK_D)
        b_logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * KEY_SCALE)
        m_near = is_near(start, k_start, WIDTH, IS_CAUSAL, BLOCK) & m_k[None, :]
        b_logits = tl.where(m_near, b_logits, NOTHING)
        b_higher = tl.maximum(b_top, tl.max(b_logits, axis=1))
        b_shrink = tl.exp(b_top - b_higher)
        b_weights = tl.where(m_near, tl.exp(b_logits - b_higher[:, None]), 0.0)
        b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
        b_out = b_out * b_shrink[:, None]
        b_out += tl.dot(b_weights.to(dtype), b_v, input_precision=PRECISION)
        b_weight = b_weight * b_shrink + tl.sum(b_weights, axis=1)
        b_top = b_higher

    # A row that sees nothing has an infinite denominator: no weight is left for any key.
    m_any = b_weight > 0.0
    b_log_total = tl.where(m_any, b_top + tl.log(tl.where(m_any, b_weight, 1.0)), -NOTHING)
    b_inverse = tl.where(m_some, tl.exp(log_weight - b_log_total), 0.0)
    b_slope = (b_exponent < 0.0) & (b_exponent > LOWEST_EXPONENT) & m_below
    i_out = tl.full([], i_bh, tl.int64) * N
    b_out = b_out / tl.where(m_any, b_weight, 1.0)[:, None]
    store_tile(p_out + i_out * DV, start, b_out, m_q, DV, BLOCK, BLOCK_V)
    o_row = i_out + start + o_n
    tl.store(p_log_total + o_row, b_log_total, mask=m_q)
    tl.store(p_inverse + o_row, b_inverse, mask=m_q)
    tl.store(p_constant + o_row, constant + b_more, mask=m_q)
    tl.store(p_slope + o_row, tl.where(b_slope, b_floor * slope, 0.0), mask=m_q)
