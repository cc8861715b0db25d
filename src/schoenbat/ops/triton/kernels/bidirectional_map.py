"""Bidirectional attention: the gradients of a trained map, from one pass over queries and one over keys.

As for `bidirectional_sums.summarize`, both passes are one kernel. What the features φ(x) of a row get is S row + w z: of
queries, S and z are sums and totals over keys, row is the output's gradient divided by the denominator, w that of the
denominator; of keys, S and z are the gradients of sums and totals, row is the centred value and w is 1.

Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.bidirectional_sums import LENGTHS
from schoenbat.ops.triton.kernels.map_gradients import (
    add_rows,
    group_of,
    nothing,
    part_and_program,
    store_total,
)
from schoenbat.ops.triton.kernels.rows import load_tile, load_unit_tile, visible


@triton.jit(do_not_specialize=LENGTHS)
def map_backward(
    p_x, p_rows, p_mask, p_scale, p_row_scale, p_row_weight, p_row_mean, p_sums, p_totals, p_parts,
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn, N, TILES, SPLITS, KEY_SCALE, EPS,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr,
    LINEAR: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What TILES tiles of queries (IS_QUERY) or keys give one tile of directions, or the identity features (LINEAR)."""
    i_part, i_program = part_and_program(NUM_TILES, LINEAR)
    i_split, i_bh = i_program % SPLITS, i_program // SPLITS
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h // GROUPS
    i_state = (i_bh // GROUPS).to(tl.int64)
    num_features = IDENTITY * BLOCK_D + num_groups * GROUP
    o_v = tl.arange(0, BLOCK_V)
    p_x += i_b.to(tl.int64) * stride_xb + i_h.to(tl.int64) * stride_xh
    p_rows += i_b.to(tl.int64) * stride_rb + i_h.to(tl.int64) * stride_rh
    p_mask += i_b.to(tl.int64) * N
    p_row_scale += tl.full([], i_bh, tl.int64) * N
    p_row_weight += tl.full([], i_bh, tl.int64) * N
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    scale = KEY_SCALE
    if IS_QUERY:
        scale = tl.load(p_scale + i_h)
    i_group = group_of(i_part, p_first, num_groups, QUADRATIC)
    o_first = 0 if LINEAR else IDENTITY * BLOCK_D + i_group * GROUP
    FEATURES: tl.constexpr = BLOCK_D if LINEAR else GROUP
    o_f = i_state * num_features + o_first + tl.arange(0, FEATURES)
    b_s = tl.trans(tl.load(p_sums + o_f[:, None] * BLOCK_V + o_v[None, :]))
    b_z = tl.load(p_totals + o_f)

    b_total = nothing(LINEAR, BLOCK_D, GROUP)
    for i_tile in range(i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))):
        start = i_tile * BLOCK
        m_n = visible(p_mask, start, N, BLOCK, HAS_MASK)
        b_x, _ = load_unit_tile(p_x, start, stride_xn, m_n, EPS, UNIT, DIM, BLOCK, BLOCK_D)
        b_rows = load_tile(p_rows, start, stride_rn, m_n, DV, BLOCK, BLOCK_V).to(tl.float32)
        b_dphi = b_z[None, :]
        if IS_QUERY:
            o_row = start + tl.arange(0, BLOCK)
            b_rows *= tl.load(p_row_scale + o_row, mask=m_n, other=0.0)[:, None]
            b_dphi = b_dphi * tl.load(p_row_weight + o_row, mask=m_n, other=0.0)[:, None]
        else:
            b_rows -= tl.load(p_row_mean + i_state * BLOCK_V + o_v)[None, :]
        b_dphi = b_dphi + tl.dot(b_rows.to(b_x.dtype), b_s, input_precision=PRECISION)
        b_total = add_rows(
            b_total, b_dphi, b_x, scale, i_group, i_part, p_tiles, p_root, p_degrees, p_first, LINEAR, QUADRATIC, BLOCK,
            BLOCK_D, GROUP, PRECISION,
        )  # fmt: skip
    store_total(p_parts, b_total, scale, p_linear, LINEAR, BLOCK_D, GROUP)
