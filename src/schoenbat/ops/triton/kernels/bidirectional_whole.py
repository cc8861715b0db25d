"""A map that stays at hand: identity features and WHOLE groups of pairs, loaded once for all row tiles of a program.

Vectors that rows are multiplied with are columns of one narrow tile: a product then does what sums over rows would, which
take registers and make warps wait. Names are those of `features`.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import (
    first_directions,
    pair_directions,
    pairs,
    pairs_backward,
    projected,
    projected_backward,
)
from schoenbat.ops.triton.kernels.rows import NARROW


@triton.jit
def twice(b_first, b_second, dtype: tl.constexpr):
    """Two numbers of each row as they are multiplied with `columns`."""
    o_c = tl.arange(0, NARROW)[None, :]
    return tl.where(o_c < 4, tl.where(o_c < 2, b_first[:, None], b_second[:, None]), 0.0).to(dtype)


@triton.jit
def columns(b_first, b_second, dtype: tl.constexpr):
    """Two vectors as columns of a narrow tile, each the sum of two in `dtype`: what it is rounded to, and the rest."""
    b_both = twice(b_first, b_second, tl.float32)
    b_rounded = b_both.to(dtype)
    is_rounded = tl.arange(0, NARROW)[None, :] % 2 == 0
    return tl.where(is_rounded, b_rounded, (b_both - b_rounded.to(tl.float32)).to(dtype))


@triton.jit
def of_columns(b_products, i_vector: tl.constexpr):
    """Rows times a vector of `columns`, from their product with the tile."""
    return tl.sum(tl.where(tl.arange(0, NARROW)[None, :] // 2 == i_vector, b_products, 0.0), axis=1)


@triton.jit
def whole_tiles(
    p_sums, p_totals, p_mean, p_tiles, p_linear, dtype: tl.constexpr, WHOLE: tl.constexpr, QUADRATIC: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sums and directions of a map that is WHOLE: loaded before the loop over tiles, they stay in shared memory.

    Of identity features the sums, and totals and the mean as `columns`; what rows are projected on first;
    for each group its sums, totals and both directions.
    """
    o_d, o_g, o_v = tl.arange(0, BLOCK_D), tl.arange(0, GROUP), tl.arange(0, BLOCK_V)
    b_linear = tl.load(p_linear + o_d)
    b_s1 = tl.load(p_sums + o_d[:, None] * BLOCK_V + o_v[None, :]) * b_linear[:, None]
    b_z1 = columns(tl.load(p_totals + o_d) * b_linear, tl.load(p_mean + o_d), dtype)
    b_groups = ()
    for i_group in tl.static_range(WHOLE):
        o_f = BLOCK_D + i_group * GROUP + o_g
        b_s2 = tl.load(p_sums + o_f[:, None] * BLOCK_V + o_v[None, :])
        b_z2 = tl.load(p_totals + o_f)
        b_left, b_right = pair_directions(p_tiles, i_group, QUADRATIC, BLOCK_D, GROUP)
        b_groups += ((b_s2.to(dtype), columns(b_z2, tl.zeros_like(b_z2), dtype), b_left, b_right),)
    return b_s1.to(dtype), b_z1, first_directions(p_tiles, QUADRATIC, BLOCK_D, GROUP), b_groups


@triton.jit
def read_whole(
    b_x, scale, b_tiles, p_root, WHOLE: tl.constexpr, QUADRATIC: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Numerator [BLOCK, BLOCK_V] and total of query rows, as `bidirectional.read` wants them, and the mean logit."""
    b_s1, b_z1, b_first, b_groups = b_tiles
    b_y = projected(b_x, b_first, QUADRATIC, PRECISION)
    b_small = tl.dot(b_x, b_z1, input_precision="ieee") * scale
    for i_group in tl.static_range(WHOLE):
        b_s2, b_z2, b_left, b_right = b_groups[i_group]
        b_root = tl.load(p_root + i_group * GROUP + tl.arange(0, GROUP))
        b_phi = pairs(b_y, b_left, b_right, b_root, scale, PRECISION).to(b_x.dtype)
        if i_group == 0:  # after the features: until then it would take registers
            b_numerator = tl.dot(b_x, b_s1, input_precision=PRECISION) * scale
        b_small += tl.dot(b_phi, b_z2, input_precision="ieee")
        b_numerator += tl.dot(b_phi, b_s2, input_precision=PRECISION)
    return b_numerator, of_columns(b_small, 0), of_columns(b_small, 1)


@triton.jit
def whole_backward(
    b_rows, b_dsmall, b_x, scale, b_tiles, p_tiles, p_root,
    WHOLE: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of scaled rows from those of numerator (b_rows), total and mean logit (b_dsmall, see `twice`)."""
    b_s1, b_z1, b_first, b_groups = b_tiles
    b_y = projected(b_x, b_first, QUADRATIC, PRECISION)
    b_dy = tl.zeros(b_y.shape, tl.float32)
    for i_group in tl.static_range(WHOLE):
        b_s2, b_z2, b_left, b_right = b_groups[i_group]
        b_root = tl.load(p_root + i_group * GROUP + tl.arange(0, GROUP))
        b_dphi = tl.dot(b_dsmall, tl.trans(b_z2), input_precision="ieee")
        b_dphi += tl.dot(b_rows, tl.trans(b_s2), input_precision=PRECISION)
        if WHOLE > 1 or GROUP > BLOCK_D:
            # The factors of so many do not fit the registers until now: from directions loaded again they are formed again.
            b_left, b_right = pair_directions(p_tiles, i_group, QUADRATIC, BLOCK_D, GROUP)
        b_dy += pairs_backward(b_dphi * (b_root * scale)[None, :], b_y, b_left, b_right, PRECISION)
    b_dx = projected_backward(b_dy, b_first, QUADRATIC, PRECISION)
    b_dx += tl.dot(b_dsmall, tl.trans(b_z1), input_precision="ieee")
    return b_dx + tl.dot(b_rows, tl.trans(b_s1), input_precision=PRECISION)
