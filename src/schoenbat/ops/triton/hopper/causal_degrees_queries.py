"""Gradients of queries of causal attention by maps of many degrees on Hopper, as `causal_degrees.read` goes.

Sums are put away before the levels of queries are formed, to multiply and then to divide by: in registers there is no room for both. Gradients are those of the scaled rows and multiplied by the scale last. Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.causal import keys_seen
from schoenbat.ops.triton.hopper.causal_degrees import (
    LENGTHS,
    both_features,
    in_two,
    packing_again,
    shared_ones,
    tiles_of_sums,
    vectors_of_sums,
)
from schoenbat.ops.triton.hopper.causal_narrow import size_of_sums, two_vectors
from schoenbat.ops.triton.hopper.degrees import (
    GROUP,
    ROWS,
    WARPS,
    column,
    flat,
    packing,
    products,
    shared_added,
    shared_map,
    shared_weights,
    times_last,
    times_packed,
    two_levels,
    zeros,
)
from schoenbat.ops.triton.hopper.degrees_backward import packed_backward, products_backward
from schoenbat.ops.triton.hopper.warp_groups import (
    NARROW,
    accumulator,
    add,
    anew,
    at_head,
    by_column,
    by_row,
    copy_numbers,
    copy_rows,
    in_memory,
    make_unit,
    operand,
    place,
    row_sums,
    seen_from,
    shared_tile,
    shared_tiles,
    shared_vector,
    split_in_two,
    start,
    store_rows,
    unit_backward,
    unknown,
    visible,
)


@gluon.jit
def load_rows(p, start_row, N, C: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile of a contiguous matrix in registers; zeros where there are no rows."""
    layout: gl.constexpr = in_memory(COLUMNS, WARPS)
    m_n = visible(start_row, N, gl.SliceLayout(1, layout))
    stride = anew(C // 8) * 8
    o_n = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    p = p + gl.to_tensor(start_row).to(gl.int64) * stride + (o_n[:, None] * stride + o_c[None, :])
    return gl.load(p, mask=m_n[:, None] & (o_c[None, :] < C), other=0.0)


@gluon.jit
def weigh_gradient(s_g, b_out, s_inverse, V: gl.constexpr):
    """g/f in place of g; ⟨g/f, out⟩ by row."""
    layout: gl.constexpr = in_memory(V, WARPS)
    b_g = s_g.load(layout).to(gl.float32) * s_inverse.load(gl.SliceLayout(1, layout))[:, None]
    b_along_out = gl.sum(b_g * b_out.to(gl.float32), axis=1)
    s_g.store(b_g.to(s_g.dtype))
    return gl.convert_layout(b_along_out, by_row(ROWS, WARPS))


@gluon.jit
def second_of_both(s_x, s_tiles, s_added, of_second, zero):
    """The products of the second group, which are divided again; the factors of the first group's last features."""
    middle, narrow, _ = of_second
    s_added = s_added.index(zero + 1)
    b_product = products(s_x, s_tiles, s_added, middle, narrow)
    b_first, b_second = two_levels(s_x, s_tiles, s_added, anew(narrow), narrow - middle)
    return times_packed(b_product, b_first, b_second)


@gluon.jit
def first_of_both(s_x, s_tiles, s_added, b_last, of_first, zero):
    """Those of the first group."""
    return times_last(products(s_x, s_tiles, s_added.index(zero), zero, of_first[0]), b_last)


@gluon.jit
def times_products(b_one, b_two, s_x, s_tiles, s_added, s_weights, of_first, of_second, zero):
    """Gradients of features become those of products, times these; but for a scale."""
    layout: gl.constexpr = by_column(GROUP, WARPS)
    of_first, of_second = packing_again(of_first, of_second)
    b_product, b_last = second_of_both(s_x, s_tiles, s_added, of_second, zero)
    b_two *= b_product * s_weights.index(1).load(layout)[None, :]
    b_product = first_of_both(s_x, s_tiles, s_added, b_last, of_first, zero)
    return b_one * (b_product * s_weights.index(0).load(layout)[None, :]), b_two


@gluon.jit
def through_both(b_one, b_two, s_x, s_free, s_tiles, s_added, of_first, of_second, zero, D: gl.constexpr):
    """The gradient of rows; of both groups the gradients of their products, times these. Those of one wait in a free tile."""
    of_first, of_second = packing_again(of_first, of_second)
    short, middle, narrow = of_first[0], of_second[0], of_second[1]
    b_first, b_second = two_levels(s_x, s_tiles, s_added.index(zero + 1), anew(narrow), narrow - middle)
    b_dx = gl.zeros([ROWS, D], gl.float32, accumulator(D, WARPS))
    b_dx = packed_backward(b_dx, b_one, b_two, b_first, b_second, s_tiles, anew(narrow), D)
    s_free.store(b_one.to(s_free.dtype))
    b_dx = products_backward(b_dx, b_two, s_x, s_tiles, s_added.index(zero + 1), middle, narrow, D)
    b_one = s_free.load(accumulator(GROUP, WARPS)).to(gl.float32)
    return products_backward(b_dx, b_one, s_x, s_tiles, s_added.index(zero), zero, short, D)


@gluon.jit
def again(m_q, m_k, m_v, m_g, m_sums):
    """A zero that is `unknown`, and the tiles there: each phase works out places anew, and none are kept for the next."""
    zero = unknown(0)
    return zero, m_q.index(zero), m_k.index(zero), m_v.index(zero), m_g.index(zero), m_sums.index(zero)


@gluon.jit
def put_away(s_high, s_low, b_s1, b_s2):
    """Store both sums, each as two numbers of 16 bits: the first is what products read."""
    b_high, b_low = split_in_two(b_s1, s_high.dtype)
    s_high.slice(0, GROUP).store(b_high)
    s_low.slice(0, GROUP).store(b_low)
    b_high, b_low = split_in_two(b_s2, s_high.dtype)
    s_high.slice(GROUP, GROUP).store(b_high)
    s_low.slice(GROUP, GROUP).store(b_low)


@gluon.jit
def take_up(s_high, s_low, FIRST: gl.constexpr, V: gl.constexpr):
    """A sum that was put away."""
    b_high = s_high.slice(FIRST, GROUP).load(flat(V)).to(gl.float32)
    return b_high + s_low.slice(FIRST, GROUP).load(flat(V)).to(gl.float32)


@gluon.jit
def add_column(s_vector, b_narrow):
    """Add the first column of a narrow result to a vector."""
    layout: gl.constexpr = gl.SliceLayout(1, flat(NARROW))
    s_vector.store(s_vector.load(layout) + column(b_narrow, 0))


@gluon.jit
def shared_vectors_of_sums(p_sums, first, last, D: gl.constexpr, V: gl.constexpr):
    """Those that `vectors_of_sums` gives."""
    s_z, s_x, s_v = two_vectors(GROUP), shared_vector(D), shared_vector(V)
    b_z1, b_z2, b_x, b_v = vectors_of_sums(p_sums, first, last, D, V)
    s_z.index(0).store(column(b_z1, 0))
    s_z.index(1).store(column(b_z2, 0))
    s_x.store(column(b_x, 0))
    s_v.store(column(b_v, 0))
    return s_z, s_x, s_v


@gluon.jit(do_not_specialize=LENGTHS)
def query_backward(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_grad, p_out, p_inverse, p_constant, p_slope,
    p_dquery, p_dtotal, p_dmean, p_dscale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS,
    p_tiles, p_root, p_degrees, p_first, MAP_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
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
    p_sums += (i_bh // GROUPS).to(gl.int64) * (SEGMENTS - 1) * size_of_sums(D, GROUP, V)
    i_row = i_bh.to(gl.int64) * N_QUERY
    p_inverse, p_constant, p_slope = p_inverse + i_row, p_constant + i_row, p_slope + i_row
    p_dtotal, p_dmean = p_dtotal + i_row, p_dmean + i_row
    p_out, p_dquery = p_out + i_row * DV, p_dquery + i_row * DIM
    scale, constant = gl.load(p_scale + i_h), gl.load(p_coefficients + 3 * i_map)

    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * MAP_TILES * D * GROUP, p_first, MAP_TILES, dtype, D, HELD)
    s_added = shared_added(p_degrees, p_first, dtype)
    p_root += i_map * 2 * GROUP
    s_weights = shared_weights(p_root, p_degrees, p_first, KEY_SCALE)
    s_query_weights = shared_weights(p_root, p_degrees, p_first, scale)
    m_q, m_k = shared_tile(dtype, ROWS, D), shared_tile(dtype, ROWS, D)
    m_v, m_g = shared_tile(dtype, ROWS, V), shared_tile(dtype, ROWS, V)
    s_inverse, s_constant, s_slope = shared_vector(ROWS), shared_vector(ROWS), shared_vector(ROWS)
    s_phi, m_ones = shared_tiles(dtype, 2, ROWS, GROUP), shared_ones(dtype)
    m_sums, m_zv, s_factor = (
        shared_tile(dtype, 2 * GROUP, V),
        shared_tile(dtype, V, NARROW),
        shared_vector(ROWS),
    )
    b_s1, b_s2 = tiles_of_sums(p_sums, 0, i_segment, D, V)
    put_away(m_sums.index(0), s_phi.index(0), b_s1, b_s2)
    s_z, s_zk, s_zv = shared_vectors_of_sums(p_sums, 0, i_segment, D, V)
    o_q = gl.arange(0, ROWS, by_row(ROWS, WARPS))
    b_dscale = gl.zeros([ROWS], gl.float32, by_row(D, WARPS))

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    q_start, k_start = first * ROWS - FIRST_QUERY, first * ROWS - FIRST_KEY
    copy_rows(m_k.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(m_g.index(0), p_grad, q_start, stride_gn, N_QUERY, DV, V)
    copy_numbers(s_inverse, p_inverse, q_start, N_QUERY)
    copy_numbers(s_constant, p_constant, q_start, N_QUERY)
    copy_numbers(s_slope, p_slope, q_start, N_QUERY)
    async_copy.commit_group()
    copy_rows(m_v.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    copy_rows(m_q.index(0), p_query, q_start, stride_qn, N_QUERY, DIM, D)
    async_copy.commit_group()
    for i in range(num_here):
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        i_tile = first + i
        q_start, k_start = i_tile * ROWS - FIRST_QUERY, i_tile * ROWS - FIRST_KEY
        b_out = load_rows(p_out, q_start, N_QUERY, DV, V)
        b_s1, b_s2 = take_up(s_sums, s_phi.index(zero), 0, V), take_up(s_sums, s_phi.index(zero), GROUP, V)
        b_before = zeros(NARROW) + s_zv.load(gl.SliceLayout(1, flat(NARROW)))[:, None]
        m_zv.index(zero).store(in_two(b_before, dtype))
        async_copy.wait_group(1)  # all but queries and values
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()
        both_features(s_phi, s_k, s_tiles, s_added, s_weights, KEY_SCALE, of_first, of_second, zero)
        b_along_out = weigh_gradient(s_g, b_out, s_inverse, V)
        async_copy.wait_group(0)
        fence_async_shared()

        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        # ⟨grad, value⟩ for all pairs; its sums are ⟨grad, mean value⟩.
        b_dots = start(s_g, s_v.permute((1, 0)), ROWS, ROWS)
        b_before = start(s_g, m_zv.index(zero), ROWS, NARROW)
        b_dots, b_before = warpgroup_mma_wait(0, [b_dots, b_before])
        b_divisor = gl.maximum(
            keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, by_row(ROWS, WARPS), ROWS), 1.0
        )
        b_along_mean = gl.convert_layout(row_sums(b_before), by_row(ROWS, WARPS))
        b_along_mean = (
            b_along_mean + gl.sum(gl.where(seen_from(zero, ROWS, False), b_dots, 0.0), axis=1)
        ) / b_divisor
        b_e = s_constant.load(by_row(ROWS, WARPS))
        b_dtotal = -gl.where(b_e == constant, b_along_out, b_along_mean)
        b_dmean = (b_along_mean - b_along_out) * s_slope.load(by_row(ROWS, WARPS)) / b_divisor
        m_row = visible(q_start, N_QUERY, by_row(ROWS, WARPS))
        gl.store(p_dtotal + q_start + o_q, b_dtotal, mask=m_row)
        gl.store(p_dmean + q_start + o_q, b_dmean, mask=m_row)
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_dscores = gl.where(seen_from(zero, ROWS, False), b_dots + b_dtotal[:, None], 0.0).to(dtype)
        b_dtotal = gl.convert_layout(b_dtotal, by_row(GROUP, WARPS))

        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_one = b_dtotal[:, None] * s_z.index(zero).load(by_column(GROUP, WARPS))[None, :]
        b_one = add(s_g, s_sums.slice(0, GROUP).permute((1, 0)), b_one)
        b_one = add(gl.convert_layout(b_dscores, operand(GROUP, WARPS)), s_phi.index(zero), b_one)
        b_one = warpgroup_mma_wait(0, [b_one])
        b_two = b_dtotal[:, None] * s_z.index(zero + 1).load(by_column(GROUP, WARPS))[None, :]
        b_two = add(s_g, s_sums.slice(GROUP, GROUP).permute((1, 0)), b_two)
        b_two = add(gl.convert_layout(b_dscores, operand(GROUP, WARPS)), s_phi.index(zero + 1), b_two)
        b_two = warpgroup_mma_wait(0, [b_two])

        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        # What is added to vectors first, so that few results are at work at a time.
        s_ones = m_ones.index(zero)
        b_1 = start(s_phi.index(zero).permute((1, 0)), s_ones, GROUP, NARROW)
        b_2 = start(s_phi.index(zero + 1).permute((1, 0)), s_ones, GROUP, NARROW)
        b_v = start(s_v.permute((1, 0)), s_ones, V, NARROW)
        b_1, b_2, b_v = warpgroup_mma_wait(0, [b_1, b_2, b_v])
        add_column(s_z.index(zero), b_1)
        add_column(s_z.index(zero + 1), b_2)
        add_column(s_zv, b_v)
        b_s1 = add(s_phi.index(zero).permute((1, 0)), s_v, b_s1)
        b_s2 = add(s_phi.index(zero + 1).permute((1, 0)), s_v, b_s2)
        b_s1, b_s2 = warpgroup_mma_wait(0, [b_s1, b_s2])
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        put_away(s_sums, s_phi.index(zero), b_s1, b_s2)
        # The floor acts somewhere, which is rare: what comes from it waits where features were.
        is_floored = gl.max(gl.abs(b_dmean), axis=0) > 0.0
        if is_floored:
            b_mean = gl.where(seen_from(zero, ROWS, False), b_dmean[:, None], 0.0).to(dtype)
            b_rare = start(gl.convert_layout(b_mean, operand(D, WARPS)), s_k, ROWS, D)
            b_rare = warpgroup_mma_wait(0, [b_rare])
            b_mean = gl.convert_layout(b_dmean, by_row(D, WARPS))
            b_rare += b_mean[:, None] * s_zk.load(by_column(D, WARPS))[None, :]
            s_phi.index(zero + 1).store((b_rare * KEY_SCALE).to(dtype))
        add_column(s_zk, warpgroup_mma_wait(0, [start(s_k.permute((1, 0)), s_ones, D, NARROW)]))
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        copy_rows(s_k, p_key, k_start + ROWS, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_g, p_grad, q_start + ROWS, stride_gn, N_QUERY, DV, V)
        copy_numbers(s_inverse, p_inverse, q_start + ROWS, N_QUERY)
        copy_numbers(s_constant, p_constant, q_start + ROWS, N_QUERY)
        copy_numbers(s_slope, p_slope, q_start + ROWS, N_QUERY)
        async_copy.commit_group()
        make_unit(s_q, EPS, UNIT, DIM, D, s_factor)
        fence_async_shared()
        b_one, b_two = times_products(
            b_one, b_two, s_q, s_tiles, s_added, s_query_weights, of_first, of_second, zero
        )
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        b_dx = through_both(b_one, b_two, s_q, s_v, s_tiles, s_added, of_first, of_second, zero, D)
        zero, s_q, s_k, s_v, s_g, s_sums = again(m_q, m_k, m_v, m_g, m_sums)
        if is_floored:
            b_dx += s_phi.index(zero + 1).load(accumulator(D, WARPS)).to(gl.float32)

        # b_dx is the gradient of scale · query, on which alone everything depends.
        b_q = s_q.load(accumulator(D, WARPS)).to(gl.float32)
        b_dscale += gl.sum(b_dx * b_q, axis=1)
        b_dx *= scale
        if UNIT > 0:
            b_dx = unit_backward(b_dx, b_q, s_factor, EPS, UNIT, DIM, D)
        store_rows(p_dquery, q_start, b_dx, s_q, N_QUERY, DIM, D)
        copy_rows(s_v, p_value, k_start + ROWS, stride_vn, N_KEY, DV, V, p_mask)
        copy_rows(s_q, p_query, q_start + ROWS, stride_qn, N_QUERY, DIM, D)
        async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(p_dscale + gl.program_id(0), gl.sum(b_dscale, axis=0))
