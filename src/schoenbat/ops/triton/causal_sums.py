"""Sums along a sequence, for causal attention: what lies before each chunk, or behind it.

Queries and keys lie on one axis of positions, the last query beside the last key, cut into tiles of BLOCK positions. CHUNK
tiles are a chunk: inside it scores are formed; what lies before it (behind it, for the gradients of keys) is a sum.
TILES tiles are a segment: one program goes through it and leaves the sums over what is `near`, the part of the segment
that lies before each chunk (each tile, for sums of rows alone); `scan` adds up what is `far`, the segments before.

`accumulate` and `scan` serve keys and values in both passes and, from the end on, queries and output gradients in the
backward pass. In `causal`, `read` gives each query row its output, `query_backward` its gradient and what `accumulate` needs
from it; in `causal_keys`, `key_backward` gives the gradients of keys and values, for each query head.

With f the floored denominator of a row, T what the features give it and e = (f - T) / count, which is the constant's
weight unless the floor acts,

    out_i = Σ_{j ≤ i} (φ(q_i)·φ(k_j) + e_i) v_j / f_i.

Σφ(k)vᵀ is kept as a mean over positions, Σφ(q)(grad/f)ᵀ as one of terms that are multiplied by about how many keys their
rows see (`normaliser`): such tiles stay in the range of float16 for any length. Totals are sums in float32.

A sequence may go on from a state (HAS_STATE): then `scan` begins with its sums, and every row sees as many `earlier` keys more.

Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.features import evaluate
from schoenbat.ops.triton.rows import NARROW, load_tile, load_unit_tile, visible

# What depends on the length of a sequence: no kernel is compiled again for another length.
LENGTHS = (
    "N", "N_QUERY", "N_KEY", "FIRST", "FIRST_QUERY", "FIRST_KEY", "FIRST_TILE", "TILES", "SPLITS", "SEGMENTS", "NUM_ROW_TILES", "EACH",
)  # fmt: skip
# Triton makes an argument that is 1 a constant. A loop over one group of features would become straight-line code, which Triton
# 3.6 compiles wrongly for causal heads padded to 32: where kernels loop over groups on warp groups, their number stays an argument.
GENERAL = (*LENGTHS, "num_groups")


@triton.jit
def earlier_keys(p_earlier, i_b, HAS_STATE: tl.constexpr):
    """How many keys are in the state that a sequence goes on from; a constant without one."""
    earlier = 0
    if HAS_STATE:
        earlier = tl.load(p_earlier + i_b)
    return earlier


@triton.jit
def normaliser(i_tile, FIRST_KEY, earlier, BLOCK: tl.constexpr):
    """About how many keys the rows of a tile see."""
    return tl.maximum(i_tile * BLOCK - FIRST_KEY + earlier, 1).to(tl.float32)


@triton.jit
def shares(
    i_tile, FIRST_KEY, earlier, TILES, NUM_ROW_TILES, AFTER: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What the means `near` and `far` of a tile are multiplied by for a mean of both, and this one for the sum."""
    i_chunk, i_segment = i_tile // CHUNK, i_tile // TILES
    if AFTER:
        chunk_end = tl.minimum((i_chunk + 1) * CHUNK, NUM_ROW_TILES)
        segment_end = tl.minimum((i_segment + 1) * TILES, NUM_ROW_TILES)
        near = (segment_end - chunk_end) * BLOCK / normaliser(chunk_end - 1, FIRST_KEY, earlier, BLOCK)
        far = (NUM_ROW_TILES - segment_end) * BLOCK / normaliser(segment_end - 1, FIRST_KEY, earlier, BLOCK)
    else:
        near = ((i_chunk * CHUNK - i_segment * TILES) * BLOCK).to(tl.float32)
        far = (i_segment * TILES * BLOCK + earlier).to(tl.float32)
    both = near + far
    divisor = tl.where(both > 0.0, both, 1.0)
    return near / divisor, far / divisor, both


