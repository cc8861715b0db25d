"""Gradients of queries of 32 channels of causal attention on Hopper, from the first tile on, as `causal_narrow.read` goes.

They are those of the scaled rows and multiplied by the scale last. Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.causal import LENGTHS, keys_seen, shared_one
from schoenbat.ops.triton.hopper.causal_narrow import (
    add_features,
    second_factor,
    shared_map,
    shared_ones,
    shared_weights,
    size_of_sums,
    start_factors,
    store_features,
    sums_of,
    two_vectors,
)
from schoenbat.ops.triton.hopper.warp_groups import (
    BLOCK,
    accumulator,
    add,
    at_head,
    by_column,
    by_row,
    copy_numbers,
    copy_rows,
    make_unit,
    operand,
    place,
    row_sums,
    seen_from,
    shared_pair,
    shared_tile,
    shared_tiles,
    shared_vector,
    shared_vectors,
    start,
    store_rows,
    unit_backward,
    unknown,
    visible,
)


@gluon.jit
def features_backward(
    b_dx, b_dphi, s_x, s_map, s_weights, factor, zero, GROUP: gl.constexpr, D: gl.constexpr, F: gl.constexpr
):
    """Add to the gradient of rows what comes from that of a group's features, which may still be under way."""
    dtype: gl.constexpr = s_x.dtype
    b_left, b_right = start_factors(s_x, s_map, zero, GROUP, F)
    b_dphi, b_left, b_right = warpgroup_mma_wait(0, [b_dphi, b_left, b_right])
    b_right = second_factor(b_right, GROUP, D, F)
    b_dphi *= (s_weights.index(zero + GROUP).load(by_column(F)) * factor)[None, :]
    b_to_left = gl.convert_layout((b_dphi * b_right).to(dtype), operand(D))
    b_to_right = gl.convert_layout((b_dphi * b_left).to(dtype), operand(D))
    b_dx = add(b_to_left, s_map.index(zero + 2 * GROUP).permute((1, 0)), b_dx)
    b_dx = add(b_to_right, s_map.index(zero + 2 * GROUP + 1).permute((1, 0)), b_dx)
    return warpgroup_mma_wait(0, [b_dx])


