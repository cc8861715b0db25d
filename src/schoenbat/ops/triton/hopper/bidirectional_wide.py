"""Sums for bidirectional attention of heads of 65 to 128 channels on Hopper: identity features and two groups of pairs at once.

What is computed is in `kernels.bidirectional_sums`, whose `summarize` leaves the same: there each group of features is a part of its own,
which reads all rows again. Here the sums of both kinds, [128, 128] each, are half of the registers of eight warps, which work on
tiles of ROWS rows. Pairs are products of the 16 numbers y = Pᵀx of a row, two selections of which are their factors; half of them
at a time, for want of registers. Weights and scales multiply the sums, once.

Products end in the order in which they were started: behind each one that is waited for stands another, so that there is
something to multiply while pairs are formed and stored.

Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.degrees import GROUP, LENGTHS, ROWS, WARPS, narrow_weights
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
    copy_tile,
    in_memory,
    make_unit,
    place,
    shared_pair,
    shared_tile,
    shared_tiles,
    shared_vectors,
    start,
    store_multiplied,
)


@gluon.jit
def shared_map(p_tiles, dtype: gl.constexpr, D: gl.constexpr, F: gl.constexpr):
    """Pᵀ; of each group of pairs two tiles, which select the factors from y: see `plan.Plan`."""
    m_first, s_choices = shared_tile(dtype, NARROW, D), shared_tiles(dtype, 2 * F // GROUP, NARROW, GROUP)
    layout: gl.constexpr = in_memory(D, WARPS)
    o_y, o_c = gl.arange(0, NARROW, gl.SliceLayout(1, layout)), gl.arange(0, D, gl.SliceLayout(0, layout))
    m_first.index(0).store(gl.load(p_tiles + (o_c[None, :] * GROUP + o_y[:, None])))
    for i in gl.static_range(2 * F // GROUP):
        copy_tile(s_choices.index(i), p_tiles + (1 + i) * D * GROUP, NARROW, GROUP)
    return m_first, s_choices


@gluon.jit
def start_factors(s_y, s_choices, i_group):
    """Start the two factors of a group of pairs, [ROWS, GROUP] each."""
    return (
        start(s_y, s_choices.index(2 * i_group), ROWS, GROUP),
        start(s_y, s_choices.index(2 * i_group + 1), ROWS, GROUP),
    )


@gluon.jit
def store_pairs(s_phi, b_left, b_right, I_GROUP: gl.constexpr):
    """A group of pairs, into its columns of the features."""
    s_phi.slice(I_GROUP * GROUP, GROUP, 1).store((b_left * b_right).to(s_phi.dtype))


@gluon.jit
def column(b_narrow, COLUMN: gl.constexpr):
    o = gl.arange(0, NARROW, by_column(NARROW, WARPS))[None, :]
    return gl.sum(gl.where(o == COLUMN, b_narrow, 0.0), axis=1)


@gluon.jit
def zeros(SIZE: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.zeros([SIZE, COLUMNS], gl.float32, accumulator(COLUMNS, WARPS))


@gluon.jit
def store_weighted(p_sums, p_totals, b_sums, b_total, p_weight, scale, SIZE: gl.constexpr, V: gl.constexpr):
    """The sums of some features, and their totals, times weights."""
    layout: gl.constexpr = accumulator(V, WARPS)
    o_f, o_v = gl.arange(0, SIZE, gl.SliceLayout(1, layout)), gl.arange(0, V, gl.SliceLayout(0, layout))
    b_weight = gl.load(p_weight + o_f) * scale
    gl.store(p_sums + (o_f[:, None] * V + o_v[None, :]), b_sums * b_weight[:, None])
    o_f = gl.arange(0, SIZE, by_row(NARROW, WARPS))
    gl.store(p_totals + o_f, b_total * (gl.load(p_weight + o_f) * scale))


@gluon.jit(do_not_specialize=LENGTHS)
def summarize(
    p_x, p_rows, p_mask, p_scale, p_row_scale, p_row_weight, p_mean_weight, p_sums, p_totals, p_x_sum, p_row_sum,
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn, N, TILES, SPLITS, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, NUM_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Partial sums over TILES tiles, of queries where there is a p_row_scale, else of keys."""
    dtype: gl.constexpr = p_x.dtype.element_ty
    i_split, i_bh, i_b, i_h, i_map = place(SPLITS, HEADS, GROUPS, MAPS)
    p_x = at_head(p_x, i_b, i_h, stride_xb, stride_xh)
    p_rows = at_head(p_rows, i_b, i_h, stride_rb, stride_rh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N
    first_row = i_split * TILES * ROWS
    # Rows of other programs are not copied.
    end = gl.minimum(first_row + TILES * ROWS, N)
    scale = KEY_SCALE
    m_narrow = shared_tile(dtype, ROWS, NARROW)
    if p_row_scale is not None:
        scale = gl.load(p_scale + i_h)
        i_row = i_bh.to(gl.int64) * N
        p_row_scale, p_row_weight = p_row_scale + i_row, p_row_weight + i_row
        p_mean_weight += i_row
        s_scales, s_row_weights, s_mean_weights = shared_vectors(), shared_vectors(), shared_vectors()
        m_scaled = shared_tile(dtype, ROWS, V)
        copy_numbers(s_scales.index(0), p_row_scale, first_row, end)
        copy_numbers(s_row_weights.index(0), p_row_weight, first_row, end)
        copy_numbers(s_mean_weights.index(0), p_mean_weight, first_row, end)
    else:
        m_narrow.index(0).store(gl.full([ROWS, NARROW], 1.0, dtype, accumulator(NARROW, WARPS)))
    m_first, m_choices = shared_map(p_tiles + i_map * NUM_TILES * D * GROUP, dtype, D, F)
    s_xs, s_all_rows = shared_pair(dtype, D), shared_pair(dtype, V)
    m_y, m_phi = shared_tile(dtype, ROWS, NARROW), shared_tile(dtype, ROWS, F)
    b_s1, b_s2 = zeros(D, V), zeros(F, V)
    b_x, b_z, b_v = zeros(D, NARROW), zeros(F, NARROW), zeros(V, NARROW)
    copy_rows(s_xs.index(0), p_x, first_row, stride_xn, end, DIM, D, p_mask)
    copy_rows(s_all_rows.index(0), p_rows, first_row, stride_rn, end, DV, V, p_mask)
    async_copy.commit_group()
    for i in range((end - first_row + ROWS - 1) // ROWS):
        zero = anew(0)
        s_first, s_y, s_phi = m_first.index(zero), m_y.index(zero), m_phi.index(zero)
        s_narrow = m_narrow.index(zero)
        here, there = i & 1, (i + 1) & 1
        s_x, s_rows = s_xs.index(here), s_all_rows.index(here)
        next_row = first_row + (i + 1) * ROWS
        async_copy.wait_group(0)
        make_unit(s_x, EPS, UNIT, DIM, D)
        if p_row_scale is not None:
            narrow_weights(s_narrow, s_row_weights.index(here), s_mean_weights.index(here))
        fence_async_shared()
        b_y = start(s_x, s_first.permute((1, 0)), ROWS, NARROW)
        b_v = add(s_rows.permute((1, 0)), s_narrow, b_v)
        copy_rows(s_xs.index(there), p_x, next_row, stride_xn, end, DIM, D, p_mask)
        copy_rows(s_all_rows.index(there), p_rows, next_row, stride_rn, end, DV, V, p_mask)
        if p_row_scale is not None:
            copy_numbers(s_scales.index(there), p_row_scale, next_row, end)
            copy_numbers(s_row_weights.index(there), p_row_weight, next_row, end)
            copy_numbers(s_mean_weights.index(there), p_mean_weight, next_row, end)
            # Not in place: rows as they are may still be added up.
            s_scaled = m_scaled.index(zero)
            store_multiplied(s_scaled, s_rows, s_scales.index(here), V)
            s_rows = s_scaled
        async_copy.commit_group()
        s_y.store(warpgroup_mma_wait(1, [b_y]).to(dtype))
        fence_async_shared()
        b_left, b_right = start_factors(s_y, m_choices, zero)
        b_x = add(s_x.permute((1, 0)), s_narrow, b_x)
        b_left, b_right = warpgroup_mma_wait(1, [b_left, b_right])
        store_pairs(s_phi, b_left, b_right, 0)
        b_left, b_right = start_factors(s_y, m_choices, zero + 1)
        b_s1 = add(s_x.permute((1, 0)), s_rows, b_s1)
        b_left, b_right = warpgroup_mma_wait(1, [b_left, b_right])
        store_pairs(s_phi, b_left, b_right, 1)
        fence_async_shared()
        b_s2, b_z = add(s_phi.permute((1, 0)), s_rows, b_s2), add(s_phi.permute((1, 0)), s_narrow, b_z)
        b_s1, b_s2, b_x, b_z, b_v = warpgroup_mma_wait(0, [b_s1, b_s2, b_x, b_z, b_v])
    async_copy.wait_group(0)
    i_out = (i_bh * SPLITS + i_split).to(gl.int64)
    p_sums, p_totals = p_sums + i_out * (D + F) * V, p_totals + i_out * (D + F)
    store_weighted(p_sums, p_totals, b_s1, column(b_x, 0), p_linear + i_map * D, scale, D, V)
    p_root += i_map * F
    store_weighted(p_sums + D * V, p_totals + D, b_s2, column(b_z, 0), p_root, scale * scale, F, V)
    gl.store(p_x_sum + i_out * D + gl.arange(0, D, by_row(NARROW, WARPS)), column(b_x, 1) * scale)
    gl.store(p_row_sum + i_out * V + gl.arange(0, V, by_row(NARROW, WARPS)), column(b_v, 2))
