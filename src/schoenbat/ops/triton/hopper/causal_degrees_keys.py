"""Gradients of keys and values of causal attention by maps of many degrees on Hopper, in one pass from the last tile on.

A program goes with the sums over queries and output gradients of `causal_keys`, laid out as those over keys are in
`causal_degrees`: Σφ(q)(g/f)ᵀ and Σφ(q) dT of both groups, Σq dm and Σg e/f. Gradients are divided by f as they arrive.

Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.causal_degrees import (
    LENGTHS,
    add_features,
    both_features,
    packing_again,
    store_sums,
    tiles_of_sums,
    weighted,
)
from schoenbat.ops.triton.hopper.causal_degrees_queries import (
    again,
    first_of_both,
    put_away,
    second_of_both,
    shared_vectors_of_sums,
    take_up,
    through_both,
)
from schoenbat.ops.triton.hopper.causal_keys import store_weights
from schoenbat.ops.triton.hopper.causal_narrow import size_of_sums
from schoenbat.ops.triton.hopper.degrees import (
    GROUP,
    ROWS,
    WARPS,
    flat,
    packing,
    shared_added,
    shared_map,
    shared_weights,
    zeros,
)
from schoenbat.ops.triton.hopper.warp_groups import (
    NARROW,
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
    seen_from,
    shared_pair,
    shared_tile,
    shared_tiles,
    shared_vector,
    shared_vectors,
    start,
    store_in,
    store_multiplied,
    store_rows,
    unit_backward,
    unknown,
    visible,
)


@gluon.jit
def two_columns(b_narrow, FIRST: gl.constexpr):
    """The sum of two columns of a narrow result."""
    o = gl.arange(0, NARROW, gl.SliceLayout(0, flat(NARROW)))[None, :]
    return gl.sum(gl.where((o == FIRST) | (o == FIRST + 1), b_narrow, 0.0), axis=1)


@gluon.jit
def add_two_columns(s_vector, b_narrow, FIRST: gl.constexpr):
    s_vector.store(s_vector.load(gl.SliceLayout(1, flat(NARROW))) + two_columns(b_narrow, FIRST))


@gluon.jit(do_not_specialize=LENGTHS)
def sum_queries(
    p_query, p_scale, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_sums,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn,
    N_QUERY, FIRST_QUERY, TILES, SEGMENTS, NUM_TILES, EPS, p_tiles, p_root, p_degrees, p_first, MAP_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
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
    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * MAP_TILES * D * GROUP, p_first, MAP_TILES, dtype, D, HELD)
    s_added = shared_added(p_degrees, p_first, dtype)
    s_weights = shared_weights(p_root + i_map * 2 * GROUP, p_degrees, p_first, scale)
    s_queries, s_grads = shared_pair(dtype, D), shared_pair(dtype, V)
    s_inverses, s_constants = shared_vectors(), shared_vectors()
    s_dtotals, s_dmeans = shared_vectors(), shared_vectors()
    s_phi, m_narrow = shared_tiles(dtype, 2, ROWS, GROUP), shared_tile(dtype, ROWS, NARROW)
    b_s1, b_s2, b_z1, b_z2, b_x, b_g = (
        zeros(V),
        zeros(V),
        zeros(NARROW),
        zeros(NARROW),
        zeros(NARROW),
        zeros(NARROW),
    )
    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    for i in range(-1, num_here):
        zero = unknown(0)
        here, there = i & 1, (i + 1) & 1
        async_copy.wait_group(0)
        q_start = (first + i + 1) * ROWS - FIRST_QUERY
        copy_rows(s_queries.index(there), p_query, q_start, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_grads.index(there), p_grad, q_start, stride_gn, N_QUERY, DV, V)
        copy_numbers(s_inverses.index(there), p_inverse, q_start, N_QUERY)
        copy_numbers(s_constants.index(there), p_constant, q_start, N_QUERY)
        copy_numbers(s_dtotals.index(there), p_dtotal, q_start, N_QUERY)
        copy_numbers(s_dmeans.index(there), p_dmean, q_start, N_QUERY)
        async_copy.commit_group()
        if i >= 0:
            s_q, s_g, s_narrow = s_queries.index(here), s_grads.index(here), m_narrow.index(zero)
            make_unit(s_q, EPS, UNIT, DIM, D)
            store_multiplied(s_g, s_g, s_inverses.index(here), V)
            b_e = s_constants.index(here).load(by_row(NARROW, WARPS))
            store_weights(s_narrow, b_e, s_dtotals.index(here), s_dmeans.index(here))
            fence_async_shared()
            both_features(s_phi, s_q, s_tiles, s_added, s_weights, scale, of_first, of_second, zero)
            fence_async_shared()
            b_s1, b_s2, b_z1, b_z2 = add_features(b_s1, b_s2, b_z1, b_z2, s_phi, s_g, s_narrow, zero)
            b_x, b_g = add(s_q.permute((1, 0)), s_narrow, b_x), add(s_g.permute((1, 0)), s_narrow, b_g)
            b_s1, b_s2, b_z1, b_z2, b_x, b_g = warpgroup_mma_wait(0, [b_s1, b_s2, b_z1, b_z2, b_x, b_g])
    async_copy.wait_group(0)
    p_sums += (i_bh * SEGMENTS + i_segment).to(gl.int64) * size_of_sums(D, GROUP, V)
    b_z1, b_z2 = two_columns(b_z1, 0), two_columns(b_z2, 0)
    store_sums(p_sums, b_s1, b_s2, b_z1, b_z2, two_columns(b_x, 2), two_columns(b_g, 4), D, V)


@gluon.jit
def features_of_both(s_x, s_tiles, s_added, s_weights, scale, of_first, of_second, zero):
    """The features of both groups in registers, of 16 bits."""
    dtype: gl.constexpr = s_x.dtype
    of_first, of_second = packing_again(of_first, of_second)
    b_two, b_last = second_of_both(s_x, s_tiles, s_added, of_second, zero)
    b_two = weighted(b_two, s_weights.index(1), scale, dtype)
    b_one = first_of_both(s_x, s_tiles, s_added, b_last, of_first, zero)
    return weighted(b_one, s_weights.index(0), scale, dtype), b_two


@gluon.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_sums, p_grad, p_inverse, p_constant, p_dtotal, p_dmean, p_dkey, p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS,
    p_tiles, p_root, p_degrees, p_first, MAP_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
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
    p_sums += i_bh.to(gl.int64) * SEGMENTS * size_of_sums(D, GROUP, V)
    i_row, i_out = i_bh.to(gl.int64) * N_QUERY, i_bh.to(gl.int64) * N_KEY
    p_inverse, p_constant = p_inverse + i_row, p_constant + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    p_dkey, p_dvalue = p_dkey + i_out * DIM, p_dvalue + i_out * DV
    scale = gl.load(p_scale + i_h)

    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * MAP_TILES * D * GROUP, p_first, MAP_TILES, dtype, D, HELD)
    s_added = shared_added(p_degrees, p_first, dtype)
    p_root += i_map * 2 * GROUP
    s_weights = shared_weights(p_root, p_degrees, p_first, KEY_SCALE)
    s_query_weights = shared_weights(p_root, p_degrees, p_first, scale)
    m_q, m_k = shared_tile(dtype, ROWS, D), shared_tile(dtype, ROWS, D)
    m_v, m_g = shared_tile(dtype, ROWS, V), shared_tile(dtype, ROWS, V)
    s_inverse, s_constant = shared_vector(ROWS), shared_vector(ROWS)
    s_dtotal, s_dmean = shared_vector(ROWS), shared_vector(ROWS)
    s_phi, m_narrow = shared_tiles(dtype, 2, ROWS, GROUP), shared_tile(dtype, ROWS, NARROW)
    m_sums, s_factor, s_behind = shared_tile(dtype, 2 * GROUP, V), shared_vector(ROWS), shared_vector(D)
    b_s1, b_s2 = tiles_of_sums(p_sums, i_segment + 1, SEGMENTS, D, V)
    put_away(m_sums.index(0), s_phi.index(0), b_s1, b_s2)
    s_z, s_zm, s_ze = shared_vectors_of_sums(p_sums, i_segment + 1, SEGMENTS, D, V)

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    last = first + num_here - 1
    q_start, k_start = last * ROWS - FIRST_QUERY, last * ROWS - FIRST_KEY
    copy_rows(m_q.index(0), p_query, q_start, stride_qn, N_QUERY, DIM, D)
    copy_rows(m_g.index(0), p_grad, q_start, stride_gn, N_QUERY, DV, V)
    copy_numbers(s_inverse, p_inverse, q_start, N_QUERY)
    copy_numbers(s_constant, p_constant, q_start, N_QUERY)
    copy_numbers(s_dtotal, p_dtotal, q_start, N_QUERY)
    copy_numbers(s_dmean, p_dmean, q_start, N_QUERY)
    async_copy.commit_group()
    copy_rows(m_v.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    copy_rows(m_k.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    async_copy.commit_group()
    for i in range(num_here):
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        s_narrow = m_narrow.index(zero)
        q_start, k_start = (last - i) * ROWS - FIRST_QUERY, (last - i) * ROWS - FIRST_KEY
        b_s1, b_s2 = take_up(s_sums, s_phi.index(zero), 0, V), take_up(s_sums, s_phi.index(zero), GROUP, V)
        async_copy.wait_group(1)  # all but keys and values
        make_unit(s_q, EPS, UNIT, DIM, D)
        store_multiplied(s_g, s_g, s_inverse, V)
        store_weights(s_narrow, s_constant.load(by_row(NARROW, WARPS)), s_dtotal, s_dmean)
        fence_async_shared()
        both_features(s_phi, s_q, s_tiles, s_added, s_query_weights, scale, of_first, of_second, zero)
        async_copy.wait_group(0)
        make_unit(s_k, EPS, UNIT, DIM, D, s_factor)
        fence_async_shared()
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_phi1, b_phi2 = features_of_both(
            s_k, s_tiles, s_added, s_weights, KEY_SCALE, of_first, of_second, zero
        )

        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        # Values first.
        s_phi1, s_phi2 = s_phi.index(zero).permute((1, 0)), s_phi.index(zero + 1).permute((1, 0))
        b_scores = start(gl.convert_layout(b_phi1, operand(ROWS, WARPS)), s_phi1, ROWS, ROWS)
        b_scores = add(gl.convert_layout(b_phi2, operand(ROWS, WARPS)), s_phi2, b_scores)
        b_scores = warpgroup_mma_wait(0, [b_scores])
        b_scores += s_constant.load(by_column(ROWS, WARPS))[None, :]
        b_scores = gl.where(seen_from(zero, ROWS, True), b_scores, 0.0).to(dtype)
        b_dv = start(gl.convert_layout(b_phi1, operand(V, WARPS)), s_sums.slice(0, GROUP), ROWS, V)
        b_dv = add(gl.convert_layout(b_phi2, operand(V, WARPS)), s_sums.slice(GROUP, GROUP), b_dv)
        b_dv = add(gl.convert_layout(b_scores, operand(V, WARPS)), s_g, b_dv)
        b_dv = warpgroup_mma_wait(0, [b_dv])
        b_dv += s_ze.load(by_column(V, WARPS))[None, :]
        if p_mask is not None:  # what is masked gets zeros; what lies outside gets nothing
            b_dv = gl.where(visible(k_start, N_KEY, by_row(V, WARPS), p_mask)[:, None], b_dv, 0.0)
        # No tile is free for it to pass.
        b_dv = b_dv.to(p_dvalue.dtype.element_ty)
        store_in(p_dvalue, k_start, b_dv, N_KEY, DV, V, accumulator(V, WARPS))

        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_dots = warpgroup_mma_wait(0, [start(s_v, s_g.permute((1, 0)), ROWS, ROWS)])
        b_dots += s_dtotal.load(by_column(ROWS, WARPS))[None, :]
        b_dscores = gl.where(seen_from(zero, ROWS, True), b_dots, 0.0).to(dtype)
        b_zeros = gl.zeros([ROWS, GROUP], gl.float32, accumulator(GROUP, WARPS))
        b_grad = b_zeros + s_z.index(zero).load(by_column(GROUP, WARPS))[None, :]
        b_grad = add(s_v, s_sums.slice(0, GROUP).permute((1, 0)), b_grad)
        b_grad = add(gl.convert_layout(b_dscores, operand(GROUP, WARPS)), s_phi.index(zero), b_grad)
        b_grad = warpgroup_mma_wait(0, [b_grad])
        b_one = b_grad * b_phi1.to(gl.float32)
        b_grad = b_zeros + s_z.index(zero + 1).load(by_column(GROUP, WARPS))[None, :]
        b_grad = add(s_v, s_sums.slice(GROUP, GROUP).permute((1, 0)), b_grad)
        b_grad = add(gl.convert_layout(b_dscores, operand(GROUP, WARPS)), s_phi.index(zero + 1), b_grad)
        b_grad = warpgroup_mma_wait(0, [b_grad])
        b_two = b_grad * b_phi2.to(gl.float32)

        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_s1, b_s2, b_1, b_2 = add_features(
            b_s1, b_s2, zeros(NARROW), zeros(NARROW), s_phi, s_g, s_narrow, zero
        )
        b_x = start(s_q.permute((1, 0)), s_narrow, D, NARROW)
        b_g = start(s_g.permute((1, 0)), s_narrow, V, NARROW)
        b_s1, b_s2, b_1, b_2, b_x, b_g = warpgroup_mma_wait(0, [b_s1, b_s2, b_1, b_2, b_x, b_g])
        put_away(s_sums, s_phi.index(zero), b_s1, b_s2)
        # The floor acts somewhere, which is rare: what comes from it waits where features were.
        b_dmean = s_dmean.load(by_column(ROWS, WARPS))
        is_floored = gl.max(gl.abs(b_dmean), axis=0) > 0.0
        if is_floored:
            b_mean = gl.where(seen_from(zero, ROWS, True), b_dmean[None, :], 0.0).to(dtype)
            b_rare = start(gl.convert_layout(b_mean, operand(D, WARPS)), s_q, ROWS, D)
            b_rare = warpgroup_mma_wait(0, [b_rare])
            s_phi.index(zero + 1).store((b_rare * (scale * KEY_SCALE)).to(dtype))
        s_behind.store(s_zm.load(by_row(NARROW, WARPS)))
        add_two_columns(s_z.index(zero), b_1, 0)
        add_two_columns(s_z.index(zero + 1), b_2, 0)
        add_two_columns(s_zm, b_x, 2)
        add_two_columns(s_ze, b_g, 4)
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        copy_rows(s_q, p_query, q_start - ROWS, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_g, p_grad, q_start - ROWS, stride_gn, N_QUERY, DV, V)
        copy_numbers(s_inverse, p_inverse, q_start - ROWS, N_QUERY)
        copy_numbers(s_constant, p_constant, q_start - ROWS, N_QUERY)
        copy_numbers(s_dtotal, p_dtotal, q_start - ROWS, N_QUERY)
        copy_numbers(s_dmean, p_dmean, q_start - ROWS, N_QUERY)
        async_copy.commit_group()
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_dx = through_both(b_one, b_two, s_k, s_v, s_tiles, s_added, of_first, of_second, zero, D)
        b_dx += (s_behind.load(by_column(D, WARPS)) * (scale * KEY_SCALE))[None, :]
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        if is_floored:
            b_dx += s_phi.index(zero + 1).load(accumulator(D, WARPS)).to(gl.float32)
        if UNIT > 0:
            b_k = s_k.load(accumulator(D, WARPS)).to(gl.float32)
            b_dx = unit_backward(b_dx, b_k, s_factor, EPS, UNIT, DIM, D)
        if p_mask is not None:
            b_dx = gl.where(visible(k_start, N_KEY, by_row(D, WARPS), p_mask)[:, None], b_dx, 0.0)
        store_rows(p_dkey, k_start, b_dx, s_k, N_KEY, DIM, D)
        copy_rows(s_v, p_value, k_start - ROWS, stride_vn, N_KEY, DV, V, p_mask)
        copy_rows(s_k, p_key, k_start - ROWS, stride_kn, N_KEY, DIM, D, p_mask)
        async_copy.commit_group()
    async_copy.wait_group(0)