@gluon.jit(do_not_specialize=LENGTHS)
def query_backward(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_grad, p_out, p_inverse, p_constant, p_slope,
    p_dquery, p_dtotal, p_dmean, p_dscale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The gradients of a segment of queries; by row also those of T and of the mean logit, divided by the count; of the scale."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS, HEADS, GROUPS, MAPS)
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_grad = at_head(p_grad, i_b, i_h, stride_gb, stride_gh)
    p_key = at_head(p_key, i_b, i_h // GROUPS, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h // GROUPS, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    p_sums += (i_bh // GROUPS).to(gl.int64) * (SEGMENTS - 1) * size_of_sums(D, F, V)
    i_row = i_bh.to(gl.int64) * N_QUERY
    p_inverse, p_constant, p_slope = p_inverse + i_row, p_constant + i_row, p_slope + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    p_out, p_dquery = p_out + i_row * DV, p_dquery + i_row * DIM
    scale, constant = gl.load(p_scale + i_h), gl.load(p_coefficients + 3 * i_map)

    s_map = shared_map(p_tiles, i_map, dtype, D, F, PAIRS)
    s_weights = shared_weights(p_root, p_linear, i_map, KEY_SCALE, D, F, PAIRS)
    s_query_weights = shared_weights(p_root, p_linear, i_map, scale, D, F, PAIRS)
    s_queries, s_keys = shared_pair(dtype, D), shared_pair(dtype, D)
    m_v, m_g, m_out = shared_tile(dtype, BLOCK, V), shared_tile(dtype, BLOCK, V), shared_tile(dtype, BLOCK, V)
    s_inverses, s_constants, s_slopes = shared_vectors(), shared_vectors(), shared_vectors()
    s_phi, m_one, s_ones = shared_tiles(dtype, 2, BLOCK, F), shared_one(dtype), shared_ones(dtype)
    s_sums, s_totals, s_factor = shared_tiles(dtype, 2, F, V), two_vectors(F), shared_vector(BLOCK)
    b_s1, b_s2, b_z1, b_z2, b_keys, b_values = sums_of(p_sums, 0, i_segment, D, F, V)
    o_q = gl.arange(0, BLOCK, by_row(BLOCK))
    b_dscale = gl.zeros([BLOCK], gl.float32, by_row(D))

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    q_start, k_start = first * BLOCK - FIRST_QUERY, first * BLOCK - FIRST_KEY
    copy_rows(s_queries.index(0), p_query, q_start, stride_qn, N_QUERY, DIM, D)
    copy_rows(s_keys.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(m_v.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    copy_rows(m_g.index(0), p_grad, q_start, stride_gn, N_QUERY, DV, V)
    copy_rows(m_out.index(0), p_out, q_start, DV, N_QUERY, DV, V)
    copy_numbers(s_inverses.index(0), p_inverse, q_start, N_QUERY)
    copy_numbers(s_constants.index(0), p_constant, q_start, N_QUERY)
    copy_numbers(s_slopes.index(0), p_slope, q_start, N_QUERY)
    async_copy.commit_group()
    for i in range(num_here):
        zero = unknown(0)
        s_v, s_g, s_out = m_v.index(zero), m_g.index(zero), m_out.index(zero)
        i_tile = first + i
        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        s_q, s_k = s_queries.index(i % 2), s_keys.index(i % 2)
        s_sums.index(zero).store(b_s1.to(dtype))
        s_sums.index(zero + 1).store(b_s2.to(dtype))
        s_totals.index(zero).store(b_z1)
        s_totals.index(zero + 1).store(b_z2)
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start + BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_numbers(s_inverses.index((i + 1) % 2), p_inverse, q_start + BLOCK, N_QUERY)
        copy_numbers(s_constants.index((i + 1) % 2), p_constant, q_start + BLOCK, N_QUERY)
        copy_numbers(s_slopes.index((i + 1) % 2), p_slope, q_start + BLOCK, N_QUERY)
        make_unit(s_q, EPS, UNIT, DIM, D, s_factor)
        make_unit(s_k, EPS, UNIT, DIM, D)
        b_inverse = s_inverses.index(i % 2).load(by_row(V))
        b_g = s_g.load(accumulator(V)).to(gl.float32) * b_inverse[:, None]
        b_along_out = gl.sum(b_g * s_out.load(accumulator(V)).to(gl.float32), axis=1)
        # ⟨grad, value⟩ for all pairs; its sums are ⟨grad, mean value⟩.
        b_along_mean = gl.sum(b_g * b_values, axis=1)
        b_g = b_g.to(dtype)
        fence_async_shared()
        b_dots, b_seen = start(s_g, s_v.permute((1, 0)), BLOCK, BLOCK), add(s_ones.index(zero), s_k, b_keys)
        b_dots, b_seen = warpgroup_mma_wait(0, [b_dots, b_seen])
        b_divisor = gl.maximum(
            keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, by_row(BLOCK)), 1.0
        )
        b_dots *= gl.convert_layout(b_inverse, by_row(BLOCK))[:, None]
        b_along_out = gl.convert_layout(b_along_out, by_row(BLOCK))
        b_along_mean = gl.convert_layout(b_along_mean, by_row(BLOCK))
        b_along_mean = (
            b_along_mean + gl.sum(gl.where(seen_from(zero, BLOCK, False), b_dots, 0.0), axis=1)
        ) / b_divisor
        b_e = s_constants.index(i % 2).load(by_row(BLOCK))
        b_dtotal = -gl.where(b_e == constant, b_along_out, b_along_mean)
        b_dmean = (b_along_mean - b_along_out) * s_slopes.index(i % 2).load(by_row(BLOCK)) / b_divisor
        m_q = visible(q_start, N_QUERY, by_row(BLOCK))
        gl.store(p_dtotal + q_start + o_q, b_dtotal, mask=m_q)
        gl.store(p_dmean + q_start + o_q, b_dmean, mask=m_q)
        b_dscores = gl.where(seen_from(zero, BLOCK, False), b_dots + b_dtotal[:, None], 0.0).to(dtype)
        b_dtotal = gl.convert_layout(b_dtotal, by_row(F))
        b_dx = b_seen * (gl.convert_layout(b_dmean, by_row(D)) * KEY_SCALE)[:, None]

        store_features(s_phi, s_k, s_map, s_weights, KEY_SCALE, zero, D, F)
        fence_async_shared()
        b_s1, b_s2, b_1, b_2 = add_features(b_s1, b_s2, s_phi, s_v, m_one.index(zero), zero, F)
        s_all = s_ones.index(zero + 1)
        b_keys, b_values = add(s_all, s_k, b_keys), add(s_all, s_v, b_values)
        b_s1, b_s2, b_1, b_2, b_keys, b_values = warpgroup_mma_wait(
            0, [b_s1, b_s2, b_1, b_2, b_keys, b_values]
        )
        b_z1, b_z2 = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2)
        copy_rows(s_v, p_value, k_start + BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        copy_rows(s_g, p_grad, q_start + BLOCK, stride_gn, N_QUERY, DV, V)
        copy_rows(s_out, p_out, q_start + BLOCK, DV, N_QUERY, DV, V)
        async_copy.commit_group()
        # Places of tiles are worked out again: see `unknown`.
        zero, here = unknown(0), unknown(i) % 2
        s_q = s_queries.index(here)
        for j in gl.static_range(2):
            b_dphi = b_dtotal[:, None] * s_totals.index(zero + j).load(by_column(F))[None, :]
            b_dphi = add(gl.convert_layout(b_g, operand(F)), s_sums.index(zero + j).permute((1, 0)), b_dphi)
            b_dphi = add(gl.convert_layout(b_dscores, operand(F)), s_phi.index(zero + j), b_dphi)
            b_dx = features_backward(b_dx, b_dphi, s_q, s_map, s_query_weights, 1.0, zero, j, D, F)

        # b_dx is the gradient of scale · query, on which alone everything depends.
        b_q = s_q.load(accumulator(D)).to(gl.float32)
        b_dscale += gl.sum(b_dx * b_q, axis=1)
        b_dx *= scale
        if UNIT > 0:
            b_dx = unit_backward(b_dx, b_q, s_factor, EPS, UNIT, DIM, D)
        store_rows(p_dquery, q_start, b_dx, s_q, N_QUERY, DIM, D)
    async_copy.wait_group(0)
    gl.store(p_dscale + gl.program_id(0), gl.sum(b_dscale, axis=0))
