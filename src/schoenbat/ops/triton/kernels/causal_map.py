"""Causal attention: the gradients of a trained map, from one pass over queries and one over keys.

What the kernels compute is in `causal_sums`; what a tile gives a map, in `map_gradients`. Scores are formed with every tile of
the chunk up to the own one (of keys: from the own one on), where causality is looked after for all of them alike.

Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.causal_sums import LENGTHS, normaliser, shares, state, vector
from schoenbat.ops.triton.kernels.features import evaluate
from schoenbat.ops.triton.kernels.map_gradients import (
    add_rows,
    group_of,
    nothing,
    part_and_program,
    store_total,
)
from schoenbat.ops.triton.kernels.rows import load_tile, load_unit_tile, visible


@triton.jit
def _features(
    b_x, scale, i_group, p_tiles, p_root, p_linear, p_degrees, p_first,
    LINEAR: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The features of a group, or the identity features (LINEAR)."""
    if LINEAR:
        b_phi = b_x.to(tl.float32) * (tl.load(p_linear + tl.arange(0, BLOCK_D)) * scale)[None, :]
    else:
        b_phi = evaluate(
            b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
        )  # fmt: skip
    return b_phi.to(b_x.dtype)


@triton.jit
def _score_gradient(
    b_grad, b_v, b_inverse, b_dtotal, weight, i_query, i_key, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):
    """Of the scores [queries, keys] of two tiles, times `weight`."""
    o_n = tl.arange(0, BLOCK)
    b_dots = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    m_causal = (i_query * BLOCK + o_n)[:, None] >= (i_key * BLOCK + o_n)[None, :]
    return tl.where(m_causal, (b_dots * b_inverse[:, None] + b_dtotal[:, None]) * weight, 0.0).to(
        b_grad.dtype
    )


