"""Gradients of keys and values of causal attention on Hopper, of heads of 65 to 128 channels: see `causal_wide`.

The sums are those of `causal_keys`. Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.causal import (
    LENGTHS,
    linear_weights,
    size_of_sums,
    store_sums,
    weight_of_all,
)
from schoenbat.ops.triton.hopper.causal_keys import (
    query_sums_behind,
    size_of_query_sums,
    store_weights,
    two_columns,
)
from schoenbat.ops.triton.hopper.causal_wide import (
    WARPS,
    add_rows,
    pairs_of,
    project,
    shared_map,
    store_weighted,
)
from schoenbat.ops.triton.hopper.causal_wide_queries import pairs_backward
from schoenbat.ops.triton.hopper.warp_groups import (
    BLOCK,
    NARROW,
    accumulator,
    add,
    anew,
    at_head,
    by_column,
    by_row,
    copy_numbers,
    copy_rows,
    make_unit,
    place,
    shared_pair,
    shared_tile,
    shared_vector,
    shared_vectors,
    start,
    store_multiplied,
    store_rows,
    unit_backward,
    visible,
)


@gluon.jit(do_not_specialize=LENGTHS)
def sum_queries(
    p_query, p_scale, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_sums,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn,
    N_QUERY, FIRST_QUERY, TILES, SEGMENTS, NUM_TILES, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As `causal_keys.sum_queries`."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS - 1, HEADS, GROUPS, MAPS)
    i_segment += 1
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_grad = at_head(p_grad, i_b, i_h, stride_gb, stride_gh)
    i_row = i_bh.to(gl.int64) * N_QUERY
    p_inverse, p_constant = p_inverse + i_row, p_constant + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    scale = gl.load(p_scale + i_h)
    m_first, m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    s_queries, s_grads = shared_pair(dtype, D, BLOCK), shared_pair(dtype, V, BLOCK)
    s_inverses, s_constants = shared_vectors(BLOCK), shared_vectors(BLOCK)
    s_dtotals, s_dmeans = shared_vectors(BLOCK), shared_vectors(BLOCK)
    m_y, m_phi = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, F)
    m_weights = shared_tile(dtype, BLOCK, NARROW)
    b_s1, b_s2, b_z1, b_z2, b_ze, b_zm = query_sums_behind(p_sums, 0, 0, D, F, V)
    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    for i in range(-1, num_here):
        zero = anew(0)
        s_first, s_left, s_right = m_first.index(zero), m_left.index(zero), m_right.index(zero)
        s_y, s_phi, s_weights = m_y.index(zero), m_phi.index(zero), m_weights.index(zero)
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
            s_q, s_g = s_queries.index(here), s_grads.index(here)
            make_unit(s_q, EPS, UNIT, DIM, D)
            store_multiplied(s_g, s_g, s_inverses.index(here), V)
            b_e = s_constants.index(here).load(by_row(NARROW, WARPS))
            store_weights(s_weights, b_e, s_dtotals.index(here), s_dmeans.index(here))
            fence_async_shared()
            b_y = project(s_q, s_first)
            b_s1, b_1 = add_rows(b_s1, s_q, s_g, s_weights, D)
            b_g = start(s_g.permute((1, 0)), s_weights, V, NARROW)
            s_y.store(warpgroup_mma_wait(3, [b_y]).to(dtype))
            fence_async_shared()
            s_phi.store(pairs_of(s_y, s_left, s_right, s_root, scale, F).to(dtype))
            fence_async_shared()
            b_s2, b_2 = add_rows(b_s2, s_phi, s_g, s_weights, F)
            b_s1, b_1, b_g, b_s2, b_2 = warpgroup_mma_wait(0, [b_s1, b_1, b_g, b_s2, b_2])
            b_z1, b_zm = b_z1 + two_columns(b_1, 0), b_zm + two_columns(b_1, 2)
            b_z2, b_ze = b_z2 + two_columns(b_2, 0), b_ze + two_columns(b_g, 4)
    async_copy.wait_group(0)
    i_out = (i_bh * SEGMENTS + i_segment).to(gl.int64)
    p = p_sums + i_out * size_of_query_sums(D, F, V)
    store_sums(p, b_s1, b_s2, b_z1, b_z2, b_ze, D, F, V)
    gl.store(p + size_of_sums(D, F, V) + gl.arange(0, D, by_row(NARROW, WARPS)), b_zm)


@gluon.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_sums, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_dkey, p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As `causal_keys.key_backward`."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS, HEADS, GROUPS, MAPS)
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_grad = at_head(p_grad, i_b, i_h, stride_gb, stride_gh)
    p_key = at_head(p_key, i_b, i_h // GROUPS, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h // GROUPS, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    p_sums += i_bh.to(gl.int64) * SEGMENTS * size_of_query_sums(D, F, V)
    i_row, i_out = i_bh.to(gl.int64) * N_QUERY, i_bh.to(gl.int64) * N_KEY
    p_inverse, p_constant = p_inverse + i_row, p_constant + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    p_dkey, p_dvalue = p_dkey + i_out * DIM, p_dvalue + i_out * DV
    scale = gl.load(p_scale + i_h)

    m_first, m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    p_linear += i_map * D
    b_linear = linear_weights(p_linear, D, by_row(V, WARPS))
    largest, is_even = weight_of_all(b_linear, DIM, D, by_row(V, WARPS))
    s_queries, s_keys = shared_pair(dtype, D, BLOCK), shared_pair(dtype, D, BLOCK)
    m_v, m_g = shared_tile(dtype, BLOCK, V), shared_tile(dtype, BLOCK, V)
    s_inverses, s_constants = shared_vectors(BLOCK), shared_vectors(BLOCK)
    s_dtotals, s_dmeans = shared_vectors(BLOCK), shared_vectors(BLOCK)
    m_yq, m_yk = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, NARROW)
    m_phiq, m_phik = shared_tile(dtype, BLOCK, F), shared_tile(dtype, BLOCK, F)
    m_weights, m_dscores = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, BLOCK)
    m_s1, m_s2 = shared_tile(dtype, D, V), shared_tile(dtype, F, V)
    # Vectors before a tile and behind it: in registers they would be spilled.
    s_z1s, s_z2s, s_zes, s_zms = shared_vectors(D), shared_vectors(F), shared_vectors(V), shared_vectors(D)
    s_factor = shared_vector(BLOCK)
    b_s1, b_s2, b_z1, b_z2, b_ze, b_zm = query_sums_behind(p_sums, i_segment + 1, SEGMENTS, D, F, V)
    s_z1s.index(0).store(b_z1)
    s_z2s.index(0).store(b_z2)
    s_zes.index(0).store(b_ze)
    s_zms.index(0).store(b_zm)
    vector: gl.constexpr = by_row(NARROW, WARPS)
    columns: gl.constexpr = by_column(BLOCK, WARPS, BLOCK)
    m_causal = (
        gl.arange(0, BLOCK, by_row(BLOCK, WARPS, BLOCK))[:, None] <= gl.arange(0, BLOCK, columns)[None, :]
    )

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
        zero = anew(0)
        s_first, s_left, s_right = m_first.index(zero), m_left.index(zero), m_right.index(zero)
        s_yq, s_yk, s_weights = m_yq.index(zero), m_yk.index(zero), m_weights.index(zero)
        s_phiq, s_phik, s_dscores = m_phiq.index(zero), m_phik.index(zero), m_dscores.index(zero)
        s_v, s_g, s_s1, s_s2 = m_v.index(zero), m_g.index(zero), m_s1.index(zero), m_s2.index(zero)
        here, there = i & 1, (i + 1) & 1
        q_start, k_start = (last - i) * BLOCK - FIRST_QUERY, (last - i) * BLOCK - FIRST_KEY
        s_q, s_k = s_queries.index(here), s_keys.index(here)
        s_inverse, s_constant = s_inverses.index(here), s_constants.index(here)
        s_dtotal, s_dmean = s_dtotals.index(here), s_dmeans.index(here)
        s_z1, s_z2, s_ze, s_zm = s_z1s.index(here), s_z2s.index(here), s_zes.index(here), s_zms.index(here)
        s_s1.store((b_s1 * (b_linear * (scale * KEY_SCALE))[:, None]).to(dtype))
        s_s2.store(b_s2.to(dtype))
        async_copy.wait_group(0)
        copy_rows(s_queries.index(there), p_query, q_start - BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index(there), p_key, k_start - BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_numbers(s_inverses.index(there), p_inverse, q_start - BLOCK, N_QUERY)
        copy_numbers(s_constants.index(there), p_constant, q_start - BLOCK, N_QUERY)
        copy_numbers(s_dtotals.index(there), p_dtotal, q_start - BLOCK, N_QUERY)
        copy_numbers(s_dmeans.index(there), p_dmean, q_start - BLOCK, N_QUERY)
        make_unit(s_q, EPS, UNIT, DIM, D)
        make_unit(s_k, EPS, UNIT, DIM, D, s_factor)
        store_multiplied(s_g, s_g, s_inverse, V)
        store_weights(s_weights, s_constant.load(by_row(NARROW, WARPS)), s_dtotal, s_dmean)
        fence_async_shared()

        b_yq, b_yk = project(s_q, s_first), project(s_k, s_first)
        b_dscores = start(s_v, s_g.permute((1, 0)), BLOCK, BLOCK)
        # Sums go on meanwhile.
        b_s1, b_1 = add_rows(b_s1, s_q, s_g, s_weights, D)
        b_g = start(s_g.permute((1, 0)), s_weights, V, NARROW)
        b_yq, b_yk, b_dscores = warpgroup_mma_wait(3, [b_yq, b_yk, b_dscores])
        s_yq.store(b_yq.to(dtype))
        s_yk.store(b_yk.to(dtype))
        s_dscores.store(gl.where(m_causal, b_dscores + s_dtotal.load(columns)[None, :], 0.0).to(dtype))
        fence_async_shared()
        s_phiq.store(pairs_of(s_yq, s_left, s_right, s_root, scale, F).to(dtype))
        b_s1, b_1, b_g = warpgroup_mma_wait(0, [b_s1, b_1, b_g])
        b_z1, b_zm, b_ze = s_z1.load(vector), s_zm.load(vector), s_ze.load(vector)
        s_z1s.index(there).store(b_z1 + two_columns(b_1, 0))
        s_zms.index(there).store(b_zm + two_columns(b_1, 2))
        s_zes.index(there).store(b_ze + two_columns(b_g, 4))
        s_phik.store(pairs_of(s_yk, s_left, s_right, s_root, KEY_SCALE, F).to(dtype))
        fence_async_shared()

        # Values first. Places of tiles are worked out again: kept until here they would take registers.
        zero, here = anew(0), anew(i) & 1
        s_v, s_g, s_dscores = m_v.index(zero), m_g.index(zero), m_dscores.index(zero)
        s_q, s_k, s_weights = s_queries.index(here), s_keys.index(here), m_weights.index(zero)
        b_linear_scores = start(s_k, s_q.permute((1, 0)), BLOCK, BLOCK)
        b_scores = start(s_phik, s_phiq.permute((1, 0)), BLOCK, BLOCK)
        b_dv = add(s_phik, s_s2, start(s_k, s_s1, BLOCK, V))
        b_s2, b_2 = add_rows(b_s2, s_phiq, s_g, s_weights, F)
        b_linear_scores, b_scores, b_dv, b_s2, b_2 = warpgroup_mma_wait(
            0, [b_linear_scores, b_scores, b_dv, b_s2, b_2]
        )
        s_z2s.index(there).store(s_z2.load(vector) + two_columns(b_2, 0))
        if is_even:
            b_scores += b_linear_scores * (largest * scale * KEY_SCALE)
        else:
            store_weighted(s_phik, s_k, p_linear, scale * KEY_SCALE, D)
            b_scores = warpgroup_mma_wait(0, [add(s_phik, s_q.permute((1, 0)), b_scores)])
        b_scores = gl.where(m_causal, b_scores + s_constant.load(columns)[None, :], 0.0)
        s_scores = s_phik.slice(0, BLOCK, 1)
        s_scores.store(b_scores.to(dtype))
        fence_async_shared()
        b_dv = add(s_scores, s_g, b_dv)
        b_dphi = add(s_dscores, s_phiq, start(s_v, s_s2.permute((1, 0)), BLOCK, F))
        b_dv = warpgroup_mma_wait(2, [b_dv])
        b_dv += s_ze.load(by_column(V, WARPS, BLOCK))[None, :]
        if p_mask is not None:  # what is masked gets zeros; what lies outside gets nothing
            m_k = visible(k_start, N_KEY, by_row(V, WARPS, BLOCK), p_mask, BLOCK)
            b_dv = gl.where(m_k[:, None], b_dv, 0.0)
        store_rows(p_dvalue, k_start, b_dv, s_g, N_KEY, DV, V)

        b_dphi = warpgroup_mma_wait(0, [b_dphi])
        copy_rows(s_g, p_grad, q_start - BLOCK, stride_gn, N_QUERY, DV, V)
        columns_f: gl.constexpr = by_column(F, WARPS, BLOCK)
        b_dphi += s_z2.load(columns_f)[None, :]
        b_dphi = b_dphi * (s_root.load(columns_f) * (KEY_SCALE * KEY_SCALE))[None, :]
        b_dy = pairs_backward(b_dphi, s_yk, s_left, s_right, s_phik, F)
        b_dx, b_more = start(s_v, s_s1.permute((1, 0)), BLOCK, D), start(s_dscores, s_q, BLOCK, D)
        s_yk.store(warpgroup_mma_wait(2, [b_dy]).to(dtype))
        fence_async_shared()
        b_dx, b_more = warpgroup_mma_wait(0, [b_dx, b_more])
        copy_rows(s_v, p_value, k_start - BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        b_weight = linear_weights(p_linear, D, by_column(D, WARPS, BLOCK))
        b_queries = b_weight * s_z1.load(by_column(D, WARPS, BLOCK)) + s_zm.load(by_column(D, WARPS, BLOCK))
        b_dx += (b_more * b_weight[None, :] + b_queries[None, :]) * (scale * KEY_SCALE)
        b_dmean = s_dmean.load(columns)
        if gl.max(gl.abs(b_dmean), axis=0) > 0.0:
            s_dscores.store(gl.where(m_causal, b_dmean[None, :], 0.0).to(dtype))
            fence_async_shared()
            b_dx += warpgroup_mma_wait(0, [start(s_dscores, s_q, BLOCK, D)]) * (scale * KEY_SCALE)
        b_dx = warpgroup_mma_wait(0, [add(s_yk, s_first, b_dx)])
        if UNIT > 0:
            b_unit = s_k.load(accumulator(D, WARPS, BLOCK)).to(gl.float32)
            b_dx = unit_backward(b_dx, b_unit, s_factor, EPS, UNIT, DIM, D)
        if p_mask is not None:
            m_k = visible(k_start, N_KEY, by_row(D, WARPS, BLOCK), p_mask, BLOCK)
            b_dx = gl.where(m_k[:, None], b_dx, 0.0)
        store_rows(p_dkey, k_start, b_dx, s_k, N_KEY, DIM, D)
    async_copy.wait_group(0)
