"""The choice of tiles: by the shape of a call, its map and the GPU's memory alone.

Nothing is timed at run time: the same call always runs the same code, so two runs are bit-equal.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.triton.layout import padded
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.shared_memory import is_roomy

# With so many, three programs of four warps fit a multiprocessor instead of two, six of two instead of four.
_FEWER_REGISTERS = 168


# A product and a sum are one operation, for which Triton from 3.10 on wants to be asked.
FUSED = {"enable_fp_fusion": True}


class Tiles(NamedTuple):
    """Rows a tile, and how a program is compiled."""

    block: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # at most so many a thread; None for as many as there are

    @property
    def compilation(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        sizes = {"BLOCK": self.block, "num_warps": self.num_warps, "num_stages": self.num_stages}
        return sizes | limit | FUSED


# For maps of many degrees in wide groups.
WIDE_TILES = Tiles(64, 4, 3)


def tiles_for(dtype: torch.dtype, block_d: int, block_v: int, quadratic: int, device: torch.device) -> Tiles:
    """By shape; for pairs of wide heads on smaller GPUs, what fits their memory and hardly spills.

    Four warps are a Hopper warp group, and the asynchronous products of one go wrong where Triton 3.6
    compiles narrow ones for a loop of run-time length (other numbers from run to run) or for values narrower
    than the keys (illegal accesses). Two warps multiply without them, and so do four on tiles of 16 rows.
    """
    widest = max(block_d, block_v)
    if dtype == torch.float32:
        return Tiles(16, 8, 1 if block_d <= 128 else 2)
    if block_d > 128:
        return Tiles(16, 4, 1)
    if not quadratic:
        return Tiles(64 if widest <= 64 else 32, 2, 1 if widest <= 32 else 2)
    if widest > 64 and not is_roomy(device):
        return Tiles(32, 8, 1)
    if block_v < block_d or block_d < 32:
        return Tiles(32, 2, 3)
    return Tiles(64, 4, 3) if widest <= 64 else Tiles(128, 8, 2)


def takes_wide_groups(query: Tensor, dtype: torch.dtype, block_v: int) -> bool:
    """Whether kernels for many degrees multiply by warp groups: where all products are 64 wide or wider.

    Of narrower ones some end in illegal accesses, and at d = 32 those that are right are slower.
    """
    block_d = padded(query.shape[-1])
    return dtype != torch.float32 and block_d == block_v and block_d in (64, 128) and is_roomy(query.device)


def tiles_of_sums(tiles: Tiles, block_d: int, block_v: int) -> Tiles:
    """For sums: of products of several degrees, which two warps form; of pairs of wide heads."""
    if tiles.block == 128:
        return Tiles(64, 4, 2)
    is_narrow = tiles.num_warps == 2 and tiles.block == 64 and max(block_d, block_v) <= 32
    return tiles._replace(registers=_FEWER_REGISTERS) if is_narrow else tiles


def tiles_of_read(tiles: Tiles, plan: Plan) -> Tiles:
    """For outputs: of wide heads and two groups, two programs then fit the shared memory."""
    return Tiles(64, 4, 1) if tiles.block == 128 and plan.whole == 2 else tiles


def tiles_of_gradients(tiles: Tiles, plan: Plan) -> Tiles:
    """For gradients of several groups at hand: their shared memory leaves no room to load tiles ahead."""
    if plan.whole < 2:
        return tiles
    return tiles._replace(block=min(tiles.block, 64), num_warps=min(tiles.num_warps, 4), num_stages=1)


def causal_tiles_for(
    dtype: torch.dtype, block_d: int, block_v: int, quadratic: int, device: torch.device
) -> Tiles:
    """As `tiles_for`, but for pairs in float32, which spill kilobytes with one stage, and by width.

    With 128 rows the gradients of wide heads would not fit the shared memory. Narrow ones spill little with
    fewer registers.
    """
    if quadratic and dtype == torch.float32:
        return Tiles(16, 8, 2)
    tiles = tiles_for(dtype, block_d, block_v, quadratic, device)
    if tiles.block == 64 and max(block_d, block_v) <= 32:
        return tiles._replace(registers=_FEWER_REGISTERS)
    return Tiles(64, 8, 2) if tiles.block == 128 else tiles


def causal_tiles_of_read(tiles: Tiles, plan: Plan) -> Tiles:
    """For outputs: several tiles to a program, loaded ahead, or more programs of fewer registers."""
    if is_of_one_group(tiles, plan):
        return tiles._replace(num_stages=2)
    if tiles.num_warps == 4 and tiles.block == 64:
        return tiles._replace(registers=_FEWER_REGISTERS)
    return _of_wide_heads(tiles)


def causal_tiles_of_queries(tiles: Tiles, plan: Plan) -> Tiles:
    """For the gradients of queries: one group is no loop that would load the next one ahead."""
    if is_of_one_group(tiles, plan):
        return tiles._replace(num_stages=2)
    return _of_wide_heads(tiles)


def _of_wide_heads(tiles: Tiles) -> Tiles:
    """Eight warps hold the sums of wide heads, but share the rows of all other tiles badly."""
    return Tiles(64, 4, 1) if tiles.block == 64 and tiles.num_warps == 8 else tiles


def is_of_one_group(tiles: Tiles, plan: Plan) -> bool:
    """Whether four warps work on one group of pairs: their registers suffice for several tiles of outputs."""
    has_registers = tiles.num_warps == 4 and tiles.block == 64 and tiles.registers is None
    return plan.is_single and has_registers and is_roomy(plan.tiles.device)


def causal_tiles_of_keys(tiles: Tiles, plan: Plan) -> Tiles:
    """For the gradients of keys: two programs must fit the shared memory of a multiprocessor."""
    if is_of_one_group(tiles, plan):
        return tiles._replace(num_stages=1)
    most = 2 if is_roomy(plan.tiles.device) or tiles.num_warps < 8 else 1
    return tiles._replace(num_stages=min(tiles.num_stages, most))


def window_tiles_for(dtype: torch.dtype, block_d: int, block_v: int, quadratic: int) -> Tiles:
    """By shape alone.

    Loops over visited tiles are of run-time length, where products of warp groups go wrong (see `tiles_for`).
    These want 64 rows: with 32, four warps and eight multiply without them.
    """
    if dtype == torch.float32:
        return Tiles(16, 8, 1)
    return Tiles(32, 8 if quadratic and max(block_d, block_v) > 64 else 4, 2)


def tiles_of_map(tiles: Tiles, dtype: torch.dtype) -> Tiles:
    """Two warps where rows have 16 bits: they were right wherever they were tried, see `tiles_for`."""
    return tiles if dtype == torch.float32 else Tiles(tiles.block, 2, min(2, tiles.num_stages))