@triton.jit
def _gradients(
    p_grad,
    p_inverse,
    p_dtotal,
    start,
    stride,
    m_q,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Of a tile of queries: the output's gradient, 1/f, and the gradient of T."""
    o_row = start + tl.arange(0, BLOCK)
    b_inverse = tl.load(p_inverse + o_row, mask=m_q, other=0.0)
    b_dtotal = tl.load(p_dtotal + o_row, mask=m_q, other=0.0)
    return load_tile(p_grad, start, stride, m_q, DV, BLOCK, BLOCK_V), b_inverse, b_dtotal


@triton.jit(do_not_specialize=(*LENGTHS, "EACH"))
def map_backward(
    p_query, p_key, p_value, p_mask, p_scale, p_grad, p_inverse, p_dtotal,
    p_near, p_near_totals, p_far, p_far_totals, p_parts,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    N_QUERY, N_KEY, FIRST_QUERY, FIRST_KEY, FIRST_TILE, TILES, SEGMENTS, NUM_ROW_TILES, KEY_SCALE, EPS, EACH, SPLITS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_FAR: tl.constexpr, IS_QUERY: tl.constexpr,
    LINEAR: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What EACH tiles of queries (IS_QUERY) or keys give one tile of directions, or the identity features (LINEAR)."""
    i_part, i_program = part_and_program(NUM_TILES, LINEAR)
    i_split, i_bh = i_program % SPLITS, i_program // SPLITS
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = i_bh // GROUPS if IS_QUERY else i_bh
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    p_query += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_grad += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh
    p_key += i_b.to(tl.int64) * stride_kb + (i_h // GROUPS).to(tl.int64) * stride_kh
    p_value += i_b.to(tl.int64) * stride_vb + (i_h // GROUPS).to(tl.int64) * stride_vh
    p_mask += i_b.to(tl.int64) * N_KEY
    p_inverse += tl.full([], i_bh, tl.int64) * N_QUERY
    p_dtotal += tl.full([], i_bh, tl.int64) * N_QUERY
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = tl.load(p_scale + i_h)
    row_scale = scale if IS_QUERY else KEY_SCALE
    dtype = p_query.dtype.element_ty
    i_group = group_of(i_part, p_first, num_groups, QUADRATIC)
    o_first = 0 if LINEAR else IDENTITY * BLOCK_D + i_group * GROUP
    FEATURES: tl.constexpr = BLOCK_D if LINEAR else GROUP

    b_total = nothing(LINEAR, BLOCK_D, GROUP)
    begin = FIRST_TILE + i_split * EACH
    for i_tile in range(begin, tl.minimum(begin + EACH, NUM_ROW_TILES)):
        # What comes from the sums.
        i_near = (i_state * tl.cdiv(NUM_ROW_TILES, CHUNK) + i_tile // CHUNK).to(tl.int64) * num_features
        i_far = (i_state * SEGMENTS + i_tile // TILES).to(tl.int64) * num_features
        near, far, both = shares(i_tile, FIRST_KEY, 0, TILES, NUM_ROW_TILES, not IS_QUERY, CHUNK, BLOCK)
        b_s = state(
            p_near + i_near * BLOCK_V, p_far + i_far * BLOCK_V, near, far, o_first, HAS_FAR, FEATURES, BLOCK_V
        )
        b_s = tl.trans(b_s.to(dtype))
        b_z = vector(p_near_totals + i_near, p_far_totals + i_far, o_first, HAS_FAR, FEATURES)
        weight = normaliser(i_tile, FIRST_KEY, 0, BLOCK)
        q_start, k_start = i_tile * BLOCK - FIRST_QUERY, i_tile * BLOCK - FIRST_KEY
        if IS_QUERY:
            m_q = visible(p_mask, q_start, N_QUERY, BLOCK, False)
            b_grad, b_inverse, b_dtotal = _gradients(
                p_grad, p_inverse, p_dtotal, q_start, stride_gn, m_q, DV, BLOCK, BLOCK_V
            )
            b_rows = (b_grad.to(tl.float32) * (b_inverse * weight)[:, None]).to(dtype)
            b_dphi = tl.dot(b_rows, b_s, input_precision=PRECISION) * (both / weight)
            b_dphi += b_dtotal[:, None] * b_z[None, :]
            first, last = i_tile // CHUNK * CHUNK, i_tile + 1
        else:
            m_k = visible(p_mask, k_start, N_KEY, BLOCK, HAS_MASK)
            b_v = load_tile(p_value, k_start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
            b_dphi = tl.dot(b_v, b_s, input_precision=PRECISION) * both + b_z[None, :]
            first, last = i_tile, tl.minimum((i_tile // CHUNK + 1) * CHUNK, NUM_ROW_TILES)

        # What comes from scores with the tiles of the chunk.
        for i_other in range(first, last):
            if IS_QUERY:
                start = i_other * BLOCK - FIRST_KEY
                m_k = visible(p_mask, start, N_KEY, BLOCK, HAS_MASK)
                b_v = load_tile(p_value, start, stride_vn, m_k, DV, BLOCK, BLOCK_V)
                b_dscores = _score_gradient(
                    b_grad, b_v, b_inverse, b_dtotal, weight, i_tile, i_other, BLOCK, PRECISION
                )
                b_other, _ = load_unit_tile(p_key, start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
                other_scale = KEY_SCALE
            else:
                start = i_other * BLOCK - FIRST_QUERY
                weight = normaliser(i_other, FIRST_KEY, 0, BLOCK)
                m_q = visible(p_mask, start, N_QUERY, BLOCK, False)
                b_grad, b_inverse, b_dtotal = _gradients(
                    p_grad, p_inverse, p_dtotal, start, stride_gn, m_q, DV, BLOCK, BLOCK_V
                )
                b_dscores = tl.trans(
                    _score_gradient(
                        b_grad, b_v, b_inverse, b_dtotal, weight, i_other, i_tile, BLOCK, PRECISION
                    )
                )
                b_other, _ = load_unit_tile(p_query, start, stride_qn, m_q, EPS, UNIT, DIM, BLOCK, BLOCK_D)
                other_scale = scale
            b_phi = _features(
                b_other, other_scale, i_group, p_tiles, p_root, p_linear, p_degrees, p_first, LINEAR, QUADRATIC, BLOCK_D,
                BLOCK, GROUP, PRECISION,
            )  # fmt: skip
            b_dphi += tl.dot(b_dscores, b_phi, input_precision=PRECISION) / weight

        if IS_QUERY:
            b_x, _ = load_unit_tile(p_query, q_start, stride_qn, m_q, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        else:
            b_x, _ = load_unit_tile(p_key, k_start, stride_kn, m_k, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_total = add_rows(
            b_total, b_dphi, b_x, row_scale, i_group, i_part, p_tiles, p_root, p_degrees, p_first, LINEAR, QUADRATIC, BLOCK,
            BLOCK_D, GROUP, PRECISION,
        )  # fmt: skip
    store_total(p_parts, b_total, row_scale, p_linear, LINEAR, BLOCK_D, GROUP)
