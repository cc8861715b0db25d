"""Gradients of queries of causal attention on Hopper, of heads of 65 to 128 channels: see `causal_wide`.

What comes from pairs is formed first and ends in the gradient of y, 16 numbers a row: of the results as wide as a row there are
then few at a time. Names are those of `warp_groups`.
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
    keys_seen,
    linear_weights,
    shared_one,
    size_of_sums,
    sums_before,
)
from schoenbat.ops.triton.hopper.causal_wide import WARPS, add_rows, pairs_of, project, shared_map
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
    in_memory,
    in_two_columns,
    make_unit,
    place,
    row_sums,
    seen_from,
    shared_pair,
    shared_tile,
    shared_vector,
    shared_vectors,
    start,
    store_rows,
    unit_backward,
    unknown,
    visible,
)


@gluon.jit
def weigh_gradient(s_g, s_out, s_inverse, V: gl.constexpr):
    """g/f in place of g; ⟨g/f, out⟩ by row."""
    layout: gl.constexpr = in_memory(V, WARPS)
    b_g = s_g.load(layout).to(gl.float32) * s_inverse.load(gl.SliceLayout(1, layout))[:, None]
    b_along_out = gl.sum(b_g * s_out.load(layout).to(gl.float32), axis=1)
    s_g.store(b_g.to(s_g.dtype))
    return gl.convert_layout(b_along_out, by_row(BLOCK, WARPS, BLOCK))


@gluon.jit
def pairs_backward(b_dphi, s_y, s_left, s_right, s_factor, F: gl.constexpr):
    """Start the gradient of y from that of the products of its pairs; s_factor is for those of the factors, in turn."""
    dtype: gl.constexpr = s_y.dtype
    s_factor.store((b_dphi * warpgroup_mma_wait(0, [start(s_y, s_right, BLOCK, F)])).to(dtype))
    fence_async_shared()
    b_dy, b_left = start(s_factor, s_left.permute((1, 0)), BLOCK, NARROW), start(s_y, s_left, BLOCK, F)
    b_dy, b_left = warpgroup_mma_wait(0, [b_dy, b_left])
    s_factor.store((b_dphi * b_left).to(dtype))
    fence_async_shared()
    return add(s_factor, s_right.permute((1, 0)), b_dy)


@gluon.jit(do_not_specialize=LENGTHS)
def query_backward(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_grad, p_out, p_inverse, p_constant, p_slope,
    p_dquery, p_dtotal, p_dmean, p_dscale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As `causal_queries.query_backward`."""
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

    m_first, m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    p_linear += i_map * D
    s_queries, s_keys = shared_pair(dtype, D, BLOCK), shared_pair(dtype, D, BLOCK)
    m_v, m_g, m_out = shared_tile(dtype, BLOCK, V), shared_tile(dtype, BLOCK, V), shared_tile(dtype, BLOCK, V)
    s_inverses, s_constants, s_slopes = shared_vectors(BLOCK), shared_vectors(BLOCK), shared_vectors(BLOCK)
    m_yq, m_yk = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, NARROW)
    m_phi, m_one, m_dscores = (
        shared_tile(dtype, BLOCK, F),
        shared_one(dtype),
        shared_tile(dtype, BLOCK, BLOCK),
    )
    m_s1, m_s2 = shared_tile(dtype, D, V), shared_tile(dtype, F, V)
    s_z1, s_z2, m_zv = shared_vector(D), shared_vector(F), shared_tile(dtype, NARROW, V)
    s_factor = shared_vector(BLOCK)
    b_s1, b_s2, b_z1, b_z2, b_zv = sums_before(p_sums, 0, i_segment, D, F, V)
    rows: gl.constexpr = by_row(BLOCK, WARPS, BLOCK)
    o_q = gl.arange(0, BLOCK, rows)
    b_dscale = gl.zeros([BLOCK], gl.float32, by_row(D, WARPS, BLOCK))

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
        s_first, s_left, s_right = m_first.index(zero), m_left.index(zero), m_right.index(zero)
        s_yq, s_yk, s_phi, s_one = m_yq.index(zero), m_yk.index(zero), m_phi.index(zero), m_one.index(zero)
        s_v, s_g, s_out, s_dscores = (
            m_v.index(zero),
            m_g.index(zero),
            m_out.index(zero),
            m_dscores.index(zero),
        )
        s_s1, s_s2, s_zv = m_s1.index(zero), m_s2.index(zero), m_zv.index(zero).permute((1, 0))
        i_tile = first + i
        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        s_q, s_k = s_queries.index(i % 2), s_keys.index(i % 2)
        s_s1.store(b_s1.to(dtype))
        s_s2.store(b_s2.to(dtype))
        s_zv.store(in_two_columns(b_zv, dtype, 0))
        s_z1.store(b_z1)
        s_z2.store(b_z2)
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start + BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_numbers(s_inverses.index((i + 1) % 2), p_inverse, q_start + BLOCK, N_QUERY)
        copy_numbers(s_constants.index((i + 1) % 2), p_constant, q_start + BLOCK, N_QUERY)
        copy_numbers(s_slopes.index((i + 1) % 2), p_slope, q_start + BLOCK, N_QUERY)
        make_unit(s_q, EPS, UNIT, DIM, D, s_factor)
        make_unit(s_k, EPS, UNIT, DIM, D)
        b_along_out = weigh_gradient(s_g, s_out, s_inverses.index(i % 2), V)
        fence_async_shared()

        # ⟨grad, value⟩ for all pairs; its sums are ⟨grad, mean value⟩.
        b_yq, b_yk, b_before = project(s_q, s_first), project(s_k, s_first), start(s_g, s_zv, BLOCK, NARROW)
        b_dots = start(s_g, s_v.permute((1, 0)), BLOCK, BLOCK)
        # Sums go on meanwhile.
        b_s1, b_1 = add_rows(b_s1, s_k, s_v, s_one, D)
        b_v = start(s_v.permute((1, 0)), s_one, V, NARROW)
        b_yq, b_yk, b_before, b_dots = warpgroup_mma_wait(3, [b_yq, b_yk, b_before, b_dots])
        s_yq.store(b_yq.to(dtype))
        s_yk.store(b_yk.to(dtype))
        b_divisor = gl.maximum(keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, rows), 1.0)
        b_dots = gl.where(seen_from(zero, BLOCK, False), b_dots, 0.0)
        b_along_mean = gl.sum(b_dots, axis=1) + gl.convert_layout(row_sums(b_before), rows)
        b_along_mean = b_along_mean / b_divisor
        b_e = s_constants.index(i % 2).load(rows)
        b_dtotal = -gl.where(b_e == constant, b_along_out, b_along_mean)
        b_dmean = (b_along_mean - b_along_out) * s_slopes.index(i % 2).load(rows) / b_divisor
        m_q = visible(q_start, N_QUERY, rows, None, BLOCK)
        gl.store(p_dtotal + q_start + o_q, b_dtotal, mask=m_q)
        gl.store(p_dmean + q_start + o_q, b_dmean, mask=m_q)
        s_dscores.store(gl.where(seen_from(zero, BLOCK, False), b_dots + b_dtotal[:, None], 0.0).to(dtype))
        fence_async_shared()
        s_phi.store(pairs_of(s_yk, s_left, s_right, s_root, KEY_SCALE, F).to(dtype))
        b_s1, b_1, b_v = warpgroup_mma_wait(0, [b_s1, b_1, b_v])
        b_z1, b_zv = b_z1 + row_sums(b_1), b_zv + row_sums(b_v)
        fence_async_shared()

        # Places of tiles are worked out again: see `unknown`.
        zero = unknown(0)
        s_v, s_g, s_phi, s_one = m_v.index(zero), m_g.index(zero), m_phi.index(zero), m_one.index(zero)
        s_dscores, s_s2 = m_dscores.index(zero), m_s2.index(zero)
        b_dphi = add(s_dscores, s_phi, start(s_g, s_s2.permute((1, 0)), BLOCK, F))
        b_s2, b_2 = add_rows(b_s2, s_phi, s_v, s_one, F)
        b_dphi = warpgroup_mma_wait(2, [b_dphi])
        b_to_pairs = gl.convert_layout(b_dtotal, by_row(F, WARPS, BLOCK))
        b_dphi += b_to_pairs[:, None] * s_z2.load(by_column(F, WARPS, BLOCK))[None, :]
        b_dphi = b_dphi * (s_root.load(by_column(F, WARPS, BLOCK)) * scale)[None, :]
        b_s2, b_2 = warpgroup_mma_wait(0, [b_s2, b_2])
        b_z2 += row_sums(b_2)
        zero, here = unknown(0), unknown(i) % 2
        s_first, s_left, s_right = m_first.index(zero), m_left.index(zero), m_right.index(zero)
        s_yq, s_phi, s_dscores, s_s1 = (
            m_yq.index(zero),
            m_phi.index(zero),
            m_dscores.index(zero),
            m_s1.index(zero),
        )
        s_v, s_g, s_out = m_v.index(zero), m_g.index(zero), m_out.index(zero)
        s_q, s_k = s_queries.index(here), s_keys.index(here)
        copy_rows(s_v, p_value, k_start + BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        copy_rows(s_out, p_out, q_start + BLOCK, DV, N_QUERY, DV, V)
        b_dy = pairs_backward(b_dphi, s_yq, s_left, s_right, s_phi, F)
        b_dx = add(s_dscores, s_k, start(s_g, s_s1.permute((1, 0)), BLOCK, D))
        s_yq.store(warpgroup_mma_wait(2, [b_dy]).to(dtype))
        fence_async_shared()
        b_dx = warpgroup_mma_wait(0, [b_dx])
        copy_rows(s_g, p_grad, q_start + BLOCK, stride_gn, N_QUERY, DV, V)
        async_copy.commit_group()
        b_keys = s_z1.load(by_column(D, WARPS, BLOCK))[None, :]
        b_dx += gl.convert_layout(b_dtotal, by_row(D, WARPS, BLOCK))[:, None] * b_keys
        b_dx = b_dx * (linear_weights(p_linear, D, by_column(D, WARPS, BLOCK)) * KEY_SCALE)[None, :]
        b_dx += gl.convert_layout(b_dmean, by_row(D, WARPS, BLOCK))[:, None] * (b_keys * KEY_SCALE)
        if gl.max(gl.abs(b_dmean), axis=0) > 0.0:  # the floor acts somewhere, which is rare
            s_dscores.store(gl.where(seen_from(zero, BLOCK, False), b_dmean[:, None], 0.0).to(dtype))
            fence_async_shared()
            b_dx += warpgroup_mma_wait(0, [start(s_dscores, s_k, BLOCK, D)]) * KEY_SCALE
        b_dx = warpgroup_mma_wait(0, [add(s_yq, s_first, b_dx)])

        # b_dx is the gradient of scale · query, on which alone everything depends.
        b_q = s_q.load(accumulator(D, WARPS, BLOCK)).to(gl.float32)
        b_dscale += gl.sum(b_dx * b_q, axis=1)
        b_dx *= scale
        if UNIT > 0:
            b_dx = unit_backward(b_dx, b_q, s_factor, EPS, UNIT, DIM, D)
        store_rows(p_dquery, q_start, b_dx, s_q, N_QUERY, DIM, D)
    async_copy.wait_group(0)
    gl.store(p_dscale + gl.program_id(0), gl.sum(b_dscale, axis=0))
