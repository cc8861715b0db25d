"""Bidirectional attention by maps of many degrees on Hopper: all directions of a map stay in shared memory.

What is computed is in `kernels.bidirectional_sums` and `kernels.bidirectional`: `summarize` leaves the same parts of the sums, `read` gives
the same outputs. A map has two groups of GROUP features, each a product of as many projections as its degree says: one for each
level below it. The highest levels serve few features, and share two tiles of directions: `layout.Packing` says which. A program of
two warp groups works on tiles of ROWS rows, so that one may multiply factors while the other multiplies matrices.

Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
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
    copy_numbers,
    copy_rows,
    copy_tile,
    in_memory,
    in_two_columns,
    make_unit,
    operand,
    place,
    row_sums,
    shared_pair,
    shared_tile,
    shared_tiles,
    shared_vector,
    start,
    store_multiplied,
    store_rows,
)

WARPS = gl.constexpr(8)
ROWS = gl.constexpr(128)
GROUP = gl.constexpr(64)
# What depends on the length of a sequence, or on the degrees that were drawn: no kernel is compiled again for it.
LENGTHS = ("N", "TILES", "SPLITS", "NUM_TILES")
# Its square is still a normal number.
TINY = gl.constexpr(1e-15)


@gluon.constexpr_function
def flat(columns):
    """The layout of a result of GROUP rows: the warp groups share its columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, columns // 2, 16])


@gluon.jit
def shared_map(p_tiles, p_first, NUM_TILES, dtype: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr):
    """Begin to copy the tiles of directions that are needed, of which there may be fewer than there is room for.

    The two that are packed follow the others.
    """
    s_tiles = shared_tiles(dtype, HELD, D, GROUP)
    narrow = gl.load(p_first + 3)
    for i in range(narrow + 2):
        i_tile = i if i < narrow else NUM_TILES - 2 + i - narrow
        copy_tile(s_tiles.index(i), p_tiles + i_tile * D * GROUP, D, GROUP)
    return s_tiles


@gluon.jit
def shared_features(p_root, p_degrees, p_first, scale, dtype: gl.constexpr):
    """Of each group the weights of its features, and what is added to its projections."""
    return shared_weights(p_root, p_degrees, p_first, scale), shared_added(p_degrees, p_first, dtype)


@gluon.jit
def shared_weights(p_root, p_degrees, p_first, scale):
    """Of each group ``√w scale^(degree − 1)``."""
    vectors: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_weights = gl.allocate_shared_memory(gl.float32, [2, GROUP], vectors)
    middle, last = gl.load(p_first + 1), gl.load(p_first + 2)
    for i in gl.static_range(2):
        o_f = i * GROUP + gl.arange(0, GROUP, by_column(GROUP, WARPS))
        b_degree, b_weight = gl.load(p_degrees + o_f), gl.load(p_root + o_f)
        for level in range(1, middle if i == 0 else last - middle):
            b_weight = gl.where(b_degree > level, b_weight * scale, b_weight)
        s_weights.index(i).store(b_weight)
    return s_weights


@gluon.jit
def shared_added(p_degrees, p_first, dtype: gl.constexpr):
    """A row for each tile of a group: 1 for features that have no factor there, whose directions are zeros.

    To all others almost nothing is added, so that no factor is zero: products can be divided by each of them.
    """
    layout: gl.constexpr = in_memory(GROUP, WARPS)
    s_added = shared_tiles(dtype, 2, NARROW, GROUP)
    for i in gl.static_range(2):
        o_level = gl.arange(0, NARROW, gl.SliceLayout(1, layout))[:, None]
        o_f = i * GROUP + gl.arange(0, GROUP, gl.SliceLayout(0, layout))[None, :]
        if i == 1:
            o_level, o_f = packed_places(
                o_level, o_f - GROUP, gl.load(p_first + 3) - gl.load(p_first + 1), gl.load(p_first + 4)
            )
        b_added = gl.where(gl.load(p_degrees + o_f) > o_level, TINY, 1.0)
        s_added.index(i).store(b_added.to(dtype))
    return s_added


