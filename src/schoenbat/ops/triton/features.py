"""A feature map inside a kernel: the monomials of a tile of rows, one group of features at a time.

Identity features need no code: they are the tile itself. All others are products of projections, cut into
groups of GROUP features. For each group and level there is one tile of directions [BLOCK_D, GROUP], zeros where
a feature or a dimension does not exist, so that nothing here is masked. Every factor is multiplied by the rows'
scale, every feature by the square root of its weight. Gradients are those of the scaled rows: who wants that of the
rows themselves multiplies by the scale last, and a scale of zero does no harm.

Names: i_ indices, o_ offsets, p_ pointers, b_ blocks.
"""

import triton
import triton.language as tl


@triton.jit
def product(b_a, b_b, PRECISION: tl.constexpr):
    """b_a b_b in float32; tensor cores, and Triton's products, want 16 rows at least."""
    if b_a.shape[0] >= 16:
        b_c = tl.dot(b_a, b_b, input_precision=PRECISION)
    else:
        b_c = tl.sum(b_a[:, :, None] * b_b[None, :, :], axis=1)
    return b_c


@triton.jit
def factors(b_x, p_tiles, i_tile, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr):
    """One level's factors [BLOCK, GROUP] in float32, and the directions they are projections on."""
    o_tile = tl.arange(0, BLOCK_D)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_w = tl.load(p_tiles + i_tile * BLOCK_D * GROUP + o_tile)
    return product(b_x, b_w, PRECISION), b_w


@triton.jit
def monomials(
    b_x, scale, i_group, p_tiles, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The features [BLOCK, GROUP] of a group without weights, in float32; QUADRATIC: all have two factors."""
    if QUADRATIC:
        b_left, _ = factors(b_x, p_tiles, 2 * i_group, BLOCK_D, GROUP, PRECISION)
        b_right, _ = factors(b_x, p_tiles, 2 * i_group + 1, BLOCK_D, GROUP, PRECISION)
        b_phi = b_left * b_right * (scale * scale)
    else:
        first = tl.load(p_first + i_group)
        b_degree = tl.load(p_degrees + i_group * GROUP + tl.arange(0, GROUP))
        b_phi = tl.full([BLOCK, GROUP], 1.0, tl.float32)
        for i_tile in range(first, tl.load(p_first + i_group + 1)):
            b_factor, _ = factors(b_x, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
            b_phi = tl.where((b_degree > i_tile - first)[None, :], b_phi * (b_factor * scale), b_phi)
    return b_phi


@triton.jit
def evaluate(
    b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The features [BLOCK, GROUP] of a group, in float32."""
    b_phi = monomials(
        b_x, scale, i_group, p_tiles, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
    )  # fmt: skip
    return b_phi * tl.load(p_root + i_group * GROUP + tl.arange(0, GROUP))[None, :]


@triton.jit
def evaluate_backward(
    b_grad, b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a group adds to the gradient of the scaled rows, [BLOCK, BLOCK_D]; `b_grad` is that of `evaluate`."""
    o_f = i_group * GROUP + tl.arange(0, GROUP)
    b_grad = b_grad * tl.load(p_root + o_f)[None, :]
    if QUADRATIC:
        b_grad = b_grad * scale
        b_left, b_w_left = factors(b_x, p_tiles, 2 * i_group, BLOCK_D, GROUP, PRECISION)
        b_right, b_w_right = factors(b_x, p_tiles, 2 * i_group + 1, BLOCK_D, GROUP, PRECISION)
        b_dx = _spread(b_grad * b_right, b_w_left, PRECISION)
        b_dx += _spread(b_grad * b_left, b_w_right, PRECISION)
    else:
        first, last = tl.load(p_first + i_group), tl.load(p_first + i_group + 1)
        b_degree = tl.load(p_degrees + o_f)
        # All factors but one are the product divided by that one; factors of exactly zero are counted apart.
        b_product = tl.full([BLOCK, GROUP], 1.0, tl.float32)
        b_zeros = tl.zeros([BLOCK, GROUP], tl.int32)
        for i_tile in range(first, last):
            b_factor, _ = factors(b_x, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
            b_factor = b_factor * scale
            b_exists = (b_degree > i_tile - first)[None, :]
            b_zeros += (b_exists & (b_factor == 0.0)).to(tl.int32)
            b_product = tl.where(b_exists & (b_factor != 0.0), b_product * b_factor, b_product)
        b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for i_tile in range(first, last):
            b_factor, b_w = factors(b_x, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
            b_factor = b_factor * scale
            b_is_zero = b_factor == 0.0
            b_others = b_product / tl.where(b_is_zero, 1.0, b_factor)
            b_counts = (b_degree > i_tile - first)[None, :] & (b_zeros == b_is_zero.to(tl.int32))
            b_dx += _spread(tl.where(b_counts, b_grad * b_others, 0.0), b_w, PRECISION)
    return b_dx


@triton.jit
def _spread(b_grad, b_w, PRECISION: tl.constexpr):
    """The gradient of the rows from that of their projections on b_w."""
    return tl.dot(b_grad.to(b_w.dtype), tl.trans(b_w), input_precision=PRECISION)
