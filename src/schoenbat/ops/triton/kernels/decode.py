"""One decoding step as one kernel: add a key and a value to the sums of a head, and read them.

The sums are those of `sums.Sums`, in float32 and without weights, and so is everything here. A program does some
value columns of one key head, for all query heads that share it: they and the key are the rows of one tile, the key
last. Names are those of `features`; m_ are masks.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import monomials, product
from schoenbat.ops.triton.kernels.rows import LOWEST_EXPONENT, unit_tile


@triton.jit
def at_head(
    p_sums, p_totals, p_new_sums, p_new_totals, p_tiles, p_root, p_linear, i_state, i_map, num_features, NUM_TILES,
    num_groups, DV: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Where the sums and totals of a head are, before and after the step, and its map."""
    p_sums += i_state * num_features * DV
    p_new_sums += i_state * num_features * DV
    p_totals += i_state * num_features
    p_new_totals += i_state * num_features
    p_tiles += i_map * NUM_TILES * BLOCK_D * GROUP
    p_root += i_map * num_groups * GROUP
    p_linear += i_map * BLOCK_D
    return p_sums, p_totals, p_new_sums, p_new_totals, p_tiles, p_root, p_linear


@triton.jit
def _load(p_sums, p_totals, o_f, m_f, o_v, m_v, DV: tl.constexpr):
    """Some features' sums [features, BLOCK_V] and totals."""
    o_s, m_s = o_f[:, None] * DV + o_v[None, :], m_f[:, None] & m_v[None, :]
    return tl.load(p_sums + o_s, mask=m_s, other=0.0), tl.load(p_totals + o_f, mask=m_f, other=0.0)