@triton.jit
def state(p_near, p_far, near, far, o_first, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """ROWS rows of the mean φ ⊗ row, [ROWS, BLOCK_V]."""
    o = (o_first + tl.arange(0, ROWS))[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(p_near + o).to(tl.float32) * near + tl.load(p_far + o).to(tl.float32) * far


@triton.jit
def vector(p_near, p_far, o_first, SIZE: tl.constexpr):
    """SIZE elements of a sum."""
    o = o_first + tl.arange(0, SIZE)
    return tl.load(p_near + o) + tl.load(p_far + o)


@triton.jit
def seen(p_count, i_b, i_tile, N, FIRST_KEY, earlier, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys each row of a tile sees."""
    o_n = i_tile * BLOCK + tl.arange(0, BLOCK)
    if HAS_MASK:
        b_count = tl.load(p_count + i_b.to(tl.int64) * N + o_n, mask=o_n < N, other=0)
    else:
        b_count = tl.maximum(o_n - FIRST_KEY + 1, 0)
    return (b_count + earlier).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def accumulate(
    p_x, p_rows, p_mask, p_scale, p_inverse, p_constant, p_dtotal, p_dmean,
    p_near, p_near_totals, p_near_x, p_near_rows, p_sums, p_totals, p_x_sum, p_row_sum, p_earlier,
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn,
    N, FIRST, FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_STATE: tl.constexpr,
    IS_QUERY: tl.constexpr, IDENTITY: tl.constexpr, PARTS: tl.constexpr, QUADRATIC: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
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
    earlier = earlier_keys(p_earlier, i_b, HAS_STATE)
    if i_part == 0:
        _accumulate(
            p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
            p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, 0,
            N, FIRST, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
            True, HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, UNIT, CHUNK, DIM, DV, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            BLOCK_D,
        )  # fmt: skip
    else:
        _accumulate(
            p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
            p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, i_part - 1,
            N, FIRST, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
            False, HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, UNIT, CHUNK, DIM, DV, BLOCK_D, BLOCK_V, BLOCK, GROUP, PRECISION,
            GROUP,
        )  # fmt: skip


@triton.jit
def _accumulate(
    p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
    p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, i_group,
    N, FIRST, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    LINEAR: tl.constexpr, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
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
            weight = normaliser(i_tile, FIRST_KEY, earlier, BLOCK)
            ratio = weight / normaliser(i_tile + 1, FIRST_KEY, earlier, BLOCK)
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
        b_x, _ = load_unit_tile(p_x, start, stride_xn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
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
    p_state, p_state_totals, p_state_x, p_state_rows, p_earlier, FIRST_KEY, TILES, SEGMENTS, NUM_ROW_TILES, num_features,
    HEADS: tl.constexpr, HAS_STATE: tl.constexpr, AFTER: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each segment what the state and all segments before it (AFTER: all behind it) hold, the sums as means."""
    i_bh, i_rows = tl.program_id(0), tl.program_id(1)
    earlier = earlier_keys(p_earlier, i_bh // HEADS, HAS_STATE)
    o_d, o_v, o_f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), i_rows * ROWS + tl.arange(0, ROWS)
    m_f = o_f < num_features
    b_sums = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_totals = tl.zeros([ROWS], tl.float32)
    b_x = tl.zeros([BLOCK_D], tl.float32)
    b_rows = tl.zeros([BLOCK_V], tl.float32)
    if HAS_STATE and not AFTER:
        i_state = i_bh.to(tl.int64) * num_features + o_f
        b_sums += tl.load(p_state + i_state[:, None] * BLOCK_V + o_v[None, :], mask=m_f[:, None], other=0.0)
        b_totals += tl.load(p_state_totals + i_state, mask=m_f, other=0.0)
        b_x += tl.load(p_state_x + i_bh * BLOCK_D + o_d)
        b_rows += tl.load(p_state_rows + i_bh * BLOCK_V + o_v)
    for i in range(SEGMENTS):
        i_segment = i
        share = 1.0 / tl.maximum(i * TILES * BLOCK + earlier, 1)
        if AFTER:
            i_segment = SEGMENTS - 1 - i
            end = tl.minimum((i_segment + 1) * TILES, NUM_ROW_TILES)
            share = normaliser(end - 1, FIRST_KEY, earlier, BLOCK) / tl.maximum(
                (NUM_ROW_TILES - end) * BLOCK, 1
            )
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
