"""Gradients of keys and values of 32 channels of causal attention on Hopper, in one pass from the last tile on.

A program goes with the sums over queries and output gradients of `causal_keys`, laid out as those over keys are in
`causal_narrow`: Σφ(q)(g/f)ᵀ and Σφ(q) dT; Σq dm and Σg e/f as tiles of equal rows.

Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.causal import LENGTHS
from schoenbat.ops.triton.hopper.causal_keys import over_denominator
from schoenbat.ops.triton.hopper.causal_narrow import (
    add_features,
    features,
    shared_map,
    shared_weights,
    size_of_sums,
    store_features,
    store_sums,
    sums_of,
    two_vectors,
)
from schoenbat.ops.triton.hopper.causal_narrow_queries import features_backward
from schoenbat.ops.triton.hopper.warp_groups import (
    BLOCK,
    NARROW,
    accumulator,
    add,
    at_head,
    by_column,
    by_row,
    copy_numbers,
    copy_rows,
    in_two_columns,
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
    store_multiplied,
    store_rows,
    unit_backward,
    unknown,
    visible,
)


@gluon.jit
def by_all_rows(s_vector, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """A tile each row of which is the vector, as an operand: its product with rows is their weighted sum, in each row."""
    layout: gl.constexpr = operand(COLUMNS)
    b_vector = s_vector.load(gl.SliceLayout(0, layout))
    return (gl.zeros([BLOCK, BLOCK], gl.float32, layout) + b_vector[None, :]).to(dtype)


@gluon.jit(do_not_specialize=LENGTHS)
def sum_queries(
    p_query, p_scale, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_sums,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn,
    N_QUERY, FIRST_QUERY, TILES, SEGMENTS, NUM_TILES, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The sums over a segment of queries; of the first one nobody needs them."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS - 1, HEADS, GROUPS, MAPS)
    i_segment += 1
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_grad = at_head(p_grad, i_b, i_h, stride_gb, stride_gh)
    i_row = i_bh.to(gl.int64) * N_QUERY
    p_inverse, p_constant = p_inverse + i_row, p_constant + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    scale = gl.load(p_scale + i_h)
    s_map = shared_map(p_tiles, i_map, dtype, D, F, PAIRS)
    s_query_weights = shared_weights(p_root, p_linear, i_map, scale, D, F, PAIRS)
    s_queries, s_grads = shared_pair(dtype, D), shared_pair(dtype, V)
    s_inverses, s_constants = shared_vectors(), shared_vectors()
    s_dtotals, s_dmeans = shared_vectors(), shared_vectors()
    s_phi, m_weighted = shared_tiles(dtype, 2, BLOCK, F), shared_tile(dtype, BLOCK, V)
    m_narrow, s_constant_weight = shared_tile(dtype, BLOCK, NARROW), shared_vector(BLOCK)
    b_s1, b_s2, b_z1, b_z2, b_queries, b_grads = sums_of(p_sums, 0, 0, D, F, V)
    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    for i in range(-1, num_here):
        zero = unknown(0)
        s_weighted, s_narrow = m_weighted.index(zero), m_narrow.index(zero)
        here, there = i & 1, (i + 1) & 1
        async_copy.wait_group(0)
        q_start = (first + i + 1) * BLOCK - FIRST_QUERY
        copy_rows(s_queries.index(there), p_query, q_start, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_grads.index(there), p_grad, q_start, stride_gn, N_QUERY, DV, V)
        copy_numbers(s_inverses.index(there), p_inverse, q_start, N_QUERY)
        copy_numbers(s_constants.index(there), p_constant, q_start, N_QUERY)
        copy_numbers(s_dtotals.index(there), p_dtotal, q_start, N_QUERY)
        copy_numbers(s_dmeans.index(there), p_dmean, q_start, N_QUERY)
        async_copy.commit_group()
        if i >= 0:
            s_q, s_g, s_dmean = s_queries.index(here), s_grads.index(here), s_dmeans.index(here)
            make_unit(s_q, EPS, UNIT, DIM, D)
            store_multiplied(s_weighted, s_g, s_inverses.index(here), V)
            s_narrow.store(in_two_columns(s_dtotals.index(here).load(by_row(NARROW)), dtype, 0))
            s_constant_weight.store(over_denominator(s_constants.index(here), s_inverses.index(here)))
            fence_async_shared()
            store_features(s_phi, s_q, s_map, s_query_weights, scale, zero, D, F)
            b_e = by_all_rows(s_constant_weight, V, dtype)
            fence_async_shared()
            b_s1, b_s2, b_1, b_2 = add_features(b_s1, b_s2, s_phi, s_weighted, s_narrow, zero, F)
            b_grads = add(b_e, s_g, b_grads)
            b_s1, b_s2, b_1, b_2, b_grads = warpgroup_mma_wait(0, [b_s1, b_s2, b_1, b_2, b_grads])
            b_z1, b_z2 = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2)
            if (
                gl.max(gl.abs(s_dmean.load(by_row(NARROW))), axis=0) > 0.0
            ):  # the floor acts somewhere, which is rare
                b_rare = start(by_all_rows(s_dmean, D, dtype), s_q, BLOCK, D)
                b_queries += warpgroup_mma_wait(0, [b_rare])
    async_copy.wait_group(0)
    p_sums += (i_bh * SEGMENTS + i_segment).to(gl.int64) * size_of_sums(D, F, V)
    store_sums(p_sums, b_s1, b_s2, b_z1, b_z2, b_queries, b_grads, D, F, V)


@gluon.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_sums, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_dkey, p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The gradients of a segment of keys and values, as far as they come from one query head.

    Scores are [keys, queries] here, so that they are operands as they are.
    """
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS, HEADS, GROUPS, MAPS)
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_grad = at_head(p_grad, i_b, i_h, stride_gb, stride_gh)
    p_key = at_head(p_key, i_b, i_h // GROUPS, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h // GROUPS, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    p_sums += i_bh.to(gl.int64) * SEGMENTS * size_of_sums(D, F, V)
    i_row, i_out = i_bh.to(gl.int64) * N_QUERY, i_bh.to(gl.int64) * N_KEY
    p_inverse, p_constant = p_inverse + i_row, p_constant + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    p_dkey, p_dvalue = p_dkey + i_out * DIM, p_dvalue + i_out * DV
    scale = gl.load(p_scale + i_h)

    s_map = shared_map(p_tiles, i_map, dtype, D, F, PAIRS)
    s_weights = shared_weights(p_root, p_linear, i_map, KEY_SCALE, D, F, PAIRS)
    s_query_weights = shared_weights(p_root, p_linear, i_map, scale, D, F, PAIRS)
    s_queries, s_keys = shared_pair(dtype, D), shared_pair(dtype, D)
    m_v, m_g, m_weighted = (
        shared_tile(dtype, BLOCK, V),
        shared_tile(dtype, BLOCK, V),
        shared_tile(dtype, BLOCK, V),
    )
    s_inverses, s_constants = shared_vectors(), shared_vectors()
    s_dtotals, s_dmeans = shared_vectors(), shared_vectors()
    s_phi, m_dscores = shared_tiles(dtype, 2, BLOCK, F), shared_tile(dtype, BLOCK, BLOCK)
    m_narrow, s_constant_weight = shared_tile(dtype, BLOCK, NARROW), shared_vector(BLOCK)
    s_sums, s_totals, s_factor = shared_tiles(dtype, 2, F, V), two_vectors(F), shared_vector(BLOCK)
    b_s1, b_s2, b_z1, b_z2, b_queries, b_grads = sums_of(p_sums, i_segment + 1, SEGMENTS, D, F, V)

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    last = first + num_here - 1
    q_start, k_start = last * BLOCK - FIRST_QUERY, last * BLOCK - FIRST_KEY
    copy_rows(s_queries.index(0), p_query, q_start, stride_qn, N_QUERY, DIM, D)
    copy_rows(s_keys.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(m_v.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    copy_rows(m_g.index(0), p_grad, q_start, stride_gn, N_QUERY, DV, V)
    copy_numbers(s_inverses.index(0), p_inverse, q_start, N_QUERY)
    copy_numbers(s_constants.index(0), p_constant, q_start, N_QUERY)
    copy_numbers(s_dtotals.index(0), p_dtotal, q_start, N_QUERY)
    copy_numbers(s_dmeans.index(0), p_dmean, q_start, N_QUERY)
    async_copy.commit_group()
    for i in range(num_here):
        zero = unknown(0)
        s_v, s_g, s_weighted = m_v.index(zero), m_g.index(zero), m_weighted.index(zero)
        s_narrow, s_dscores = m_narrow.index(zero), m_dscores.index(zero)
        here, there = i & 1, (i + 1) & 1
        q_start, k_start = (last - i) * BLOCK - FIRST_QUERY, (last - i) * BLOCK - FIRST_KEY
        s_q, s_k = s_queries.index(here), s_keys.index(here)
        s_inverse, s_constant = s_inverses.index(here), s_constants.index(here)
        s_dtotal, s_dmean = s_dtotals.index(here), s_dmeans.index(here)
        s_sums.index(zero).store(b_s1.to(dtype))
        s_sums.index(zero + 1).store(b_s2.to(dtype))
        s_totals.index(zero).store(b_z1)
        s_totals.index(zero + 1).store(b_z2)
        async_copy.wait_group(0)
        copy_rows(s_queries.index(there), p_query, q_start - BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index(there), p_key, k_start - BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_numbers(s_inverses.index(there), p_inverse, q_start - BLOCK, N_QUERY)
        copy_numbers(s_constants.index(there), p_constant, q_start - BLOCK, N_QUERY)
        copy_numbers(s_dtotals.index(there), p_dtotal, q_start - BLOCK, N_QUERY)
        copy_numbers(s_dmeans.index(there), p_dmean, q_start - BLOCK, N_QUERY)
        make_unit(s_q, EPS, UNIT, DIM, D)
        make_unit(s_k, EPS, UNIT, DIM, D, s_factor)
        store_multiplied(s_weighted, s_g, s_inverse, V)
        s_narrow.store(in_two_columns(s_dtotal.load(by_row(NARROW)), dtype, 0))
        s_constant_weight.store(over_denominator(s_constant, s_inverse))
        fence_async_shared()

        b_dots = warpgroup_mma_wait(0, [start(s_v, s_weighted.permute((1, 0)), BLOCK, BLOCK)])
        b_dots += s_dtotal.load(by_column(BLOCK))[None, :]
        s_dscores.store(gl.where(seen_from(zero, BLOCK, True), b_dots, 0.0).to(dtype))
        store_features(s_phi, s_q, s_map, s_query_weights, scale, zero, D, F)
        b_phi1 = features(s_k, s_map, s_weights, KEY_SCALE, zero, 0, D, F)
        b_phi2 = features(s_k, s_map, s_weights, KEY_SCALE, zero, 1, D, F)

        # Places of tiles are worked out again: see `unknown`.
        zero, here = unknown(0), unknown(i) & 1
        s_g, s_weighted, s_narrow = m_g.index(zero), m_weighted.index(zero), m_narrow.index(zero)
        s_inverse, s_constant = s_inverses.index(here), s_constants.index(here)
        # Values first.
        fence_async_shared()
        s_phi1, s_phi2 = s_phi.index(zero).permute((1, 0)), s_phi.index(zero + 1).permute((1, 0))
        b_scores = start(gl.convert_layout(b_phi1, operand(BLOCK)), s_phi1, BLOCK, BLOCK)
        b_scores = add(gl.convert_layout(b_phi2, operand(BLOCK)), s_phi2, b_scores)
        b_dv = start(gl.convert_layout(b_phi1, operand(V)), s_sums.index(zero), BLOCK, V)
        b_dv = add(gl.convert_layout(b_phi2, operand(V)), s_sums.index(zero + 1), b_dv)
        b_s1, b_s2, b_1, b_2 = add_features(b_s1, b_s2, s_phi, s_weighted, s_narrow, zero, F)
        b_scores, b_dv, b_s1, b_s2, b_1, b_2 = warpgroup_mma_wait(0, [b_scores, b_dv, b_s1, b_s2, b_1, b_2])
        b_z1, b_z2 = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2)
        b_scores += s_constant.load(by_column(BLOCK))[None, :]
        b_scores = gl.where(
            seen_from(zero, BLOCK, True), b_scores * s_inverse.load(by_column(BLOCK))[None, :], 0.0
        ).to(dtype)
        b_dv += b_grads
        b_e = by_all_rows(s_constant_weight, V, dtype)
        b_dv = add(gl.convert_layout(b_scores, operand(V)), s_g, b_dv)
        b_grads = add(b_e, s_g, b_grads)
        b_dv, b_grads = warpgroup_mma_wait(0, [b_dv, b_grads])
        if p_mask is not None:  # what is masked gets zeros; what lies outside gets nothing
            b_dv = gl.where(visible(k_start, N_KEY, by_row(V), p_mask)[:, None], b_dv, 0.0)
        s_weighted = m_weighted.index(unknown(0))
        store_rows(p_dvalue, k_start, b_dv, s_weighted, N_KEY, DV, V)

        b_dx = b_queries * (scale * KEY_SCALE)
        b_dmean = s_dmean.load(by_column(BLOCK))
        if gl.max(gl.abs(b_dmean), axis=0) > 0.0:
            b_mean = gl.where(seen_from(zero, BLOCK, True), b_dmean[None, :], 0.0).to(dtype)
            b_rare = start(gl.convert_layout(b_mean, operand(D)), s_q, BLOCK, D)
            b_all = start(by_all_rows(s_dmean, D, dtype), s_q, BLOCK, D)
            b_rare, b_all = warpgroup_mma_wait(0, [b_rare, b_all])
            b_dx += b_rare * (scale * KEY_SCALE)
            b_queries += b_all
        zero, here = unknown(0), unknown(i) & 1
        s_v, s_g, s_dscores, s_k = m_v.index(zero), m_g.index(zero), m_dscores.index(zero), s_keys.index(here)
        for j in gl.static_range(2):
            b_dphi = gl.zeros([BLOCK, F], gl.float32, accumulator(F))
            b_dphi += s_totals.index(zero + j).load(by_column(F))[None, :]
            b_dphi = add(s_v, s_sums.index(zero + j).permute((1, 0)), b_dphi)
            b_dphi = add(s_dscores, s_phi.index(zero + j), b_dphi)
            b_dx = features_backward(b_dx, b_dphi, s_k, s_map, s_weights, KEY_SCALE, zero, j, D, F)
        copy_rows(s_v, p_value, k_start - BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        copy_rows(s_g, p_grad, q_start - BLOCK, stride_gn, N_QUERY, DV, V)
        async_copy.commit_group()
        if UNIT > 0:
            b_dx = unit_backward(b_dx, s_k.load(accumulator(D)).to(gl.float32), s_factor, EPS, UNIT, DIM, D)
        if p_mask is not None:
            b_dx = gl.where(visible(k_start, N_KEY, by_row(D), p_mask)[:, None], b_dx, 0.0)
        store_rows(p_dkey, k_start, b_dx, s_k, N_KEY, DIM, D)
    async_copy.wait_group(0)
