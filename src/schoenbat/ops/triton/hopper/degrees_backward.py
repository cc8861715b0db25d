"""Gradients of bidirectional attention by maps of many degrees on Hopper: see `degrees`.

What is computed is in `kernels.bidirectional`. All factors of a feature but one are the product divided by that one; two levels share
a division. Gradients are those of the scaled rows and multiplied by the scale last. Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.degrees import (
    GROUP,
    LENGTHS,
    ROWS,
    WARPS,
    halves,
    products,
    shared_copy,
    shared_features,
    shared_map,
    shared_narrow,
    side_by_side,
    start_level,
    times_last,
    times_packed,
    two_levels,
)
from schoenbat.ops.triton.hopper.warp_groups import (
    LOWEST_EXPONENT,
    NARROW,
    accumulator,
    add,
    anew,
    at_head,
    by_column,
    by_row,
    copy_rows,
    copy_tile,
    in_memory,
    make_unit,
    operand,
    place,
    row_sums,
    shared_pair,
    shared_tile,
    shared_tiles,
    shared_vector,
    start,
    store_rows,
    unit_backward,
    visible,
)


@gluon.jit
def reciprocal(b):
    one_over: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(one_over, "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def both_products(s_x, s_tiles, s_added, short, middle, narrow):
    """The products of both groups; the factors in the packed tiles, which are held until they get their gradients."""
    b_one = products(s_x, s_tiles, s_added.index(0), 0, short)
    b_two = products(s_x, s_tiles, s_added.index(1), middle, narrow)
    b_first, b_second = two_levels(s_x, s_tiles, s_added.index(1), anew(narrow), narrow - middle)
    b_two, b_last = times_packed(b_two, b_first, b_second)
    return times_last(b_one, b_last), b_two, b_first, b_second


@gluon.jit
def both_backward(
    b_dx, b_one, b_two, b_first, b_second, s_x, s_tiles, s_added, short, middle, narrow, D: gl.constexpr
):
    """Add to the gradient of scaled rows; of both groups the gradients of their products, times these."""
    b_dx = packed_backward(b_dx, b_one, b_two, b_first, b_second, s_tiles, anew(narrow), D)
    b_dx = products_backward(b_dx, b_one, s_x, s_tiles, s_added.index(0), 0, short, D)
    return products_backward(b_dx, b_two, s_x, s_tiles, s_added.index(1), middle, narrow, D)


@gluon.jit
def products_backward(b_dx, b_grad, s_x, s_tiles, s_added, first, last, D: gl.constexpr):
    """What comes from a group, but for its packed levels."""
    dtype: gl.constexpr = s_x.dtype
    layout: gl.constexpr = operand(D, WARPS)
    last = anew(last)
    for i in range(first, last - 1, 2):
        b_a, b_b = two_levels(s_x, s_tiles, s_added, i, i - first)
        b_share = b_grad * reciprocal(b_a * b_b)
        b_dx = two_backward(b_dx, b_share * b_b, b_share * b_a, s_tiles, i, D)
    if (last - first) % 2 == 1:
        b_a = warpgroup_mma_wait(0, [start_level(s_x, s_tiles, s_added, last - 1, last - 1 - first)])
        b_to_a = gl.convert_layout((b_grad * reciprocal(b_a)).to(dtype), layout)
        b_dx = warpgroup_mma_wait(0, [add(b_to_a, s_tiles.index(last - 1).permute((1, 0)), b_dx)])
    return b_dx


@gluon.jit
def packed_backward(b_dx, b_one, b_two, b_first, b_second, s_tiles, i_tile, D: gl.constexpr):
    """What comes from the packed levels: at each place there the gradient of its feature, divided by the factor."""
    _, b_32 = halves(b_two, 32)
    _, b_16 = halves(b_32, 16)
    _, b_8 = halves(b_16, 8)
    _, b_of_first = halves(b_one, 32)
    _, b_of_first = halves(b_of_first, 16)
    b_eights = side_by_side(b_8, b_8, 8)
    b_to_first = side_by_side(b_32, side_by_side(b_16, b_eights, 16), 32)
    b_to_second = side_by_side(
        side_by_side(b_eights, b_eights, 16), side_by_side(b_eights, b_of_first, 16), 32
    )
    # Places that share a division are of other features: only quotients are sure to be in range.
    b_share = reciprocal(b_first * b_second)
    b_to_first, b_to_second = b_to_first * (b_share * b_second), b_to_second * (b_share * b_first)
    return two_backward(b_dx, b_to_first, b_to_second, s_tiles, i_tile, D)


@gluon.jit
def two_backward(b_dx, b_to_a, b_to_b, s_tiles, i_tile, D: gl.constexpr):
    """What comes from two tiles of factors, given their gradients."""
    layout: gl.constexpr = operand(D, WARPS)
    b_to_a = gl.convert_layout(b_to_a.to(s_tiles.dtype), layout)
    b_to_b = gl.convert_layout(b_to_b.to(s_tiles.dtype), layout)
    b_dx = add(b_to_a, s_tiles.index(i_tile).permute((1, 0)), b_dx)
    return warpgroup_mma_wait(0, [add(b_to_b, s_tiles.index(i_tile + 1).permute((1, 0)), b_dx)])


@gluon.jit
def shared_sums(p_sums, p_totals, i_state, dtype: gl.constexpr, V: gl.constexpr):
    """Begin to copy a head's sums, and copy its totals."""
    s_sums = shared_tiles(dtype, 2, GROUP, V)
    copy_tile(s_sums.index(0), p_sums + i_state * 2 * GROUP * V, GROUP, V)
    copy_tile(s_sums.index(1), p_sums + (i_state * 2 + 1) * GROUP * V, GROUP, V)
    s_totals = gl.allocate_shared_memory(gl.float32, [2, GROUP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(2):
        o_f = gl.arange(0, GROUP, by_column(GROUP, WARPS))
        s_totals.index(i).store(gl.load(p_totals + (i_state * 2 + i) * GROUP + o_f))
    return s_sums, s_totals


@gluon.jit
def gradient_of_features(s_rows, s_sums):
    """⟨row, sum⟩ for the features of a group."""
    return warpgroup_mma_wait(0, [start(s_rows, s_sums.permute((1, 0)), ROWS, GROUP)])


@gluon.jit(do_not_specialize=LENGTHS)
def read_backward(
    p_query, p_grad, p_dquery, p_inverse, p_dtotal, p_dmean, p_dscale, p_scale, p_sums, p_totals, p_key_mean, p_coefficients,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, N, TILES, SPLITS, EPS,
    p_tiles, p_root, p_degrees, p_first, NUM_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Some tiles of query gradients; also 1/f and the gradients of denominator and mean logit by row, that of the scale."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_split, i_bh, i_b, i_h, i_map = place(SPLITS, HEADS, GROUPS, MAPS)
    i_state, i_row = (i_bh // GROUPS).to(gl.int64), i_bh.to(gl.int64) * N
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_grad = at_head(p_grad, i_b, i_h, stride_gb, stride_gh)
    p_inverse, p_dtotal, p_dmean, p_dquery = (
        p_inverse + i_row,
        p_dtotal + i_row,
        p_dmean + i_row,
        p_dquery + i_row * DIM,
    )
    scale = gl.load(p_scale + i_h)
    constant, zeroth = gl.load(p_coefficients + 3 * i_map), gl.load(p_coefficients + 3 * i_map + 1)
    slope = gl.load(p_coefficients + 3 * i_map + 2)
    middle, narrow, short = gl.load(p_first + 1), gl.load(p_first + 3), gl.load(p_first + 4)
    s_tiles = shared_map(p_tiles + i_map * NUM_TILES * D * GROUP, p_first, NUM_TILES, dtype, D, HELD)
    s_weights, s_added = shared_features(p_root + i_map * 2 * GROUP, p_degrees, p_first, scale, dtype)
    s_sums, s_totals = shared_sums(p_sums, p_totals, i_state, dtype, V)
    s_mean, s_means = (
        shared_narrow(p_key_mean + i_state * D, dtype, D),
        shared_copy(p_key_mean + i_state * D, D),
    )
    s_queries, m_g, s_factor = shared_pair(dtype, D), shared_tile(dtype, ROWS, V), shared_vector(ROWS)
    s_g = m_g.index(0)
    b_dscale = gl.zeros([ROWS], gl.float32, by_row(D, WARPS))
    first_tile = i_split * TILES
    num_here = gl.minimum(TILES, (N + ROWS - 1) // ROWS - first_tile)
    copy_rows(s_queries.index(0), p_query, first_tile * ROWS, stride_qn, N, DIM, D)
    copy_rows(s_g, p_grad, first_tile * ROWS, stride_gn, N, DV, V)
    async_copy.commit_group()
    for i in range(num_here):
        q_start = (first_tile + i) * ROWS
        s_q = s_queries.index(i % 2)
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + ROWS, stride_qn, N, DIM, D)
        make_unit(s_q, EPS, UNIT, DIM, D, s_factor)
        fence_async_shared()
        b_logit = warpgroup_mma_wait(0, [start(s_q, s_mean.index(0), ROWS, NARROW)])
        b_logit = gl.convert_layout(scale * row_sums(b_logit), by_row(GROUP, WARPS))
        # ⟨grad, numerator⟩ and the total, from features and what they are multiplied by.
        b_one, b_two, b_first, b_second = both_products(s_q, s_tiles, s_added, short, middle, narrow)
        b_phi = b_one * (s_weights.index(0).load(by_column(GROUP, WARPS)) * scale)[None, :]
        b_total = constant + gl.sum(b_phi * s_totals.index(0).load(by_column(GROUP, WARPS))[None, :], axis=1)
        b_along = gl.sum(b_phi * gradient_of_features(s_g, s_sums.index(anew(0))), axis=1)
        b_phi = b_two * (s_weights.index(1).load(by_column(GROUP, WARPS)) * scale)[None, :]
        b_total += gl.sum(b_phi * s_totals.index(1).load(by_column(GROUP, WARPS))[None, :], axis=1)
        b_along += gl.sum(b_phi * gradient_of_features(s_g, s_sums.index(anew(1))), axis=1)

        b_exponent = slope * b_logit
        b_floor = zeroth * gl.exp(gl.minimum(gl.maximum(b_exponent, LOWEST_EXPONENT), 0.0))
        m_below = b_total < b_floor
        b_floored = gl.where(m_below, b_floor, b_total)
        b_inverse = gl.where(b_floored == float("inf"), float("nan"), 1.0 / b_floored)
        b_dfloored = -b_along * b_inverse * b_inverse
        b_dtotal = gl.where(m_below, 0.0, b_dfloored)
        m_falling = m_below & (b_exponent < 0.0) & (b_exponent > LOWEST_EXPONENT)
        b_dmean = gl.where(m_falling, b_dfloored * b_floor * slope, 0.0)
        m_n = visible(q_start, N, by_row(GROUP, WARPS))
        o_row = q_start + gl.arange(0, ROWS, by_row(GROUP, WARPS))
        gl.store(p_inverse + o_row, b_inverse, mask=m_n)
        gl.store(p_dtotal + o_row, b_dtotal, mask=m_n)
        gl.store(p_dmean + o_row, b_dmean, mask=m_n)

        b_dx = (
            gl.convert_layout(b_dmean, by_row(D, WARPS))[:, None] * s_means.load(by_column(D, WARPS))[None, :]
        )
        b_grad = gradient_of_features(s_g, s_sums.index(anew(0))) * b_inverse[:, None]
        b_grad += b_dtotal[:, None] * s_totals.index(0).load(by_column(GROUP, WARPS))[None, :]
        b_one *= b_grad * s_weights.index(0).load(by_column(GROUP, WARPS))[None, :]
        b_grad = gradient_of_features(s_g, s_sums.index(anew(1))) * b_inverse[:, None]
        b_grad += b_dtotal[:, None] * s_totals.index(1).load(by_column(GROUP, WARPS))[None, :]
        b_two *= b_grad * s_weights.index(1).load(by_column(GROUP, WARPS))[None, :]
        copy_rows(s_g, p_grad, q_start + ROWS, stride_gn, N, DV, V)
        async_copy.commit_group()
        b_dx = both_backward(
            b_dx, b_one, b_two, b_first, b_second, s_q, s_tiles, s_added, short, middle, narrow, D
        )

        # b_dx is the gradient of scale · query, on which alone everything depends.
        b_q = s_q.load(accumulator(D, WARPS)).to(gl.float32)
        b_dscale += gl.sum(b_dx * b_q, axis=1)
        b_dx *= scale
        if UNIT > 0:
            b_dx = unit_backward(b_dx, b_q, s_factor, EPS, UNIT, DIM, D)
        store_rows(p_dquery, q_start, b_dx, s_q, N, DIM, D)
    async_copy.wait_group(0)
    gl.store(p_dscale + gl.program_id(0), gl.sum(b_dscale, axis=0))


@gluon.jit
def through_features(b_dv, b_product, b_weight, KEY_SCALE, s_v, s_sums, s_totals):
    """Add to the gradient of values what comes from a group; the gradient of its products, times these."""
    b_phi = (b_product * (b_weight * KEY_SCALE)[None, :]).to(s_sums.dtype)
    b_dv = add(gl.convert_layout(b_phi, operand(s_sums.shape[1], WARPS)), s_sums, b_dv)
    b_dv = warpgroup_mma_wait(0, [b_dv])
    b_grad = gradient_of_features(s_v, s_sums) + s_totals.load(by_column(GROUP, WARPS))[None, :]
    return b_dv, b_grad * b_product * b_weight[None, :]


@gluon.jit
def centre_rows(s_rows, s_mean, V: gl.constexpr):
    layout: gl.constexpr = in_memory(V, WARPS)
    b_rows = s_rows.load(layout).to(gl.float32) - s_mean.load(gl.SliceLayout(0, layout))[None, :]
    s_rows.store(b_rows.to(s_rows.dtype))


@gluon.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_key, p_value, p_mask, p_dkey, p_dvalue, p_dsums, p_dtotals, p_dkey_mean, p_value_mean, p_to_mean,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, N, TILES, SPLITS, KEY_SCALE, EPS,
    p_tiles, p_root, p_degrees, p_first, NUM_TILES,
    HEADS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Some tiles of key and value gradients, from those of the sums; what all get is in `p_dkey_mean`, `p_to_mean`."""
    dtype: gl.constexpr = p_key.dtype.element_ty
    i_split, i_bh, i_b, i_h, i_map = place(SPLITS, HEADS, 1, MAPS)
    i_state = i_bh.to(gl.int64)
    p_key = at_head(p_key, i_b, i_h, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h, stride_vb, stride_vh)
    p_dkey, p_dvalue = p_dkey + i_state * N * DIM, p_dvalue + i_state * N * DV
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N
    middle, narrow, short = gl.load(p_first + 1), gl.load(p_first + 3), gl.load(p_first + 4)
    s_tiles = shared_map(p_tiles + i_map * NUM_TILES * D * GROUP, p_first, NUM_TILES, dtype, D, HELD)
    s_weights, s_added = shared_features(p_root + i_map * 2 * GROUP, p_degrees, p_first, KEY_SCALE, dtype)
    s_sums, s_totals = shared_sums(p_dsums, p_dtotals, i_state, dtype, V)
    s_dkey, s_mean = shared_copy(p_dkey_mean + i_state * D, D), shared_copy(p_value_mean + i_state * V, V)
    s_to_mean = shared_copy(p_to_mean + i_state * V, V)
    s_keys, m_v, s_factor = shared_pair(dtype, D), shared_tile(dtype, ROWS, V), shared_vector(ROWS)
    s_v = m_v.index(0)
    first_tile = i_split * TILES
    num_here = gl.minimum(TILES, (N + ROWS - 1) // ROWS - first_tile)
    copy_rows(s_keys.index(0), p_key, first_tile * ROWS, stride_kn, N, DIM, D, p_mask)
    copy_rows(s_v, p_value, first_tile * ROWS, stride_vn, N, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(num_here):
        k_start = (first_tile + i) * ROWS
        s_k = s_keys.index(i % 2)
        async_copy.wait_group(0)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start + ROWS, stride_kn, N, DIM, D, p_mask)
        make_unit(s_k, EPS, UNIT, DIM, D, s_factor)
        centre_rows(s_v, s_mean, V)
        fence_async_shared()
        b_dv = (
            gl.zeros([ROWS, V], gl.float32, accumulator(V, WARPS))
            + s_to_mean.load(by_column(V, WARPS))[None, :]
        )
        b_one, b_two, b_first, b_second = both_products(s_k, s_tiles, s_added, short, middle, narrow)
        b_weight = s_weights.index(0).load(by_column(GROUP, WARPS))
        b_dv, b_one = through_features(
            b_dv, b_one, b_weight, KEY_SCALE, s_v, s_sums.index(anew(0)), s_totals.index(0)
        )
        b_weight = s_weights.index(1).load(by_column(GROUP, WARPS))
        b_dv, b_two = through_features(
            b_dv, b_two, b_weight, KEY_SCALE, s_v, s_sums.index(anew(1)), s_totals.index(1)
        )
        # What is masked gets zeros; what lies behind the end gets nothing.
        if p_mask is not None:
            b_dv = gl.where(visible(k_start, N, by_row(V, WARPS), p_mask)[:, None], b_dv, 0.0)
        store_rows(p_dvalue, k_start, b_dv, s_v, N, DV, V)
        copy_rows(s_v, p_value, k_start + ROWS, stride_vn, N, DV, V, p_mask)
        async_copy.commit_group()
        b_dx = (
            gl.zeros([ROWS, D], gl.float32, accumulator(D, WARPS)) + s_dkey.load(by_column(D, WARPS))[None, :]
        )
        b_dx = both_backward(
            b_dx, b_one, b_two, b_first, b_second, s_k, s_tiles, s_added, short, middle, narrow, D
        )
        b_dx *= KEY_SCALE
        if UNIT > 0:
            b_dx = unit_backward(
                b_dx, s_k.load(accumulator(D, WARPS)).to(gl.float32), s_factor, EPS, UNIT, DIM, D
            )
        if p_mask is not None:
            b_dx = gl.where(visible(k_start, N, by_row(D, WARPS), p_mask)[:, None], b_dx, 0.0)
        store_rows(p_dkey, k_start, b_dx, s_k, N, DIM, D)
    async_copy.wait_group(0)
