"""Causal attention: the gradients of keys and values, as far as they come from one query head.

What the kernels compute is in `causal_sums`. Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.causal_sums import GENERAL, earlier_keys, normaliser, shares, state, vector
from schoenbat.ops.triton.kernels.features import evaluate, evaluate_backward, linear_scores
from schoenbat.ops.triton.kernels.rows import load_tile, load_unit_tile, store_tile, unit_backward, visible


@triton.jit
def _value_pair(
    b_dv, b_k, b_q, b_grad, b_inverse, b_e, scale, KEY_SCALE, weight, p_near, p_far, near, far, both,
    p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    OWN: tl.constexpr, HAS_FAR: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of values what comes from one tile of queries.

    OWN: the tile of the keys themselves, in which not every row sees every key; also what comes from the sums.
    """
    dtype = b_q.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    b_read = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    if IDENTITY:
        b_scores += linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
        if OWN:
            b_root = tl.load(p_linear + tl.arange(0, BLOCK_D)) * KEY_SCALE
            b_s1 = state(p_near, p_far, near, far, 0, HAS_FAR, BLOCK_D, BLOCK_V)
            if HAS_FAR:
                b_read += tl.dot(b_k, (b_s1 * b_root[:, None]).to(dtype), input_precision=PRECISION)
            else:  # rows are weighted: sums that are multiplied as they were stored take no registers
                b_linear = (b_k.to(tl.float32) * b_root[None, :]).to(dtype)
                b_read += tl.dot(b_linear, b_s1, input_precision=PRECISION)
    for i_group in range(num_groups):
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        if OWN:
            b_s = state(p_near, p_far, near, far, first + i_group * GROUP, HAS_FAR, GROUP, BLOCK_V).to(dtype)
            b_read += tl.dot(b_phi_k, b_s, input_precision=PRECISION)
        if QUADRATIC:
            tl.debug_barrier()
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        b_scores += tl.dot(b_phi_q, tl.trans(b_phi_k), input_precision=PRECISION)
    if OWN:
        o_n = tl.arange(0, BLOCK)
        b_scores = tl.where(o_n[:, None] >= o_n[None, :], b_scores + b_e[:, None], 0.0)
    b_scores = (b_scores * (b_inverse * weight)[:, None]).to(dtype)
    return b_dv + b_read * both + tl.dot(tl.trans(b_scores), b_grad, input_precision=PRECISION) / weight


