"""Sums along a sequence, for causal attention: what lies before each chunk, or behind it.

Queries and keys lie on one axis of positions, the last query beside the last key, cut into tiles of BLOCK positions. CHUNK
tiles are a chunk: inside it scores are formed; what lies before it (behind it, for the gradients of keys) is a sum.
TILES tiles are a segment: one program goes through it and leaves the sums over what is `near`, the part of the segment
that lies before each chunk (each tile, for sums of rows alone); `scan` adds up what is `far`, the segments before. Where
heads are many, each is one segment: nothing is far (HAS_FAR), and sums are multiplied as they were stored.

`accumulate` and `scan` serve keys and values in both passes and, from the end on, queries and output gradients in the
backward pass. In `causal`, `read` gives each query row its output, `query_backward` its gradient and what `accumulate` needs
from it; in `causal_keys`, `key_backward` gives the gradients of keys and values, for each query head.

With f the floored denominator of a row, T what the features give it and e = (f - T) / count, which is the constant's
weight unless the floor acts,

    out_i = Σ_{j ≤ i} (φ(q_i)·φ(k_j) + e_i) v_j / f_i.

Σφ(k)vᵀ is kept as a mean over positions, Σφ(q)(grad/f)ᵀ as one of terms that are multiplied by about how many keys their
rows see (`normaliser`): such tiles do not leave the range of float16 upwards for any length. Totals are sums in float32.

A sequence may go on from a state (HAS_STATE): then `scan` begins with its sums, and every row sees as many `earlier` keys more.

Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import directions, evaluate, pairs
from schoenbat.ops.triton.kernels.rows import NARROW, load_tile, load_unit_tile, visible

# What depends on the length of a sequence: no kernel is compiled again for another length, but for whether anything is far.
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
def state(
    p_near, p_far, near, far, o_first, HAS_FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr
):
    """ROWS rows of the mean φ ⊗ row, [ROWS, BLOCK_V]: in float32, or where nothing is far as they were stored."""
    o = (o_first + tl.arange(0, ROWS))[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    b_means = tl.load(p_near + o)
    if HAS_FAR:
        b_means = b_means.to(tl.float32) * near + tl.load(p_far + o).to(tl.float32) * far
    return b_means


@triton.jit
def vector(p_near, p_far, o_first, HAS_FAR: tl.constexpr, SIZE: tl.constexpr):
    """SIZE elements of a sum."""
    o = o_first + tl.arange(0, SIZE)
    b = tl.load(p_near + o)
    if HAS_FAR:
        b += tl.load(p_far + o)
    return b


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
    IS_QUERY: tl.constexpr, IDENTITY: tl.constexpr, PARTS: tl.constexpr, SINGLE: tl.constexpr, QUADRATIC: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment's Σφ(x) rowᵀ, Σφ(x) w, Σx u and Σrow e, whole and as they were before each chunk or tile.

    For keys w, u and e are 1. For queries (IS_QUERY) tiles come in reverse, row is the output's gradient divided by the
    denominator, w the gradient of the denominator, u that of the mean logit. A part is one group of features. What has no
    group, x itself and rows, is a part of its own, unless a map is SINGLE (see `causal.read`): then everything is one part.
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
            True, SINGLE, HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, UNIT, CHUNK, DIM, DV, BLOCK_D, BLOCK_V,
            BLOCK, GROUP, PRECISION,
        )  # fmt: skip
    elif PARTS > 1:
        _accumulate(
            p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
            p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, i_part - 1,
            N, FIRST, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
            False, True, HAS_MASK, IS_QUERY, IDENTITY, QUADRATIC, UNIT, CHUNK, DIM, DV, BLOCK_D, BLOCK_V,
            BLOCK, GROUP, PRECISION,
        )  # fmt: skip


@triton.jit
def _accumulate(
    p_x, p_rows, p_mask, scale, p_inverse, p_constant, p_dtotal, p_dmean, p_near, p_near_totals, p_near_x, p_near_rows,
    p_sums, p_totals, p_x_sum, p_row_sum, stride_xn, stride_rn, i_bh, i_segment, i_group,
    N, FIRST, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, EPS, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups,
    OF_ROWS: tl.constexpr, OF_GROUP: tl.constexpr, HAS_MASK: tl.constexpr,
    IS_QUERY: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What `accumulate` does for one part: that of a group (OF_GROUP), that of x itself and rows (OF_ROWS), or both.

    What is summed over rows alone is a product with a narrow tile, (w, u, e, ...): sums across warps would make them
    wait for one another at every tile.
    """
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_d, o_v, o_g = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, GROUP)
    o_f, o_narrow = IDENTITY * BLOCK_D + i_group * GROUP + o_g, tl.arange(0, NARROW)[None, :]
    o_sums, o_identity = o_f[:, None] * BLOCK_V + o_v[None, :], o_d[:, None] * BLOCK_V + o_v[None, :]
    first_tile = i_segment * TILES
    num_here = tl.minimum(TILES, NUM_ROW_TILES - first_tile)
    # Sums of queries are those of terms times a weight, which changes from tile to tile.
    weight = 1.0
    dtype = p_x.dtype.element_ty
    if IS_QUERY:
        weight = normaliser(first_tile + num_here, FIRST_KEY, earlier, BLOCK)
    if OF_GROUP:
        b_sums = tl.zeros([GROUP, BLOCK_V], tl.float32)
        b_totals = tl.zeros([GROUP, NARROW], tl.float32)
    if OF_GROUP and OF_ROWS:  # one part has room for its directions
        b_left, b_right = directions(p_tiles, 0, BLOCK_D, GROUP), directions(p_tiles, 1, BLOCK_D, GROUP)
        b_weight = tl.load(p_root + o_g)
    if OF_ROWS:
        b_x_totals = tl.zeros([BLOCK_D, NARROW], tl.float32)
        b_row_totals = tl.zeros([BLOCK_V, NARROW], tl.float32)
    if OF_ROWS and IDENTITY:
        b_identity = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        b_root = tl.load(p_linear + o_d) * scale
    for i in range(num_here):
        i_tile = first_tile + i
        if IS_QUERY:
            i_tile = first_tile + num_here - 1 - i
            before, weight = weight, normaliser(i_tile, FIRST_KEY, earlier, BLOCK)
            ratio = weight / before
            if OF_GROUP:
                b_sums *= ratio
                b_totals *= ratio
            if OF_ROWS:
                b_x_totals *= ratio
                b_row_totals *= ratio
            if OF_ROWS and IDENTITY:
                b_identity *= ratio

        # What came before.
        new_chunk = i_tile % CHUNK == 0
        if IS_QUERY:
            new_chunk = ((i_tile + 1) % CHUNK == 0) | (i_tile == NUM_ROW_TILES - 1)
        if CHUNK == 1 or new_chunk:
            i_near = (i_bh * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64) * num_features
            share = 1.0 / tl.maximum(i * BLOCK, 1)
            if OF_GROUP:
                tl.store(p_near + i_near * BLOCK_V + o_sums, (b_sums * share).to(p_near.dtype.element_ty))
                _store_column(p_near_totals + i_near + o_f, b_totals, 0, 1.0 / weight)
            if OF_ROWS and IDENTITY:
                b_means = b_identity * (b_root * share)[:, None]
                tl.store(p_near + i_near * BLOCK_V + o_identity, b_means.to(p_near.dtype.element_ty))
                _store_column(p_near_totals + i_near + o_d, b_x_totals * b_root[:, None], 0, 1.0 / weight)
        if OF_ROWS:
            i_row = (i_bh * NUM_ROW_TILES + i_tile).to(tl.int64)
            _store_column(p_near_x + i_row * BLOCK_D + o_d, b_x_totals, 1, scale / weight)
            _store_column(p_near_rows + i_row * BLOCK_V + o_v, b_row_totals, 2, 1.0 / weight)

        # What this tile adds.
        start = i_tile * BLOCK - FIRST
        m_n = visible(p_mask, start, N, BLOCK, HAS_MASK)
        b_x, _ = load_unit_tile(p_x, start, stride_xn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_rows = load_tile(p_rows, start, stride_rn, m_n, DV, BLOCK, BLOCK_V)
        b_narrow = tl.full([BLOCK, NARROW], 1.0, tl.float32)
        if IS_QUERY:
            o_row = tl.full([], i_bh, tl.int64) * N + start + tl.arange(0, BLOCK)
            b_inverse = tl.load(p_inverse + o_row, mask=m_n, other=0.0)[:, None]
            b_narrow = tl.load(p_dtotal + o_row, mask=m_n, other=0.0)[:, None] * weight
            if OF_ROWS:
                b_u = tl.load(p_dmean + o_row, mask=m_n, other=0.0)[:, None] * weight
                b_e = tl.load(p_constant + o_row, mask=m_n, other=0.0)[:, None] * b_inverse * weight
                b_narrow = tl.where(o_narrow == 0, b_narrow, tl.where(o_narrow == 1, b_u, b_e))
        b_narrow = tl.where(m_n[:, None] & (o_narrow >= 0), b_narrow, 0.0).to(dtype)
        if OF_ROWS:
            b_x_totals += tl.dot(tl.trans(b_x), b_narrow, input_precision=PRECISION)
            b_row_totals += tl.dot(tl.trans(b_rows), b_narrow, input_precision=PRECISION)
        if IS_QUERY:
            b_rows = (b_rows.to(tl.float32) * (b_inverse * weight)).to(dtype)
        if OF_ROWS and IDENTITY:
            b_identity += tl.dot(tl.trans(b_x), b_rows, input_precision=PRECISION)
        if OF_GROUP:
            if OF_ROWS:
                b_phi = pairs(b_x, b_left, b_right, b_weight, scale, PRECISION)
            else:
                b_phi = evaluate(
                    b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
                )  # fmt: skip
            b_phi = tl.trans(b_phi.to(dtype))
            b_sums += tl.dot(b_phi, b_rows, input_precision=PRECISION)
            b_totals += tl.dot(b_phi, b_narrow, input_precision=PRECISION)

    i_out, inverse = (i_bh * SEGMENTS + i_segment).to(tl.int64), 1.0 / weight
    p_sums += i_out * num_features * BLOCK_V
    p_totals += i_out * num_features
    if OF_GROUP:
        tl.store(p_sums + o_sums, b_sums * inverse)
        _store_column(p_totals + o_f, b_totals, 0, inverse)
    if OF_ROWS and IDENTITY:
        tl.store(p_sums + o_identity, b_identity * (b_root * inverse)[:, None])
        _store_column(p_totals + o_d, b_x_totals * b_root[:, None], 0, inverse)
    if OF_ROWS:
        _store_column(p_x_sum + i_out * BLOCK_D + o_d, b_x_totals, 1, scale * inverse)
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
    o_f, o_sums = i_rows * ROWS + tl.arange(0, ROWS), i_rows * ROWS * BLOCK_V + tl.arange(0, ROWS * BLOCK_V)
    WITH_STATE: tl.constexpr = HAS_STATE and not AFTER
    _scan(
        p_sums, p_far, p_state, i_bh, o_sums, num_features * BLOCK_V, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, WITH_STATE,
        AFTER, True, BLOCK,
    )  # fmt: skip
    _scan(
        p_totals, p_far_totals, p_state_totals, i_bh, o_f, num_features, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES, WITH_STATE,
        AFTER, False, BLOCK,
    )  # fmt: skip
    if i_rows == 0:
        _scan(
            p_x, p_far_x, p_state_x, i_bh, tl.arange(0, BLOCK_D), BLOCK_D, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES,
            WITH_STATE, AFTER, False, BLOCK,
        )  # fmt: skip
        _scan(
            p_rows, p_far_rows, p_state_rows, i_bh, tl.arange(0, BLOCK_V), BLOCK_V, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES,
            WITH_STATE, AFTER, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _scan(
    p_parts, p_far, p_state, i_bh, o, size, FIRST_KEY, earlier, TILES, SEGMENTS, NUM_ROW_TILES,
    WITH_STATE: tl.constexpr, AFTER: tl.constexpr, AS_MEANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The entries `o` of sums that have `size` of them. Four segments are loaded before the first of them is needed."""
    p_parts += i_bh.to(tl.int64) * SEGMENTS * size
    p_far += i_bh.to(tl.int64) * SEGMENTS * size
    b_sum = tl.zeros(o.shape, tl.float32)
    if WITH_STATE:
        b_sum += tl.load(p_state + i_bh.to(tl.int64) * size + o, mask=o < size, other=0.0)
    for first in range(0, SEGMENTS, 4):
        b_0 = _part(p_parts, first, o, size, SEGMENTS, AFTER)
        b_1 = _part(p_parts, first + 1, o, size, SEGMENTS, AFTER)
        b_2 = _part(p_parts, first + 2, o, size, SEGMENTS, AFTER)
        b_3 = _part(p_parts, first + 3, o, size, SEGMENTS, AFTER)
        for i in tl.static_range(4):
            # i_far is the number of the segment, first + i its place in the order in which they are gone through.
            i_far = SEGMENTS - 1 - first - i if AFTER else first + i
            share = 1.0
            if AS_MEANS and AFTER:
                end = tl.minimum((i_far + 1) * TILES, NUM_ROW_TILES)
                weight = normaliser(end - 1, FIRST_KEY, earlier, BLOCK)
                share = weight / tl.maximum((NUM_ROW_TILES - end) * BLOCK, 1)
            elif AS_MEANS:
                share = 1.0 / tl.maximum(i_far * TILES * BLOCK + earlier, 1)
            m = (o < size) & ((first + i) * size + o < SEGMENTS * size)
            tl.store(p_far + i_far * size + o, (b_sum * share).to(p_far.dtype.element_ty), mask=m)
            b_sum += b_0 if i == 0 else (b_1 if i == 1 else (b_2 if i == 2 else b_3))


@triton.jit
def _part(p_parts, i, o, size, SEGMENTS, AFTER: tl.constexpr):
    """The sum over the segment that is the i-th to be gone through."""
    i_segment = SEGMENTS - 1 - i if AFTER else i
    return tl.load(
        p_parts + i_segment * size + o, mask=(o < size) & (i * size + o < SEGMENTS * size), other=0.0
    )
