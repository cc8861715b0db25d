"""The gradients of a trained map inside a kernel: what a tile of rows adds to them.

A program adds up over rows what one tile of directions gets, in registers, and stores it once, in a place of its own:
no atomic additions. Programs for other tiles of the same group form the same products again.

A feature is linear in each of its directions ω, and has the root of its weight w on both sides of a score. Hence ⟨ω, dω⟩,
added up over queries and keys, is 2 w dw: weights need no kernel, but for those of identity features (LINEAR), which
have no directions.

Names are those of `features`.
"""

import triton
import triton.language as tl

from schoenbat.ops.triton.kernels.features import factors, level_factors, monomials


@triton.jit
def group_of(i_tile, p_first, num_groups, QUADRATIC: tl.constexpr):
    """The group that a tile of directions belongs to."""
    i_group = i_tile // 2
    if not QUADRATIC:
        i_group = 0
        for i in range(1, num_groups):
            i_group += (tl.load(p_first + i) <= i_tile).to(tl.int32)
    return i_group


@triton.jit
def part_and_program(NUM_TILES, LINEAR: tl.constexpr):
    """Which tile of directions a program is for, and which of those it is that are for the same."""
    i_part, i_program = 0, tl.program_id(0)
    if not LINEAR:  # there may be no tiles then
        i_part, i_program = tl.program_id(0) % NUM_TILES, tl.program_id(0) // NUM_TILES
    return i_part, i_program


@triton.jit
def nothing(LINEAR: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr):
    """What a program begins with."""
    return tl.zeros([BLOCK_D] if LINEAR else [BLOCK_D, GROUP], tl.float32)


@triton.jit
def add_rows(
    b_total, b_dphi, b_x, scale, i_group, i_tile, p_tiles, p_root, p_degrees, p_first,
    LINEAR: tl.constexpr, QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a tile of rows gives one tile of directions, divided by their scale; `b_dphi` is the gradient of features.

    Where a feature has no factor at this level something is added as well, to a direction that does not exist.
    LINEAR: Σx dφ of identity features instead.
    """
    if LINEAR:
        b_total += tl.sum(b_x.to(tl.float32) * b_dphi, axis=0)
    else:
        if QUADRATIC:
            b_weight = tl.load(p_root + i_group * GROUP + tl.arange(0, GROUP)) * scale
            b_others, _ = factors(b_x, p_tiles, i_tile ^ 1, BLOCK_D, GROUP, PRECISION)
        else:
            b_product, b_weight = monomials(
                b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
            )  # fmt: skip
            b_degree = tl.load(p_degrees + i_group * GROUP + tl.arange(0, GROUP))
            level = i_tile - tl.load(p_first + i_group)
            b_factor, _ = level_factors(b_x, b_degree, level, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
            b_others = b_product / b_factor
        b_grad = b_dphi * b_weight[None, :] * b_others
        b_total += tl.dot(tl.trans(b_x), b_grad.to(b_x.dtype), input_precision=PRECISION)
    return b_total


@triton.jit
def store_total(
    p_parts, b_total, scale, p_linear, LINEAR: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr
):
    """A program's tile of directions, or Σφ dφ of the identity features."""
    i_out = tl.program_id(0).to(tl.int64)
    o_d, o_g = tl.arange(0, BLOCK_D), tl.arange(0, GROUP)
    if LINEAR:
        b_root = tl.load(p_linear + o_d) * scale
        tl.store(p_parts + i_out * BLOCK_D + o_d, b_total * b_root)
    else:
        p_out = p_parts + i_out * BLOCK_D * GROUP + (o_d[:, None] * GROUP + o_g[None, :])
        tl.store(p_out, b_total * scale)
