"""Causal attention: each query row's output, and its gradient with what the sums of the backward pass need from it.

What the kernels compute is in `causal_sums`. Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.causal_sums import (
    GENERAL,
    earlier_keys,
    normaliser,
    seen,
    shares,
    state,
    vector,
)
from schoenbat.ops.triton.kernels.features import (
    directions,
    evaluate,
    evaluate_backward,
    linear_scores,
    pairs,
)
from schoenbat.ops.triton.kernels.rows import (
    LOWEST_EXPONENT,
    load_tile,
    load_unit_tile,
    store_tile,
    unit_backward,
    visible,
)


@triton.jit
def _scores(
    b_q, b_k, scale, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """φ(q)·φ(k) for all pairs of two tiles, [BLOCK, BLOCK]."""
    b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    if IDENTITY:
        b_scores += linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
    for i_group in range(num_groups):
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_scores += tl.dot(b_phi_q.to(b_q.dtype), tl.trans(b_phi_k.to(b_q.dtype)), input_precision=PRECISION)
    return b_scores


@triton.jit
def _read_group(
    b_scores, b_numerator, b_total, b_phi_q, b_phi_k, p_near, p_near_totals, p_far, p_far_totals, near, far, o_first,
    HAS_FAR: tl.constexpr, BARRIER: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a group of features adds to the scores of two tiles, and to what is read from the sums."""
    dtype = b_phi_k.dtype
    b_total += tl.sum(b_phi_q * vector(p_near_totals, p_far_totals, o_first, HAS_FAR, GROUP)[None, :], axis=1)
    b_phi_q = b_phi_q.to(dtype)
    b_scores += tl.dot(b_phi_q, tl.trans(b_phi_k), input_precision=PRECISION)
    if BARRIER:
        tl.debug_barrier()
    b_s = state(p_near, p_far, near, far, o_first, HAS_FAR, GROUP, BLOCK_V)
    b_numerator += tl.dot(b_phi_q, b_s.to(dtype), input_precision=PRECISION)
    return b_scores, b_numerator, b_total


