"""A feature map inside a kernel: the monomials of a tile of rows, one group of features at a time.

Identity features need no code: they are the tile itself. All others are products of projections, cut into
groups of GROUP features. For each group and level there is one tile of directions [BLOCK_D, GROUP], zeros where
a feature or a dimension does not exist, so that nothing here is masked. Every factor counts times the rows'
scale, every feature times the square root of its weight. Gradients are those of the scaled rows: who wants that of the
rows themselves multiplies by the scale last, and a scale of zero does no harm.

Names: i_ indices, o_ offsets, p_ pointers, b_ blocks.
"""

import triton
import triton.language as tl

# Below it a factor counts as zero; its square is still a normal number.
TINY = tl.constexpr(1e-15)


@triton.jit
def product(b_a, b_b, PRECISION: tl.constexpr):
    """b_a b_b in float32; tensor cores, and Triton's products, want 16 rows at least."""
    if b_a.shape[0] >= 16:
        b_c = tl.dot(b_a, b_b, input_precision=PRECISION)
    else:
        # Row by row: all at once would need a register for each term.
        o_r = tl.arange(0, b_a.shape[0])[:, None]
        b_c = tl.zeros([b_a.shape[0], b_b.shape[1]], tl.float32)
        for i_row in tl.static_range(b_a.shape[0]):
            b_row = tl.sum(tl.where(o_r == i_row, b_a, 0.0), axis=0)
            b_c = tl.where(o_r == i_row, tl.sum(b_row[:, None] * b_b, axis=0)[None, :], b_c)
    return b_c


@triton.jit
def directions(p_tiles, i_tile, BLOCK_D: tl.constexpr, GROUP: tl.constexpr):
    """One level's directions, [BLOCK_D, GROUP]."""
    o_tile = tl.arange(0, BLOCK_D)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(p_tiles + i_tile * BLOCK_D * GROUP + o_tile)


@triton.jit
def factors(b_x, p_tiles, i_tile, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr):
    """One level's factors [BLOCK, GROUP] in float32, and the directions they are projections on."""
    b_w = directions(p_tiles, i_tile, BLOCK_D, GROUP)
    return product(b_x, b_w, PRECISION), b_w


