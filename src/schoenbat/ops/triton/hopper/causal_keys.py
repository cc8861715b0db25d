"""Gradients of keys and values of causal attention on Hopper, in one pass from the last tile on.

A program goes with sums over queries and output gradients: with g/f a row's gradient divided by its denominator, Σq(g/f)ᵀ and
Σφ(q)(g/f)ᵀ; and with dT and dm the gradients of a row's total and of its mean logit, which `query_backward` leaves, Σq dT,
Σφ(q) dT, Σq dm and Σg e/f. Where a head has several segments, `sum_queries` leaves those of each.

Names are those of `warp_groups`.
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
    linear_scores,
    linear_weights,
    pairs,
    pairs_of_rows,
    shared_map,
    size_of_sums,
    store_sums,
    weight_of_all,
)
from schoenbat.ops.triton.hopper.causal_queries import pairs_backward
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
    seen_from,
    shared_pair,
    shared_tile,
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
def store_weights(s_weights, b_e, s_dtotal, s_dmean):
    """dT, dm and what gradients of outputs are added up with, e/f or e, by row: two columns each."""
    layout: gl.constexpr = by_row(NARROW, gl.num_warps())
    dtype: gl.constexpr = s_weights.dtype
    b_dtotal = in_two_columns(s_dtotal.load(layout), dtype, 0)
    b_dmean = in_two_columns(s_dmean.load(layout), dtype, 2)
    b_e = in_two_columns(b_e, dtype, 4)
    o = gl.arange(0, NARROW, by_column(NARROW, gl.num_warps()))[None, :]
    s_weights.store(gl.where(o < 2, b_dtotal, gl.where(o < 4, b_dmean, b_e)))


@gluon.jit
def over_denominator(s_constant, s_inverse):
    """e/f by row."""
    layout: gl.constexpr = by_row(NARROW, gl.num_warps())
    return s_constant.load(layout) * s_inverse.load(layout)


@gluon.jit
def two_columns(b_narrow, FIRST: gl.constexpr):
    """The sum of two columns of a narrow product."""
    o = gl.arange(0, NARROW, by_column(NARROW, gl.num_warps()))[None, :]
    return gl.sum(gl.where((o == FIRST) | (o == FIRST + 1), b_narrow, 0.0), axis=1)


@gluon.jit
def size_of_query_sums(D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    return size_of_sums(D, F, V) + D


@gluon.jit
def query_sums_behind(p_sums, first, last, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    """The sums over the segments from `first` to before `last`: two tiles, four vectors."""
    layout: gl.constexpr = accumulator(V, gl.num_warps())
    vector: gl.constexpr = by_row(NARROW, gl.num_warps())
    o_v = gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
    o_f = gl.arange(0, F, gl.SliceLayout(1, layout))[:, None] * V
    o_d = gl.arange(0, D, gl.SliceLayout(1, layout))[:, None] * V
    b_s1 = gl.zeros([D, V], gl.float32, layout)
    b_s2 = gl.zeros([F, V], gl.float32, layout)
    b_z1, b_zm = gl.zeros([D], gl.float32, vector), gl.zeros([D], gl.float32, vector)
    b_z2, b_ze = gl.zeros([F], gl.float32, vector), gl.zeros([V], gl.float32, vector)
    for i in range(first, last):
        p = p_sums + i * size_of_query_sums(D, F, V)
        b_s1 += gl.load(p + (o_d + o_v))
        b_s2 += gl.load(p + (D * V + o_f + o_v))
        p += (D + F) * V
        b_z1 += gl.load(p + gl.arange(0, D, vector))
        b_z2 += gl.load(p + D + gl.arange(0, F, vector))
        b_ze += gl.load(p + D + F + gl.arange(0, V, vector))
        b_zm += gl.load(p + D + F + V + gl.arange(0, D, vector))
    return b_s1, b_s2, b_z1, b_z2, b_ze, b_zm


@gluon.jit
def add_queries(
    b_s1, b_s2, s_q, s_phi, s_g, s_weighted, s_weights, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr
):
    """Start to add a tile of queries to two sums; and what it adds to the four others, as narrow products."""
    s_q, s_phi = s_q.permute((1, 0)), s_phi.permute((1, 0))
    return (
        add(s_q, s_weighted, b_s1),
        add(s_phi, s_weighted, b_s2),
        start(s_q, s_weights, D, NARROW),
        start(s_phi, s_weights, F, NARROW),
        start(s_g.permute((1, 0)), s_weights, V, NARROW),
    )


@gluon.jit(do_not_specialize=LENGTHS)
def sum_queries(
    p_query, p_scale, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_sums,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn,
    N_QUERY, FIRST_QUERY, TILES, SEGMENTS, NUM_TILES, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
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
    m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    s_queries, s_grads = shared_pair(dtype, D), shared_pair(dtype, V)
    s_inverses, s_constants = shared_vectors(), shared_vectors()
    s_dtotals, s_dmeans = shared_vectors(), shared_vectors()
    m_phi, m_weighted = shared_tile(dtype, BLOCK, F), shared_tile(dtype, BLOCK, V)
    m_weights = shared_tile(dtype, BLOCK, NARROW)
    b_s1, b_s2, b_z1, b_z2, b_ze, b_zm = query_sums_behind(p_sums, 0, 0, D, F, V)
    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    for i in range(-1, num_here):
        zero = unknown(0)
        s_left, s_right, s_phi = m_left.index(zero), m_right.index(zero), m_phi.index(zero)
        s_weighted, s_weights = m_weighted.index(zero), m_weights.index(zero)
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
            s_inverse, s_constant = s_inverses.index(here), s_constants.index(here)
            s_dtotal, s_dmean = s_dtotals.index(here), s_dmeans.index(here)
            make_unit(s_q, EPS, UNIT, DIM, D)
            store_multiplied(s_weighted, s_g, s_inverse, V)
            store_weights(s_weights, over_denominator(s_constant, s_inverse), s_dtotal, s_dmean)
            fence_async_shared()
            s_phi.store(pairs_of_rows(s_q, s_left, s_right, s_root, scale, F).to(dtype))
            fence_async_shared()
            b_s1, b_s2, b_1, b_2, b_g = warpgroup_mma_wait(
                0, add_queries(b_s1, b_s2, s_q, s_phi, s_g, s_weighted, s_weights, D, F, V)
            )
            b_z1, b_zm = b_z1 + two_columns(b_1, 0), b_zm + two_columns(b_1, 2)
            b_z2, b_ze = b_z2 + two_columns(b_2, 0), b_ze + two_columns(b_g, 4)
    async_copy.wait_group(0)
    i_out = (i_bh * SEGMENTS + i_segment).to(gl.int64)
    p = p_sums + i_out * size_of_query_sums(D, F, V)
    store_sums(p, b_s1, b_s2, b_z1, b_z2, b_ze, D, F, V)
    gl.store(p + size_of_sums(D, F, V) + gl.arange(0, D, by_row(NARROW)), b_zm)


@gluon.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_sums, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_dkey, p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
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
    p_sums += i_bh.to(gl.int64) * SEGMENTS * size_of_query_sums(D, F, V)
    i_row, i_out = i_bh.to(gl.int64) * N_QUERY, i_bh.to(gl.int64) * N_KEY
    p_inverse, p_constant = p_inverse + i_row, p_constant + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    p_dkey, p_dvalue = p_dkey + i_out * DIM, p_dvalue + i_out * DV
    scale = gl.load(p_scale + i_h)

    m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    p_linear += i_map * D
    b_linear = linear_weights(p_linear, D, by_row(V))
    largest, is_even = weight_of_all(b_linear, DIM, D, by_row(V))
    s_queries, s_keys = shared_pair(dtype, D), shared_pair(dtype, D)
    m_v, m_g = shared_tile(dtype, BLOCK, V), shared_tile(dtype, BLOCK, V)
    s_inverses, s_constants = shared_vectors(), shared_vectors()
    s_dtotals, s_dmeans = shared_vectors(), shared_vectors()
    m_phi, m_weighted = shared_tile(dtype, BLOCK, F), shared_tile(dtype, BLOCK, V)
    m_weights, m_dscores = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, BLOCK)
    m_s1, m_s2 = shared_tile(dtype, D, V), shared_tile(dtype, F, V)
    s_z1, s_z2, s_ze, s_zm = shared_vector(D), shared_vector(F), shared_vector(V), shared_vector(D)
    s_factor = shared_vector(BLOCK)
    b_s1, b_s2, b_z1, b_z2, b_ze, b_zm = query_sums_behind(p_sums, i_segment + 1, SEGMENTS, D, F, V)

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
        s_left, s_right, s_phi = m_left.index(zero), m_right.index(zero), m_phi.index(zero)
        s_weighted, s_weights = m_weighted.index(zero), m_weights.index(zero)
        s_v, s_g, s_s1, s_s2 = m_v.index(zero), m_g.index(zero), m_s1.index(zero), m_s2.index(zero)
        s_dscores = m_dscores.index(zero)
        here, there = i & 1, (i + 1) & 1
        q_start, k_start = (last - i) * BLOCK - FIRST_QUERY, (last - i) * BLOCK - FIRST_KEY
        s_q, s_k = s_queries.index(here), s_keys.index(here)
        s_inverse, s_constant = s_inverses.index(here), s_constants.index(here)
        s_dtotal, s_dmean = s_dtotals.index(here), s_dmeans.index(here)
        s_s1.store((b_s1 * (b_linear * (scale * KEY_SCALE))[:, None]).to(dtype))
        s_s2.store(b_s2.to(dtype))
        s_z1.store(b_z1)
        s_z2.store(b_z2)
        s_ze.store(b_ze)
        s_zm.store(b_zm)
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
        store_weights(s_weights, over_denominator(s_constant, s_inverse), s_dtotal, s_dmean)
        fence_async_shared()

        b_left, b_right = start(s_q, s_left, BLOCK, F), start(s_q, s_right, BLOCK, F)
        b_dots = start(s_v, s_g.permute((1, 0)), BLOCK, BLOCK)
        b_left, b_right, b_dots = warpgroup_mma_wait(0, [b_left, b_right, b_dots])
        s_phi.store(pairs(b_left, b_right, s_root, scale, F).to(dtype))
        b_dscores = (
            b_dots * s_inverse.load(by_column(BLOCK))[None, :] + s_dtotal.load(by_column(BLOCK))[None, :]
        )
        s_dscores.store(gl.where(seen_from(zero, BLOCK, True), b_dscores, 0.0).to(dtype))
        b_left, b_right = start(s_k, s_left, BLOCK, F), start(s_k, s_right, BLOCK, F)
        b_scores = start(s_k, s_q.permute((1, 0)), BLOCK, BLOCK)
        b_left, b_right, b_scores = warpgroup_mma_wait(0, [b_left, b_right, b_scores])
        b_phi = pairs(b_left, b_right, s_root, KEY_SCALE, F).to(dtype)
        if is_even:
            b_scores = b_scores * (largest * scale * KEY_SCALE)
        else:
            b_scores = linear_scores(s_k, s_q, p_linear, scale * KEY_SCALE, D)

        # Values first.
        fence_async_shared()
        b_scores = add(gl.convert_layout(b_phi, operand(BLOCK)), s_phi.permute((1, 0)), b_scores)
        b_dv = add(gl.convert_layout(b_phi, operand(V)), s_s2, start(s_k, s_s1, BLOCK, V))
        b_s1, b_s2, b_1, b_2, b_g = add_queries(b_s1, b_s2, s_q, s_phi, s_g, s_weighted, s_weights, D, F, V)
        b_scores, b_dv, b_s1, b_s2, b_1, b_2, b_g = warpgroup_mma_wait(
            0, [b_scores, b_dv, b_s1, b_s2, b_1, b_2, b_g]
        )
        b_z1, b_zm = b_z1 + two_columns(b_1, 0), b_zm + two_columns(b_1, 2)
        b_z2, b_ze = b_z2 + two_columns(b_2, 0), b_ze + two_columns(b_g, 4)
        b_inverse = s_inverse.load(by_column(BLOCK))
        b_scores = (b_scores + s_constant.load(by_column(BLOCK))[None, :]) * b_inverse[None, :]
        b_scores = gl.where(seen_from(zero, BLOCK, True), b_scores, 0.0).to(dtype)
        b_dv = add(gl.convert_layout(b_scores, operand(V)), s_g, b_dv)
        b_dphi, b_dx = start(s_v, s_s2.permute((1, 0)), BLOCK, F), start(s_v, s_s1.permute((1, 0)), BLOCK, D)
        b_dv, b_dphi, b_dx = warpgroup_mma_wait(0, [b_dv, b_dphi, b_dx])
        b_dv += s_ze.load(by_column(V))[None, :]
        if p_mask is not None:  # what is masked gets zeros; what lies outside gets nothing
            b_dv = gl.where(visible(k_start, N_KEY, by_row(V), p_mask)[:, None], b_dv, 0.0)
        store_rows(p_dvalue, k_start, b_dv, s_weighted, N_KEY, DV, V)
        copy_rows(s_v, p_value, k_start - BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        copy_rows(s_g, p_grad, q_start - BLOCK, stride_gn, N_QUERY, DV, V)
        async_copy.commit_group()

        b_dphi += s_z2.load(by_column(F))[None, :]
        b_weight = linear_weights(p_linear, D, by_column(D))
        b_queries = b_weight * s_z1.load(by_column(D)) + s_zm.load(by_column(D))
        b_dx += (b_queries * (scale * KEY_SCALE))[None, :]
        # Places of tiles are worked out again: see `unknown`.
        zero, here = unknown(0), unknown(i) & 1
        s_left, s_right, s_phi = m_left.index(zero), m_right.index(zero), m_phi.index(zero)
        s_dscores, s_q, s_k = m_dscores.index(zero), s_queries.index(here), s_keys.index(here)
        b_dphi, b_more = add(s_dscores, s_phi, b_dphi), start(s_dscores, s_q, BLOCK, D)
        b_dphi, b_more = warpgroup_mma_wait(0, [b_dphi, b_more])
        b_dx += b_more * (b_weight * (scale * KEY_SCALE))[None, :]
        b_dmean = s_dmean.load(by_column(BLOCK))
        if gl.max(gl.abs(b_dmean), axis=0) > 0.0:
            b_mean = gl.where(seen_from(zero, BLOCK, True), b_dmean[None, :], 0.0).to(dtype)
            b_rare = start(gl.convert_layout(b_mean, operand(D)), s_q, BLOCK, D)
            b_dx += warpgroup_mma_wait(0, [b_rare]) * (scale * KEY_SCALE)
        b_dx = pairs_backward(b_dx, b_dphi, s_k, s_left, s_right, s_root, KEY_SCALE * KEY_SCALE, D, F)
        if UNIT > 0:
            b_dx = unit_backward(b_dx, s_k.load(accumulator(D)).to(gl.float32), s_factor, EPS, UNIT, DIM, D)
        if p_mask is not None:
            b_dx = gl.where(visible(k_start, N_KEY, by_row(D), p_mask)[:, None], b_dx, 0.0)
        store_rows(p_dkey, k_start, b_dx, s_k, N_KEY, DIM, D)
    async_copy.wait_group(0)
