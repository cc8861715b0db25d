"""Causal attention as five kernels.

Queries and keys lie on one axis of positions, the last query beside the last key, cut into tiles of BLOCK positions. CHUNK
tiles are a chunk: inside it scores are formed; what lies before it (behind it, for the gradients of keys) is a sum.
TILES tiles are a segment: one program goes through it and leaves the sums over what is `near`, the part of the segment
that lies before each chunk (each tile, for sums of rows alone); `scan` adds up what is `far`, the segments before.

`accumulate` and `scan` serve keys and values in the forward pass and, backwards, queries and output gradients in the
backward pass. `read` gives each query row its output, `query_backward` its gradient and what `accumulate` needs from it,
`key_backward` the gradients of keys and values, for each query head.

With f the floored denominator of a row, T what the features give it and e = (f - T) / count, which is the constant's
weight unless the floor acts,

    out_i = Σ_{j ≤ i} (φ(q_i)·φ(k_j) + e_i) v_j / f_i.

Σφ(k)vᵀ is kept as a mean over positions, Σφ(q)(grad/f)ᵀ as one of terms that are multiplied by about how many keys their
rows see (`_normaliser`): such tiles stay in the range of float16 for any length. Totals are sums in float32.

Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.features import evaluate, evaluate_backward
from schoenbat.ops.triton.rows import LOWEST_EXPONENT, NARROW, load_tile, store_tile, visible

# What depends on the length of a sequence: no kernel is compiled again for another length.
LENGTHS = (
    "N", "N_QUERY", "N_KEY", "FIRST", "FIRST_QUERY", "FIRST_KEY", "FIRST_TILE", "TILES", "SPLITS", "SEGMENTS", "NUM_ROW_TILES",
)  # fmt: skip


@triton.jit
def _normaliser(i_tile, FIRST_KEY, BLOCK: tl.constexpr):
    """About how many keys the rows of a tile see."""
    return tl.maximum(i_tile * BLOCK - FIRST_KEY, 1).to(tl.float32)


@triton.jit
def _shares(
    i_tile, FIRST_KEY, TILES, NUM_ROW_TILES, AFTER: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """What the means `near` and `far` of a tile are multiplied by for a mean of both, and this one for the sum."""
    i_chunk, i_segment = i_tile // CHUNK, i_tile // TILES
    if AFTER:
        chunk_end = tl.minimum((i_chunk + 1) * CHUNK, NUM_ROW_TILES)
        segment_end = tl.minimum((i_segment + 1) * TILES, NUM_ROW_TILES)
        near = (segment_end - chunk_end) * BLOCK / _normaliser(chunk_end - 1, FIRST_KEY, BLOCK)
        far = (NUM_ROW_TILES - segment_end) * BLOCK / _normaliser(segment_end - 1, FIRST_KEY, BLOCK)
    else:
        near = ((i_chunk * CHUNK - i_segment * TILES) * BLOCK).to(tl.float32)
        far = (i_segment * TILES * BLOCK).to(tl.float32)
    both = near + far
    divisor = tl.where(both > 0.0, both, 1.0)
    return near / divisor, far / divisor, both


@triton.jit
def _state(p_near, p_far, near, far, o_first, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """ROWS rows of the mean φ ⊗ row, [ROWS, BLOCK_V]."""
    o = (o_first + tl.arange(0, ROWS))[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(p_near + o).to(tl.float32) * near + tl.load(p_far + o).to(tl.float32) * far


@triton.jit
def _vector(p_near, p_far, o_first, SIZE: tl.constexpr):
    """SIZE elements of a sum."""
    o = o_first + tl.arange(0, SIZE)
    return tl.load(p_near + o) + tl.load(p_far + o)


@triton.jit
def _count(p_count, i_b, i_tile, N, FIRST_KEY, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys each row of a tile sees."""
    o_n = i_tile * BLOCK + tl.arange(0, BLOCK)
    if HAS_MASK:
        return tl.load(p_count + i_b.to(tl.int64) * N + o_n, mask=o_n < N, other=0).to(tl.float32)
    return tl.maximum(o_n - FIRST_KEY + 1, 0).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def accumulate(
    p_x, p_rows, p_mask, p_scale, p_inverse, p_constant, p_dtotal, p_dmean,
    p_near, p_near_totals, p_near_x, p_near_rows, p_sums, p_totals, p_x_sum, p_row_sum,
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn,
    N, FIRST, FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr,
    IDENTITY: tl.constexpr, PARTS: tl.constexpr, QUADRATIC: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment's Σφ(x) rowᵀ, Σφ(x) w, Σx u and Σrow e, whole and as they were before each chunk or tile.

    For keys w, u and e are 1. For queries (IS_QUERY) tiles come in reverse, row is the output's gradient divided by the
    denominator, w the gradient of the denominator, u that of the mean logit. A part is x itself, with what has no
    features (always the first), or one group of features.
    """
    i_part, i_segment = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % SEGMENTS
    i_bh = tl.program_id(0) // (PARTS * SEGMENTS)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    p_x += i_b.to(tl.int64) * stride_xb + i_h.to(tl.int64) * stride_xh
    p_rows += i_b.to(tl.int64) * stride_rb + i_h.to(tl.int64) * stride_rh
    p_mask += i_b.to(tl.int64) * N
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = KEY_SCALE
    if IS_QUERY:
        scale = tl.load(p_scale + i_h)
    if i_part == 0:
        _accumulate(
            p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
            p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, 0,
            N, FIRST, FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
            True, HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, CHUNK, DIM, DV, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            BLOCK_D,
        )  # fmt: skip
    else:
        _accumulate(
            p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
            p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, i_part - 1,
            N, FIRST, FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
            False, HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, CHUNK, DIM, DV, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            GROUP,
        )  # fmt: skip


@triton.jit
def _accumulate(
    p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
    p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, i_group,
    N, FIRST, FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    LINEAR: tl.constexpr, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """What `accumulate` does for one part; it has FEATURES features.

    What is summed over rows alone is a product with a narrow tile, (w, u, e, ...): sums across warps would make them
    wait for one another at every tile.
    """
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_d, o_v, o_f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, FEATURES)
    o_narrow = tl.arange(0, NARROW)[None, :]
    b_factor = tl.full([FEATURES], 1.0, tl.float32)
    if LINEAR:
        b_factor = tl.load(p_linear + o_d) * scale
    else:
        o_f += IDENTITY * BLOCK_D + i_group * GROUP
    b_sums = tl.zeros([FEATURES, BLOCK_V], tl.float32)
    b_totals = tl.zeros([FEATURES, NARROW], tl.float32)
    b_row_totals = tl.zeros([BLOCK_V, NARROW], tl.float32)
    weight = 1.0
    first_tile = i_segment * TILES
    num_here = tl.minimum(TILES, NUM_ROW_TILES - first_tile)
    for i in range(num_here):
        i_tile = first_tile + i
        if IS_QUERY:
            i_tile = first_tile + num_here - 1 - i
            weight = _normaliser(i_tile, FIRST_KEY, BLOCK)
            ratio = weight / _normaliser(i_tile + 1, FIRST_KEY, BLOCK)
            b_sums *= ratio
            b_totals *= ratio
            b_row_totals *= ratio

        # What came before.
        new_chunk = i_tile % CHUNK == 0
        if IS_QUERY:
            new_chunk = ((i_tile + 1) % CHUNK == 0) | (i_tile == NUM_ROW_TILES - 1)
        if IDENTITY or not LINEAR:
            if CHUNK == 1 or new_chunk:
                i_near = (i_bh * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64) * num_features
                b_share = b_factor / tl.maximum(i * BLOCK, 1)
                p = p_near + i_near * BLOCK_V + (o_f[:, None] * BLOCK_V + o_v[None, :])
                tl.store(p, (b_sums * b_share[:, None]).to(p_near.dtype.element_ty))
                _store_column(p_near_totals + i_near + o_f, b_totals * b_factor[:, None], 0, 1.0 / weight)
        if LINEAR:
            i_row = (i_bh * NUM_ROW_TILES + i_tile).to(tl.int64)
            _store_column(p_near_x + i_row * BLOCK_D + o_d, b_totals, 1, scale / weight)
            _store_column(p_near_rows + i_row * BLOCK_V + o_v, b_row_totals, 2, 1.0 / weight)

        # What this tile adds.
        start = i_tile * BLOCK - FIRST
        m_n = visible(p_mask, start, N, BLOCK, HAS_MASK)
        b_x = load_tile(p_x, start, stride_xn, m_n, DIM, BLOCK, BLOCK_D)
        b_rows = load_tile(p_rows, start, stride_rn, m_n, DV, BLOCK, BLOCK_V)
        dtype = b_x.dtype
        b_narrow = tl.full([BLOCK, NARROW], 1.0, tl.float32)
        if IS_QUERY:
            o_row = tl.full([], i_bh, tl.int64) * N + start + tl.arange(0, BLOCK)
            b_inverse = tl.load(p_inverse + o_row, mask=m_n, other=0.0)[:, None]
            b_narrow = tl.load(p_dtotal + o_row, mask=m_n, other=0.0)[:, None] * weight
            if LINEAR:
                b_u = tl.load(p_dmean + o_row, mask=m_n, other=0.0)[:, None] * weight
                b_e = tl.load(p_constant + o_row, mask=m_n, other=0.0)[:, None] * b_inverse * weight
                b_narrow = tl.where(o_narrow == 0, b_narrow, tl.where(o_narrow == 1, b_u, b_e))
        b_narrow = tl.where(m_n[:, None] & (o_narrow >= 0), b_narrow, 0.0).to(dtype)
        if LINEAR:
            b_row_totals += tl.dot(tl.trans(b_rows), b_narrow, input_precision=PRECISION)
        if IS_QUERY:
            b_rows = (b_rows.to(tl.float32) * (b_inverse * weight)).to(dtype)
        if LINEAR:
            b_phi = tl.trans(b_x)
        else:
            b_phi = evaluate(
                b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
            )  # fmt: skip
            b_phi = tl.trans(b_phi.to(dtype))
        if IDENTITY or not LINEAR:
            b_sums += tl.dot(b_phi, b_rows, input_precision=PRECISION)
        b_totals += tl.dot(b_phi, b_narrow, input_precision=PRECISION)

    i_out = (i_bh * SEGMENTS + i_segment).to(tl.int64)
    inverse = 1.0 / weight
    if IDENTITY or not LINEAR:
        p = p_sums + i_out * num_features * BLOCK_V + (o_f[:, None] * BLOCK_V + o_v[None, :])
        tl.store(p, b_sums * (b_factor * inverse)[:, None])
        _store_column(p_totals + i_out * num_features + o_f, b_totals * b_factor[:, None], 0, inverse)
    if LINEAR:
        _store_column(p_x_sum + i_out * BLOCK_D + o_d, b_totals, 1, scale * inverse)
        _store_column(p_row_sum + i_out * BLOCK_V + o_v, b_row_totals, 2, inverse)


@triton.jit
def _store_column(p, b, i_column: tl.constexpr, factor):
    """One column of a narrow tile; without a sum, for which warps would wait for one another."""
    o = tl.arange(0, NARROW)[None, :]
    tl.store(p[:, None] + o * 0, b * factor, mask=o == i_column)


@triton.jit(do_not_specialize=LENGTHS)
def scan(
    p_sums, p_totals, p_x, p_rows, p_far, p_far_totals, p_far_x, p_far_rows,
    FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, num_features,
    AFTER: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each segment what all segments before it (AFTER: behind it) hold, the sums as means."""
    i_bh, i_rows = tl.program_id(0), tl.program_id(1)
    o_d, o_v, o_f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), i_rows * ROWS + tl.arange(0, ROWS)
    m_f = o_f < num_features
    b_sums = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_totals = tl.zeros([ROWS], tl.float32)
    b_x = tl.zeros([BLOCK_D], tl.float32)
    b_rows = tl.zeros([BLOCK_V], tl.float32)
    for i in range(SEGMENTS):
        i_segment = i
        share = 1.0 / tl.maximum(i * TILES * BLOCK, 1)
        if AFTER:
            i_segment = SEGMENTS - 1 - i
            end = tl.minimum((i_segment + 1) * TILES, NUM_ROW_TILES)
            share = _normaliser(end - 1, FIRST_KEY, BLOCK) / tl.maximum((NUM_ROW_TILES - end) * BLOCK, 1)
        i_out = (i_bh * SEGMENTS + i_segment).to(tl.int64)
        o_sums = i_out * num_features * BLOCK_V + (o_f[:, None] * BLOCK_V + o_v[None, :])
        tl.store(p_far + o_sums, (b_sums * share).to(p_far.dtype.element_ty), mask=m_f[:, None])
        tl.store(p_far_totals + i_out * num_features + o_f, b_totals, mask=m_f)
        b_sums += tl.load(p_sums + o_sums, mask=m_f[:, None], other=0.0)
        b_totals += tl.load(p_totals + i_out * num_features + o_f, mask=m_f, other=0.0)
        if i_rows == 0:
            tl.store(p_far_x + i_out * BLOCK_D + o_d, b_x)
            tl.store(p_far_rows + i_out * BLOCK_V + o_v, b_rows)
            b_x += tl.load(p_x + i_out * BLOCK_D + o_d)
            b_rows += tl.load(p_rows + i_out * BLOCK_V + o_v)