@triton.jit
def level_factors(
    b_x, b_degree, level, p_tiles, i_tile, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr
):
    """One level's factors, 1 for features that have none, and their directions.

    A factor of zero becomes a tiny one: a product can then be divided by it again, and is as good as zero.
    """
    b_factor, b_w = factors(b_x, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
    b_least = tl.where(b_degree > level, TINY, 1.0)[None, :]
    return tl.where(tl.abs(b_factor) < TINY, b_least, b_factor), b_w


@triton.jit
def monomials(
    b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, DIVISIBLE: tl.constexpr = True,
):  # fmt: skip
    """A group's products of projections [BLOCK, GROUP] in float32, and their weights [GROUP].

    Features are ``product · weight · scale``: the weight is √w · scale^(degree − 1), as gradients want it.
    QUADRATIC: all features have two factors; it is 1 here, see `plan.Plan`. Products that are DIVISIBLE are those of
    `level_factors`.
    """
    b_weight = tl.load(p_root + i_group * GROUP + tl.arange(0, GROUP))
    if QUADRATIC:
        b_left, _ = factors(b_x, p_tiles, 2 * i_group, BLOCK_D, GROUP, PRECISION)
        b_right, _ = factors(b_x, p_tiles, 2 * i_group + 1, BLOCK_D, GROUP, PRECISION)
        b_product = b_left * b_right
        b_weight = b_weight * scale
    else:
        first = tl.load(p_first + i_group)
        b_degree = tl.load(p_degrees + i_group * GROUP + tl.arange(0, GROUP))
        b_product = tl.full([BLOCK, GROUP], 1.0, tl.float32)
        for i_tile in range(first, tl.load(p_first + i_group + 1)):
            level = i_tile - first
            if DIVISIBLE:
                b_factor, _ = level_factors(b_x, b_degree, level, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
            else:
                b_factor, _ = factors(b_x, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION)
                b_factor = tl.where((b_degree > level)[None, :], b_factor, 1.0)
            b_product = b_product * b_factor
            b_weight = tl.where((level > 0) & (b_degree > level), b_weight * scale, b_weight)
    return b_product, b_weight


@triton.jit
def evaluate(
    b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The features [BLOCK, GROUP] of a group, in float32."""
    b_product, b_weight = monomials(
        b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION,
        DIVISIBLE=False,
    )  # fmt: skip
    return b_product * (b_weight * scale)[None, :]


@triton.jit
def monomials_backward(
    b_grad, b_product, b_weight, b_x, i_group, p_tiles, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a group adds to the gradient of the scaled rows, [BLOCK, BLOCK_D]; `b_grad` is that of the features."""
    b_grad = b_grad * b_weight[None, :]
    if QUADRATIC:
        b_left = directions(p_tiles, 2 * i_group, BLOCK_D, GROUP)
        b_right = directions(p_tiles, 2 * i_group + 1, BLOCK_D, GROUP)
        b_dx = pairs_backward(b_grad, b_x, b_left, b_right, PRECISION)
    else:
        first = tl.load(p_first + i_group)
        b_degree = tl.load(p_degrees + i_group * GROUP + tl.arange(0, GROUP))
        # All factors but one are the product divided by that one.
        b_grad = b_grad * b_product
        b_dx = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for i_tile in range(first, tl.load(p_first + i_group + 1)):
            b_factor, b_w = level_factors(
                b_x, b_degree, i_tile - first, p_tiles, i_tile, BLOCK_D, GROUP, PRECISION
            )
            b_dx += _spread(b_grad / b_factor, b_w, PRECISION)
    return b_dx


@triton.jit
def pairs(b_x, b_left, b_right, b_root, scale, PRECISION: tl.constexpr):
    """The features ``√w (scale x·left)(scale x·right)`` in float32; x may be what rows were projected on."""
    b_product = tl.dot(b_x, b_left, input_precision=PRECISION) * tl.dot(
        b_x, b_right, input_precision=PRECISION
    )
    return b_product * (b_root * (scale * scale))[None, :]


@triton.jit
def pairs_backward(b_grad, b_x, b_left, b_right, PRECISION: tl.constexpr):
    """The gradient of rows from that of ``(x·left)(x·right)``; x may be what they were projected on."""
    b_dx = _spread(b_grad * tl.dot(b_x, b_right, input_precision=PRECISION), b_left, PRECISION)
    return b_dx + _spread(b_grad * tl.dot(b_x, b_left, input_precision=PRECISION), b_right, PRECISION)


@triton.jit
def first_directions(p_tiles, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr):
    """What rows are projected on first, [BLOCK_D, QUADRATIC]; nothing where QUADRATIC is 1, see `plan.Plan`."""
    b_first = 0
    if QUADRATIC > 1:
        o_d, o_y = tl.arange(0, BLOCK_D), tl.arange(0, QUADRATIC)
        b_first = tl.load(p_tiles + (o_d[:, None] * GROUP + o_y[None, :]))
    return b_first


@triton.jit
def pair_directions(p_tiles, i_group, QUADRATIC: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr):
    """What `projected` rows are projected on for the two factors of a group's pairs."""
    if QUADRATIC > 1:
        p_tiles += (2 * i_group + 1) * BLOCK_D * GROUP
        b_left = directions(p_tiles, 0, QUADRATIC, GROUP)
        b_right = directions(p_tiles + BLOCK_D * GROUP, 0, QUADRATIC, GROUP)
    else:
        b_left = directions(p_tiles, 2 * i_group, BLOCK_D, GROUP)
        b_right = directions(p_tiles, 2 * i_group + 1, BLOCK_D, GROUP)
    return b_left, b_right


@triton.jit
def projected(b_x, b_first, QUADRATIC: tl.constexpr, PRECISION: tl.constexpr):
    """y = Pᵀx in the rows' dtype, or the rows."""
    return tl.dot(b_x, b_first, input_precision=PRECISION).to(b_x.dtype) if QUADRATIC > 1 else b_x


@triton.jit
def projected_backward(b_dy, b_first, QUADRATIC: tl.constexpr, PRECISION: tl.constexpr):
    """The gradient of the rows from that of `projected`."""
    return _spread(b_dy, b_first, PRECISION) if QUADRATIC > 1 else b_dy


@triton.jit
def evaluate_backward(
    b_grad, b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first,
    QUADRATIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same where the products are not at hand."""
    b_product, b_weight = monomials(
        b_x, scale, i_group, p_tiles, p_root, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP, PRECISION
    )  # fmt: skip
    return monomials_backward(
        b_grad, b_product, b_weight, b_x, i_group, p_tiles, p_degrees, p_first, QUADRATIC, BLOCK, BLOCK_D, GROUP,
        PRECISION,
    )  # fmt: skip


@triton.jit
def _spread(b_grad, b_w, PRECISION: tl.constexpr):
    """The gradient of the rows from that of their projections on b_w."""
    return tl.dot(b_grad.to(b_w.dtype), tl.trans(b_w), input_precision=PRECISION)


@triton.jit
def linear_scores(b_a, b_b, p_linear, scale, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """What identity features add to the scores of two tiles."""
    b_root = tl.load(p_linear + tl.arange(0, BLOCK_D))
    b_a = (b_a.to(tl.float32) * (b_root * b_root * scale)[None, :]).to(b_a.dtype)
    return tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)