@gluon.jit
def packed_places(o_tile, o_column, narrow, short):
    """The levels and features at the places of the second group's tiles, of which those from `narrow` on are packed.

    The first of them has 32 features of a level, 16 of the next and 8 of two more, the second 8 of six levels and 16 of the
    first group's level `short`: see `layout.PACKED`.
    """
    o_later = (o_column >= 32).to(gl.int32) + (o_column >= 48).to(gl.int32) + (o_column >= 56).to(gl.int32)
    o_shift = gl.where(o_later == 0, 32, gl.where(o_later == 1, 16, gl.where(o_later == 2, 8, 0)))
    m_of_first = o_column >= 48
    o_second_level = gl.where(m_of_first, short, narrow + 4 + o_column // 8)
    o_second = gl.where(m_of_first, o_column, GROUP + 56 + o_column % 8)
    m_wide, m_first = o_tile < narrow, o_tile == narrow
    o_level = gl.where(m_wide, o_tile, gl.where(m_first, narrow + o_later, o_second_level))
    o_feature = gl.where(m_wide, GROUP + o_column, gl.where(m_first, GROUP + o_column + o_shift, o_second))
    return o_level, o_feature


@gluon.jit
def start_level(s_x, s_tiles, s_added, i_tile, level):
    """Start a level's factors, [ROWS, GROUP]: projections, and what is added to them, by a product as well.

    It is added last: before, it would be lost where the terms of a projection cancel. Which row is added is said by an
    operand that is made anew: one that is the same for all tiles might be lost (docs/kernels.md).
    """
    layout: gl.constexpr = operand(GROUP, WARPS)
    m_level = gl.arange(0, NARROW, gl.SliceLayout(0, layout)) == anew(level)
    b_own = gl.zeros([ROWS, NARROW], gl.float32, layout) + gl.where(m_level, 1.0, 0.0)[None, :]
    return add(b_own.to(s_x.dtype), s_added, start_full(s_x, s_tiles, i_tile))


@gluon.jit
def start_full(s_x, s_tiles, i_tile):
    """The same where every feature has a factor, and nobody divides by it."""
    return start(s_x, s_tiles.index(i_tile), ROWS, GROUP)


@gluon.jit
def two_levels(s_x, s_tiles, s_added, i_tile, level):
    """The factors of two levels."""
    b_a = start_level(s_x, s_tiles, s_added, i_tile, level)
    b_b = start_level(s_x, s_tiles, s_added, i_tile + 1, level + 1)
    return warpgroup_mma_wait(0, [b_a, b_b])


@gluon.jit
def products(s_x, s_tiles, s_added, first, last, full=None):
    """A group's products of projections, [ROWS, GROUP]; two levels at a time.

    Up to the tile `full` every feature has a factor. Products that are divided again are formed without it.
    """
    first = anew(first)
    if full is None:
        b_product = warpgroup_mma_wait(0, [start_level(s_x, s_tiles, s_added, first, 0)])
        mixed = first + 1
    else:
        b_product = warpgroup_mma_wait(0, [start_full(s_x, s_tiles, first)])
        mixed = first + 1 + (gl.minimum(full, last) - first - 1) // 2 * 2
        for i in range(first + 1, mixed, 2):
            b_a, b_b = start_full(s_x, s_tiles, i), start_full(s_x, s_tiles, i + 1)
            b_a, b_b = warpgroup_mma_wait(0, [b_a, b_b])
            b_product = b_product * b_a * b_b
    for i in range(mixed, last - 1, 2):
        b_a, b_b = two_levels(s_x, s_tiles, s_added, i, i - first)
        b_product = b_product * b_a * b_b
    if (last - mixed) % 2 == 1:
        b_a = start_level(s_x, s_tiles, s_added, last - 1, last - 1 - first)
        b_product = b_product * warpgroup_mma_wait(0, [b_a])
    return b_product


@gluon.jit
def halves(b, HALF: gl.constexpr):
    """The first and the last HALF columns: other names for the same registers."""
    layout: gl.constexpr = accumulator(HALF, WARPS)
    b_low, b_high = gl.split(gl.permute(gl.reshape(b, [ROWS, 2, HALF]), (0, 2, 1)))
    return gl.convert_layout(b_low, layout), gl.convert_layout(b_high, layout)


@gluon.jit
def side_by_side(b_low, b_high, HALF: gl.constexpr):
    b_whole = gl.reshape(gl.permute(gl.join(b_low, b_high), (0, 2, 1)), [ROWS, 2 * HALF])
    return gl.convert_layout(b_whole, accumulator(2 * HALF, WARPS))


@gluon.jit
def times_packed(b_product, b_first, b_second):
    """The products of the second group times their factors in the packed tiles; those of the first group's last 16 features."""
    b_32, b_rest = halves(b_first, 32)
    b_16, b_eights = halves(b_rest, 16)
    b_four, b_rest = halves(b_second, 32)
    b_two, b_of_first = halves(b_rest, 16)
    b_a, b_b = halves(b_four, 16)
    b_a, b_b = halves(b_eights * b_a * b_b * b_two, 8)
    b_low, b_high = halves(b_product, 32)
    b_middle, b_top = halves(b_high * b_32, 16)
    b_last_but_one, b_last = halves(b_top * b_16, 8)
    b_top = side_by_side(b_last_but_one, b_last * b_a * b_b, 8)
    return side_by_side(b_low, side_by_side(b_middle, b_top, 16), 32), b_of_first


@gluon.jit
def times_last(b_product, b_factor):
    """The products of the first group times the factors of its last 16 features."""
    b_low, b_high = halves(b_product, 32)
    b_middle, b_top = halves(b_high, 16)
    return side_by_side(b_low, side_by_side(b_middle, b_top * b_factor, 16), 32)


@gluon.jit
def packing(p_first):
    """Of each group what `layout.Packing` says: where it ends, but for what is packed, and up to where it is full."""
    narrow, short = gl.load(p_first + 3), gl.load(p_first + 4)
    return (short, gl.load(p_first + 5)), (gl.load(p_first + 1), narrow, gl.load(p_first + 6))


@gluon.jit
def second_products(s_x, s_tiles, s_added, of_second, zero=0):
    """Products of the second group that are not divided by their factors; the factors of the first group's last features.

    Here and below: a zero that is `unknown` makes places in memory be worked out again.
    """
    middle, narrow, full = of_second
    s_added = s_added.index(zero + 1)
    b_product = products(s_x, s_tiles, s_added, middle, narrow, full)
    b_first, b_second = two_levels(s_x, s_tiles, s_added, anew(narrow), narrow - middle)
    return times_packed(b_product, b_first, b_second)


@gluon.jit
def first_products(s_x, s_tiles, s_added, b_last, of_first, zero=0):
    """Those of the first group."""
    short, full = of_first
    return times_last(products(s_x, s_tiles, s_added.index(zero), zero, short, full), b_last)


@gluon.jit
def shared_narrow(p, dtype: gl.constexpr, SIZE: gl.constexpr):
    """A vector as a narrow operand: two columns that add up to it, and zeros."""
    s_narrow = shared_tile(dtype, SIZE, NARROW)
    b_vector = gl.load(p + gl.arange(0, SIZE, by_row(NARROW, WARPS)))
    s_narrow.index(0).store(in_two_columns(b_vector, dtype, 0))
    return s_narrow


@gluon.jit
def shared_copy(p, SIZE: gl.constexpr):
    """A vector by column."""
    s_vector = shared_vector(SIZE)
    s_vector.store(gl.load(p + gl.arange(0, SIZE, by_column(SIZE, WARPS))))
    return s_vector


@gluon.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_out, p_scale, p_sums, p_totals, p_key_mean, p_value_mean, p_coefficients,
    stride_qb, stride_qh, stride_qn, N, TILES, SPLITS, EPS, p_tiles, p_root, p_degrees, p_first, NUM_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Some tiles of outputs: ``v̄ + numerator / max(total, floor)``."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_split, i_bh, i_b, i_h, i_map = place(SPLITS, HEADS, GROUPS, MAPS)
    i_state = (i_bh // GROUPS).to(gl.int64)
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_out += i_bh.to(gl.int64) * N * DV
    scale = gl.load(p_scale + i_h)
    constant, zeroth = gl.load(p_coefficients + 3 * i_map), gl.load(p_coefficients + 3 * i_map + 1)
    slope = gl.load(p_coefficients + 3 * i_map + 2)
    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * NUM_TILES * D * GROUP, p_first, NUM_TILES, dtype, D, HELD)
    s_weights, s_added = shared_features(p_root + i_map * 2 * GROUP, p_degrees, p_first, scale, dtype)
    s_sums = shared_tiles(dtype, 2, GROUP, V)
    copy_tile(s_sums.index(0), p_sums + i_state * 2 * GROUP * V, GROUP, V)
    copy_tile(s_sums.index(1), p_sums + (i_state * 2 + 1) * GROUP * V, GROUP, V)
    s_first = shared_narrow(p_totals + i_state * 2 * GROUP, dtype, GROUP)
    s_second = shared_narrow(p_totals + (i_state * 2 + 1) * GROUP, dtype, GROUP)
    s_mean = shared_narrow(p_key_mean + i_state * D, dtype, D)
    s_value = shared_copy(p_value_mean + i_state * V, V)
    s_queries = shared_pair(dtype, D)
    first_tile = i_split * TILES
    num_here = gl.minimum(TILES, (N + ROWS - 1) // ROWS - first_tile)
    copy_rows(s_queries.index(0), p_query, first_tile * ROWS, stride_qn, N, DIM, D)
    async_copy.commit_group()
    for i in range(num_here):
        q_start = (first_tile + i) * ROWS
        s_q = s_queries.index(i % 2)
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + ROWS, stride_qn, N, DIM, D)
        async_copy.commit_group()
        make_unit(s_q, EPS, UNIT, DIM, D)
        fence_async_shared()
        b_logit = start(s_q, s_mean.index(0), ROWS, NARROW)
        b_logit = scale * row_sums(warpgroup_mma_wait(0, [b_logit]))
        b_phi, b_last = second_products(s_q, s_tiles, s_added, of_second)
        b_phi = (b_phi * (s_weights.index(1).load(by_column(GROUP, WARPS)) * scale)[None, :]).to(dtype)
        b_numerator = start(gl.convert_layout(b_phi, operand(V, WARPS)), s_sums.index(1), ROWS, V)
        b_total = start(gl.convert_layout(b_phi, operand(NARROW, WARPS)), s_second.index(0), ROWS, NARROW)
        b_numerator, b_total = warpgroup_mma_wait(0, [b_numerator, b_total])
        b_phi = first_products(s_q, s_tiles, s_added, b_last, of_first)
        b_phi = (b_phi * (s_weights.index(0).load(by_column(GROUP, WARPS)) * scale)[None, :]).to(dtype)
        b_numerator = add(gl.convert_layout(b_phi, operand(V, WARPS)), s_sums.index(0), b_numerator)
        b_total = add(gl.convert_layout(b_phi, operand(NARROW, WARPS)), s_first.index(0), b_total)
        b_numerator, b_total = warpgroup_mma_wait(0, [b_numerator, b_total])

        b_total = row_sums(b_total) + constant
        b_floor = zeroth * gl.exp(gl.minimum(gl.maximum(slope * b_logit, LOWEST_EXPONENT), 0.0))
        b_floored = gl.where(b_total < b_floor, b_floor, b_total)
        # One that overflows shows as NaN, where a quotient of zero would pass for v̄.
        b_inverse = gl.where(b_floored == float("inf"), float("nan"), 1.0 / b_floored)
        b_inverse = gl.convert_layout(b_inverse, by_row(V, WARPS))
        b_out = s_value.load(by_column(V, WARPS))[None, :] + b_numerator * b_inverse[:, None]
        store_rows(p_out, q_start, b_out, s_q, N, DV, V)
    async_copy.wait_group(0)


@gluon.jit
def narrow_weights(s_weights, s_weight, s_mean):
    """The columns w, u and 1, and zeros."""
    layout: gl.constexpr = by_row(NARROW, WARPS)
    o = gl.arange(0, NARROW, by_column(NARROW, WARPS))[None, :]
    b_w, b_u = s_weight.load(layout)[:, None], s_mean.load(layout)[:, None]
    s_weights.store(
        gl.where(o == 0, b_w, gl.where(o == 1, b_u, gl.where(o == 2, 1.0, 0.0))).to(s_weights.dtype)
    )


@gluon.jit
def column(b_narrow, COLUMN: gl.constexpr):
    o = gl.arange(0, NARROW, gl.SliceLayout(0, flat(NARROW)))[None, :]
    return gl.sum(gl.where(o == COLUMN, b_narrow, 0.0), axis=1)


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    return gl.zeros([GROUP, COLUMNS], gl.float32, flat(COLUMNS))


@gluon.jit
def store_features(s_phi, b_phi, s_weight, scale):
    s_phi.store((b_phi * (s_weight.load(by_column(GROUP, WARPS)) * scale)[None, :]).to(s_phi.dtype))


@gluon.jit(do_not_specialize=LENGTHS)
def summarize(
    p_x, p_rows, p_mask, p_scale, p_row_scale, p_row_weight, p_mean_weight, p_sums, p_totals, p_x_sum, p_row_sum,
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn, N, TILES, SPLITS, KEY_SCALE, EPS,
    p_tiles, p_root, p_degrees, p_first, NUM_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Partial sums over TILES tiles, of queries where there is a p_row_scale, else of keys."""
    dtype: gl.constexpr = p_x.dtype.element_ty
    i_split, i_bh, i_b, i_h, i_map = place(SPLITS, HEADS, GROUPS, MAPS)
    p_x = at_head(p_x, i_b, i_h, stride_xb, stride_xh)
    p_rows = at_head(p_rows, i_b, i_h, stride_rb, stride_rh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N
    scale = KEY_SCALE
    m_narrow = shared_tile(dtype, ROWS, NARROW)
    if p_row_scale is not None:
        scale = gl.load(p_scale + i_h)
        i_row = i_bh.to(gl.int64) * N
        p_row_scale, p_row_weight = p_row_scale + i_row, p_row_weight + i_row
        p_mean_weight += i_row
        s_scale, s_row_weight, s_mean_weight = shared_vector(ROWS), shared_vector(ROWS), shared_vector(ROWS)
    else:
        m_narrow.index(0).store(gl.full([ROWS, NARROW], 1.0, dtype, accumulator(NARROW, WARPS)))
    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * NUM_TILES * D * GROUP, p_first, NUM_TILES, dtype, D, HELD)
    s_weights, s_added = shared_features(p_root + i_map * 2 * GROUP, p_degrees, p_first, scale, dtype)
    s_xs, m_rows, s_phi = (
        shared_pair(dtype, D),
        shared_tile(dtype, ROWS, V),
        shared_tiles(dtype, 2, ROWS, GROUP),
    )
    b_s1, b_s2, b_z1, b_z2 = zeros(V), zeros(V), zeros(NARROW), zeros(NARROW)
    b_x, b_v = zeros(NARROW), zeros(NARROW)
    first_tile = i_split * TILES
    num_here = gl.minimum(TILES, (N + ROWS - 1) // ROWS - first_tile)
    for i in range(-1, num_here):
        s_rows, s_narrow = m_rows.index(0), m_narrow.index(0)
        start_row = (first_tile + i + 1) * ROWS
        async_copy.wait_group(0)
        copy_rows(s_xs.index((i + 1) & 1), p_x, start_row, stride_xn, N, DIM, D, p_mask)
        if i >= 0:
            s_x = s_xs.index(i & 1)
            make_unit(s_x, EPS, UNIT, DIM, D)
            if p_row_scale is not None:
                narrow_weights(s_narrow, s_row_weight, s_mean_weight)
            fence_async_shared()
            b_x, b_v = add(s_x.permute((1, 0)), s_narrow, b_x), add(s_rows.permute((1, 0)), s_narrow, b_v)
            b_x, b_v = warpgroup_mma_wait(0, [b_x, b_v])
            if p_row_scale is not None:
                store_multiplied(s_rows, s_rows, s_scale, V)
            b_phi, b_last = second_products(s_x, s_tiles, s_added, of_second)
            store_features(s_phi.index(1), b_phi, s_weights.index(1), scale)
            b_phi = first_products(s_x, s_tiles, s_added, b_last, of_first)
            store_features(s_phi.index(0), b_phi, s_weights.index(0), scale)
            fence_async_shared()
            s_phi1, s_phi2 = s_phi.index(0).permute((1, 0)), s_phi.index(1).permute((1, 0))
            b_s1, b_s2 = add(s_phi1, s_rows, b_s1), add(s_phi2, s_rows, b_s2)
            b_z1, b_z2 = add(s_phi1, s_narrow, b_z1), add(s_phi2, s_narrow, b_z2)
            b_s1, b_s2, b_z1, b_z2 = warpgroup_mma_wait(0, [b_s1, b_s2, b_z1, b_z2])
        copy_rows(s_rows, p_rows, start_row, stride_rn, N, DV, V, p_mask)
        if p_row_scale is not None:
            copy_numbers(s_scale, p_row_scale, start_row, N)
            copy_numbers(s_row_weight, p_row_weight, start_row, N)
            copy_numbers(s_mean_weight, p_mean_weight, start_row, N)
        async_copy.commit_group()
    async_copy.wait_group(0)
    i_out = (i_bh * SPLITS + i_split).to(gl.int64)
    o_row, o_v = gl.arange(0, GROUP, gl.SliceLayout(1, flat(V))), gl.arange(0, V, gl.SliceLayout(0, flat(V)))
    p_sums += i_out * 2 * GROUP * V
    gl.store(p_sums + (o_row[:, None] * V + o_v[None, :]), b_s1)
    gl.store(p_sums + ((GROUP + o_row)[:, None] * V + o_v[None, :]), b_s2)
    o = gl.arange(0, GROUP, gl.SliceLayout(1, flat(NARROW)))
    gl.store(p_totals + i_out * 2 * GROUP + o, column(b_z1, 0))
    gl.store(p_totals + (i_out * 2 + 1) * GROUP + o, column(b_z2, 0))
    gl.store(p_x_sum + i_out * D + o, column(b_x, 1) * scale)
    gl.store(p_row_sum + i_out * V + o, column(b_v, 2))
