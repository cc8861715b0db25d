"""One decoding step of exact near, linear far as one kernel: near keys by softmax, and the sums of all before them.

What is said in `decode` holds here. The key that goes into the sums is not the token's own but the one that leaves the
window, and it goes in after the queries have read them. Near keys are loaded once, attended to, and stored one place
further on, in the window of the state after this token.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.decode import add_and_read, at_head, load_first
from schoenbat.ops.triton.kernels.features import product
from schoenbat.ops.triton.kernels.rows import load_unit_tile, unit_tile
from schoenbat.ops.triton.kernels.window import NOTHING


@triton.jit
def _near(
    b_q, b_k, b_value, takes_part, p_near_keys, p_near_values, p_near_mask, p_new_near_keys, p_new_near_values,
    p_new_near_mask, i_b, i_h, i_state, WIDTH, KEY_SCALE, o_v, m_v,
    DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over the token itself and the window before it: numerator and denominator over exp(top), and top.

    The window after the token is stored on the way, but for its last place.
    """
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    writes_keys = tl.program_id(1) == 0
    p_near_mask += i_b.to(tl.int64) * WIDTH
    p_new_near_mask += i_b.to(tl.int64) * WIDTH
    b_top = tl.where(takes_part, tl.sum(b_q * b_k[None, :], axis=1), NOTHING)
    b_weight = tl.zeros_like(b_top) + tl.where(takes_part, 1.0, 0.0)
    b_out = tl.zeros([b_q.shape[0], b_value.shape[0]], tl.float32) + b_value[None, :]
    for start in range(0, WIDTH, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < WIDTH
        b_mask = tl.load(p_near_mask + o_n, mask=m_n, other=0)
        o_row = i_state * WIDTH + o_n.to(tl.int64)[:, None]
        o_key, m_key = o_row * DIM + o_d[None, :], m_n[:, None] & m_d[None, :]
        o_value, m_value = o_row * DV + o_v[None, :], m_n[:, None] & m_v[None, :]
        b_keys = tl.load(p_near_keys + o_key, mask=m_key, other=0.0)
        b_values = tl.load(p_near_values + o_value, mask=m_value, other=0.0)
        # The first one leaves.
        m_stays = o_n[:, None] > 0
        b_moved = b_values.to(p_new_near_values.dtype.element_ty)
        tl.store(p_new_near_values + o_value - DV, b_moved, mask=m_value & m_stays)
        if writes_keys:
            b_moved_keys = b_keys.to(p_new_near_keys.dtype.element_ty)
            tl.store(p_new_near_keys + o_key - DIM, b_moved_keys, mask=m_key & m_stays)
            if i_h == 0:
                tl.store(p_new_near_mask + o_n - 1, b_mask, mask=m_n & (o_n > 0))

        # What is masked may be NaN.
        m_near = b_mask != 0
        b_keys = tl.where(m_near[:, None], b_keys.to(tl.float32) * KEY_SCALE, 0.0)
        b_values = tl.where(m_near[:, None], b_values.to(tl.float32), 0.0)
        b_logits = tl.where(m_near[None, :], product(b_q, tl.trans(b_keys), "ieee"), NOTHING)
        b_higher = tl.maximum(b_top, tl.max(b_logits, axis=1))
        b_shrink = tl.exp(b_top - b_higher)
        b_weights = tl.where(m_near[None, :], tl.exp(b_logits - b_higher[:, None]), 0.0)
        b_out = b_out * b_shrink[:, None] + product(b_weights, b_values, "ieee")
        b_weight = b_weight * b_shrink + tl.sum(b_weights, axis=1)
        b_top = b_higher
    return b_out, b_weight, b_top


@triton.jit
def step(
    p_query, p_key, p_value, p_mask, p_far_query, p_leaving_key, p_leaving_value, p_leaving_mask,
    p_near_keys, p_near_values, p_near_mask, p_count, p_scale, p_far_weight, p_coefficients,
    p_out, p_new_near_keys, p_new_near_values, p_new_near_mask, p_new_count,
    p_sums, p_totals, p_keys, p_values, p_new_sums, p_new_totals, p_new_keys, p_new_values,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_fqb, stride_fqh,
    stride_lkb, stride_lkh, stride_lvb, stride_lvh, stride_lm, WIDTH, KEY_SCALE, EPS, num_features,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LEAVING_MASK: tl.constexpr,
    SEPARATE: tl.constexpr, UNIT: tl.constexpr, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr, DIM: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The state after one token, and the outputs of the query heads of one key head; UNIT is of query and key."""
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    i_map = 0 if MAPS == 1 else i_h
    i_state = i_bh.to(tl.int64)
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    o_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_d, m_v, m_q = o_d < DIM, o_v < DV, o_r < GROUPS
    p_sums, p_totals, p_new_sums, p_new_totals, p_tiles, p_root, p_linear = at_head(
        p_sums, p_totals, p_new_sums, p_new_totals, p_tiles, p_root, p_linear, i_state, i_map, num_features, NUM_TILES,
        num_groups, DV, BLOCK_D, GROUP,
    )  # fmt: skip

    # The token: its queries, and its key and value as the state will hold them.
    o_b, o_h = i_b.to(tl.int64), i_h.to(tl.int64)
    b_scale = tl.load(p_scale + i_h * GROUPS + o_r, mask=m_q, other=0.0)[:, None] / KEY_SCALE
    o_head = (i_h * GROUPS + o_r).to(tl.int64)[:, None]
    m_query = m_q[:, None] & m_d[None, :]
    b_q = tl.load(p_query + o_b * stride_qb + o_head * stride_qh + o_d[None, :], mask=m_query, other=0.0)
    b_q = unit_tile(b_q.to(tl.float32), EPS, UNIT, DIM, ROWS, BLOCK_D)[0] * b_scale
    m_one = tl.arange(0, 1) == 0
    b_own, _ = load_unit_tile(
        p_key + o_b * stride_kb + o_h * stride_kh, 0, 0, m_one, EPS, UNIT, DIM, 1, BLOCK_D
    )
    b_own = tl.sum(b_own.to(tl.float32), axis=0)
    b_own_value = tl.load(p_value + o_b * stride_vb + o_h * stride_vh + o_v, mask=m_v, other=0.0)
    takes_part = tl.full([], True, tl.int1)
    if HAS_MASK:
        takes_part = tl.load(p_mask + i_b) != 0
    writes_keys = tl.program_id(1) == 0
    if WIDTH > 0:
        o_last = i_state * WIDTH + WIDTH - 1
        tl.store(p_new_near_values + o_last * DV + o_v, b_own_value, mask=m_v)
        if writes_keys:
            b_stored = b_own.to(p_new_near_keys.dtype.element_ty)
            tl.store(p_new_near_keys + o_last * DIM + o_d, b_stored, mask=m_d)
            if i_h == 0:
                tl.store(p_new_near_mask + o_b * WIDTH + WIDTH - 1, takes_part.to(tl.uint8))
    b_k = tl.where(takes_part, b_own * KEY_SCALE, 0.0)
    b_value = tl.where(takes_part, b_own_value.to(tl.float32), 0.0)
    # Before the sums: both at once would not fit the registers.
    b_out, b_weight, b_top = _near(
        b_q, b_k, b_value, takes_part, p_near_keys, p_near_values, p_near_mask, p_new_near_keys, p_new_near_values,
        p_new_near_mask, i_b, i_h, i_state, WIDTH, KEY_SCALE, o_v, m_v, DIM, DV, BLOCK_D, BLOCK,
    )  # fmt: skip

    # The key that leaves the window, and the sums that it goes to.
    b_linear, b_linear_totals, b_sums, b_totals = load_first(
        p_sums, p_totals, num_features, o_v, m_v, IDENTITY, DIM, DV, BLOCK_D, GROUP
    )
    leaves = tl.full([], 1, tl.int32)
    if HAS_LEAVING_MASK:
        leaves = (tl.load(p_leaving_mask + o_b * stride_lm) != 0).to(tl.int32)
    count = tl.load(p_count + i_b)
    if writes_keys & (i_h == 0):
        tl.store(p_new_count + i_b, count + leaves)
    count = count.to(tl.float32)
    o_k, o_w = o_b * stride_lkb + o_h * stride_lkh, o_b * stride_lvb + o_h * stride_lvh
    b_leaving = (
        tl.load(p_leaving_key + o_k + o_d, mask=o_d < DIM * leaves, other=0.0).to(tl.float32) * KEY_SCALE
    )
    b_leaving_value = tl.load(p_leaving_value + o_w + o_v, mask=o_v < DV * leaves, other=0.0).to(tl.float32)
    b_far = b_q
    if SEPARATE:
        o_q = o_b * stride_fqb + o_head * stride_fqh + o_d[None, :]
        b_far = tl.load(p_far_query + o_q, mask=m_query, other=0.0).to(tl.float32) * b_scale
    b_x = tl.where(o_r[:, None] == ROWS - 1, b_leaving[None, :], b_far)

    b_numerator, b_floored = add_and_read(
        b_x, b_leaving, b_leaving_value, count, p_coefficients + 3 * i_map, b_linear, b_linear_totals, b_sums, b_totals,
        p_sums, p_totals, p_keys, p_values, p_new_sums, p_new_totals, p_new_keys, p_new_values, i_state, o_v, m_v,
        num_features, p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY, QUADRATIC, DIM, DV, BLOCK_D,
        ROWS, GROUP, True,
    )  # fmt: skip

    # Near and far under the larger of their logarithms.
    b_log_weight = tl.log(tl.load(p_far_weight + i_h * GROUPS + o_r, mask=m_q, other=1.0))
    b_higher = tl.maximum(b_top, tl.where(count > 0.0, b_log_weight + tl.log(b_floored), NOTHING))
    b_to_near = tl.exp(b_top - b_higher)
    b_to_far = tl.exp(tl.where(count > 0.0, b_log_weight - b_higher, NOTHING))
    b_out = b_out * b_to_near[:, None] + b_numerator * b_to_far[:, None]
    # A row that sees nothing is zero.
    b_weight = tl.where(b_higher > NOTHING, b_weight * b_to_near + b_floored * b_to_far, 1.0)
    b_out = b_out / b_weight[:, None]
    o_out = (i_bh * GROUPS + o_r).to(tl.int64)[:, None] * DV + o_v[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_q[:, None] & m_v[None, :])