@triton.jit(do_not_specialize=GENERAL)
def read(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_out, p_inverse, p_constant, p_slope,
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows, p_earlier,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, EACH, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_STATE: tl.constexpr, HAS_FAR: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, UNIT: tl.constexpr, SINGLE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some tiles of outputs; by row also 1/f, e, and the derivative of f with respect to the mean logit.

    Several to a program where a map is SINGLE, identity features and one group of pairs: its directions are loaded once.
    """
    programs = tl.cdiv(NUM_ROW_TILES - FIRST_TILE, EACH)
    i_first, i_bh = FIRST_TILE + tl.program_id(0) % programs * EACH, tl.program_id(0) // programs
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = i_bh // GROUPS
    first: tl.constexpr = IDENTITY * BLOCK_D
    num_features = first + num_groups * GROUP
    o_d, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = tl.load(p_scale + i_h)
    constant, zeroth = tl.load(p_coefficients + 3 * i_map), tl.load(p_coefficients + 3 * i_map + 1)
    slope = tl.load(p_coefficients + 3 * i_map + 2)
    earlier = earlier_keys(p_earlier, i_b, HAS_STATE)
    m_causal = o_n[:, None] >= o_n[None, :]
    dtype = p_query.dtype.element_ty
    is_even = False
    if SINGLE:
        # Linear features as they are drawn have one weight: the logits are their scores, but for a factor. Only here: Triton 3.6
        # compiles the branch wrongly elsewhere.
        linear = tl.load(p_linear)
        b_others = tl.load(p_linear + o_d, mask=o_d < DIM, other=linear)
        is_even = tl.max(tl.abs(b_others - linear), axis=0) == 0.0
        b_left, b_right = directions(p_tiles, 0, BLOCK_D, GROUP), directions(p_tiles, 1, BLOCK_D, GROUP)
        b_weight = tl.load(p_root + tl.arange(0, GROUP))
    last = i_first + 1
    if SINGLE:  # only then is there something that tiles share
        last = tl.minimum(i_first + EACH, NUM_ROW_TILES)
    for i_tile in range(i_first, last):
        i_near = (i_state * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64)
        i_far = (i_state * SEGMENTS + i_tile // TILES).to(tl.int64)
        i_row = (i_state * NUM_ROW_TILES + i_tile).to(tl.int64)
        p_near_sums = p_near + i_near * num_features * BLOCK_V
        p_near_total = p_near_totals + i_near * num_features
        p_far_sums = p_far + i_far * num_features * BLOCK_V
        p_far_total = p_far_totals + i_far * num_features
        near, far, both = shares(i_tile, FIRST_KEY, earlier, TILES, NUM_ROW_TILES, False, CHUNK, BLOCK)

        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
        m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
        b_q, _ = load_unit_tile(p_query, q_start, stride_qn, m_q, EPS, UNIT, DIM, BLOCK, BLOCK_D)

        # The mean logit, which makes the floor.
        b_k, _ = load_unit_tile(p_key, k_start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_logit = tl.sum(tl.where(m_causal, b_logits, 0.0), axis=1) * KEY_SCALE
        b_keys = vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, HAS_FAR, BLOCK_D)
        b_logit = (b_logit + tl.sum(b_q.to(tl.float32) * b_keys[None, :], axis=1)) * scale

        # Scores inside the tile, and what is read from the sums.
        b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
        b_numerator = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        b_total = tl.zeros([BLOCK], tl.float32)
        if IDENTITY:
            b_root = tl.load(p_linear + o_d)[None, :]
            # Rows are weighted, not the sums: one vector in one layout serves both sides.
            b_linear = b_q.to(tl.float32) * (b_root * scale)
            b_total += tl.sum(
                b_linear * vector(p_near_total, p_far_total, 0, HAS_FAR, BLOCK_D)[None, :], axis=1
            )
            b_s1 = state(p_near_sums, p_far_sums, near, far, 0, HAS_FAR, BLOCK_D, BLOCK_V)
            b_numerator += tl.dot(b_linear.to(dtype), b_s1.to(dtype), input_precision=PRECISION)
            if SINGLE and is_even:
                b_scores += b_logits * (linear * linear * scale * KEY_SCALE)
            else:
                b_linear_k = (b_k.to(tl.float32) * (b_root * KEY_SCALE)).to(dtype)
                b_scores += tl.dot(b_linear.to(dtype), tl.trans(b_linear_k), input_precision=PRECISION)
        if SINGLE:
            b_phi_k = pairs(b_k, b_left, b_right, b_weight, KEY_SCALE, PRECISION).to(dtype)
            b_phi_q = pairs(b_q, b_left, b_right, b_weight, scale, PRECISION)
            b_scores, b_numerator, b_total = _read_group(
                b_scores, b_numerator, b_total, b_phi_q, b_phi_k, p_near_sums, p_near_total, p_far_sums, p_far_total, near, far,
                first, HAS_FAR, False, BLOCK_V, GROUP, PRECISION,
            )  # fmt: skip
        else:
            for i_group in range(num_groups):
                b_phi_k = evaluate(
                    b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
                ).to(dtype)  # fmt: skip
                # Else the compiler would keep the factors of queries and keys at once, which do not fit the registers. Where a
                # program has several tiles, barriers would keep it from loading one ahead.
                if QUADRATIC:
                    tl.debug_barrier()
                b_phi_q = evaluate(
                    b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
                )  # fmt: skip
                b_scores, b_numerator, b_total = _read_group(
                    b_scores, b_numerator, b_total, b_phi_q, b_phi_k, p_near_sums, p_near_total, p_far_sums, p_far_total, near,
                    far, first + i_group * GROUP, HAS_FAR, QUADRATIC, BLOCK_V, GROUP, PRECISION,
                )  # fmt: skip
        b_numerator *= both

        # Scores with the tiles before it in the chunk.
        if CHUNK > 1:
            for i_other in range(i_tile // CHUNK * CHUNK, i_tile):
                start = i_other * BLOCK - FIRST_KEY
                m_other = visible(p_mask, start, N_KEY, BLOCK, HAS_MASK)
                b_other, _ = load_unit_tile(p_key, start, stride_kn, m_other, EPS, UNIT, DIM, BLOCK, BLOCK_D)
                b_more = _scores(
                    b_q, b_other, scale, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY,
                    QUADRATIC, BLOCK_D, BLOCK, GROUP, PRECISION,
                )  # fmt: skip
                b_total += tl.sum(b_more, axis=1)
                b_v = load_tile(p_value, start, stride_vn, m_other, DV, BLOCK, BLOCK_V)
                b_numerator += tl.dot(b_more.to(dtype), b_v, input_precision=PRECISION)

        b_count = seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, earlier, HAS_MASK, BLOCK)
        divisor = tl.maximum(b_count, 1.0)
        b_scores = tl.where(m_causal, b_scores, 0.0)
        b_total += tl.sum(b_scores, axis=1)
        b_exponent = slope * b_logit / divisor
        b_floor = b_count * zeroth * tl.exp(tl.minimum(tl.maximum(b_exponent, LOWEST_EXPONENT), 0.0))
        m_some = b_count > 0.0
        m_below = b_total + constant * b_count < b_floor
        b_floored = tl.where(m_some, tl.where(m_below, b_floor, b_total + constant * b_count), 1.0)
        b_e = tl.where(m_some, tl.where(m_below, (b_floor - b_total) / divisor, constant), 0.0)
        m_falling = m_below & (b_exponent < 0.0) & (b_exponent > LOWEST_EXPONENT)
        b_slope = tl.where(m_falling, b_floor * slope, 0.0)

        b_scores = tl.where(m_causal, b_scores + b_e[:, None], 0.0)
        b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
        b_numerator += tl.dot(b_scores.to(dtype), b_v, input_precision=PRECISION)
        b_values = vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, HAS_FAR, BLOCK_V)
        b_numerator += b_e[:, None] * b_values[None, :]
        b_inverse = 1.0 / b_floored
        i_out = tl.full([], i_bh, tl.int64) * N_QUERY
        store_tile(p_out + i_out * DV, q_start, b_numerator * b_inverse[:, None], m_q, DV, BLOCK, BLOCK_V)
        tl.store(p_inverse + i_out + q_start + o_n, b_inverse, mask=m_q)
        tl.store(p_constant + i_out + q_start + o_n, b_e, mask=m_q)
        tl.store(p_slope + i_out + q_start + o_n, b_slope, mask=m_q)


@triton.jit
def _query_pair(
    b_dx, b_q, b_k, b_dscores, b_rows, b_dtotal, scale, KEY_SCALE, inverse_weight, p_near, p_near_totals, p_far, p_far_totals,
    near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    WITH_SUMS: tl.constexpr, HAS_FAR: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of scaled queries what comes from one tile of keys, and from the sums (WITH_SUMS)."""
    dtype = b_q.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    if IDENTITY:
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_more = tl.dot(b_dscores, b_k, input_precision=PRECISION)
        b_dx += b_more * (b_root * b_root * (KEY_SCALE * inverse_weight))[None, :]
        if WITH_SUMS:
            b_s1 = state(p_near, p_far, near, far, 0, HAS_FAR, BLOCK_D, BLOCK_V).to(dtype)
            b_more = tl.dot(b_rows, tl.trans(b_s1), input_precision=PRECISION)
            b_dx += b_more * (b_root * (both * inverse_weight))[None, :]
            b_z1 = vector(p_near_totals, p_far_totals, 0, HAS_FAR, BLOCK_D)
            b_dx += b_dtotal[:, None] * (b_z1 * b_root)[None, :]
    for i_group in range(num_groups):
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_dphi = tl.dot(b_dscores, b_phi_k.to(dtype), input_precision=PRECISION) * inverse_weight
        if WITH_SUMS:
            b_s = state(p_near, p_far, near, far, first + i_group * GROUP, HAS_FAR, GROUP, BLOCK_V).to(dtype)
            b_dphi += tl.dot(b_rows, tl.trans(b_s), input_precision=PRECISION) * (both * inverse_weight)
            b_z = vector(p_near_totals, p_far_totals, first + i_group * GROUP, HAS_FAR, GROUP)
            b_dphi += b_dtotal[:, None] * b_z[None, :]
        b_dx += evaluate_backward(
            b_dphi, b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
    return b_dx


@triton.jit(do_not_specialize=GENERAL)
def query_backward(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_grad, p_out, p_inverse, p_constant, p_slope,
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows, p_earlier,
    p_dquery, p_dtotal, p_dmean, p_dfloored, p_dscale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_STATE: tl.constexpr, HAS_FAR: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, UNIT: tl.constexpr, TRAINED: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of query gradients; by row also those of T and of the mean logit, divided by the count; that of the scale.

    For a map that is TRAINED also that of f by row.
    """
    num_here = NUM_ROW_TILES - FIRST_TILE
    i_tile, i_bh = FIRST_TILE + tl.program_id(0) % num_here, tl.program_id(0) // num_here
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = i_bh // GROUPS
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_n = tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    i_near = (i_state * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64)
    i_far = (i_state * SEGMENTS + i_tile // TILES).to(tl.int64)
    i_row = (i_state * NUM_ROW_TILES + i_tile).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64) * N_QUERY
    p_near += i_near * num_features * BLOCK_V
    p_near_totals += i_near * num_features
    p_far += i_far * num_features * BLOCK_V
    p_far_totals += i_far * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale, constant = tl.load(p_scale + i_h), tl.load(p_coefficients + 3 * i_map)
    earlier = earlier_keys(p_earlier, i_b, HAS_STATE)
    near, far, both = shares(i_tile, FIRST_KEY, earlier, TILES, NUM_ROW_TILES, False, CHUNK, BLOCK)
    weight = normaliser(i_tile, FIRST_KEY, earlier, BLOCK)

    q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
    m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
    m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
    m_causal = o_n[:, None] >= o_n[None, :]
    b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
    b_out = load_tile(p_out + i_out * DV, q_start, DV, m_q, DV, BLOCK, BLOCK_V)
    b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
    dtype = b_grad.dtype
    o_row = i_out + q_start + o_n
    b_inverse = tl.load(p_inverse + o_row, mask=m_q, other=0.0)
    b_e = tl.load(p_constant + o_row, mask=m_q, other=0.0)
    b_slope = tl.load(p_slope + o_row, mask=m_q, other=0.0)
    b_count = seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, earlier, HAS_MASK, BLOCK)
    divisor = tl.maximum(b_count, 1.0)

    # ⟨grad, value⟩ for all pairs; its sums are ⟨grad, mean value⟩.
    b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    b_dots = tl.where(m_causal, b_dots, 0.0)
    b_grad32 = b_grad.to(tl.float32)
    b_values = vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, HAS_FAR, BLOCK_V)
    b_along_mean = tl.sum(b_dots, axis=1) + tl.sum(b_grad32 * b_values[None, :], axis=1)
    b_along_mean = b_along_mean * b_inverse / divisor
    b_along_out = tl.sum(b_grad32 * b_out.to(tl.float32), axis=1) * b_inverse
    b_dtotal = -tl.where(b_e == constant, b_along_out, b_along_mean)
    b_dmean = (b_along_mean - b_along_out) * b_slope / divisor
    tl.store(p_dtotal + o_row, b_dtotal, mask=m_q)
    tl.store(p_dmean + o_row, b_dmean, mask=m_q)
    if TRAINED:
        tl.store(p_dfloored + o_row, b_along_mean - b_along_out, mask=m_q)

    b_rows = (b_grad32 * (b_inverse * weight)[:, None]).to(dtype)
    b_dscores = (b_dots * b_inverse[:, None] + b_dtotal[:, None]) * weight
    b_dscores = tl.where(m_causal, b_dscores, 0.0).to(dtype)
    b_q, b_factor = load_unit_tile(p_query, q_start, stride_qn, m_q, EPS, UNIT, DIM, BLOCK, BLOCK_D)
    b_k, _ = load_unit_tile(p_key, k_start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
    b_keys = vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, HAS_FAR, BLOCK_D)
    b_dx = b_dmean[:, None] * b_keys[None, :]
    if tl.max(tl.abs(b_dmean), axis=0) > 0.0:  # the floor acts somewhere, which is rare
        b_mean = tl.where(m_causal, (b_dmean * weight)[:, None], 0.0).to(dtype)
        b_dx += tl.dot(b_mean, b_k, input_precision=PRECISION) * (KEY_SCALE / weight)
    b_dx = _query_pair(
        b_dx, b_q, b_k, b_dscores, b_rows, b_dtotal, scale, KEY_SCALE, 1.0 / weight, p_near, p_near_totals, p_far, p_far_totals,
        near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, True, HAS_FAR, IDENTITY, QUADRATIC, BLOCK_D,
        BLOCK_V, BLOCK, GROUP, PRECISION,
    )  # fmt: skip
    if CHUNK > 1:
        for i_other in range(i_tile // CHUNK * CHUNK, i_tile):
            start = i_other * BLOCK - FIRST_KEY
            m_other = visible(p_mask, start, N_KEY, BLOCK, HAS_MASK)
            b_k, _ = load_unit_tile(p_key, start, stride_kn, m_other, EPS, UNIT, DIM, BLOCK, BLOCK_D)
            b_v = load_tile(p_value, start, stride_vn, m_other, DV, BLOCK, BLOCK_V)
            b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
            b_dscores = ((b_dots * b_inverse[:, None] + b_dtotal[:, None]) * weight).to(dtype)
            b_dx = _query_pair(
                b_dx, b_q, b_k, b_dscores, b_rows, b_dtotal, scale, KEY_SCALE, 1.0 / weight, p_near, p_near_totals, p_far,
                p_far_totals, near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, False, HAS_FAR, IDENTITY,
                QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
    # b_dx is the gradient of scale · query, on which alone everything depends.
    b_along = tl.sum(b_dx * b_q.to(tl.float32), axis=1)
    tl.store(p_dscale + tl.program_id(0), tl.sum(b_along, axis=0))
    b_dx = unit_backward(b_dx * scale, b_q, b_factor, EPS, UNIT, DIM, BLOCK_D)
    store_tile(p_dquery + i_out * DIM, q_start, b_dx, m_q, DIM, BLOCK, BLOCK_D)
