"""What kernels for Hopper's warp groups are made of, in Gluon: Triton with layouts and waiting in one's own hands.

A warp works on 16 rows of a tile, four warps are a group: tiles have BLOCK rows, or of eight warps twice as many.
Products are asynchronous: several are started, then waited for together. A product with an operand in registers is waited for before anything else is computed:
assemblers before CUDA 13.3 may write to its registers too early (docs/kernels.md).

Names: i_ indices, o_ offsets, p_ pointers, b_ blocks in registers, s_ blocks in shared memory, m_ masks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

# Its name until Triton 3.7, and since.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
BLOCK = gl.constexpr(64)
# The narrowest product, by which vectors are multiplied and rows are added up.
NARROW = gl.constexpr(16)
LOWEST_EXPONENT = gl.constexpr(-80.0)


@gluon.constexpr_function
def accumulator(columns, warps=4, rows=None):
    """The layout of a product's result, of 16 rows to a warp; of fewer rows groups of warps share the columns."""
    across = 1 if rows is None else max(1, 16 * warps // rows)
    instruction = [16, columns // across, 16]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps // across, across], instr_shape=instruction
    )


@gluon.constexpr_function
def operand(columns, warps=4):
    """The layout of an operand in registers of a product whose result has so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(columns, warps), k_width=2)


@gluon.constexpr_function
def by_row(columns, warps=4, rows=None):
    """The layout of a vector with an entry for each row of a result."""
    return gl.SliceLayout(1, accumulator(columns, warps, rows))


@gluon.constexpr_function
def by_column(columns, warps=4, rows=None):
    return gl.SliceLayout(0, accumulator(columns, warps, rows))


@gluon.constexpr_function
def in_memory(columns, warps=4):
    """The layout in which tiles of so many 16-bit columns are copied: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.jit
def start(a, b, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Start a b, [ROWS, COLUMNS]."""
    b_zeros = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS, gl.num_warps(), ROWS))
    return warpgroup_mma(a, b, b_zeros, use_acc=False, is_async=True)


@gluon.jit
def add(a, b, b_sum):
    """Start b_sum + a b."""
    return warpgroup_mma(a, b, b_sum, is_async=True)


@gluon.jit
def shared_tile(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One tile, to be taken by an index that is zero; made `anew` in a loop, it spares registers there."""
    return shared_tiles(dtype, 1, ROWS, COLUMNS)


@gluon.jit
def shared_tiles(dtype: gl.constexpr, NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [NUMBER, ROWS, COLUMNS], layout)


@gluon.jit
def shared_pair(dtype: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr = None):
    """Two tiles of rows: one is worked on while the other is loaded."""
    return shared_tiles(dtype, 2, 16 * gl.num_warps() if ROWS is None else ROWS, COLUMNS)


@gluon.jit
def shared_vector(SIZE: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def shared_vectors(ROWS: gl.constexpr = None):
    """Two vectors of a number for each row, as `shared_pair`."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows: gl.constexpr = 16 * gl.num_warps() if ROWS is None else ROWS
    return gl.allocate_shared_memory(gl.float32, [2, rows], layout)


@gluon.jit
def anew(number):
    """The same number, which a compiler takes for another: what is formed from it in a loop is formed there.

    Places in memory that are worked out once, before a loop, would take registers that accumulators need.
    """
    same: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(same, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unknown(number):
    """The same number, which the assembler does not know either: it adds what a clock shows after 2^63 cycles.

    The assembler sees through `anew`. Of what it knows it keeps places in memory for later, for which it has no
    registers: they are spilled, and where shared memory leaves no cache, a spill is read a few hundred cycles later.
    """
    read_clock: gl.constexpr = "mov.u32 $0, %clock_hi;"
    clock = gl.inline_asm_elementwise(read_clock, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
    return number + (clock >> 31)


@gluon.jit
def seen_from(zero, ROWS: gl.constexpr, KEYS_FIRST: gl.constexpr):
    """Which queries of a tile see which of its keys, [queries, keys] or [keys, queries]; the zero is `unknown`.

    Compared where it is asked: kept from tile to tile it would take registers. Columns are taken apart, so that rows
    are compared with numbers that are known when the kernel is compiled, but for where a group of warps has its columns.
    """
    layout: gl.constexpr = accumulator(ROWS, gl.num_warps(), ROWS)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + zero
    o_column = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    b_difference, o_first = o_row[:, None] - (o_column & 7)[None, :], (o_column & -8)[None, :]
    return b_difference <= o_first if KEYS_FIRST else b_difference >= o_first


@gluon.jit
def place(number, HEADS: gl.constexpr, GROUPS: gl.constexpr, MAPS: gl.constexpr):
    """Where a program works, of which each head has so many: its part, sequence and head in one, both, and the map."""
    i_part, i_bh = gl.program_id(0) % number, gl.program_id(0) // number
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    return i_part, i_bh, i_b, i_h, (0 if MAPS == 1 else i_h // GROUPS)


@gluon.jit
def at_head(p, i_b, i_h, stride_b, stride_h):
    """The first row of a head."""
    return p + (i_b.to(gl.int64) * stride_b + i_h.to(gl.int64) * stride_h)


@gluon.jit
def visible(start_row, N, layout: gl.constexpr, p_mask=None, ROWS: gl.constexpr = None):
    """Which rows of a tile exist and take part; a tile may begin before the first row."""
    o_n = start_row + gl.arange(0, 16 * gl.num_warps() if ROWS is None else ROWS, layout)
    m_n = (o_n >= 0) & (o_n < N)
    if p_mask is not None:
        m_n = m_n & (gl.load(p_mask + o_n, mask=m_n, other=0) != 0)
    return m_n


@gluon.jit
def copy_rows(s_tile, p, start_row, stride, N, C: gl.constexpr, COLUMNS: gl.constexpr, p_mask=None):
    """Begin to copy a tile of rows; zeros where there are none, or where a mask says so."""
    layout: gl.constexpr = in_memory(COLUMNS, gl.num_warps())
    m_n = visible(start_row, N, gl.SliceLayout(1, layout), p_mask, s_tile.shape[0])
    stride = anew(stride // 8) * 8
    o_n = gl.arange(0, s_tile.shape[0], gl.SliceLayout(1, layout))
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    p = p + gl.to_tensor(start_row).to(gl.int64) * stride + (o_n[:, None] * stride + o_c[None, :])
    _copy(s_tile, p, mask=m_n[:, None] & (o_c[None, :] < C))


@gluon.jit
def copy_tile(s_tile, p, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Begin to copy a whole tile that lies in one piece."""
    layout: gl.constexpr = in_memory(COLUMNS, gl.num_warps())
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    _copy(s_tile, p + (o_r[:, None] * COLUMNS + o_c[None, :]))


@gluon.jit
def copy_numbers(s_vector, p, start_row, N):
    """Begin to copy a number for each row of a tile; zeros where there is none."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    m_n = visible(start_row, N, layout, None, s_vector.shape[0])
    _copy(s_vector, p + start_row + gl.arange(0, s_vector.shape[0], layout), mask=m_n)


@gluon.jit
def store_rows(p, start_row, b, s_tile, N, C: gl.constexpr, COLUMNS: gl.constexpr):
    """The rows of a result that exist, into a contiguous matrix; of 16 bits by way of a tile in shared memory."""
    if p.dtype.element_ty == s_tile.dtype:
        s_tile.store(b.to(s_tile.dtype))
        layout: gl.constexpr = in_memory(COLUMNS, gl.num_warps())
        store_in(p, start_row, s_tile.load(layout), N, C, COLUMNS, layout)
    else:
        store_in(p, start_row, b, N, C, COLUMNS, accumulator(COLUMNS, gl.num_warps(), b.shape[0]))


@gluon.jit
def store_in(p, start_row, b, N, C: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    m_n = visible(start_row, N, gl.SliceLayout(1, layout), None, b.shape[0])
    o_n = gl.arange(0, b.shape[0], gl.SliceLayout(1, layout))
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    p = p + gl.to_tensor(start_row).to(gl.int64) * C + (o_n[:, None] * C + o_c[None, :])
    gl.store(p, b, mask=m_n[:, None] & (o_c[None, :] < C))


@gluon.jit
def store_multiplied(s_to, s_rows, s_factor, COLUMNS: gl.constexpr):
    """Each row of a tile times its factor; into the same tile, if asked to."""
    layout: gl.constexpr = in_memory(COLUMNS, gl.num_warps())
    b_factor = s_factor.load(gl.SliceLayout(1, layout))
    s_to.store((s_rows.load(layout).to(gl.float32) * b_factor[:, None]).to(s_to.dtype))


@gluon.jit
def centred(b_rows, DIM: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Less the mean of each row; what is padded is zero and stays so."""
    b_rows = b_rows - (gl.sum(b_rows, axis=1) / DIM)[:, None]
    if DIM != COLUMNS:
        b_rows = gl.where(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :] < DIM, b_rows, 0.0)
    return b_rows


@gluon.jit
def make_unit(s_tile, EPS, UNIT: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr, s_factor=None):
    """Rows of norm 1 (UNIT = 1), centred and of norm 1 (2), in place; s_factor is what they are multiplied by."""
    if UNIT > 0:
        layout: gl.constexpr = in_memory(COLUMNS, gl.num_warps())
        b_rows = s_tile.load(layout).to(gl.float32)
        if UNIT > 1:
            b_rows = centred(b_rows, DIM, COLUMNS, layout)
        b_factor = gl.rsqrt(gl.maximum(gl.sum(b_rows * b_rows, axis=1), DIM * EPS))
        s_tile.store((b_rows * b_factor[:, None]).to(s_tile.dtype))
        if s_factor is not None:
            s_factor.store(b_factor)


@gluon.jit
def unit_backward(b_dx, b_unit, s_factor, EPS, UNIT: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr):
    """The gradient of the rows as they were loaded, from that of the unit rows."""
    layout: gl.constexpr = accumulator(COLUMNS, gl.num_warps(), b_dx.shape[0])
    b_factor = s_factor.load(gl.SliceLayout(1, layout))
    # Rows shorter than the least norm were multiplied by a constant.
    b_along = gl.where(b_factor < gl.rsqrt(gl.to_tensor(DIM * EPS)), gl.sum(b_dx * b_unit, axis=1), 0.0)
    b_dx = (b_dx - b_along[:, None] * b_unit) * b_factor[:, None]
    if UNIT > 1:
        b_dx = centred(b_dx, DIM, COLUMNS, layout)
    return b_dx


@gluon.jit
def split_in_two(b, dtype: gl.constexpr):
    """A number as the sum of two of 16 bits."""
    b_high = b.to(dtype)
    return b_high, (b - b_high.to(gl.float32)).to(dtype)


@gluon.jit
def in_two_columns(b_vector, dtype: gl.constexpr, FIRST: gl.constexpr):
    """A vector as a narrow operand: two columns that add up to it, from FIRST on, and zeros."""
    o = gl.arange(0, NARROW, by_column(NARROW, gl.num_warps()))[None, :]
    b_high, b_low = split_in_two(b_vector, dtype)
    b_high, b_low = b_high.to(gl.float32)[:, None], b_low.to(gl.float32)[:, None]
    return gl.where(o == FIRST, b_high, gl.where(o == FIRST + 1, b_low, 0.0)).to(dtype)


@gluon.jit
def row_sums(b):
    """Of narrow products, all columns of which belong together."""
    return gl.sum(b, axis=1)
