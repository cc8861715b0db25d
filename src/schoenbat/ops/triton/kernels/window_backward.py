"""Exact near, linear far: the gradients of queries, of keys and of values, these as far as they come from one query head.

What the kernels compute is in `window`, and what is a sum in `window_sums`. With c for 1/f the far keys' gradients are those of
causal attention. Those of the near keys are those of softmax attention. Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import evaluate, evaluate_backward, linear_scores
from schoenbat.ops.triton.kernels.rows import load_tile, store_tile, visible
from schoenbat.ops.triton.kernels.window_sums import (
    LENGTHS,
    far_count,
    far_tile,
    far_tiles,
    is_far,
    is_near,
    near_rows,
    normaliser,
    sum_rows,
)


@triton.jit
def _score_gradient(b_grad, b_v, b_inverse, b_dtotal, m_far, weight, PRECISION: tl.constexpr):
    """The gradient of the features' scores of far pairs times `weight`, by which it fits 16 bits."""
    b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    b_dscores = (b_dots * b_inverse[:, None] + b_dtotal[:, None]) * weight
    return tl.where(m_far, b_dscores, 0.0).to(b_v.dtype)


@triton.jit
def _logit_gradient(
    b_q, b_k, b_v, b_grad, b_log_total, b_delta, m_near, factor, PRECISION: tl.constexpr
):  # fmt: skip
    """The weights of near pairs, and the gradient of their logits, which are the products times `factor`."""
    b_logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * factor
    b_weights = tl.where(m_near, tl.exp(b_logits - b_log_total[:, None]), 0.0)
    b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    return b_weights, b_weights * (b_dots - b_delta[:, None])