@triton.jit
def _key_pair(
    b_dx, b_k, b_v, b_q, b_grad, b_inverse, b_dtotal, b_dmean, scale, KEY_SCALE, weight, p_near, p_near_totals,
    p_far, p_far_totals, near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    OWN: tl.constexpr, HAS_FAR: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of scaled keys what comes from one tile of queries; OWN as in `_value_pair`."""
    dtype = b_q.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_dscores = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    b_dscores = (b_dscores * b_inverse[:, None] + b_dtotal[:, None]) * weight
    if OWN:
        o_n = tl.arange(0, BLOCK)
        m_causal = o_n[:, None] >= o_n[None, :]
        b_dscores = tl.where(m_causal, b_dscores, 0.0)
        if tl.max(tl.abs(b_dmean), axis=0) > 0.0:
            b_mean = tl.where(m_causal, (b_dmean * weight)[:, None], 0.0).to(dtype)
            b_dx += tl.dot(tl.trans(b_mean), b_q, input_precision=PRECISION) * (scale / weight)
    b_dscores = tl.trans(b_dscores.to(dtype))
    if IDENTITY:
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_dx += (
            tl.dot(b_dscores, b_q, input_precision=PRECISION) * (b_root * b_root * (scale / weight))[None, :]
        )
        if OWN:
            b_s1 = state(p_near, p_far, near, far, 0, HAS_FAR, BLOCK_D, BLOCK_V).to(dtype)
            b_z1 = vector(p_near_totals, p_far_totals, 0, HAS_FAR, BLOCK_D)
            b_more = tl.dot(b_v, tl.trans(b_s1), input_precision=PRECISION) * both + b_z1[None, :]
            b_dx += b_more * b_root[None, :]
    for i_group in range(num_groups):
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        b_dphi = tl.dot(b_dscores, b_phi_q, input_precision=PRECISION) / weight
        if OWN:
            b_s = state(p_near, p_far, near, far, first + i_group * GROUP, HAS_FAR, GROUP, BLOCK_V).to(dtype)
            b_z = vector(p_near_totals, p_far_totals, first + i_group * GROUP, HAS_FAR, GROUP)
            b_dphi += tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) * both + b_z[None, :]
        b_dx += evaluate_backward(
            b_dphi, b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP,
            PRECISION,
        )  # fmt: skip
    return b_dx


@triton.jit(do_not_specialize=GENERAL)
def key_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_grad, p_inverse, p_constant, p_dtotal, p_dmean,
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows, p_earlier, p_dkey,
    p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_STATE: tl.constexpr, HAS_FAR: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of key and value gradients, as far as they come from one query head."""
    num_here = NUM_ROW_TILES - FIRST_TILE
    i_tile, i_bh = FIRST_TILE + tl.program_id(0) % num_here, tl.program_id(0) // num_here
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_n = tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    i_near = (i_bh * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64)
    i_far = (i_bh * SEGMENTS + i_tile // TILES).to(tl.int64)
    i_row = (i_bh * NUM_ROW_TILES + i_tile).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64)
    p_inverse += i_out * N_QUERY
    p_constant += i_out * N_QUERY
    p_dtotal += i_out * N_QUERY
    p_dmean += i_out * N_QUERY
    p_near += i_near * num_features * BLOCK_V
    p_near_totals += i_near * num_features
    p_far += i_far * num_features * BLOCK_V
    p_far_totals += i_far * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = tl.load(p_scale + i_h)
    earlier = earlier_keys(p_earlier, i_b, HAS_STATE)
    near, far, both = shares(i_tile, FIRST_KEY, earlier, TILES, NUM_ROW_TILES, True, CHUNK, BLOCK)

    q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
    m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
    m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
    b_k, _ = load_unit_tile(p_key, k_start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
    b_q, _ = load_unit_tile(p_query, q_start, stride_qn, m_q, EPS, UNIT, DIM, BLOCK, BLOCK_D)
    b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
    b_inverse = tl.load(p_inverse + q_start + o_n, mask=m_q, other=0.0)
    weight = normaliser(i_tile, FIRST_KEY, earlier, BLOCK)
    # What is masked gets zeros; what lies outside gets nothing.
    m_in = visible(p_mask, k_start, N_KEY, BLOCK, False)
    last = tl.minimum((i_tile // CHUNK + 1) * CHUNK, NUM_ROW_TILES)

    # Values first, then keys: the features of queries are formed twice, but both at once would not fit the registers.
    b_e = tl.load(p_constant + q_start + o_n, mask=m_q, other=0.0)
    b_values = vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, HAS_FAR, BLOCK_V)
    b_dv = tl.zeros([BLOCK, BLOCK_V], tl.float32) + b_values[None, :]
    b_dv = _value_pair(
        b_dv, b_k, b_q, b_grad, b_inverse, b_e, scale, KEY_SCALE, weight, p_near, p_far, near, far, both, p_tiles, p_root,
        p_linear, p_degrees, p_first, num_groups, True, HAS_FAR, IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
    )  # fmt: skip
    if CHUNK > 1:
        for i_other in range(i_tile + 1, last):
            start = i_other * BLOCK - FIRST_QUERY
            m_other = visible(p_mask, start, N_QUERY, BLOCK, False)
            b_other, _ = load_unit_tile(p_query, start, stride_qn, m_other, EPS, UNIT, DIM, BLOCK, BLOCK_D)
            b_other_grad = load_tile(p_grad, start, stride_gn, m_other, DV, BLOCK, BLOCK_V)
            b_other_inverse = tl.load(p_inverse + start + o_n, mask=m_other, other=0.0)
            b_dv = _value_pair(
                b_dv, b_k, b_other, b_other_grad, b_other_inverse, b_e, scale, KEY_SCALE,
                normaliser(i_other, FIRST_KEY, earlier, BLOCK), p_near, p_far, near, far, both, p_tiles, p_root, p_linear, p_degrees,
                p_first, num_groups, False, HAS_FAR, IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
    b_dv = tl.where(m_k[:, None], b_dv, 0.0)
    store_tile(p_dvalue + i_out * N_KEY * DV, k_start, b_dv, m_in, DV, BLOCK, BLOCK_V)

    # Unit rows are formed three times: to hold them and their factors all along would take registers.
    if UNIT > 0:
        b_k, _ = load_unit_tile(p_key, k_start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_q, _ = load_unit_tile(p_query, q_start, stride_qn, m_q, EPS, UNIT, DIM, BLOCK, BLOCK_D)
    b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
    b_dtotal = tl.load(p_dtotal + q_start + o_n, mask=m_q, other=0.0)
    b_dmean = tl.load(p_dmean + q_start + o_n, mask=m_q, other=0.0)
    b_keys = vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, HAS_FAR, BLOCK_D)
    b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32) + b_keys[None, :]
    b_dx = _key_pair(
        b_dx, b_k, b_v, b_q, b_grad, b_inverse, b_dtotal, b_dmean, scale, KEY_SCALE, weight, p_near, p_near_totals, p_far,
        p_far_totals, near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, True, HAS_FAR, IDENTITY, QUADRATIC,
        BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
    )  # fmt: skip
    if CHUNK > 1:
        for i_other in range(i_tile + 1, last):
            start = i_other * BLOCK - FIRST_QUERY
            m_other = visible(p_mask, start, N_QUERY, BLOCK, False)
            b_other, _ = load_unit_tile(p_query, start, stride_qn, m_other, EPS, UNIT, DIM, BLOCK, BLOCK_D)
            b_other_grad = load_tile(p_grad, start, stride_gn, m_other, DV, BLOCK, BLOCK_V)
            b_other_inverse = tl.load(p_inverse + start + o_n, mask=m_other, other=0.0)
            b_other_dtotal = tl.load(p_dtotal + start + o_n, mask=m_other, other=0.0)
            b_dx = _key_pair(
                b_dx, b_k, b_v, b_other, b_other_grad, b_other_inverse, b_other_dtotal, b_dmean, scale, KEY_SCALE,
                normaliser(i_other, FIRST_KEY, earlier, BLOCK), p_near, p_near_totals, p_far, p_far_totals, near, far, both, p_tiles,
                p_root, p_linear, p_degrees, p_first, num_groups, False, HAS_FAR, IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP,
                PRECISION,
            )  # fmt: skip
    b_dx *= KEY_SCALE
    if UNIT > 0:
        tl.debug_barrier()  # else they would be formed above and held in registers
        b_k, b_factor = load_unit_tile(p_key, k_start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_dx = unit_backward(b_dx, b_k, b_factor, EPS, UNIT, DIM, BLOCK_D)
    b_dx = tl.where(m_k[:, None], b_dx, 0.0)
    store_tile(p_dkey + i_out * N_KEY * DIM, k_start, b_dx, m_in, DIM, BLOCK, BLOCK_D)
