"""A feature map in the form the kernels take: tiles of directions and roots of weights.

Where the factors lie depends on the degrees alone and is worked out once. A map that is not trained is laid
out once, too: see `plan_for`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.weak import WeakIdKeyDictionary

from schoenbat.ops.blocks import Blocks, level_sizes
from schoenbat.ops.keeping import may_keep, may_reuse, reuse

# Narrow groups where degrees differ: a group does as many levels as its highest degree has.
GROUP = 32
GROUP_OF_PAIRS = 64
# Of narrow heads, if that makes one group of all pairs.
WIDE_GROUP_OF_PAIRS = 128
WIDEST_IDENTITY = 128


class Layout(NamedTuple):
    """Where the factors of each feature are; features are padded to whole groups."""

    group: int
    num_tiles: int
    quadratic: bool  # every feature has two factors
    columns: (
        Tensor  # (T·group,) int64: for each place in a tile its column of linear | quadratic | tail | zero
    )
    degrees: Tensor  # (num_groups·group,) int32; zero for padding
    first: Tensor  # (num_groups + 1,) int32: the first tile of each group


class Plan(NamedTuple):
    """A map as the kernels take it; M is 1 or the number of key heads."""

    tiles: Tensor  # (M, T, block_d, group)
    root_weight: Tensor  # (M, num_groups·group)
    root_linear: Tensor  # (M, block_d), of the identity features
    degrees: Tensor
    first: Tensor
    identity: bool
    quadratic: bool
    monomials: int  # of the map: features without the constant, and without padding

    @property
    def tensors(self) -> list[Tensor]:
        return list(self[:5])

    @property
    def flags(self) -> list[int]:
        return [int(self.identity), int(self.quadratic), self.monomials]

    @staticmethod
    def of(tensors: Sequence[Tensor], flags: Sequence[int]) -> "Plan":
        tiles, root_weight, root_linear, degrees, first = tensors
        identity, quadratic, monomials = flags
        return Plan(
            tiles, root_weight, root_linear, degrees, first, bool(identity), bool(quadratic), monomials
        )

    @property
    def group(self) -> int:
        return self.tiles.shape[-1]

    @property
    def num_groups(self) -> int:
        return self.degrees.shape[0] // self.group

    @property
    def num_features(self) -> int:
        """Rows of the sums, padding included."""
        return self.identity * self.tiles.shape[-2] + self.degrees.shape[0]


_PLANS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan_for(blocks: Blocks, weight: Tensor, dtype: torch.dtype, block_d: int, wide: bool = False) -> Plan:
    """The plan of a map, kept as long as its `weight` lives; a map that changes has another one.

    With `wide`, one wide group of pairs where heads are narrow.
    """
    wide = wide and block_d <= 32 and GROUP_OF_PAIRS < blocks.num_pairs <= WIDE_GROUP_OF_PAIRS
    make = partial(make_plan, blocks, weight, dtype, block_d, wide)
    if not may_reuse(weight):
        return make()
    plans = _PLANS.setdefault(weight, {})
    if (dtype, wide) in plans:
        return reuse(plans[dtype, wide], weight)
    if not may_keep(weight):
        return make()
    with torch.inference_mode(False):  # what is kept may be needed for training later
        plans[dtype, wide] = make()
    return plans[dtype, wide]


def make_plan(blocks: Blocks, weight: Tensor, dtype: torch.dtype, block_d: int, wide: bool = False) -> Plan:
    """Directions in the rows' dtype, zeros where there is nothing.

    The identity of heads beyond `WIDEST_IDENTITY` becomes directions as well, in groups: no accumulator would
    hold its sums.
    """
    if blocks.identity and block_d > WIDEST_IDENTITY:
        eye = torch.eye(blocks.linear.shape[-2], dtype=weight.dtype, device=weight.device)
        linear = eye.expand(*blocks.linear.shape[:-1], -1)
        blocks = blocks._replace(linear=linear, identity=False)
    maps, (dim, directions) = max(weight.shape[0], blocks.quadratic.shape[0]), blocks.quadratic.shape[-2:]
    lay_out: Callable[..., Layout] = _layout
    if not torch.compiler.is_compiling() and _len_torch_dispatch_stack():
        lay_out = _layout.__wrapped__  # fake tensors and the like must not be kept
    group_of_pairs = WIDE_GROUP_OF_PAIRS if wide else GROUP_OF_PAIRS
    counts = blocks.linear.shape[-1], directions, blocks.num_pairs, blocks.degrees
    layout = lay_out(*counts, group_of_pairs, weight.device)
    columns = torch.cat([*blocks.maps, blocks.linear.new_zeros(*blocks.linear.shape[:-1], 1)], dim=-1)
    tiles = F.pad(columns.to(dtype), (0, 0, 0, block_d - dim)).index_select(-1, layout.columns)
    tiles = tiles.expand(maps, -1, -1).unflatten(-1, (layout.num_tiles, layout.group))
    roots = weight.expand(maps, -1).sqrt()
    identities = dim if blocks.identity else 0
    padding = layout.degrees.shape[0] + identities - roots.shape[-1]
    return Plan(
        tiles.transpose(1, 2).contiguous(),
        F.pad(roots[:, identities:], (0, padding)).contiguous(),
        F.pad(roots[:, :identities], (0, block_d - identities)).contiguous(),
        layout.degrees,
        layout.first,
        blocks.identity,
        layout.quadratic,
        weight.shape[-1],
    )


@lru_cache(maxsize=64)
def _layout(
    num_linear: int,
    directions: int,
    num_pairs: int,
    tail: tuple[int, ...],
    group_of_pairs: int,
    device: torch.device,
) -> Layout:
    factors = _factor_columns(num_linear, directions, num_pairs, tail)
    quadratic = 0 < num_pairs == len(factors)
    group = group_of_pairs if quadratic else GROUP
    groups = [factors[start : start + group] for start in range(0, len(factors), group)]
    nothing = num_linear + directions + sum(tail)
    columns, first = [], [0]
    for members in groups:
        levels = max(len(member) for member in members)
        for level in range(levels):
            tile = [member[level] if level < len(member) else nothing for member in members]
            columns += tile + [nothing] * (group - len(tile))
        first.append(first[-1] + levels)
    degrees = [len(member) for members in groups for member in members]
    degrees += [0] * (len(groups) * group - len(degrees))
    return Layout(
        group,
        first[-1],
        quadratic,
        torch.tensor(columns, dtype=torch.int64, device=device),
        torch.tensor(degrees, dtype=torch.int32, device=device),
        torch.tensor(first, dtype=torch.int32, device=device),
    )


def _factor_columns(
    num_linear: int, directions: int, num_pairs: int, tail: tuple[int, ...]
) -> list[list[int]]:
    """For each feature but identities the columns of linear | quadratic | tail that it multiplies."""
    factors = [[column] for column in range(num_linear)]
    pairs = [(i, j) for i in range(directions) for j in range(i + 1)][:num_pairs]
    factors += [[num_linear + i, num_linear + j] for i, j in pairs]
    start = num_linear + directions
    products: list[list[int]] = [[] for _ in tail]
    for size in level_sizes(tail):
        for place, product in enumerate(products[len(tail) - size :]):
            product.append(start + place)
        start += size
    return factors + products
