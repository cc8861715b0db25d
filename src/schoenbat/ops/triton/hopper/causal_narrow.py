"""Causal attention of heads of 32 channels on Hopper in one pass, as `causal` goes through wider ones.

The result of a product has 64 rows at least, which sums over 32 channels do not. So identity features and pairs are laid out as two
groups of 64 features alike, the last of which ends with the identity: every feature is two factors and a weight, and an identity's
second factor is 1. Sums over keys are Σφ(k)vᵀ and Σφ(k); Σk and Σv are added up by a tile of ones, so that each row of the result is
the sum: what a row needs of them is then at hand in its own registers. Of Σk a triangle of ones gives what each row sees.

Names are those of `warp_groups`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from schoenbat.ops.triton.hopper.causal import LENGTHS, floored, keys_seen, shared_one
from schoenbat.ops.triton.hopper.warp_groups import (
    BLOCK,
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
    in_two_columns,
    make_unit,
    operand,
    place,
    row_sums,
    shared_pair,
    shared_tiles,
    start,
    store_rows,
    visible,
)


@gluon.jit
def shared_map(p_tiles, i_map, dtype: gl.constexpr, D: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr):
    """Begin to copy the directions of both groups, left and right.

    Of pairs there are one or two groups (PAIRS), and none in the last D places of the second: there the identity is put.
    """
    s_map = shared_tiles(dtype, 4, D, F)
    p_tiles += i_map * 2 * PAIRS * D * F
    copy_tile(s_map.index(0), p_tiles, D, F)
    copy_tile(s_map.index(1), p_tiles + D * F, D, F)
    layout: gl.constexpr = in_memory(F)
    o_d = gl.arange(0, D, gl.SliceLayout(1, layout))[:, None]
    o_f = gl.arange(0, F, gl.SliceLayout(0, layout))[None, :]
    b_left, b_right = gl.full([D, F], 0.0, dtype, layout), gl.full([D, F], 0.0, dtype, layout)
    if PAIRS == 2:
        b_left = gl.load(p_tiles + 2 * D * F + (o_d * F + o_f))
        b_right = gl.load(p_tiles + 3 * D * F + (o_d * F + o_f))
    b_one = gl.full([D, F], 1.0, dtype, layout)
    s_map.index(2).store(gl.where(o_f == o_d + (F - D), b_one, b_left))
    s_map.index(3).store(b_right)
    return s_map


@gluon.jit
def two_vectors(F: gl.constexpr):
    """A number for each feature of both groups."""
    return gl.allocate_shared_memory(gl.float32, [2, F], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def shared_weights(p_root, p_linear, i_map, scale, D: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr):
    """Of each feature ``√w scale^(degree − 1)``."""
    s_weights, o_f = two_vectors(F), gl.arange(0, F, by_column(F))
    p_root += i_map * PAIRS * F
    b_pairs = gl.zeros([F], gl.float32, by_column(F))
    if PAIRS == 2:
        b_pairs = gl.load(p_root + F + o_f) * scale
    b_linear = gl.load(p_linear + i_map * D + gl.maximum(o_f - (F - D), 0))
    s_weights.index(0).store(gl.load(p_root + o_f) * scale)
    s_weights.index(1).store(gl.where(o_f >= F - D, b_linear, b_pairs))
    return s_weights


@gluon.jit
def start_factors(s_x, s_map, zero, GROUP: gl.constexpr, F: gl.constexpr):
    """Start both projections of a group, [BLOCK, F]."""
    return (
        start(s_x, s_map.index(zero + 2 * GROUP), BLOCK, F),
        start(s_x, s_map.index(zero + 2 * GROUP + 1), BLOCK, F),
    )


@gluon.jit
def second_factor(b_right, GROUP: gl.constexpr, D: gl.constexpr, F: gl.constexpr):
    """The second projection; of the identity's features 1."""
    if GROUP == 1:
        b_right = gl.where(gl.arange(0, F, by_column(F))[None, :] >= F - D, 1.0, b_right)
    return b_right


@gluon.jit
def features(s_x, s_map, s_weights, scale, zero, GROUP: gl.constexpr, D: gl.constexpr, F: gl.constexpr):
    """A group's features of a tile of rows."""
    b_left, b_right = warpgroup_mma_wait(0, start_factors(s_x, s_map, zero, GROUP, F))
    b_weight = s_weights.index(zero + GROUP).load(by_column(F)) * scale
    return (b_left * second_factor(b_right, GROUP, D, F) * b_weight[None, :]).to(s_x.dtype)


