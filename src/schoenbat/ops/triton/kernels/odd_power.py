"""The power that post-SBN takes of outputs, γ a (a² + ε²)^((|β| − 1) / 2) with a γ and a β for each head and channel.

Memory is all that it costs: rows are read and written once, and what lies between stays in registers, in float32.

Names: i_ indices, o_ offsets, p_ pointers, b_ blocks, m_ masks.
"""

import triton
import triton.language as tl

# The square of a larger number may not fit, and ε adds nothing to it.
LARGE = tl.constexpr(1e6)
LARGEST = tl.constexpr(3.4028234663852886e38)
# What depends on the length of a sequence: no kernel is compiled again for another length.
LENGTHS = ("N", "tiles_each", "splits")


@triton.jit
def place(p, i_bh, i_column, stride_b, stride_h, HEADS: tl.constexpr):
    """The first row of a head, from a column on."""
    i_b, i_h = (i_bh // HEADS).to(tl.int64), (i_bh % HEADS).to(tl.int64)
    return p + i_b * stride_b + i_h * stride_h + i_column


@triton.jit
def load_rows(p, start, stride, m, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of rows in float32; zeros where m is false."""
    o_n, o_c = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    # 64 bits for the tile's place, 32 for places inside of it: fewer registers.
    p = p + start.to(tl.int64) * stride + (o_n[:, None] * stride + o_c[None, :])
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p, start, b, m, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Into contiguous rows."""
    o_n, o_c = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    p = p + start.to(tl.int64) * WIDTH + (o_n[:, None] * WIDTH + o_c[None, :])
    tl.store(p, b.to(p.dtype.element_ty), mask=m)


@triton.jit
def logarithm(b_size):
    """Of sizes; that of infinity, times an exponent of 0, would not be a number."""
    return tl.log(tl.minimum(b_size, LARGEST))


@triton.jit
def sizes(b_a, EPSILON: tl.constexpr):
    """√(a² + ε²)."""
    b_abs = tl.abs(b_a)
    return tl.where(b_abs < LARGE, tl.sqrt(b_a * b_a + EPSILON * EPSILON), b_abs)


@triton.jit
def numbers(p_gamma, p_beta, i_h, i_column, m_c, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """γ and the exponent of sizes, |β| − 1, of some channels of a head."""
    o = i_h * WIDTH + i_column + tl.arange(0, COLUMNS)
    b_gamma = tl.load(p_gamma + o, mask=m_c, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o, mask=m_c, other=0.0).to(tl.float32)
    return b_gamma, tl.abs(b_beta) - 1.0


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    p_rows, p_gamma, p_beta, p_out, stride_b, stride_h, stride_n, N, splits,
    EPSILON: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of outputs; `splits` tiles to a head."""
    i_split, i_bh, i_column = (
        tl.program_id(0) % splits,
        tl.program_id(0) // splits,
        tl.program_id(1) * COLUMNS,
    )
    m_c = i_column + tl.arange(0, COLUMNS) < WIDTH
    b_gamma, b_exponent = numbers(p_gamma, p_beta, i_bh % HEADS, i_column, m_c, WIDTH, COLUMNS)
    start = i_split * BLOCK
    m = (start + tl.arange(0, BLOCK) < N)[:, None] & m_c[None, :]
    p_rows = place(p_rows, i_bh, i_column, stride_b, stride_h, HEADS)
    b_a = load_rows(p_rows, start, stride_n, m, BLOCK, COLUMNS)
    b_power = tl.exp(logarithm(sizes(b_a, EPSILON)) * b_exponent[None, :])
    p_out += i_bh.to(tl.int64) * N * WIDTH + i_column
    store_rows(p_out, start, b_gamma[None, :] * b_a * b_power, m, WIDTH, BLOCK, COLUMNS)


@triton.jit(do_not_specialize=LENGTHS)
def backward(
    p_rows, p_gamma, p_beta, p_grad, p_dx, p_dgamma, p_dbeta,
    stride_b, stride_h, stride_n, stride_gb, stride_gh, stride_gn, N, tiles_each, splits,
    EPSILON: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of rows, and what a program's rows add to those of γ and of |β|, the latter but for γ."""
    i_split, i_bh, i_column = (
        tl.program_id(0) % splits,
        tl.program_id(0) // splits,
        tl.program_id(1) * COLUMNS,
    )
    m_c = i_column + tl.arange(0, COLUMNS) < WIDTH
    b_gamma, b_exponent = numbers(p_gamma, p_beta, i_bh % HEADS, i_column, m_c, WIDTH, COLUMNS)
    p_rows = place(p_rows, i_bh, i_column, stride_b, stride_h, HEADS)
    p_grad = place(p_grad, i_bh, i_column, stride_gb, stride_gh, HEADS)
    p_dx += i_bh.to(tl.int64) * N * WIDTH + i_column
    b_dgamma = tl.zeros([BLOCK, COLUMNS], tl.float32)
    b_dbeta = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for i in range(tiles_each):
        start = (i_split * tiles_each + i) * BLOCK
        m = (start + tl.arange(0, BLOCK) < N)[:, None] & m_c[None, :]
        b_a = load_rows(p_rows, start, stride_n, m, BLOCK, COLUMNS)
        b_g = load_rows(p_grad, start, stride_gn, m, BLOCK, COLUMNS)
        b_size = sizes(b_a, EPSILON)
        b_log = logarithm(b_size)
        b_g *= tl.exp(b_log * b_exponent[None, :])
        b_dgamma += b_g * b_a
        b_dbeta += b_g * b_a * b_log
        b_share = b_a / b_size
        b_dx = b_g * b_gamma[None, :] * (1.0 + b_exponent[None, :] * (b_share * b_share))
        store_rows(p_dx, start, b_dx, m, WIDTH, BLOCK, COLUMNS)
    o = tl.program_id(0).to(tl.int64) * WIDTH + i_column + tl.arange(0, COLUMNS)
    tl.store(p_dgamma + o, tl.sum(b_dgamma, axis=0), mask=m_c)
    tl.store(p_dbeta + o, tl.sum(b_dbeta, axis=0), mask=m_c)
