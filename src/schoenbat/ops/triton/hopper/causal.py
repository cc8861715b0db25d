"""Causal attention on Hopper in one pass: a program goes through a segment of tiles, the sums over what lies before in registers.

What is computed is in `kernels.causal_sums`; here sums over keys are Σkvᵀ, Σφ(k)vᵀ, Σk, Σφ(k) and Σv of rows as they are, φ being pairs:
weights and scales enter where they are read. A head is one segment where heads are many. Else `sum_keys` leaves the sums of
each segment, and a program begins with those of the segments before its own.

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
    BLOCK,
    LOWEST_EXPONENT,
    NARROW,
    accumulator,
    add,
    at_head,
    by_column,
    by_row,
    copy_rows,
    copy_tile,
    in_two_columns,
    make_unit,
    operand,
    place,
    row_sums,
    seen_from,
    shared_pair,
    shared_tile,
    shared_vector,
    start,
    store_rows,
    unknown,
    visible,
)

# What depends on the length of a sequence: no kernel is compiled again for another length.
LENGTHS = ("N_QUERY", "N_KEY", "FIRST_QUERY", "FIRST_KEY", "TILES", "SEGMENTS", "NUM_TILES")


@gluon.jit
def pairs(b_left, b_right, s_root, scale, F: gl.constexpr):
    """The features ``√w (scale x·left)(scale x·right)`` from the two projections."""
    return b_left * b_right * (s_root.load(by_column(F, gl.num_warps(), BLOCK)) * (scale * scale))[None, :]


@gluon.jit
def size_of_sums(D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    return (D + F) * V + D + F + V


@gluon.jit
def sums_before(p_sums, first, last, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    """The sums over the segments from `first` to before `last`: two tiles, three vectors."""
    layout: gl.constexpr = accumulator(V, gl.num_warps())
    vector: gl.constexpr = by_row(NARROW, gl.num_warps())
    o_v = gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
    o_f = gl.arange(0, F, gl.SliceLayout(1, layout))[:, None] * V
    o_d = gl.arange(0, D, gl.SliceLayout(1, layout))[:, None] * V
    b_s1 = gl.zeros([D, V], gl.float32, layout)
    b_s2 = gl.zeros([F, V], gl.float32, layout)
    b_z1 = gl.zeros([D], gl.float32, vector)
    b_z2 = gl.zeros([F], gl.float32, vector)
    b_zv = gl.zeros([V], gl.float32, vector)
    for i in range(first, last):
        p = p_sums + i * size_of_sums(D, F, V)
        b_s1 += gl.load(p + (o_d + o_v))
        b_s2 += gl.load(p + (D * V + o_f + o_v))
        p += (D + F) * V
        b_z1 += gl.load(p + gl.arange(0, D, vector))
        b_z2 += gl.load(p + D + gl.arange(0, F, vector))
        b_zv += gl.load(p + D + F + gl.arange(0, V, vector))
    return b_s1, b_s2, b_z1, b_z2, b_zv


@gluon.jit
def store_sums(p, b_s1, b_s2, b_z1, b_z2, b_zv, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    layout: gl.constexpr = accumulator(V, gl.num_warps())
    vector: gl.constexpr = by_row(NARROW, gl.num_warps())
    o_v = gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
    o_f = gl.arange(0, F, gl.SliceLayout(1, layout))[:, None] * V
    o_d = gl.arange(0, D, gl.SliceLayout(1, layout))[:, None] * V
    gl.store(p + (o_d + o_v), b_s1)
    gl.store(p + (D * V + o_f + o_v), b_s2)
    p += (D + F) * V
    gl.store(p + gl.arange(0, D, vector), b_z1)
    gl.store(p + D + gl.arange(0, F, vector), b_z2)
    gl.store(p + D + F + gl.arange(0, V, vector), b_zv)


@gluon.jit
def add_keys(b_s1, b_s2, s_k, s_phi, s_v, s_one, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    """Start to add a tile of keys and values to two sums; and what it adds to the three others, as narrow products."""
    s_k, s_phi = s_k.permute((1, 0)), s_phi.permute((1, 0))
    return (
        add(s_k, s_v, b_s1),
        add(s_phi, s_v, b_s2),
        start(s_k, s_one, D, NARROW),
        start(s_phi, s_one, F, NARROW),
        start(s_v.permute((1, 0)), s_one, V, NARROW),
    )


@gluon.jit
def shared_one(dtype: gl.constexpr):
    """By which rows are added up: a column of ones, and zeros."""
    s_one = shared_tile(dtype, BLOCK, NARROW)
    o = gl.arange(0, NARROW, by_column(NARROW, gl.num_warps()))[None, :]
    b_one = gl.zeros([BLOCK, NARROW], gl.float32, accumulator(NARROW, gl.num_warps()))
    s_one.index(0).store(gl.where(o == 0, b_one + 1.0, b_one).to(dtype))
    return s_one


@gluon.jit
def shared_map(p_tiles, p_root, i_map, dtype: gl.constexpr, D: gl.constexpr, F: gl.constexpr):
    """Begin to copy the directions of the pairs, and copy the roots of their weights."""
    s_left, s_right, s_root = shared_tile(dtype, D, F), shared_tile(dtype, D, F), shared_vector(F)
    copy_tile(s_left.index(0), p_tiles + i_map * 2 * D * F, D, F)
    copy_tile(s_right.index(0), p_tiles + (i_map * 2 + 1) * D * F, D, F)
    s_root.store(gl.load(p_root + i_map * F + gl.arange(0, F, by_row(NARROW))))
    return s_left, s_right, s_root


@gluon.jit
def pairs_of_rows(s_x, s_left, s_right, s_root, scale, F: gl.constexpr):
    b_left, b_right = start(s_x, s_left, BLOCK, F), start(s_x, s_right, BLOCK, F)
    b_left, b_right = warpgroup_mma_wait(0, [b_left, b_right])
    return pairs(b_left, b_right, s_root, scale, F)


@gluon.jit(do_not_specialize=LENGTHS)
def sum_keys(
    p_key, p_value, p_mask, p_sums, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_KEY, FIRST_KEY, TILES, SEGMENTS, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """The sums over a segment of keys; of the last one nobody needs them."""
    dtype: gl.constexpr = p_key.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS - 1, HEADS, 1, MAPS)
    p_key = at_head(p_key, i_b, i_h, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    s_keys, s_values = shared_pair(dtype, D), shared_pair(dtype, V)
    m_phi, m_one = shared_tile(dtype, BLOCK, F), shared_one(dtype)
    b_s1, b_s2, b_z1, b_z2, b_zv = sums_before(p_sums, 0, 0, D, F, V)
    first = i_segment * TILES
    k_start = first * BLOCK - FIRST_KEY
    copy_rows(s_keys.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(TILES):
        zero = unknown(0)
        s_left, s_right = m_left.index(zero), m_right.index(zero)
        s_phi, s_one = m_phi.index(zero), m_one.index(zero)
        async_copy.wait_group(0)
        s_k, s_v = s_keys.index(i % 2), s_values.index(i % 2)
        k_start = (first + i + 1) * BLOCK - FIRST_KEY
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()
        s_phi.store(pairs_of_rows(s_k, s_left, s_right, s_root, KEY_SCALE, F).to(dtype))
        fence_async_shared()
        b_s1, b_s2, b_1, b_2, b_v = warpgroup_mma_wait(
            0, add_keys(b_s1, b_s2, s_k, s_phi, s_v, s_one, D, F, V)
        )
        b_z1, b_z2, b_zv = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2), b_zv + row_sums(b_v)
    async_copy.wait_group(0)
    i_out = (i_bh * (SEGMENTS - 1) + i_segment).to(gl.int64)
    store_sums(p_sums + i_out * size_of_sums(D, F, V), b_s1, b_s2, b_z1, b_z2, b_zv, D, F, V)


@gluon.jit
def keys_seen(p_count, i_b, i_tile, N, FIRST_KEY, layout: gl.constexpr, ROWS: gl.constexpr = 64):
    """How many keys each row of a tile sees; with a mask they were counted."""
    o_n = i_tile * ROWS + gl.arange(0, ROWS, layout)
    if p_count is not None:
        b_count = gl.load(p_count + i_b.to(gl.int64) * N + o_n, mask=o_n < N, other=0)
    else:
        b_count = gl.maximum(o_n - FIRST_KEY + 1, 0)
    return b_count.to(gl.float32)


@gluon.jit
def linear_scores(s_a, s_b, p_linear, scale, D: gl.constexpr):
    """What linear features of different weights add to the scores of two tiles; waited for."""
    layout: gl.constexpr = operand(BLOCK)
    b_linear = linear_weights(p_linear, D, gl.SliceLayout(0, layout))
    b_a = (s_a.load(layout).to(gl.float32) * (b_linear * scale)[None, :]).to(s_a.dtype)
    b_scores = start(b_a, s_b.permute((1, 0)), BLOCK, BLOCK)
    return warpgroup_mma_wait(0, [b_scores])


@gluon.jit
def linear_weights(p_linear, D: gl.constexpr, layout: gl.constexpr):
    b_root = gl.load(p_linear + gl.arange(0, D, layout))
    return b_root * b_root


@gluon.jit
def weight_of_all(b_linear, DIM: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """The largest weight of a linear feature, and whether it is that of all."""
    largest = gl.max(b_linear, axis=0)
    return largest, gl.min(gl.where(gl.arange(0, D, layout) < DIM, b_linear, largest), axis=0) == largest


@gluon.jit
def floored(b_total, b_logit, b_count, constant, zeroth, slope):
    """By row 1/f, e and the slope of the floor, from the total and the sum of the logits."""
    b_exponent = slope * b_logit / gl.maximum(b_count, 1.0)
    b_floor = b_count * zeroth * gl.exp(gl.minimum(gl.maximum(b_exponent, LOWEST_EXPONENT), 0.0))
    m_some = b_count > 0.0
    m_below = b_total + constant * b_count < b_floor
    b_floored = gl.where(m_some, gl.where(m_below, b_floor, b_total + constant * b_count), 1.0)
    b_e = (b_floor - b_total) / gl.maximum(b_count, 1.0)
    b_e = gl.where(m_some, gl.where(m_below, b_e, constant), 0.0)
    m_falling = m_below & (b_exponent < 0.0) & (b_exponent > LOWEST_EXPONENT)
    b_slope = gl.where(m_falling, b_floor * slope, 0.0)
    return 1.0 / b_floored, b_e, b_slope


@gluon.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_out, p_inverse, p_constant, p_slope,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
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

    m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    p_linear += i_map * D
    b_linear = linear_weights(p_linear, D, by_row(V))
    b_linear_narrow = linear_weights(p_linear, D, by_row(NARROW))
    largest, is_even = weight_of_all(b_linear, DIM, D, by_row(V))

    s_queries, s_keys, s_values = shared_pair(dtype, D), shared_pair(dtype, D), shared_pair(dtype, V)
    m_phi, m_one = shared_tile(dtype, BLOCK, F), shared_one(dtype)
    m_s1, m_s2 = shared_tile(dtype, D, V), shared_tile(dtype, F, V)
    m_z1, m_z2, s_zv = shared_tile(dtype, D, NARROW), shared_tile(dtype, F, NARROW), shared_vector(V)
    b_s1, b_s2, b_z1, b_z2, b_zv = sums_before(p_sums, 0, i_segment, D, F, V)
    o_narrow = gl.arange(0, NARROW, by_column(NARROW))[None, :]
    o_q = gl.arange(0, BLOCK, by_row(BLOCK))

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    copy_rows(s_queries.index(0), p_query, first * BLOCK - FIRST_QUERY, stride_qn, N_QUERY, DIM, D)
    copy_rows(s_keys.index(0), p_key, first * BLOCK - FIRST_KEY, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, first * BLOCK - FIRST_KEY, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(num_here):
        zero = unknown(0)
        s_left, s_right = m_left.index(zero), m_right.index(zero)
        s_phi, s_one = m_phi.index(zero), m_one.index(zero)
        s_s1, s_s2 = m_s1.index(zero), m_s2.index(zero)
        s_z1, s_z2 = m_z1.index(zero), m_z2.index(zero)
        i_tile = first + i
        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        s_q, s_k, s_v = s_queries.index(i % 2), s_keys.index(i % 2), s_values.index(i % 2)
        s_s1.store((b_s1 * (b_linear * (scale * KEY_SCALE))[:, None]).to(dtype))
        s_s2.store(b_s2.to(dtype))
        b_own = in_two_columns(b_z1, dtype, 0)
        b_weighted = in_two_columns(b_z1 * b_linear_narrow, dtype, 2)
        s_z1.store(gl.where(o_narrow < 2, b_own, b_weighted))
        s_z2.store(in_two_columns(b_z2, dtype, 0))
        s_zv.store(b_zv)
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start + BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start + BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_q, EPS, UNIT, DIM, D)
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()

        b_left, b_right = start(s_k, s_left, BLOCK, F), start(s_k, s_right, BLOCK, F)
        b_left, b_right = warpgroup_mma_wait(0, [b_left, b_right])
        s_phi.store(pairs(b_left, b_right, s_root, KEY_SCALE, F).to(dtype))
        b_left, b_right = start(s_q, s_left, BLOCK, F), start(s_q, s_right, BLOCK, F)
        b_left, b_right = warpgroup_mma_wait(0, [b_left, b_right])
        b_phi = pairs(b_left, b_right, s_root, scale, F).to(dtype)
        b_logits, b_before = start(s_q, s_k.permute((1, 0)), BLOCK, BLOCK), start(s_q, s_z1, BLOCK, NARROW)
        b_logits, b_before = warpgroup_mma_wait(0, [b_logits, b_before])
        # The mean logit, which makes the floor.
        b_logit = gl.sum(gl.where(seen_from(zero, BLOCK, False), b_logits, 0.0), axis=1)
        b_logit += gl.convert_layout(gl.sum(gl.where(o_narrow < 2, b_before, 0.0), axis=1), by_row(BLOCK))
        b_logit *= scale * KEY_SCALE
        b_total = gl.convert_layout(gl.sum(gl.where(o_narrow < 2, 0.0, b_before), axis=1), by_row(BLOCK))
        b_total *= scale * KEY_SCALE
        if is_even:
            b_scores = b_logits * (largest * scale * KEY_SCALE)
        else:
            b_scores = linear_scores(s_q, s_k, p_linear, scale * KEY_SCALE, D)
        fence_async_shared()
        b_scores = add(gl.convert_layout(b_phi, operand(BLOCK)), s_phi.permute((1, 0)), b_scores)
        b_numerator = add(gl.convert_layout(b_phi, operand(V)), s_s2, start(s_q, s_s1, BLOCK, V))
        b_before = start(gl.convert_layout(b_phi, operand(NARROW)), s_z2, BLOCK, NARROW)
        b_scores, b_numerator, b_before = warpgroup_mma_wait(0, [b_scores, b_numerator, b_before])

        b_count = keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, by_row(BLOCK))
        b_scores = gl.where(seen_from(zero, BLOCK, False), b_scores, 0.0)
        b_total += gl.convert_layout(gl.sum(b_before, axis=1), by_row(BLOCK)) + gl.sum(b_scores, axis=1)
        b_inverse, b_e, b_slope = floored(b_total, b_logit, b_count, constant, zeroth, slope)

        b_scores = gl.where(seen_from(zero, BLOCK, False), b_scores + b_e[:, None], 0.0).to(dtype)
        b_numerator = add(gl.convert_layout(b_scores, operand(V)), s_v, b_numerator)
        b_s1, b_s2, b_1, b_2, b_v = add_keys(b_s1, b_s2, s_k, s_phi, s_v, s_one, D, F, V)
        b_numerator, b_s1, b_s2, b_1, b_2, b_v = warpgroup_mma_wait(
            0, [b_numerator, b_s1, b_s2, b_1, b_2, b_v]
        )
        b_z1, b_z2, b_zv = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2), b_zv + row_sums(b_v)
        m_q = visible(q_start, N_QUERY, by_row(BLOCK))
        o_row = i_out + q_start + o_q
        gl.store(p_inverse + o_row, b_inverse, mask=m_q)
        gl.store(p_constant + o_row, b_e, mask=m_q)
        gl.store(p_slope + o_row, b_slope, mask=m_q)
        b_values = s_zv.load(by_column(V))
        b_numerator += gl.convert_layout(b_e, by_row(V))[:, None] * b_values[None, :]
        b_numerator *= gl.convert_layout(b_inverse, by_row(V))[:, None]
        store_rows(p_out + i_out * DV, q_start, b_numerator, s_q, N_QUERY, DV, V)
    async_copy.wait_group(0)