@triton.jit
def load_first(
    p_sums, p_totals, num_features, o_v, m_v,
    IDENTITY: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sums and totals of the identity and of the first group of features: what `add_and_read` begins with.

    Sums are most of what is read: they are under way while rows are loaded and features formed.
    """
    o_d, o_g = tl.arange(0, BLOCK_D), IDENTITY * DIM + tl.arange(0, GROUP)
    b_linear, b_linear_totals = _load(p_sums, p_totals, o_d, (o_d < DIM) & (IDENTITY == 1), o_v, m_v, DV)
    b_sums, b_totals = _load(p_sums, p_totals, o_g, o_g < num_features, o_v, m_v, DV)
    return b_linear, b_linear_totals, b_sums, b_totals


@triton.jit
def _of_features(
    b_phi, b_weight, b_value, b_sums, b_totals, o_f, m_f, p_new_sums, p_new_totals, b_numerator, b_total, o_v, m_v,
    DV: tl.constexpr, ROWS: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Some features of all rows [ROWS, ...]: the key's go into the sums, the queries' read them."""
    m_key = tl.arange(0, ROWS)[:, None] == ROWS - 1
    b_key = tl.sum(tl.where(m_key, b_phi, 0.0), axis=0)
    b_query = tl.where(m_key, 0.0, b_phi * b_weight[None, :])
    b_new_totals = b_totals + b_key
    b_new_sums = b_sums + b_key[:, None] * b_value[None, :]
    tl.store(p_new_sums + o_f[:, None] * DV + o_v[None, :], b_new_sums, mask=m_f[:, None] & m_v[None, :])
    if tl.program_id(1) == 0:
        tl.store(p_new_totals + o_f, b_new_totals, mask=m_f)
    if not LATE:
        b_sums, b_totals = b_new_sums, b_new_totals
    b_numerator += product(b_query, b_sums, "ieee")
    b_total += tl.sum(b_query * b_totals[None, :], axis=1)
    return b_numerator, b_total


@triton.jit
def add_and_read(
    b_x, b_k, b_value, count, p_coefficients, b_linear, b_linear_totals, b_sums, b_totals, p_sums, p_totals, p_keys,
    p_values, p_new_sums, p_new_totals, p_new_keys, p_new_values, i_state, o_v, m_v, num_features,
    p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY: tl.constexpr, QUADRATIC: tl.constexpr,
    DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Numerators [ROWS, BLOCK_V] and floored denominators of the queries among the rows b_x; the sums with the key.

    The key b_k is the last row, too. LATE: it goes in after the queries have read; `count` is of the keys they see.
    """
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    b_numerator = tl.zeros([ROWS, b_value.shape[0]], tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    constant, zeroth = tl.load(p_coefficients), tl.load(p_coefficients + 1)
    slope = tl.load(p_coefficients + 2)
    if IDENTITY:
        b_root = tl.load(p_linear + o_d)
        b_numerator, b_total = _of_features(
            b_x, b_root * b_root, b_value, b_linear, b_linear_totals, o_d, m_d, p_new_sums, p_new_totals, b_numerator,
            b_total, o_v, m_v, DV, ROWS, LATE,
        )  # fmt: skip
    o_g = IDENTITY * DIM + tl.arange(0, GROUP)
    for i_group in range(num_groups):
        o_next = o_g + GROUP
        b_next, b_next_totals = _load(p_sums, p_totals, o_next, o_next < num_features, o_v, m_v, DV)
        b_phi, _ = monomials(
            b_x, 1.0, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, ROWS, BLOCK_D, GROUP, "ieee"
        )  # fmt: skip
        b_weight = tl.load(p_root + i_group * GROUP + tl.arange(0, GROUP))
        b_numerator, b_total = _of_features(
            b_phi, b_weight * b_weight, b_value, b_sums, b_totals, o_g, o_g < num_features, p_new_sums, p_new_totals,
            b_numerator, b_total, o_v, m_v, DV, ROWS, LATE,
        )  # fmt: skip
        b_sums, b_totals, o_g = b_next, b_next_totals, o_next

    b_keys = tl.load(p_keys + i_state * DIM + o_d, mask=m_d, other=0.0)
    b_values = tl.load(p_values + i_state * DV + o_v, mask=m_v, other=0.0)
    b_new_keys, b_new_values = b_keys + b_k, b_values + b_value
    if tl.program_id(1) == 0:
        tl.store(p_new_keys + i_state * DIM + o_d, b_new_keys, mask=m_d)
    tl.store(p_new_values + i_state * DV + o_v, b_new_values, mask=m_v)
    if not LATE:
        b_keys, b_values = b_new_keys, b_new_values
    divisor = tl.maximum(count, 1.0)
    b_exponent = slope * tl.sum(b_x * b_keys[None, :], axis=1) / divisor
    b_floor = count * zeroth * tl.exp(tl.minimum(tl.maximum(b_exponent, LOWEST_EXPONENT), 0.0))
    # An infinite total would pass for one that fits.
    b_total = tl.where(tl.abs(b_total) == float("inf"), float("nan"), b_total)
    m_below = b_total + constant * count < b_floor
    b_floored = tl.where(count > 0.0, tl.where(m_below, b_floor, b_total + constant * count), 1.0)
    # The constant's weight, raised where the floor acts: see `causal`.
    b_e = tl.where(m_below, (b_floor - b_total) / divisor, constant)
    return b_numerator + b_e[:, None] * b_values[None, :], b_floored


@triton.jit
def step(
    p_query, p_key, p_value, p_mask, p_count, p_scale, p_coefficients, p_out,
    p_sums, p_totals, p_keys, p_values, p_new_sums, p_new_totals, p_new_keys, p_new_values,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, KEY_SCALE, EPS, num_features,
    p_tiles, p_root, p_linear, p_degrees, p_first, NUM_TILES, num_groups,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, HAS_MASK: tl.constexpr, IDENTITY: tl.constexpr,
    QUADRATIC: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sums after one token, and the outputs of the query heads of one key head."""
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
    b_linear, b_linear_totals, b_sums, b_totals = load_first(
        p_sums, p_totals, num_features, o_v, m_v, IDENTITY, DIM, DV, BLOCK_D, GROUP
    )
    takes_part = tl.full([], 1, tl.int32)
    if HAS_MASK:
        takes_part = (tl.load(p_mask + i_b) != 0).to(tl.int32)
    count = (tl.load(p_count + i_b) + takes_part).to(tl.float32)

    # Queries and the key, of norm 1 if UNIT says so, scaled; zeros for a key that does not take part.
    o_q = i_b.to(tl.int64) * stride_qb + (i_h * GROUPS + o_r).to(tl.int64)[:, None] * stride_qh + o_d[None, :]
    b_q = tl.load(p_query + o_q, mask=m_q[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_q = unit_tile(b_q, EPS, UNIT, DIM, ROWS, BLOCK_D)[0]
    b_q = b_q * tl.load(p_scale + i_h * GROUPS + o_r, mask=m_q, other=0.0)[:, None]
    o_k = i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh
    b_k = tl.load(p_key + o_k + o_d, mask=o_d < DIM * takes_part, other=0.0).to(tl.float32)
    if UNIT > 0:
        b_k = tl.sum(unit_tile(b_k[None, :], EPS, UNIT, DIM, 1, BLOCK_D)[0], axis=0)
    b_k *= KEY_SCALE
    o_w = i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh
    b_value = tl.load(p_value + o_w + o_v, mask=o_v < DV * takes_part, other=0.0).to(tl.float32)
    b_x = tl.where(o_r[:, None] == ROWS - 1, b_k[None, :], b_q)

    b_numerator, b_floored = add_and_read(
        b_x, b_k, b_value, count, p_coefficients + 3 * i_map, b_linear, b_linear_totals, b_sums, b_totals, p_sums,
        p_totals, p_keys, p_values, p_new_sums, p_new_totals, p_new_keys, p_new_values, i_state, o_v, m_v, num_features,
        p_tiles, p_root, p_linear, p_degrees, p_first, num_groups, IDENTITY, QUADRATIC, DIM, DV, BLOCK_D, ROWS, GROUP,
        False,
    )  # fmt: skip
    b_out = b_numerator / b_floored[:, None]
    o_out = (i_bh * GROUPS + o_r).to(tl.int64)[:, None] * DV + o_v[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_q[:, None] & m_v[None, :])