@triton.jit(do_not_specialize=LENGTHS)
def query_backward(
    p_query, p_key, p_far_query, p_far_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_grad, p_out,
    p_log_total, p_inverse, p_constant, p_slope, p_sums, p_totals, p_keys, p_values, p_share,
    p_dquery, p_dfar_query, p_delta, p_dtotal, p_dmean, p_dscale, p_dlog_weight,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_fqb, stride_fqh, stride_fqn,
    stride_fkb, stride_fkh, stride_fkn, stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    N, WIDTH, REACH, CHUNKS, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SEPARATE: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of query gradients, and parts of those of the scale and of log g.

    By row also ⟨grad, out⟩ and the gradients of T and of the mean logit, this divided by the count.
    """
    num_row_tiles = tl.cdiv(N, BLOCK)
    i_tile, i_bh = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    first: tl.constexpr = IDENTITY * BLOCK_D
    num_features = first + num_groups * GROUP
    o_d, o_v, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_far_query += i_b.to(tl.int64) * stride_fqb + i_h.to(tl.int64) * stride_fqh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_far_key += i_b.to(tl.int64) * stride_fkb + (i_h // GROUPS).to(tl.int64) * stride_fkh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N
    start = i_tile * BLOCK
    i_state = (i_bh // GROUPS * CHUNKS + start // SPAN).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64) * N
    p_sums += i_state * num_features * BLOCK_V
    p_totals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale, share, constant = (
        tl.load(p_scale + i_h),
        tl.load(p_share + i_state),
        tl.load(p_coefficients + 3 * i_map),
    )
    weight = normaliser(start, N, IS_CAUSAL)
    before, num_before, after, num_far = far_tiles(start, N, WIDTH, REACH, True, not IS_CAUSAL, SPAN, BLOCK)

    m_q = visible(p_mask, start, N, BLOCK, False)
    b_grad = load_tile(p_grad, start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
    b_out = load_tile(p_out + i_out * DV, start, DV, m_q, DV, BLOCK, BLOCK_V)
    dtype = b_grad.dtype
    o_row = i_out + start + o_n
    b_delta = tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), axis=1)
    tl.store(p_delta + o_row, b_delta, mask=m_q)
    b_inverse = tl.load(p_inverse + o_row, mask=m_q, other=0.0)

    # Near keys. A row's gradients of all logits add up to nothing: what they leave is that of log g + log f.
    b_q = load_tile(p_query, start, stride_qn, m_q, DIM, BLOCK, BLOCK_D)
    b_log_total = tl.load(p_log_total + o_row, mask=m_q, other=0.0)
    b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    b_left = tl.zeros([BLOCK], tl.float32)
    near, end = near_rows(start, N, WIDTH, True, not IS_CAUSAL, BLOCK)
    for k_start in range(near, end, BLOCK):
        m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
        m_near = is_near(start, k_start, WIDTH, IS_CAUSAL, BLOCK) & m_k[None, :] & m_q[:, None]
        b_k = load_tile(p_key, k_start, stride_kn, m_k, DIM, BLOCK, BLOCK_D)
        b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
        _, b_dlogits = _logit_gradient(
            b_q, b_k, b_v, b_grad, b_log_total, b_delta, m_near, scale * KEY_SCALE, PRECISION
        )
        b_left -= tl.sum(b_dlogits, axis=1)
        b_dx += tl.dot(b_dlogits.to(dtype), b_k, input_precision=PRECISION)
    b_dx *= KEY_SCALE
    tl.store(p_dlog_weight + tl.program_id(0), tl.sum(tl.where(b_inverse > 0.0, b_left, 0.0), axis=0))
    dscale = 0.0
    if SEPARATE:
        store_tile(p_dquery + i_out * DIM, start, b_dx * scale, m_q, DIM, BLOCK, BLOCK_D)
        dscale += tl.sum(tl.sum(b_dx * b_q.to(tl.float32), axis=1), axis=0)
        b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        b_q = load_tile(p_far_query, start, stride_fqn, m_q, DIM, BLOCK, BLOCK_D)

    # Far keys: where the floor acts, which is rare, their mean value and mean key count too.
    b_e = tl.load(p_constant + o_row, mask=m_q, other=constant)
    b_slope = tl.load(p_slope + o_row, mask=m_q, other=0.0)
    divisor = tl.maximum(far_count(p_count, i_b, start, N, WIDTH, HAS_MASK, IS_CAUSAL, BLOCK), 1.0)
    b_along_mean = tl.zeros([BLOCK], tl.float32)
    if tl.max(tl.abs(b_e - constant), axis=0) > 0.0:
        b_values = tl.load(p_values + i_state * BLOCK_V + o_v)
        b_along_mean += tl.sum(b_grad.to(tl.float32) * b_values[None, :], axis=1)
        for i in range(num_far):
            k_start = far_tile(i, before, num_before, after, BLOCK)
            m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
            b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
            b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
            b_along_mean += tl.sum(
                tl.where(is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK), b_dots, 0.0), axis=1
            )
    b_along_mean = b_along_mean * b_inverse / divisor
    b_along_out = b_delta * b_inverse
    b_dtotal = -tl.where(b_e == constant, b_along_out, b_along_mean)
    b_dmean = (b_along_mean - b_along_out) * b_slope / divisor
    tl.store(p_dtotal + o_row, b_dtotal, mask=m_q)
    tl.store(p_dmean + o_row, b_dmean, mask=m_q)
    if tl.max(tl.abs(b_dmean), axis=0) > 0.0:
        b_dx += b_dmean[:, None] * tl.load(p_keys + i_state * BLOCK_D + o_d)[None, :]
        for i in range(num_far):
            k_start = far_tile(i, before, num_before, after, BLOCK)
            m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
            b_k = load_tile(p_far_key, k_start, stride_fkn, m_k, DIM, BLOCK, BLOCK_D)
            m_far = is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK)
            b_mean = tl.where(m_far, (b_dmean * weight)[:, None], 0.0).to(dtype)
            b_dx += tl.dot(b_mean, b_k, input_precision=PRECISION) * (KEY_SCALE / weight)

    b_rows = (b_grad.to(tl.float32) * (b_inverse * weight)[:, None]).to(dtype)
    if IDENTITY:
        b_root = tl.load(p_linear + o_d)
        b_s1 = (sum_rows(p_sums, 0, BLOCK_D, BLOCK_V).to(tl.float32) * b_root[:, None]).to(dtype)
        b_dx += tl.dot(b_rows, tl.trans(b_s1), input_precision=PRECISION) * (share / weight)
        b_dx += b_dtotal[:, None] * (tl.load(p_totals + o_d) * b_root)[None, :]
        for i in range(num_far):
            k_start = far_tile(i, before, num_before, after, BLOCK)
            m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
            b_k = load_tile(p_far_key, k_start, stride_fkn, m_k, DIM, BLOCK, BLOCK_D)
            b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
            m_far = is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK)
            b_dscores = _score_gradient(b_grad, b_v, b_inverse, b_dtotal, m_far, weight, PRECISION)
            b_more = tl.dot(b_dscores, b_k, input_precision=PRECISION)
            b_dx += b_more * (b_root * b_root * (KEY_SCALE / weight))[None, :]
    for i_group in range(num_groups):
        o_f = first + i_group * GROUP
        b_s = sum_rows(p_sums, o_f, GROUP, BLOCK_V).to(dtype)
        b_dphi = tl.dot(b_rows, tl.trans(b_s), input_precision=PRECISION) * share
        for i in range(num_far):
            k_start = far_tile(i, before, num_before, after, BLOCK)
            m_k = visible(p_mask, k_start, N, BLOCK, HAS_MASK)
            b_k = load_tile(p_far_key, k_start, stride_fkn, m_k, DIM, BLOCK, BLOCK_D)
            b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
            m_far = is_far(start, k_start, WIDTH, IS_CAUSAL, BLOCK)
            b_dscores = _score_gradient(b_grad, b_v, b_inverse, b_dtotal, m_far, weight, PRECISION)
            b_phi_k = evaluate(
                b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
            )  # fmt: skip
            b_dphi += tl.dot(b_dscores, b_phi_k.to(dtype), input_precision=PRECISION)
        b_z = tl.load(p_totals + o_f + tl.arange(0, GROUP))
        b_dphi = b_dphi / weight + b_dtotal[:, None] * b_z[None, :]
        b_dx += evaluate_backward(
            b_dphi, b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip

    # b_dx is the gradient of scale · query, on which alone everything depends.
    dscale += tl.sum(tl.sum(b_dx * b_q.to(tl.float32), axis=1), axis=0)
    tl.store(p_dscale + tl.program_id(0), dscale)
    store_tile(p_dfar_query + i_out * DIM, start, b_dx * scale, m_q, DIM, BLOCK, BLOCK_D)


@triton.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_query, p_key, p_far_query, p_far_key, p_value, p_mask, p_scale, p_grad,
    p_log_total, p_inverse, p_constant, p_delta, p_dtotal, p_dmean, p_sums, p_totals, p_queries, p_grads, p_share,
    p_dkey, p_dfar_key, p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_fqb, stride_fqh, stride_fqn,
    stride_fkb, stride_fkh, stride_fkn, stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    N, WIDTH, REACH, CHUNKS, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SEPARATE: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, SPAN: tl.constexpr, DIM: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of key and value gradients, as far as they come from one query head."""
    num_row_tiles = tl.cdiv(N, BLOCK)
    i_tile, i_bh = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    first: tl.constexpr = IDENTITY * BLOCK_D
    num_features = first + num_groups * GROUP
    o_d, o_v, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_far_query += i_b.to(tl.int64) * stride_fqb + i_h.to(tl.int64) * stride_fqh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_far_key += i_b.to(tl.int64) * stride_fkb + (i_h // GROUPS).to(tl.int64) * stride_fkh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N
    start = i_tile * BLOCK
    i_state = (i_bh * CHUNKS + start // SPAN).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64) * N
    p_log_total += i_out
    p_inverse += i_out
    p_constant += i_out
    p_delta += i_out
    p_dtotal += i_out
    p_dmean += i_out
    p_sums += i_state * num_features * BLOCK_V
    p_totals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale, share = tl.load(p_scale + i_h), tl.load(p_share + i_state)
    before, num_before, after, num_far = far_tiles(start, N, WIDTH, REACH, not IS_CAUSAL, True, SPAN, BLOCK)

    m_in = visible(p_mask, start, N, BLOCK, False)
    m_k = visible(p_mask, start, N, BLOCK, HAS_MASK)
    b_v = load_tile(p_value, start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
    b_k = load_tile(p_key, start, stride_kn, m_k, DIM, BLOCK, BLOCK_D)
    dtype = b_v.dtype

    # Near queries.
    b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK, BLOCK_V], tl.float32) + tl.load(p_grads + i_state * BLOCK_V + o_v)[None, :]
    near, end = near_rows(start, N, WIDTH, not IS_CAUSAL, True, BLOCK)
    for q_start in range(near, end, BLOCK):
        m_q = visible(p_mask, q_start, N, BLOCK, False)
        m_near = is_near(q_start, start, WIDTH, IS_CAUSAL, BLOCK) & m_k[None, :] & m_q[:, None]
        b_q = load_tile(p_query, q_start, stride_qn, m_q, DIM, BLOCK, BLOCK_D)
        b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
        b_log_total = tl.load(p_log_total + q_start + o_n, mask=m_q, other=0.0)
        b_delta = tl.load(p_delta + q_start + o_n, mask=m_q, other=0.0)
        b_weights, b_dlogits = _logit_gradient(
            b_q, b_k, b_v, b_grad, b_log_total, b_delta, m_near, scale * KEY_SCALE, PRECISION
        )
        b_dv += tl.dot(tl.trans(b_weights.to(dtype)), b_grad, input_precision=PRECISION)
        b_dx += tl.dot(tl.trans(b_dlogits.to(dtype)), b_q, input_precision=PRECISION)
    b_dx *= scale
    if SEPARATE:
        b_dx = tl.where(m_k[:, None], b_dx * KEY_SCALE, 0.0)
        store_tile(p_dkey + i_out * DIM, start, b_dx, m_in, DIM, BLOCK, BLOCK_D)
        b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        b_k = load_tile(p_far_key, start, stride_fkn, m_k, DIM, BLOCK, BLOCK_D)

    # Far queries: what weighs all keys alike, and identity features.
    b_dx += tl.load(p_queries + i_state * BLOCK_D + o_d)[None, :]
    if IDENTITY:
        b_root = tl.load(p_linear + o_d)
        b_s1 = sum_rows(p_sums, 0, BLOCK_D, BLOCK_V).to(tl.float32) * b_root[:, None]
        b_dv += tl.dot(b_k, (b_s1 * KEY_SCALE).to(dtype), input_precision=PRECISION) * share
        b_dx += tl.dot(b_v, tl.trans(b_s1.to(dtype)), input_precision=PRECISION) * share
        b_dx += (tl.load(p_totals + o_d) * b_root)[None, :]
    for i in range(num_far):
        q_start = far_tile(i, before, num_before, after, BLOCK)
        weight = normaliser(q_start, N, IS_CAUSAL)
        m_q = visible(p_mask, q_start, N, BLOCK, False)
        m_far = is_far(q_start, start, WIDTH, IS_CAUSAL, BLOCK)
        b_q = load_tile(p_far_query, q_start, stride_fqn, m_q, DIM, BLOCK, BLOCK_D)
        b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
        b_inverse = tl.load(p_inverse + q_start + o_n, mask=m_q, other=0.0)
        b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
        b_scores += tl.load(p_constant + q_start + o_n, mask=m_q, other=0.0)[:, None]
        if IDENTITY:
            b_scores += linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
        b_scores = tl.where(m_far, b_scores * (b_inverse * weight)[:, None], 0.0).to(dtype)
        b_dv += tl.dot(tl.trans(b_scores), b_grad, input_precision=PRECISION) / weight
        if IDENTITY:
            b_dtotal = tl.load(p_dtotal + q_start + o_n, mask=m_q, other=0.0)
            b_dscores = _score_gradient(b_grad, b_v, b_inverse, b_dtotal, m_far, weight, PRECISION)
            b_more = tl.dot(tl.trans(b_dscores), b_q, input_precision=PRECISION)
            b_dx += b_more * (b_root * b_root * (scale / weight))[None, :]
        b_dmean = tl.load(p_dmean + q_start + o_n, mask=m_q, other=0.0)
        if tl.max(tl.abs(b_dmean), axis=0) > 0.0:
            b_mean = tl.where(m_far, (b_dmean * weight)[:, None], 0.0).to(dtype)
            b_dx += tl.dot(tl.trans(b_mean), b_q, input_precision=PRECISION) * (scale / weight)

    # All other features, a group at a time.
    for i_group in range(num_groups):
        o_f = first + i_group * GROUP
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        b_s = sum_rows(p_sums, o_f, GROUP, BLOCK_V).to(dtype)
        b_dv += tl.dot(b_phi_k, b_s, input_precision=PRECISION) * share
        b_dphi = tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) * share
        b_dphi += tl.load(p_totals + o_f + tl.arange(0, GROUP))[None, :]
        for i in range(num_far):
            q_start = far_tile(i, before, num_before, after, BLOCK)
            weight = normaliser(q_start, N, IS_CAUSAL)
            m_q = visible(p_mask, q_start, N, BLOCK, False)
            m_far = is_far(q_start, start, WIDTH, IS_CAUSAL, BLOCK)
            b_q = load_tile(p_far_query, q_start, stride_fqn, m_q, DIM, BLOCK, BLOCK_D)
            b_phi_q = evaluate(
                b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
            ).to(dtype)  # fmt: skip
            if QUADRATIC:
                tl.debug_barrier()
            b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
            b_inverse = tl.load(p_inverse + q_start + o_n, mask=m_q, other=0.0)
            b_scores = tl.dot(b_phi_q, tl.trans(b_phi_k), input_precision=PRECISION)
            b_scores = tl.where(m_far, b_scores * (b_inverse * weight)[:, None], 0.0).to(dtype)
            b_dv += tl.dot(tl.trans(b_scores), b_grad, input_precision=PRECISION) / weight
            b_dtotal = tl.load(p_dtotal + q_start + o_n, mask=m_q, other=0.0)
            b_dscores = _score_gradient(b_grad, b_v, b_inverse, b_dtotal, m_far, weight, PRECISION)
            b_dphi += tl.dot(tl.trans(b_dscores), b_phi_q, input_precision=PRECISION) / weight
        if QUADRATIC:
            tl.debug_barrier()
        b_dx += evaluate_backward(
            b_dphi, b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP,
            PRECISION,
        )  # fmt: skip

    b_dv = tl.where(m_k[:, None], b_dv, 0.0)
    store_tile(p_dvalue + i_out * DV, start, b_dv, m_in, DV, BLOCK, BLOCK_V)
    b_dx = tl.where(m_k[:, None], b_dx * KEY_SCALE, 0.0)
    store_tile(p_dfar_key + i_out * DIM, start, b_dx, m_in, DIM, BLOCK, BLOCK_D)