@gluon.jit
def store_features(s_phi, s_x, s_map, s_weights, scale, zero, D: gl.constexpr, F: gl.constexpr):
    s_phi.index(zero).store(features(s_x, s_map, s_weights, scale, zero, 0, D, F))
    s_phi.index(zero + 1).store(features(s_x, s_map, s_weights, scale, zero, 1, D, F))


@gluon.jit
def shared_ones(dtype: gl.constexpr):
    """A triangle of ones, which adds up what each row sees of its tile; and a tile of ones."""
    s_ones = shared_tiles(dtype, 2, BLOCK, BLOCK)
    o_row, o_column = gl.arange(0, BLOCK, by_row(BLOCK)), gl.arange(0, BLOCK, by_column(BLOCK))
    b_ones = gl.full([BLOCK, BLOCK], 1.0, gl.float32, accumulator(BLOCK))
    s_ones.index(0).store(gl.where(o_row[:, None] >= o_column[None, :], b_ones, 0.0).to(dtype))
    s_ones.index(1).store(b_ones.to(dtype))
    return s_ones


@gluon.jit
def size_of_sums(D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    return 2 * F * (V + 1) + D + V


@gluon.jit
def sums_of(p_sums, first, last, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    """The sums over the segments from `first` to before `last`: two tiles, two vectors, two tiles of equal rows."""
    o_v, o_d = gl.arange(0, V, by_column(V))[None, :], gl.arange(0, D, by_column(D))[None, :]
    o_f, o_z = gl.arange(0, F, by_row(V))[:, None] * V, gl.arange(0, F, by_row(NARROW))
    b_s1, b_s2 = gl.zeros([F, V], gl.float32, accumulator(V)), gl.zeros([F, V], gl.float32, accumulator(V))
    b_z1, b_z2 = gl.zeros([F], gl.float32, by_row(NARROW)), gl.zeros([F], gl.float32, by_row(NARROW))
    b_x = gl.zeros([BLOCK, D], gl.float32, accumulator(D))
    b_v = gl.zeros([BLOCK, V], gl.float32, accumulator(V))
    for i in range(first, last):
        p = p_sums + i * size_of_sums(D, F, V)
        b_s1 += gl.load(p + (o_f + o_v))
        b_s2 += gl.load(p + (F * V + o_f + o_v))
        p += 2 * F * V
        b_z1 += gl.load(p + o_z)
        b_z2 += gl.load(p + F + o_z)
        b_x += gl.load(p + 2 * F + o_d)
        b_v += gl.load(p + 2 * F + D + o_v)
    return b_s1, b_s2, b_z1, b_z2, b_x, b_v


@gluon.jit
def store_sums(p, b_s1, b_s2, b_z1, b_z2, b_x, b_v, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    o_v, o_d = gl.arange(0, V, by_column(V))[None, :], gl.arange(0, D, by_column(D))[None, :]
    o_f, o_z = gl.arange(0, F, by_row(V))[:, None] * V, gl.arange(0, F, by_row(NARROW))
    gl.store(p + (o_f + o_v), b_s1)
    gl.store(p + (F * V + o_f + o_v), b_s2)
    p += 2 * F * V
    gl.store(p + o_z, b_z1)
    gl.store(p + F + o_z, b_z2)
    o_x, o_row = gl.arange(0, BLOCK, by_row(D))[:, None], gl.arange(0, BLOCK, by_row(V))[:, None]
    gl.store(p + 2 * F + (o_x * 0 + o_d), b_x, mask=(o_x == 0) & (o_d < D))
    gl.store(p + 2 * F + D + (o_row * 0 + o_v), b_v, mask=(o_row == 0) & (o_v < V))


@gluon.jit
def add_features(b_s1, b_s2, s_phi, s_rows, s_weights, zero, F: gl.constexpr):
    """Start to add a tile of features times rows to two sums; and what it adds to their own, as narrow products."""
    s_phi1, s_phi2 = s_phi.index(zero).permute((1, 0)), s_phi.index(zero + 1).permute((1, 0))
    return (
        add(s_phi1, s_rows, b_s1),
        add(s_phi2, s_rows, b_s2),
        start(s_phi1, s_weights, F, NARROW),
        start(s_phi2, s_weights, F, NARROW),
    )


@gluon.jit(do_not_specialize=LENGTHS)
def sum_keys(
    p_key, p_value, p_mask, p_sums, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_KEY, FIRST_KEY, TILES, SEGMENTS, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The sums over a segment of keys; of the last one nobody needs them."""
    dtype: gl.constexpr = p_key.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS - 1, HEADS, 1, MAPS)
    p_key = at_head(p_key, i_b, i_h, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    s_map = shared_map(p_tiles, i_map, dtype, D, F, PAIRS)
    s_weights = shared_weights(p_root, p_linear, i_map, KEY_SCALE, D, F, PAIRS)
    s_keys, s_values = shared_pair(dtype, D), shared_pair(dtype, V)
    s_phi, m_one, s_ones = shared_tiles(dtype, 2, BLOCK, F), shared_one(dtype), shared_ones(dtype)
    b_s1, b_s2, b_z1, b_z2, b_keys, b_values = sums_of(p_sums, 0, 0, D, F, V)
    first = i_segment * TILES
    k_start = first * BLOCK - FIRST_KEY
    copy_rows(s_keys.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(TILES):
        zero = anew(0)
        async_copy.wait_group(0)
        s_k, s_v = s_keys.index(i % 2), s_values.index(i % 2)
        k_start = (first + i + 1) * BLOCK - FIRST_KEY
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()
        store_features(s_phi, s_k, s_map, s_weights, KEY_SCALE, zero, D, F)
        fence_async_shared()
        b_s1, b_s2, b_1, b_2 = add_features(b_s1, b_s2, s_phi, s_v, m_one.index(zero), zero, F)
        s_all = s_ones.index(zero + 1)
        b_keys, b_values = add(s_all, s_k, b_keys), add(s_all, s_v, b_values)
        b_s1, b_s2, b_1, b_2, b_keys, b_values = warpgroup_mma_wait(
            0, [b_s1, b_s2, b_1, b_2, b_keys, b_values]
        )
        b_z1, b_z2 = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2)
    async_copy.wait_group(0)
    p_sums += (i_bh * (SEGMENTS - 1) + i_segment).to(gl.int64) * size_of_sums(D, F, V)
    store_sums(p_sums, b_s1, b_s2, b_z1, b_z2, b_keys, b_values, D, F, V)


@gluon.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_out, p_inverse, p_constant, p_slope,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The outputs of a segment of queries, and by row 1/f, e and the slope of the floor."""
    dtype: gl.constexpr = p_query.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS, HEADS, GROUPS, MAPS)
    p_query = at_head(p_query, i_b, i_h, stride_qb, stride_qh)
    p_key = at_head(p_key, i_b, i_h // GROUPS, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h // GROUPS, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    p_sums += (i_bh // GROUPS).to(gl.int64) * (SEGMENTS - 1) * size_of_sums(D, F, V)
    i_out = i_bh.to(gl.int64) * N_QUERY
    scale = gl.load(p_scale + i_h)
    constant = gl.load(p_coefficients + 3 * i_map)
    zeroth = gl.load(p_coefficients + 3 * i_map + 1)
    slope = gl.load(p_coefficients + 3 * i_map + 2)

    s_map = shared_map(p_tiles, i_map, dtype, D, F, PAIRS)
    s_weights = shared_weights(p_root, p_linear, i_map, KEY_SCALE, D, F, PAIRS)
    s_query_weights = shared_weights(p_root, p_linear, i_map, scale, D, F, PAIRS)
    s_queries, s_keys, s_values = shared_pair(dtype, D), shared_pair(dtype, D), shared_pair(dtype, V)
    s_phi, m_one, s_ones = shared_tiles(dtype, 2, BLOCK, F), shared_one(dtype), shared_ones(dtype)
    s_sums, s_totals = shared_tiles(dtype, 2, F, V), shared_tiles(dtype, 2, F, NARROW)
    b_s1, b_s2, b_z1, b_z2, b_keys, b_values = sums_of(p_sums, 0, i_segment, D, F, V)
    o_q, o_k = gl.arange(0, BLOCK, by_row(BLOCK)), gl.arange(0, BLOCK, by_column(BLOCK))
    m_causal = o_q[:, None] >= o_k[None, :]

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    copy_rows(s_queries.index(0), p_query, first * BLOCK - FIRST_QUERY, stride_qn, N_QUERY, DIM, D)
    copy_rows(s_keys.index(0), p_key, first * BLOCK - FIRST_KEY, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, first * BLOCK - FIRST_KEY, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(num_here):
        zero = anew(0)
        i_tile = first + i
        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        s_q, s_k, s_v = s_queries.index(i % 2), s_keys.index(i % 2), s_values.index(i % 2)
        s_sums.index(zero).store(b_s1.to(dtype))
        s_sums.index(zero + 1).store(b_s2.to(dtype))
        s_totals.index(zero).store(in_two_columns(b_z1, dtype, 0))
        s_totals.index(zero + 1).store(in_two_columns(b_z2, dtype, 0))
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start + BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start + BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_q, EPS, UNIT, DIM, D)
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()

        # The mean logit, which makes the floor.
        b_seen = warpgroup_mma_wait(0, [add(s_ones.index(zero), s_k, b_keys)])
        b_logit = gl.sum(b_seen * s_q.load(accumulator(D)).to(gl.float32), axis=1) * (scale * KEY_SCALE)
        store_features(s_phi, s_k, s_map, s_weights, KEY_SCALE, zero, D, F)
        b_phi1 = features(s_q, s_map, s_query_weights, scale, zero, 0, D, F)
        b_phi2 = features(s_q, s_map, s_query_weights, scale, zero, 1, D, F)
        fence_async_shared()
        s_phi1, s_phi2 = s_phi.index(zero).permute((1, 0)), s_phi.index(zero + 1).permute((1, 0))
        b_scores = start(gl.convert_layout(b_phi1, operand(BLOCK)), s_phi1, BLOCK, BLOCK)
        b_scores = add(gl.convert_layout(b_phi2, operand(BLOCK)), s_phi2, b_scores)
        b_numerator = start(gl.convert_layout(b_phi1, operand(V)), s_sums.index(zero), BLOCK, V)
        b_numerator = add(gl.convert_layout(b_phi2, operand(V)), s_sums.index(zero + 1), b_numerator)
        b_before = start(gl.convert_layout(b_phi1, operand(NARROW)), s_totals.index(zero), BLOCK, NARROW)
        b_before = add(gl.convert_layout(b_phi2, operand(NARROW)), s_totals.index(zero + 1), b_before)
        b_scores, b_numerator, b_before = warpgroup_mma_wait(0, [b_scores, b_numerator, b_before])

        b_count = keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, by_row(BLOCK))
        b_scores = gl.where(m_causal, b_scores, 0.0)
        b_total = gl.convert_layout(row_sums(b_before), by_row(BLOCK)) + gl.sum(b_scores, axis=1)
        b_logit = gl.convert_layout(b_logit, by_row(BLOCK))
        b_inverse, b_e, b_slope = floored(b_total, b_logit, b_count, constant, zeroth, slope)
        b_scores = gl.where(m_causal, b_scores + b_e[:, None], 0.0).to(dtype)
        b_numerator += gl.convert_layout(b_e, by_row(V))[:, None] * b_values
        b_numerator = add(gl.convert_layout(b_scores, operand(V)), s_v, b_numerator)
        b_s1, b_s2, b_1, b_2 = add_features(b_s1, b_s2, s_phi, s_v, m_one.index(zero), zero, F)
        s_all = s_ones.index(zero + 1)
        b_keys, b_values = add(s_all, s_k, b_keys), add(s_all, s_v, b_values)
        b_numerator, b_s1, b_s2, b_1, b_2, b_keys, b_values = warpgroup_mma_wait(
            0, [b_numerator, b_s1, b_s2, b_1, b_2, b_keys, b_values]
        )
        b_z1, b_z2 = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2)
        m_q = visible(q_start, N_QUERY, by_row(BLOCK))
        o_row = i_out + q_start + o_q
        gl.store(p_inverse + o_row, b_inverse, mask=m_q)
        gl.store(p_constant + o_row, b_e, mask=m_q)
        gl.store(p_slope + o_row, b_slope, mask=m_q)
        b_numerator *= gl.convert_layout(b_inverse, by_row(V))[:, None]
        store_rows(p_out + i_out * DV, q_start, b_numerator, s_q, N_QUERY, DV, V)
    async_copy.wait_group(0)
