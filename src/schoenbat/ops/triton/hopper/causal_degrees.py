"""Causal attention by maps of many degrees on Hopper, in one pass as `causal` has it; features are those of `degrees`.

A program of two warp groups goes through a segment of tiles of ROWS rows. Scores are products of both groups of features, and sums over
keys are Σφ(k)vᵀ and Σφ(k) of both, Σk and Σv: the latter three by a narrow tile of ones, so that all columns of a result are the same.
Directions leave room for one tile each of queries, keys and values. The next is copied as soon as one was read for the last time.

Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper import causal
from schoenbat.ops.triton.hopper.causal import floored, keys_seen
from schoenbat.ops.triton.hopper.causal_narrow import size_of_sums
from schoenbat.ops.triton.hopper.degrees import (
    GROUP,
    ROWS,
    WARPS,
    column,
    first_products,
    flat,
    packing,
    second_products,
    shared_added,
    shared_map,
    shared_weights,
    store_features,
    zeros,
)
from schoenbat.ops.triton.hopper.warp_groups import (
    NARROW,
    accumulator,
    add,
    at_head,
    by_column,
    by_row,
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
    split_in_two,
    start,
    store_rows,
    unknown,
    visible,
)

# What depends on the length of a sequence, or on the degrees that were drawn: no kernel is compiled again for it.
LENGTHS = (*causal.LENGTHS, "MAP_TILES")


@gluon.jit
def packing_again(of_first, of_second):
    """The same, `unknown`: places of the levels' tiles are worked out again."""
    short, full_first = of_first
    middle, narrow, full_second = of_second
    return (unknown(short), full_first), (unknown(middle), unknown(narrow), full_second)


@gluon.jit
def both_features(s_phi, s_x, s_tiles, s_added, s_weights, scale, of_first, of_second, zero):
    """Store the features of a tile of rows."""
    of_first, of_second = packing_again(of_first, of_second)
    b_phi, b_last = second_products(s_x, s_tiles, s_added, of_second, zero)
    store_features(s_phi.index(zero + 1), b_phi, s_weights.index(1), scale)
    b_phi = first_products(s_x, s_tiles, s_added, b_last, of_first, zero)
    store_features(s_phi.index(zero), b_phi, s_weights.index(0), scale)


@gluon.jit
def weighted(b_product, s_weight, scale, dtype: gl.constexpr):
    """Features from products of projections."""
    return (b_product * (s_weight.load(by_column(GROUP, WARPS)) * scale)[None, :]).to(dtype)


@gluon.jit
def shared_ones(dtype: gl.constexpr):
    """A narrow tile by which rows are added up."""
    s_ones = shared_tile(dtype, ROWS, NARROW)
    s_ones.index(0).store(gl.full([ROWS, NARROW], 1.0, dtype, accumulator(NARROW, WARPS)))
    return s_ones


@gluon.jit
def tiles_of_sums(p_sums, first, last, D: gl.constexpr, V: gl.constexpr):
    """Both sums of features times rows over the segments from `first` to before `last`."""
    layout: gl.constexpr = flat(V)
    o_f = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None] * V
    o_v = gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
    b_s1, b_s2 = zeros(V), zeros(V)
    for i in range(first, last):
        p = p_sums + i * size_of_sums(D, GROUP, V)
        b_s1 += gl.load(p + (o_f + o_v))
        b_s2 += gl.load(p + (GROUP * V + o_f + o_v))
    return b_s1, b_s2


@gluon.jit
def vectors_of_sums(p_sums, first, last, D: gl.constexpr, V: gl.constexpr):
    """The sums of features, of x and of rows likewise, as narrow results of equal columns."""
    o = gl.arange(0, GROUP, gl.SliceLayout(1, flat(NARROW)))[:, None]
    b_z1, b_z2, b_x, b_v = zeros(NARROW), zeros(NARROW), zeros(NARROW), zeros(NARROW)
    for i in range(first, last):
        p = p_sums + i * size_of_sums(D, GROUP, V) + 2 * GROUP * V
        b_z1 += gl.load(p + o)
        b_z2 += gl.load(p + GROUP + o)
        b_x += gl.load(p + 2 * GROUP + o)
        b_v += gl.load(p + 2 * GROUP + D + o)
    return b_z1, b_z2, b_x, b_v


