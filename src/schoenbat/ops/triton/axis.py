"""How the axis of positions is cut for sums along it: into tiles, chunks of them, segments of chunks."""

from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Shape, cdiv
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.programs import split
from schoenbat.ops.triton.tiles import Tiles, causal_tiles_for, is_of_one_group

# With so many heads each is one segment, about one program to a multiprocessor: more segments take less time
# for sums, but what is near and what is far then has to be added up by each kernel that reads them.
_MANY_HEADS = 120


class Axis(NamedTuple):
    """How queries and keys lie on the axis of positions, and how it is cut."""

    queries: int
    keys: int
    tiles: Tiles
    chunk: int  # tiles to a chunk
    num_tiles: int
    segments: int
    tiles_each: int  # tiles to a segment, whole chunks
    seen_by_all: int = 0  # about how many keys even the first row sees
    backwards: bool = False  # positions are counted from the end

    @classmethod
    def of(cls, queries: int, keys: int, shape: Shape, plan: Plan) -> "Axis":
        """Chunks so long that all their sums take no more memory than query, key, value and output."""
        tiles = causal_tiles_for(shape.dtype, shape.block_d, shape.block_v, plan.quadratic, plan.tiles.device)
        rows = 2 * tiles.block * (shape.block_d + shape.block_v)
        # A map of constants alone has no features.
        chunk = max(1, cdiv(plan.num_features * shape.block_v, rows))
        num_tiles = max(1, cdiv(max(queries, keys), tiles.block))
        pieces, heads = cdiv(num_tiles, chunk), shape.batch * shape.heads
        # Groups of several degrees take unequally long, as in `launch`; but segments have to be scanned.
        programs = heads * max(1, plan.num_groups) // (2 if plan.is_uneven else 1)
        segments, chunks_each = (1, pieces) if heads >= _MANY_HEADS else split(pieces, programs, tiles)
        return cls(queries, keys, tiles, chunk, num_tiles, segments, chunk * chunks_each)

    @property
    def first_query(self) -> int:
        return max(0, self.keys - self.queries)

    @property
    def first_key(self) -> int:
        return max(0, self.queries - self.keys)

    @property
    def has_far(self) -> bool:
        """Whether there are segments before others."""
        return self.segments > 1

    @property
    def cut(self) -> tuple[int, int, int]:
        return self.tiles_each, self.segments, self.num_tiles

    def from_tile(self, position: int) -> tuple[int, ...]:
        """What kernels that work on single tiles take, from the tile of a position on."""
        tile = min(position // self.tiles.block, self.num_tiles - 1)
        return self.queries, self.keys, self.first_query, self.first_key, tile, *self.cut

    def programs(self, position: int, heads: int) -> tuple[int]:
        return ((self.num_tiles - self.from_tile(position)[4]) * heads,)


def num_parts(tiles: Tiles, plan: Plan) -> int:
    """Of `accumulate`: all in one, or one for each group and one for what has none."""
    return 1 if is_of_one_group(tiles, plan) else 1 + plan.num_groups


def near_sizes(axis: Axis, shape: Shape, plan: Plan) -> list[tuple[int, ...]]:
    """Of a head: sums and totals before each chunk, sums of x and of rows before each tile."""
    features, chunks = plan.num_features, cdiv(axis.num_tiles, axis.chunk)
    of_features = (chunks, features, shape.block_v), (chunks, features)
    return [*of_features, (axis.num_tiles, shape.block_d), (axis.num_tiles, shape.block_v)]


def segment_sizes(axis: Axis, shape: Shape, plan: Plan) -> list[tuple[int, ...]]:
    """Of a head: the same of each segment."""
    sizes = (plan.num_features, shape.block_v), (plan.num_features,), (shape.block_d,), (shape.block_v,)
    return [(axis.segments, *size) for size in sizes]


def row_counts(seen: Tensor | None, axis: Axis, like: Tensor) -> Tensor:
    """How many keys each query sees, ``(B, 1, n)``."""
    if seen is not None:
        return seen[:, None, -axis.queries :]
    last = torch.arange(axis.queries, device=like.device) + (axis.first_query - axis.first_key)
    return (last + 1).clamp(min=0).view(1, 1, -1)
