"""Causal attention of heads of 65 to 128 channels on Hopper, in one pass as `causal` has it.

The sums, [128, 128] twice, are half of the registers of eight warps. Tiles have 64 rows: the two groups of warps share the
columns of a product's result, and all operands lie in shared memory, where each group finds its own part. Pairs are
products of the 16 numbers y = Pᵀx of a row: two selections of y are their factors.

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
    floored,
    keys_seen,
    linear_weights,
    pairs,
    shared_one,
    size_of_sums,
    store_sums,
    sums_before,
    weight_of_all,
)
from schoenbat.ops.triton.hopper.warp_groups import (
    BLOCK,
    NARROW,
    add,
    anew,
    at_head,
    by_column,
    by_row,
    copy_rows,
    in_memory,
    in_two_columns,
    make_unit,
    place,
    row_sums,
    shared_pair,
    shared_tile,
    shared_vector,
    start,
    store_rows,
    visible,
)

WARPS = gl.constexpr(8)
# Pairs are laid out in groups of so many: see `plan`.
GROUP = gl.constexpr(64)


@gluon.jit
def shared_map(p_tiles, p_root, i_map, dtype: gl.constexpr, D: gl.constexpr, F: gl.constexpr):
    """Pᵀ, which two of its rows each pair is of, and the roots of the pairs' weights.

    Pair f is of directions i and j ≤ i, f = i (i + 1) / 2 + j: direction i is the first factor of the pair of i and 0.
    """
    m_first = shared_tile(dtype, NARROW, D)
    m_left, m_right, s_root = shared_tile(dtype, NARROW, F), shared_tile(dtype, NARROW, F), shared_vector(F)
    layout: gl.constexpr = in_memory(D, WARPS)
    o_y = gl.arange(0, NARROW, gl.SliceLayout(1, layout))[:, None]
    o_c = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    o_first = o_y * (o_y + 1) // 2
    p_first = p_tiles + i_map * 2 * D * F + (o_first // GROUP) * (2 * D * GROUP) + o_first % GROUP
    m_first.index(0).store(gl.load(p_first + o_c * GROUP))
    o_f = gl.arange(0, F, gl.SliceLayout(0, layout))
    b_first = gl.zeros([F], gl.int32, gl.SliceLayout(0, layout))
    for i in gl.static_range(1, 16):
        b_first = gl.where(o_f >= i * (i + 1) // 2, i * (i + 1) // 2, b_first)
    m_left.index(0).store(gl.where(b_first[None, :] == o_first, 1.0, 0.0).to(dtype))
    m_right.index(0).store(gl.where((o_f - b_first)[None, :] == o_y, 1.0, 0.0).to(dtype))
    s_root.store(gl.load(p_root + i_map * F + gl.arange(0, F, by_row(NARROW, WARPS))))
    return m_first, m_left, m_right, s_root


@gluon.jit
def project(s_x, s_first):
    """Start y = Pᵀx of a tile of rows."""
    return start(s_x, s_first.permute((1, 0)), BLOCK, NARROW)


@gluon.jit
def pairs_of(s_y, s_left, s_right, s_root, scale, F: gl.constexpr):
    """The pairs of rows from their y."""
    b_left, b_right = start(s_y, s_left, BLOCK, F), start(s_y, s_right, BLOCK, F)
    b_left, b_right = warpgroup_mma_wait(0, [b_left, b_right])
    return pairs(b_left, b_right, s_root, scale, F)


@gluon.jit
def add_rows(b_sum, s_x, s_rows, s_narrow, SIZE: gl.constexpr):
    """Start to add xᵀ times rows to a sum, and xᵀ times a narrow tile, which is added to vectors."""
    s_x = s_x.permute((1, 0))
    return add(s_x, s_rows, b_sum), start(s_x, s_narrow, SIZE, NARROW)


@gluon.jit(do_not_specialize=LENGTHS)
def sum_keys(
    p_key, p_value, p_mask, p_sums, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_KEY, FIRST_KEY, TILES, SEGMENTS, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As `causal.sum_keys`."""
    dtype: gl.constexpr = p_key.dtype.element_ty
    i_segment, i_bh, i_b, i_h, i_map = place(SEGMENTS - 1, HEADS, 1, MAPS)
    p_key = at_head(p_key, i_b, i_h, stride_kb, stride_kh)
    p_value = at_head(p_value, i_b, i_h, stride_vb, stride_vh)
    if p_mask is not None:
        p_mask += i_b.to(gl.int64) * N_KEY
    m_first, m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    s_keys, s_values = shared_pair(dtype, D, BLOCK), shared_pair(dtype, V, BLOCK)
    m_y, m_phi, m_one = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, F), shared_one(dtype)
    b_s1, b_s2, b_z1, b_z2, b_zv = sums_before(p_sums, 0, 0, D, F, V)
    first = i_segment * TILES
    k_start = first * BLOCK - FIRST_KEY
    copy_rows(s_keys.index(0), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(TILES):
        zero = anew(0)
        s_first, s_left, s_right = m_first.index(zero), m_left.index(zero), m_right.index(zero)
        s_y, s_phi, s_one = m_y.index(zero), m_phi.index(zero), m_one.index(zero)
        async_copy.wait_group(0)
        s_k, s_v = s_keys.index(i % 2), s_values.index(i % 2)
        k_start = (first + i + 1) * BLOCK - FIRST_KEY
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()
        b_y = project(s_k, s_first)
        b_s1, b_1 = add_rows(b_s1, s_k, s_v, s_one, D)
        b_v = start(s_v.permute((1, 0)), s_one, V, NARROW)
        s_y.store(warpgroup_mma_wait(3, [b_y]).to(dtype))
        fence_async_shared()
        s_phi.store(pairs_of(s_y, s_left, s_right, s_root, KEY_SCALE, F).to(dtype))
        fence_async_shared()
        b_s2, b_2 = add_rows(b_s2, s_phi, s_v, s_one, F)
        b_s1, b_1, b_v, b_s2, b_2 = warpgroup_mma_wait(0, [b_s1, b_1, b_v, b_s2, b_2])
        b_z1, b_z2, b_zv = b_z1 + row_sums(b_1), b_z2 + row_sums(b_2), b_zv + row_sums(b_v)
    async_copy.wait_group(0)
    i_out = (i_bh * (SEGMENTS - 1) + i_segment).to(gl.int64)
    store_sums(p_sums + i_out * size_of_sums(D, F, V), b_s1, b_s2, b_z1, b_z2, b_zv, D, F, V)


@gluon.jit
def store_weighted(s_to, s_x, p_linear, scale, D: gl.constexpr):
    """Rows times the weights of linear features, which differ; in place, if asked to."""
    layout: gl.constexpr = in_memory(D, WARPS)
    b_linear = linear_weights(p_linear, D, gl.SliceLayout(0, layout))
    s_to.store((s_x.load(layout).to(gl.float32) * (b_linear * scale)[None, :]).to(s_to.dtype))
    fence_async_shared()


@gluon.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_sums, p_out, p_inverse, p_constant, p_slope,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, TILES, SEGMENTS, NUM_TILES, KEY_SCALE, EPS, p_tiles, p_root, p_linear,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr, UNIT: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As `causal.read`."""
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

    m_first, m_left, m_right, s_root = shared_map(p_tiles, p_root, i_map, dtype, D, F)
    p_linear += i_map * D
    b_linear = linear_weights(p_linear, D, by_row(V, WARPS))
    b_linear_narrow = linear_weights(p_linear, D, by_row(NARROW, WARPS))
    largest, is_even = weight_of_all(b_linear, DIM, D, by_row(V, WARPS))

    s_queries, s_keys = shared_pair(dtype, D, BLOCK), shared_pair(dtype, D, BLOCK)
    s_values = shared_pair(dtype, V, BLOCK)
    m_yq, m_yk = shared_tile(dtype, BLOCK, NARROW), shared_tile(dtype, BLOCK, NARROW)
    m_phiq, m_phik, m_one = shared_tile(dtype, BLOCK, F), shared_tile(dtype, BLOCK, F), shared_one(dtype)
    m_s1, m_s2 = shared_tile(dtype, D, V), shared_tile(dtype, F, V)
    m_z1, m_z2, s_zv = shared_tile(dtype, NARROW, D), shared_tile(dtype, NARROW, F), shared_vector(V)
    b_s1, b_s2, b_z1, b_z2, b_zv = sums_before(p_sums, 0, i_segment, D, F, V)
    o_columns = gl.arange(0, NARROW, by_column(NARROW, WARPS))[None, :]
    o_narrow = gl.arange(0, NARROW, by_column(NARROW, WARPS, BLOCK))[None, :]
    rows: gl.constexpr = by_row(BLOCK, WARPS, BLOCK)
    o_q, o_k = gl.arange(0, BLOCK, rows), gl.arange(0, BLOCK, by_column(BLOCK, WARPS, BLOCK))
    m_causal = o_q[:, None] >= o_k[None, :]

    first = i_segment * TILES
    num_here = gl.minimum(TILES, NUM_TILES - first)
    copy_rows(s_queries.index(0), p_query, first * BLOCK - FIRST_QUERY, stride_qn, N_QUERY, DIM, D)
    copy_rows(s_keys.index(0), p_key, first * BLOCK - FIRST_KEY, stride_kn, N_KEY, DIM, D, p_mask)
    copy_rows(s_values.index(0), p_value, first * BLOCK - FIRST_KEY, stride_vn, N_KEY, DV, V, p_mask)
    async_copy.commit_group()
    for i in range(num_here):
        zero = anew(0)
        s_first, s_left, s_right = m_first.index(zero), m_left.index(zero), m_right.index(zero)
        s_yq, s_yk, s_one = m_yq.index(zero), m_yk.index(zero), m_one.index(zero)
        s_phiq, s_phik = m_phiq.index(zero), m_phik.index(zero)
        s_s1, s_s2 = m_s1.index(zero), m_s2.index(zero)
        s_z1, s_z2 = m_z1.index(zero).permute((1, 0)), m_z2.index(zero).permute((1, 0))
        i_tile = first + i
        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        s_q, s_k, s_v = s_queries.index(i % 2), s_keys.index(i % 2), s_values.index(i % 2)
        s_s1.store((b_s1 * (b_linear * (scale * KEY_SCALE))[:, None]).to(dtype))
        s_s2.store(b_s2.to(dtype))
        b_own = in_two_columns(b_z1 * (scale * KEY_SCALE), dtype, 0)
        b_weighted = in_two_columns(b_z1 * (b_linear_narrow * (scale * KEY_SCALE)), dtype, 2)
        s_z1.store(gl.where(o_columns < 2, b_own, b_weighted))
        s_z2.store(in_two_columns(b_z2, dtype, 2))
        s_zv.store(b_zv)
        async_copy.wait_group(0)
        copy_rows(s_queries.index((i + 1) % 2), p_query, q_start + BLOCK, stride_qn, N_QUERY, DIM, D)
        copy_rows(s_keys.index((i + 1) % 2), p_key, k_start + BLOCK, stride_kn, N_KEY, DIM, D, p_mask)
        copy_rows(s_values.index((i + 1) % 2), p_value, k_start + BLOCK, stride_vn, N_KEY, DV, V, p_mask)
        async_copy.commit_group()
        make_unit(s_q, EPS, UNIT, DIM, D)
        make_unit(s_k, EPS, UNIT, DIM, D)
        fence_async_shared()

        # Sums go on while y is stored.
        b_yq, b_yk = project(s_q, s_first), project(s_k, s_first)
        b_s1, b_1 = add_rows(b_s1, s_k, s_v, s_one, D)
        b_v = start(s_v.permute((1, 0)), s_one, V, NARROW)
        b_yq, b_yk = warpgroup_mma_wait(3, [b_yq, b_yk])
        s_yq.store(b_yq.to(dtype))
        s_yk.store(b_yk.to(dtype))
        fence_async_shared()
        s_phik.store(pairs_of(s_yk, s_left, s_right, s_root, KEY_SCALE, F).to(dtype))
        b_s1, b_1, b_v = warpgroup_mma_wait(0, [b_s1, b_1, b_v])
        b_z1, b_zv = b_z1 + row_sums(b_1), b_zv + row_sums(b_v)
        s_phiq.store(pairs_of(s_yq, s_left, s_right, s_root, scale, F).to(dtype))
        fence_async_shared()
        b_logits = start(s_q, s_k.permute((1, 0)), BLOCK, BLOCK)
        b_scores = start(s_phiq, s_phik.permute((1, 0)), BLOCK, BLOCK)
        b_before = add(s_phiq, s_z2, start(s_q, s_z1, BLOCK, NARROW))
        b_logits, b_scores, b_before = warpgroup_mma_wait(0, [b_logits, b_scores, b_before])
        b_linear_scores = b_logits * (scale * KEY_SCALE)
        if is_even:
            b_scores += b_linear_scores * largest
        else:
            store_weighted(s_k, s_k, p_linear, scale * KEY_SCALE, D)
            b_scores = warpgroup_mma_wait(0, [add(s_q, s_k.permute((1, 0)), b_scores)])
        # Sums and numerators go on while denominators are formed. Places of tiles are worked out again.
        zero, here = anew(0), anew(i) % 2
        s_phiq, s_phik, s_one = m_phiq.index(zero), m_phik.index(zero), m_one.index(zero)
        s_q, s_k, s_v = s_queries.index(here), s_keys.index(here), s_values.index(here)
        s_s1, s_s2 = m_s1.index(zero), m_s2.index(zero)
        b_s2, b_2 = add_rows(b_s2, s_phik, s_v, s_one, F)
        b_numerator = add(s_phiq, s_s2, start(s_q, s_s1, BLOCK, V))
        # The mean logit, which makes the floor.
        b_logit = gl.sum(gl.where(m_causal, b_linear_scores, 0.0), axis=1)
        b_logit += gl.convert_layout(gl.sum(gl.where(o_narrow < 2, b_before, 0.0), axis=1), rows)
        b_scores = gl.where(m_causal, b_scores, 0.0)
        b_total = gl.convert_layout(gl.sum(gl.where(o_narrow < 2, 0.0, b_before), axis=1), rows)
        b_total += gl.sum(b_scores, axis=1)
        b_count = keys_seen(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, rows)
        b_inverse, b_e, b_slope = floored(b_total, b_logit, b_count, constant, zeroth, slope)
        s_scores = s_k.slice(0, BLOCK, 1)
        s_scores.store(gl.where(m_causal, b_scores + b_e[:, None], 0.0).to(dtype))
        fence_async_shared()
        b_numerator = add(s_scores, s_v, b_numerator)
        b_s2, b_2, b_numerator = warpgroup_mma_wait(0, [b_s2, b_2, b_numerator])
        b_z2 += row_sums(b_2)
        m_q = visible(q_start, N_QUERY, rows, None, BLOCK)
        o_row = i_out + q_start + o_q
        gl.store(p_inverse + o_row, b_inverse, mask=m_q)
        gl.store(p_constant + o_row, b_e, mask=m_q)
        gl.store(p_slope + o_row, b_slope, mask=m_q)
        b_values = s_zv.load(by_column(V, WARPS, BLOCK))
        b_numerator += gl.convert_layout(b_e, by_row(V, WARPS, BLOCK))[:, None] * b_values[None, :]
        b_numerator *= gl.convert_layout(b_inverse, by_row(V, WARPS, BLOCK))[:, None]
        # Not by way of the queries' tile: where one group of warps is done, the other may still be reading it.
        store_rows(p_out + i_out * DV, q_start, b_numerator, s_k, N_QUERY, DV, V)
    async_copy.wait_group(0)