@gluon.jit
def store_sums(p, b_s1, b_s2, b_z1, b_z2, b_x, b_v, D: gl.constexpr, V: gl.constexpr):
    """Two tiles and four vectors."""
    layout: gl.constexpr = flat(V)
    o_f = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None] * V
    o_v = gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
    gl.store(p + (o_f + o_v), b_s1)
    gl.store(p + (GROUP * V + o_f + o_v), b_s2)
    p += 2 * GROUP * V
    o = gl.arange(0, GROUP, gl.SliceLayout(1, flat(NARROW)))
    gl.store(p + o, b_z1)
    gl.store(p + GROUP + o, b_z2)
    gl.store(p + 2 * GROUP + o, b_x)
    gl.store(p + 2 * GROUP + D + o, b_v)


@gluon.jit
def in_two(b_equal, dtype: gl.constexpr):
    """A narrow result of equal columns as an operand: two columns that add up to it, and zeros."""
    o = gl.arange(0, NARROW, gl.SliceLayout(0, flat(NARROW)))[None, :]
    b_high, b_low = split_in_two(b_equal, dtype)
    b_high, b_low = b_high.to(gl.float32), b_low.to(gl.float32)
    return gl.where(o == 0, b_high, gl.where(o == 1, b_low, 0.0)).to(dtype)


@gluon.jit
def add_features(b_s1, b_s2, b_z1, b_z2, s_phi, s_rows, s_narrow, zero):
    """Start to add a tile of features times rows, and times a narrow tile, to their sums."""
    s_phi1, s_phi2 = s_phi.index(zero).permute((1, 0)), s_phi.index(zero + 1).permute((1, 0))
    return (
        add(s_phi1, s_rows, b_s1),
        add(s_phi2, s_rows, b_s2),
        add(s_phi1, s_narrow, b_z1),
        add(s_phi2, s_narrow, b_z2),
    )