@triton.jit
def _scores(
    b_q, b_k, scale, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """φ(q)·φ(k) for all pairs of two tiles, [BLOCK, BLOCK]."""
    b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    if IDENTITY:
        b_scores += _linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
    for i_group in range(num_groups):
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_scores += tl.dot(b_phi_q.to(b_q.dtype), tl.trans(b_phi_k.to(b_q.dtype)), input_precision=PRECISION)
    return b_scores


@triton.jit
def _linear_scores(b_a, b_b, p_linear, scale, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """What identity features add to the scores of two tiles."""
    b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
    b_a = (b_a.to(tl.float32) * (b_root * b_root * scale)[None, :]).to(b_a.dtype)
    return tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)


@triton.jit(do_not_specialize=LENGTHS)
def read(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_out, p_inverse, p_constant, p_slope,
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of outputs; by row also 1/f, e, and the derivative of f with respect to the mean logit."""
    num_here = NUM_ROW_TILES - FIRST_TILE
    i_tile, i_bh = FIRST_TILE + tl.program_id(0) % num_here, tl.program_id(0) // num_here
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = i_bh // GROUPS
    first: tl.constexpr = IDENTITY * BLOCK_D
    num_features = first + num_groups * GROUP
    o_d, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    i_near = (i_state * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64)
    i_far = (i_state * SEGMENTS + i_tile // TILES).to(tl.int64)
    i_row = (i_state * NUM_ROW_TILES + i_tile).to(tl.int64)
    p_near += i_near * num_features * BLOCK_V
    p_near_totals += i_near * num_features
    p_far += i_far * num_features * BLOCK_V
    p_far_totals += i_far * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = tl.load(p_scale + i_h)
    constant, zeroth = tl.load(p_coefficients + 3 * i_map), tl.load(p_coefficients + 3 * i_map + 1)
    slope = tl.load(p_coefficients + 3 * i_map + 2)
    near, far, both = _shares(i_tile, FIRST_KEY, TILES, NUM_ROW_TILES, False, CHUNK, BLOCK)

    q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
    m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
    m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
    m_causal = o_n[:, None] >= o_n[None, :]
    b_q = load_tile(p_query, q_start, stride_qn, m_q, DIM, BLOCK, BLOCK_D)
    dtype = b_q.dtype

    # The mean logit, which makes the floor.
    b_k = load_tile(p_key, k_start, stride_kn, m_k, DIM, BLOCK, BLOCK_D)
    b_logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_logit = tl.sum(tl.where(m_causal, b_logits, 0.0), axis=1) * KEY_SCALE
    b_keys = _vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, BLOCK_D)
    b_logit = (b_logit + tl.sum(b_q.to(tl.float32) * b_keys[None, :], axis=1)) * scale

    # Scores inside the tile, and what is read from the sums. Without barriers the compiler would keep the factors of
    # queries and keys at once, which do not fit the registers.
    b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    b_numerator = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    b_total = tl.zeros([BLOCK], tl.float32)
    if IDENTITY:
        b_scores += _linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
        b_root = tl.load(p_linear + o_d) * scale
        b_s1 = _state(p_near, p_far, near, far, 0, BLOCK_D, BLOCK_V) * b_root[:, None]
        b_numerator += tl.dot(b_q, b_s1.to(dtype), input_precision=PRECISION)
        b_z1 = _vector(p_near_totals, p_far_totals, 0, BLOCK_D)
        b_total += tl.sum(b_q.to(tl.float32) * (b_z1 * b_root)[None, :], axis=1)
    for i_group in range(num_groups):
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        if QUADRATIC:
            tl.debug_barrier()
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_z = _vector(p_near_totals, p_far_totals, first + i_group * GROUP, GROUP)
        b_total += tl.sum(b_phi_q * b_z[None, :], axis=1)
        b_phi_q = b_phi_q.to(dtype)
        b_scores += tl.dot(b_phi_q, tl.trans(b_phi_k), input_precision=PRECISION)
        if QUADRATIC:
            tl.debug_barrier()
        b_s = _state(p_near, p_far, near, far, first + i_group * GROUP, GROUP, BLOCK_V)
        b_numerator += tl.dot(b_phi_q, b_s.to(dtype), input_precision=PRECISION)
    b_numerator *= both

    # Scores with the tiles before it in the chunk.
    if CHUNK > 1:
        for i_other in range(i_tile // CHUNK * CHUNK, i_tile):
            start = i_other * BLOCK - FIRST_KEY
            m_other = visible(p_mask, start, N_KEY, BLOCK, HAS_MASK)
            b_other = load_tile(p_key, start, stride_kn, m_other, DIM, BLOCK, BLOCK_D)
            b_more = _scores(
                b_q, b_other, scale, KEY_SCALE, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY,
                QUADRATIC, BLOCK_D, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
            b_total += tl.sum(b_more, axis=1)
            b_v = load_tile(p_value, start, stride_vn, m_other, DV, BLOCK, BLOCK_V)
            b_numerator += tl.dot(b_more.to(dtype), b_v, input_precision=PRECISION)

    b_count = _count(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, HAS_MASK, BLOCK)
    divisor = tl.maximum(b_count, 1.0)
    b_scores = tl.where(m_causal, b_scores, 0.0)
    b_total += tl.sum(b_scores, axis=1)
    b_exponent = slope * b_logit / divisor
    b_floor = b_count * zeroth * tl.exp(tl.minimum(tl.maximum(b_exponent, LOWEST_EXPONENT), 0.0))
    m_some = b_count > 0.0
    m_below = b_total + constant * b_count < b_floor
    b_floored = tl.where(m_some, tl.where(m_below, b_floor, b_total + constant * b_count), 1.0)
    b_e = tl.where(m_some, tl.where(m_below, (b_floor - b_total) / divisor, constant), 0.0)
    m_falling = m_below & (b_exponent < 0.0) & (b_exponent > LOWEST_EXPONENT)
    b_slope = tl.where(m_falling, b_floor * slope, 0.0)

    b_scores = tl.where(m_causal, b_scores + b_e[:, None], 0.0)
    b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
    b_numerator += tl.dot(b_scores.to(dtype), b_v, input_precision=PRECISION)
    b_values = _vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, BLOCK_V)
    b_numerator += b_e[:, None] * b_values[None, :]
    b_inverse = 1.0 / b_floored
    i_out = tl.full([], i_bh, tl.int64) * N_QUERY
    store_tile(p_out + i_out * DV, q_start, b_numerator * b_inverse[:, None], m_q, DV, BLOCK, BLOCK_V)
    tl.store(p_inverse + i_out + q_start + o_n, b_inverse, mask=m_q)
    tl.store(p_constant + i_out + q_start + o_n, b_e, mask=m_q)
    tl.store(p_slope + i_out + q_start + o_n, b_slope, mask=m_q)


@triton.jit
def _query_pair(
    b_dx, b_q, b_k, b_dscores, b_rows, b_dtotal, scale, KEY_SCALE, inverse_weight, p_near, p_near_totals, p_far, p_far_totals,
    near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    WITH_SUMS: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of scaled queries what comes from one tile of keys, and from the sums (WITH_SUMS)."""
    dtype = b_q.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    if IDENTITY:
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_more = tl.dot(b_dscores, b_k, input_precision=PRECISION)
        b_dx += b_more * (b_root * b_root * (KEY_SCALE * inverse_weight))[None, :]
        if WITH_SUMS:
            b_s1 = (_state(p_near, p_far, near, far, 0, BLOCK_D, BLOCK_V) * b_root[:, None]).to(dtype)
            b_dx += tl.dot(b_rows, tl.trans(b_s1), input_precision=PRECISION) * (both * inverse_weight)
            b_z1 = _vector(p_near_totals, p_far_totals, 0, BLOCK_D)
            b_dx += b_dtotal[:, None] * (b_z1 * b_root)[None, :]
    for i_group in range(num_groups):
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
        b_dphi = tl.dot(b_dscores, b_phi_k.to(dtype), input_precision=PRECISION) * inverse_weight
        if WITH_SUMS:
            b_s = _state(p_near, p_far, near, far, first + i_group * GROUP, GROUP, BLOCK_V).to(dtype)
            b_dphi += tl.dot(b_rows, tl.trans(b_s), input_precision=PRECISION) * (both * inverse_weight)
            b_z = _vector(p_near_totals, p_far_totals, first + i_group * GROUP, GROUP)
            b_dphi += b_dtotal[:, None] * b_z[None, :]
        b_dx += evaluate_backward(
            b_dphi, b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
    return b_dx


@triton.jit(do_not_specialize=LENGTHS)
def query_backward(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_grad, p_out, p_inverse, p_constant, p_slope,
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows,
    p_dquery, p_dtotal, p_dmean, p_dscale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of query gradients; by row also those of T and of the mean logit, divided by the count; that of the scale."""
    num_here = NUM_ROW_TILES - FIRST_TILE
    i_tile, i_bh = FIRST_TILE + tl.program_id(0) % num_here, tl.program_id(0) // num_here
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = i_bh // GROUPS
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_n = tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    i_near = (i_state * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64)
    i_far = (i_state * SEGMENTS + i_tile // TILES).to(tl.int64)
    i_row = (i_state * NUM_ROW_TILES + i_tile).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64) * N_QUERY
    p_near += i_near * num_features * BLOCK_V
    p_near_totals += i_near * num_features
    p_far += i_far * num_features * BLOCK_V
    p_far_totals += i_far * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale, constant = tl.load(p_scale + i_h), tl.load(p_coefficients + 3 * i_map)
    near, far, both = _shares(i_tile, FIRST_KEY, TILES, NUM_ROW_TILES, False, CHUNK, BLOCK)
    weight = _normaliser(i_tile, FIRST_KEY, BLOCK)

    q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
    m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
    m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
    m_causal = o_n[:, None] >= o_n[None, :]
    b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
    b_out = load_tile(p_out + i_out * DV, q_start, DV, m_q, DV, BLOCK, BLOCK_V)
    b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
    dtype = b_grad.dtype
    o_row = i_out + q_start + o_n
    b_inverse = tl.load(p_inverse + o_row, mask=m_q, other=0.0)
    b_e = tl.load(p_constant + o_row, mask=m_q, other=0.0)
    b_slope = tl.load(p_slope + o_row, mask=m_q, other=0.0)
    b_count = _count(p_count, i_b, i_tile, FIRST_KEY + N_KEY, FIRST_KEY, HAS_MASK, BLOCK)
    divisor = tl.maximum(b_count, 1.0)

    # ⟨grad, value⟩ for all pairs; its sums are ⟨grad, mean value⟩.
    b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    b_dots = tl.where(m_causal, b_dots, 0.0)
    b_grad32 = b_grad.to(tl.float32)
    b_values = _vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, BLOCK_V)
    b_along_mean = tl.sum(b_dots, axis=1) + tl.sum(b_grad32 * b_values[None, :], axis=1)
    b_along_mean = b_along_mean * b_inverse / divisor
    b_along_out = tl.sum(b_grad32 * b_out.to(tl.float32), axis=1) * b_inverse
    b_dtotal = -tl.where(b_e == constant, b_along_out, b_along_mean)
    b_dmean = (b_along_mean - b_along_out) * b_slope / divisor
    tl.store(p_dtotal + o_row, b_dtotal, mask=m_q)
    tl.store(p_dmean + o_row, b_dmean, mask=m_q)

    b_rows = (b_grad32 * (b_inverse * weight)[:, None]).to(dtype)
    b_dscores = (b_dots * b_inverse[:, None] + b_dtotal[:, None]) * weight
    b_dscores = tl.where(m_causal, b_dscores, 0.0).to(dtype)
    b_q = load_tile(p_query, q_start, stride_qn, m_q, DIM, BLOCK, BLOCK_D)
    b_k = load_tile(p_key, k_start, stride_kn, m_k, DIM, BLOCK, BLOCK_D)
    b_keys = _vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, BLOCK_D)
    b_dx = b_dmean[:, None] * b_keys[None, :]
    if tl.max(tl.abs(b_dmean), axis=0) > 0.0:  # the floor acts somewhere, which is rare
        b_mean = tl.where(m_causal, (b_dmean * weight)[:, None], 0.0).to(dtype)
        b_dx += tl.dot(b_mean, b_k, input_precision=PRECISION) * (KEY_SCALE / weight)
    b_dx = _query_pair(
        b_dx, b_q, b_k, b_dscores, b_rows, b_dtotal, scale, KEY_SCALE, 1.0 / weight, p_near, p_near_totals, p_far, p_far_totals,
        near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, True, IDENTITY, QUADRATIC, BLOCK_D,
        BLOCK_V, BLOCK, GROUP, PRECISION,
    )  # fmt: skip
    if CHUNK > 1:
        for i_other in range(i_tile // CHUNK * CHUNK, i_tile):
            start = i_other * BLOCK - FIRST_KEY
            m_other = visible(p_mask, start, N_KEY, BLOCK, HAS_MASK)
            b_k = load_tile(p_key, start, stride_kn, m_other, DIM, BLOCK, BLOCK_D)
            b_v = load_tile(p_value, start, stride_vn, m_other, DV, BLOCK, BLOCK_V)
            b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
            b_dscores = ((b_dots * b_inverse[:, None] + b_dtotal[:, None]) * weight).to(dtype)
            b_dx = _query_pair(
                b_dx, b_q, b_k, b_dscores, b_rows, b_dtotal, scale, KEY_SCALE, 1.0 / weight, p_near, p_near_totals, p_far,
                p_far_totals, near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, False, IDENTITY,
                QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
    # b_dx is the gradient of scale · query, on which alone everything depends.
    b_along = tl.sum(b_dx * b_q.to(tl.float32), axis=1)
    tl.store(p_dscale + tl.program_id(0), tl.sum(b_along, axis=0))
    store_tile(p_dquery + i_out * DIM, q_start, b_dx * scale, m_q, DIM, BLOCK, BLOCK_D)


@triton.jit
def _value_pair(
    b_dv, b_k, b_q, b_grad, b_inverse, b_e, scale, KEY_SCALE, weight, p_near, p_far, near, far, both,
    p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    OWN: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of values what comes from one tile of queries.

    OWN: the tile of the keys themselves, in which not every row sees every key; also what comes from the sums.
    """
    dtype = b_q.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    b_read = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    if IDENTITY:
        b_scores += _linear_scores(b_q, b_k, p_linear, scale * KEY_SCALE, BLOCK_D, PRECISION)
        if OWN:
            b_root = tl.load(p_linear + tl.arange(0, BLOCK_D)) * KEY_SCALE
            b_s1 = _state(p_near, p_far, near, far, 0, BLOCK_D, BLOCK_V) * b_root[:, None]
            b_read += tl.dot(b_k, b_s1.to(dtype), input_precision=PRECISION)
    for i_group in range(num_groups):
        b_phi_k = evaluate(
            b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        if OWN:
            b_s = _state(p_near, p_far, near, far, first + i_group * GROUP, GROUP, BLOCK_V).to(dtype)
            b_read += tl.dot(b_phi_k, b_s, input_precision=PRECISION)
        if QUADRATIC:
            tl.debug_barrier()
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        b_scores += tl.dot(b_phi_q, tl.trans(b_phi_k), input_precision=PRECISION)
    if OWN:
        o_n = tl.arange(0, BLOCK)
        b_scores = tl.where(o_n[:, None] >= o_n[None, :], b_scores + b_e[:, None], 0.0)
    b_scores = (b_scores * (b_inverse * weight)[:, None]).to(dtype)
    return b_dv + b_read * both + tl.dot(tl.trans(b_scores), b_grad, input_precision=PRECISION) / weight


@triton.jit
def _key_pair(
    b_dx, b_k, b_v, b_q, b_grad, b_inverse, b_dtotal, b_dmean, scale, KEY_SCALE, weight, p_near, p_near_totals,
    p_far, p_far_totals, near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    OWN: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of scaled keys what comes from one tile of queries; OWN as in `_value_pair`."""
    dtype = b_q.dtype
    first: tl.constexpr = IDENTITY * BLOCK_D
    b_dscores = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    b_dscores = (b_dscores * b_inverse[:, None] + b_dtotal[:, None]) * weight
    if OWN:
        o_n = tl.arange(0, BLOCK)
        m_causal = o_n[:, None] >= o_n[None, :]
        b_dscores = tl.where(m_causal, b_dscores, 0.0)
        if tl.max(tl.abs(b_dmean), axis=0) > 0.0:
            b_mean = tl.where(m_causal, (b_dmean * weight)[:, None], 0.0).to(dtype)
            b_dx += tl.dot(tl.trans(b_mean), b_q, input_precision=PRECISION) * (scale / weight)
    b_dscores = tl.trans(b_dscores.to(dtype))
    if IDENTITY:
        b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
        b_dx += (
            tl.dot(b_dscores, b_q, input_precision=PRECISION) * (b_root * b_root * (scale / weight))[None, :]
        )
        if OWN:
            b_s1 = (_state(p_near, p_far, near, far, 0, BLOCK_D, BLOCK_V) * b_root[:, None]).to(dtype)
            b_z1 = _vector(p_near_totals, p_far_totals, 0, BLOCK_D) * b_root
            b_dx += tl.dot(b_v, tl.trans(b_s1), input_precision=PRECISION) * both + b_z1[None, :]
    for i_group in range(num_groups):
        b_phi_q = evaluate(
            b_q, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        ).to(dtype)  # fmt: skip
        b_dphi = tl.dot(b_dscores, b_phi_q, input_precision=PRECISION) / weight
        if OWN:
            b_s = _state(p_near, p_far, near, far, first + i_group * GROUP, GROUP, BLOCK_V).to(dtype)
            b_z = _vector(p_near_totals, p_far_totals, first + i_group * GROUP, GROUP)
            b_dphi += tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) * both + b_z[None, :]
        b_dx += evaluate_backward(
            b_dphi, b_k, KEY_SCALE, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP,
            PRECISION,
        )  # fmt: skip
    return b_dx


@triton.jit(do_not_specialize=LENGTHS)
def key_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_grad, p_inverse, p_constant, p_dtotal, p_dmean,
    p_near, p_near_totals, p_near_x, p_near_rows, p_far, p_far_totals, p_far_x, p_far_rows, p_dkey, p_dvalue,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of key and value gradients, as far as they come from one query head."""
    num_here = NUM_ROW_TILES - FIRST_TILE
    i_tile, i_bh = FIRST_TILE + tl.program_id(0) % num_here, tl.program_id(0) // num_here
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_n = tl.arange(0, BLOCK)
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    i_near = (i_bh * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64)
    i_far = (i_bh * SEGMENTS + i_tile // TILES).to(tl.int64)
    i_row = (i_bh * NUM_ROW_TILES + i_tile).to(tl.int64)
    i_out = tl.full([], i_bh, tl.int64)
    p_inverse += i_out * N_QUERY
    p_constant += i_out * N_QUERY
    p_dtotal += i_out * N_QUERY
    p_dmean += i_out * N_QUERY
    p_near += i_near * num_features * BLOCK_V
    p_near_totals += i_near * num_features
    p_far += i_far * num_features * BLOCK_V
    p_far_totals += i_far * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = tl.load(p_scale + i_h)
    near, far, both = _shares(i_tile, FIRST_KEY, TILES, NUM_ROW_TILES, True, CHUNK, BLOCK)

    q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
    m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
    m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
    b_k = load_tile(p_key, k_start, stride_kn, m_k, DIM, BLOCK, BLOCK_D)
    b_q = load_tile(p_query, q_start, stride_qn, m_q, DIM, BLOCK, BLOCK_D)
    b_grad = load_tile(p_grad, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V)
    b_inverse = tl.load(p_inverse + q_start + o_n, mask=m_q, other=0.0)
    weight = _normaliser(i_tile, FIRST_KEY, BLOCK)
    # What is masked gets zeros; what lies outside gets nothing.
    m_in = visible(p_mask, k_start, N_KEY, BLOCK, False)
    last = tl.minimum((i_tile // CHUNK + 1) * CHUNK, NUM_ROW_TILES)

    # Values first, then keys: the features of queries are formed twice, but both at once would not fit the registers.
    b_e = tl.load(p_constant + q_start + o_n, mask=m_q, other=0.0)
    b_values = _vector(p_near_rows + i_row * BLOCK_V, p_far_rows + i_far * BLOCK_V, 0, BLOCK_V)
    b_dv = tl.zeros([BLOCK, BLOCK_V], tl.float32) + b_values[None, :]
    b_dv = _value_pair(
        b_dv, b_k, b_q, b_grad, b_inverse, b_e, scale, KEY_SCALE, weight, p_near, p_far, near, far, both, p_tiles, p_root,
        p_linear, p_degrees, p_first, num_groups, True, IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
    )  # fmt: skip
    if CHUNK > 1:
        for i_other in range(i_tile + 1, last):
            start = i_other * BLOCK - FIRST_QUERY
            m_other = visible(p_mask, start, N_QUERY, BLOCK, False)
            b_other = load_tile(p_query, start, stride_qn, m_other, DIM, BLOCK, BLOCK_D)
            b_other_grad = load_tile(p_grad, start, stride_gn, m_other, DV, BLOCK, BLOCK_V)
            b_other_inverse = tl.load(p_inverse + start + o_n, mask=m_other, other=0.0)
            b_dv = _value_pair(
                b_dv, b_k, b_other, b_other_grad, b_other_inverse, b_e, scale, KEY_SCALE,
                _normaliser(i_other, FIRST_KEY, BLOCK), p_near, p_far, near, far, both, p_tiles, p_root, p_linear, p_degrees,
                p_first, num_groups, False, IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            )  # fmt: skip
    b_dv = tl.where(m_k[:, None], b_dv, 0.0)
    store_tile(p_dvalue + i_out * N_KEY * DV, k_start, b_dv, m_in, DV, BLOCK, BLOCK_V)

    b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
    b_dtotal = tl.load(p_dtotal + q_start + o_n, mask=m_q, other=0.0)
    b_dmean = tl.load(p_dmean + q_start + o_n, mask=m_q, other=0.0)
    b_keys = _vector(p_near_x + i_row * BLOCK_D, p_far_x + i_far * BLOCK_D, 0, BLOCK_D)
    b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32) + b_keys[None, :]
    b_dx = _key_pair(
        b_dx, b_k, b_v, b_q, b_grad, b_inverse, b_dtotal, b_dmean, scale, KEY_SCALE, weight, p_near, p_near_totals, p_far,
        p_far_totals, near, far, both, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, True, IDENTITY, QUADRATIC,
        BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
    )  # fmt: skip
    if CHUNK > 1:
        for i_other in range(i_tile + 1, last):
            start = i_other * BLOCK - FIRST_QUERY
            m_other = visible(p_mask, start, N_QUERY, BLOCK, False)
            b_other = load_tile(p_query, start, stride_qn, m_other, DIM, BLOCK, BLOCK_D)
            b_other_grad = load_tile(p_grad, start, stride_gn, m_other, DV, BLOCK, BLOCK_V)
            b_other_inverse = tl.load(p_inverse + start + o_n, mask=m_other, other=0.0)
            b_other_dtotal = tl.load(p_dtotal + start + o_n, mask=m_other, other=0.0)
            b_dx = _key_pair(
                b_dx, b_k, b_v, b_other, b_other_grad, b_other_inverse, b_other_dtotal, b_dmean, scale, KEY_SCALE,
                _normaliser(i_other, FIRST_KEY, BLOCK), p_near, p_near_totals, p_far, p_far_totals, near, far, both, p_tiles,
                p_root, p_linear, p_degrees, p_first, num_groups, False, IDENTITY, QUADRATIC, BLOCK_D, BLOCK_V, BLOCK, GROUP,
                PRECISION,
            )  # fmt: skip
    b_dx = tl.where(m_k[:, None], b_dx * KEY_SCALE, 0.0)
    store_tile(p_dkey + i_out * N_KEY * DIM, k_start, b_dx, m_in, DIM, BLOCK, BLOCK_D)