@gluon.jit(do_not_specialize=LENGTHS)
def sum_keys(
    p_key, p_value, p_mask, p_sums, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_KEY, FIRST_KEY, TILES, SEGMENTS, KEY_SCALE, EPS, p_tiles, p_root, p_degrees, p_first, MAP_TILES,
    HEADS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """The sums over a segment of keys; of the last one nobody needs them."""
    dtype: gl.constexpr = p_key.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS - 1, HEADS, 1, MAPS)
    p_key = at_head(p_key, i_b, i_h, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * MAP_TILES * D * GROUP, p_first, MAP_TILES, dtype, D, HELD)
    s_added = shared_added(p_degrees, p_first, dtype)
    s_weights = shared_weights(p_root + i_map * 2 * GROUP, p_degrees, p_first, KEY_SCALE)
    s_keys, s_values = shared_pair(dtype, D), shared_pair(dtype, V)
    s_phi, m_ones = shared_tiles(dtype, 2, ROWS, GROUP), shared_ones(dtype)
    b_s1, b_s2, b_z1, b_z2, b_x, b_v = (
        zeros(V),
        zeros(V),
        zeros(NARROW),
        zeros(NARROW),
        zeros(NARROW),
        zeros(NARROW),
    )
    first = i_segment * TILES
    k_start = first * ROWS - FIRST_KEY
    copy_rows(s_keys.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(TILES):
        zero = unknown(0)
        s_k, s_v, s_ones = s_keys.index(i % 2), s_values.index(i % 2), m_ones.index(zero)
        k_start = (first + i + 1) * ROWS - FIRST_KEY
        async_copy.wait_group(0)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()
        both_features(s_phi, s_k, s_tiles, s_added, s_weights, KEY_SCALE, of_first, of_second, zero)
        fence_async_shared()
        b_s1, b_s2, b_z1, b_z2 = add_features(b_s1, b_s2, b_z1, b_z2, s_phi, s_v, s_ones, zero)
        b_x, b_v = add(s_k.permute((1, 0)), s_ones, b_x), add(s_v.permute((1, 0)), s_ones, b_v)
        b_s1, b_s2, b_z1, b_z2, b_x, b_v = warpgroup_mma_wait(0, [b_s1, b_s2, b_z1, b_z2, b_x, b_v])
    async_copy.wait_group(0)
    p_sums += (i_bh * (SEGMENTS - 1) + i_segment).to(gl.int64) * size_of_sums(D, GROUP, V)
    store_sums(p_sums, b_s1, b_s2, column(b_z1, 0), column(b_z2, 0), column(b_x, 0), column(b_v, 0), D, V)


@gluon.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_out, p_inverse, p_constant, p_slope,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS,
    p_tiles, p_root, p_degrees, p_first, MAP_TILES,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """The outputs of a segment of queries, and by row 1/f, e and the slope of the floor."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS, HEADS, GROUPS, MAPS)
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_key = at_head(p_key, i_b, i_h // GROUPS, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h // GROUPS, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    p_sums += (i_bh // GROUPS).to(gl.int64) * (SEGMENTS - 1) * size_of_sums(D, GROUP, V)
    i_out = i_bh.to(gl.int64) * N_QUERY
    scale = gl.load(p_scale + i_h)
    constant = gl.load(p_coefficients + 3 * i_map)
    zeroth = gl.load(p_coefficients + 3 * i_map + 1)
    slope = gl.load(p_coefficients + 3 * i_map + 2)

    of_first, of_second = packing(p_first)
    s_tiles = shared_map(p_tiles + i_map * MAP_TILES * D * GROUP, p_first, MAP_TILES, dtype, D, HELD)
    s_added = shared_added(p_degrees, p_first, dtype)
    p_root += i_map * 2 * GROUP
    s_weights = shared_weights(p_root, p_degrees, p_first, KEY_SCALE)
    s_query_weights = shared_weights(p_root, p_degrees, p_first, scale)
    m_q, m_k, m_v = shared_tile(dtype, ROWS, D), shared_tile(dtype, ROWS, D), shared_tile(dtype, ROWS, V)
    s_phi, m_ones = shared_tiles(dtype, 2, ROWS, GROUP), shared_ones(dtype)
    s_sums, s_totals = shared_tiles(dtype, 2, GROUP, V), shared_tiles(dtype, 2, GROUP, NARROW)
    m_before, s_zv = shared_tile(dtype, D, NARROW), shared_vector(V)
    b_s1, b_s2 = tiles_of_sums(p_sums, 0, i_segment, D, V)
    b_z1, b_z2, b_zk, b_zv = vectors_of_sums(p_sums, 0, i_segment, D, V)
    o_q = gl.arange(0, ROWS, by_row(ROWS, WARPS))

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    copy_rows(m_q.index(0), p_query, first * ROWS - FIRST_QUERY, stride_qn, N_QUERY, DIM, D)
    copy_rows(m_k.index(0), p_key, first * ROWS - FIRST_KEY, stride_kn, N_KEY, DIM, D, p_mask)
    async_copy.commit_group()
    copy_rows(m_v.index(0), p_value, first * ROWS - FIRST_KEY, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(num_here):
        zero = unknown(0)
        s_q, s_k, s_v, s_ones = m_q.index(zero), m_k.index(zero), m_v.index(zero), m_ones.index(zero)
        i_tile = first + i
        q_start, k_start = i_tile * ROWS - FIRST_QUERY, i_tile * ROWS - FIRST_KEY
        s_sums.index(zero).store(b_s1.to(dtype))
        s_sums.index(zero + 1).store(b_s2.to(dtype))
        s_totals.index(zero).store(in_two(b_z1, dtype))
        s_totals.index(zero + 1).store(in_two(b_z2, dtype))
        m_before.index(zero).store(in_two(b_zk, dtype))
        s_zv.store(column(b_zv, 0))
        async_copy.wait_group(1)  # all but the values
        make_unit(s_q, EPS, UNIT, DIM, D)
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()

        # The mean logit, which makes the floor.
        b_logits = start(s_q, s_k.permute((1, 0)), ROWS, ROWS)
        b_before = start(s_q, m_before.index(zero), ROWS, NARROW)
        b_zk = add(s_k.permute((1, 0)), s_ones, b_zk)
        b_logits, b_before, b_zk = warpgroup_mma_wait(0, [b_logits, b_before, b_zk])
        b_logit = gl.sum(gl.where(seen_from(zero, ROWS, False), b_logits, 0.0), axis=1)
        b_logit += gl.convert_layout(row_sums(b_before), by_row(ROWS, WARPS))
        b_logit *= scale * KEY_SCALE
        both_features(s_phi, s_k, s_tiles, s_added, s_weights, KEY_SCALE, of_first, of_second, zero)
        async_copy.wait_group(0)
        copy_rows(s_k, p_key, k_start + ROWS, stride_kn, N_KEY, DIM, D, p_mask)
        async_copy.commit_group()
        zero = unknown(0)
        s_q, s_k, s_v, s_ones = m_q.index(zero), m_k.index(zero), m_v.index(zero), m_ones.index(zero)
        of_first_again, of_second_again = packing_again(of_first, of_second)
        b_phi, b_last = second_products(s_q, s_tiles, s_added, of_second_again, zero)
        b_phi2 = weighted(b_phi, s_query_weights.index(1), scale, dtype)
        b_phi = first_products(s_q, s_tiles, s_added, b_last, of_first_again, zero)
        b_phi1 = weighted(b_phi, s_query_weights.index(0), scale, dtype)
        copy_rows(s_q, p_query, q_start + ROWS, stride_qn, N_QUERY, DIM, D)
        async_copy.commit_group()
        fence_async_shared()
        s_phi1, s_phi2 = s_phi.index(zero).permute((1, 0)), s_phi.index(zero + 1).permute((1, 0))
        b_scores = start(gl.convert_layout(b_phi1, operand(ROWS, WARPS)), s_phi1, ROWS, ROWS)
        b_scores = add(gl.convert_layout(b_phi2, operand(ROWS, WARPS)), s_phi2, b_scores)
        b_numerator = start(gl.convert_layout(b_phi1, operand(V, WARPS)), s_sums.index(zero), ROWS, V)
        b_numerator = add(gl.convert_layout(b_phi2, operand(V, WARPS)), s_sums.index(zero + 1), b_numerator)
        b_before = start(
            gl.convert_layout(b_phi1, operand(NARROW, WARPS)), s_totals.index(zero), ROWS, NARROW
        )
        b_before = add(gl.convert_layout(b_phi2, operand(NARROW, WARPS)), s_totals.index(zero + 1), b_before)
        b_scores, b_numerator, b_before = warpgroup_mma_wait(0, [b_scores, b_numerator, b_before])

        b_count = keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, by_row(ROWS, WARPS), ROWS)
        b_scores = gl.where(seen_from(zero, ROWS, False), b_scores, 0.0)
        b_total = gl.convert_layout(row_sums(b_before), by_row(ROWS, WARPS)) + gl.sum(b_scores, axis=1)
        b_inverse, b_e, b_slope = floored(b_total, b_logit, b_count, constant, zeroth, slope)
        b_scores = gl.where(seen_from(zero, ROWS, False), b_scores + b_e[:, None], 0.0).to(dtype)
        b_values = s_zv.load(by_column(V, WARPS))
        b_numerator += gl.convert_layout(b_e, by_row(V, WARPS))[:, None] * b_values[None, :]
        b_numerator = add(gl.convert_layout(b_scores, operand(V, WARPS)), s_v, b_numerator)
        b_s1, b_s2, b_z1, b_z2 = add_features(b_s1, b_s2, b_z1, b_z2, s_phi, s_v, s_ones, zero)
        b_zv = add(s_v.permute((1, 0)), s_ones, b_zv)
        b_numerator, b_s1, b_s2, b_z1, b_z2, b_zv = warpgroup_mma_wait(
            0, [b_numerator, b_s1, b_s2, b_z1, b_z2, b_zv]
        )
        copy_rows(s_v, p_value, k_start + ROWS, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        m_q_row = visible(q_start, N_QUERY, by_row(ROWS, WARPS))
        o_row = i_out + q_start + o_q
        gl.store(p_inverse + o_row, b_inverse, mask=m_q_row)
        gl.store(p_constant + o_row, b_e, mask=m_q_row)
        gl.store(p_slope + o_row, b_slope, mask=m_q_row)
        b_numerator *= gl.convert_layout(b_inverse, by_row(V, WARPS))[:, None]
        store_rows(p_out + i_out * DV, q_start, b_numerator, s_phi.index(zero), N_QUERY, DV, V)
    async_copy.wait_group(0)
