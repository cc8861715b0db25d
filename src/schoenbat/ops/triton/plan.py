"""A feature map in the form the kernels take: tiles of directions and roots of weights.

Where the factors lie depends on the degrees alone and is worked out once. A map that is not trained is laid
out once, too: see `plan_for`.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.weak import WeakIdKeyDictionary

from schoenbat.ops.blocks import Blocks, level_sizes
from schoenbat.ops.keeping import may_keep, may_reuse, reuse

# Narrow groups where degrees differ: a group does as many levels as its highest degree has.
GROUP = 32
# For kernels that multiply by warp groups, which wide products keep busier: see `tiles.takes_wide_groups`.
WIDE_GROUP = 64
# Highest levels of the second of two wide groups, side by side in two more tiles: how many of its last
# features may have a factor there. Behind them there is room for the highest level of the first group.
PACKED = (32, 16, 8, 8, *(8, 8, 8, 8, 8, 8))
PACKED_TILES = 2
PACKED_OF_FIRST = PACKED_TILES * WIDE_GROUP - sum(PACKED)
GROUP_OF_PAIRS = 64
# Of narrow heads, if that makes one group of all pairs.
WIDE_GROUP_OF_PAIRS = 128
WIDEST_IDENTITY = 128
HOPPER_MEMORY = 227 * 1024


def padded(size: int) -> int:
    """A width that kernels work with, a power of two."""
    return max(16, 1 << (int(size) - 1).bit_length())


class Layout(NamedTuple):
    """Where the factors of each feature are; features are padded to whole groups, wide groups at the front.

    Degrees ascend: what is packed (see `Packing`) are a group's last columns.
    """

    group: int
    num_tiles: int
    held: int  # see `Plan`
    quadratic: int  # not 0 where every feature has two factors: see `Plan`
    columns: (
        Tensor  # (T·group,) int64: for each place in a tile its column of linear | quadratic | tail | zero
    )
    selection: Tensor  # (·, block_d, group) tiles that follow those: which columns of the first a pair is of
    degrees: Tensor  # (num_groups·group,) int32; zero for padding
    first: Tensor  # (num_groups + 1,) int32: the first tile of each group; then a `Packing`, if there is one


class Packing(NamedTuple):
    """Where levels that serve few features share tiles, for kernels that hold all directions of a map."""

    narrow: int  # the first tile of the second group that is packed, as are all after it
    short: int  # the last tile of the first group, if that is packed, or where the group ends
    full_first: int  # the first tile of the first group on which a feature has no factor
    full_second: int


class Plan(NamedTuple):
    """A map as the kernels take it; M is 1 or the number of key heads.

    If all features are pairs, `quadratic` is not 0. Above 1 it is the width of P, to which y = Pᵀx is padded:
    the first tile begins with the columns of P, and for each group two follow, each of which selects a column
    of y for each pair. Narrow products then do the work of two wide ones.

    Maps of two wide groups have their highest levels twice: the last two tiles are those of PACKED.
    """

    tiles: Tensor  # (M, T, block_d, group)
    root_weight: Tensor  # (M, num_groups·group)
    root_linear: Tensor  # (M, block_d), of the identity features
    degrees: Tensor
    first: Tensor
    identity: bool
    quadratic: int
    monomials: int  # of the map: features without the constant, and without padding
    held: int  # tiles that are left if the highest levels are packed; 0 where they are not

    @property
    def tensors(self) -> list[Tensor]:
        return list(self[:5])

    @property
    def flags(self) -> list[int]:
        return [int(self.identity), self.quadratic, self.monomials, self.held]

    @staticmethod
    def of(tensors: Sequence[Tensor], flags: Sequence[int]) -> "Plan":
        tiles, root_weight, root_linear, degrees, first = tensors
        identity, *rest = flags
        return Plan(tiles, root_weight, root_linear, degrees, first, bool(identity), *rest)

    @property
    def group(self) -> int:
        return self.tiles.shape[-1]

    @property
    def num_groups(self) -> int:
        return self.degrees.shape[0] // self.group

    @property
    def is_single(self) -> bool:
        """Identity features and one group of pairs: causal kernels may load its directions once."""
        return self.identity and self.quadratic > 0 and self.num_groups == 1

    @property
    def whole(self) -> int:
        """How many groups of pairs bidirectional kernels keep at hand, beside identity features; or 0."""
        most = _most_whole(self.tiles.dtype, self.tiles.device)
        return self.num_groups if self.identity and self.quadratic and self.num_groups <= most else 0

    @property
    def is_wide(self) -> bool:
        """Of several degrees, in wide groups."""
        return not self.quadratic and self.group == WIDE_GROUP

    @property
    def is_uneven(self) -> bool:
        """Groups of several degrees: one has more levels than another."""
        return not self.quadratic and self.num_groups > 1

    def padding(self, features: int) -> tuple[int, int]:
        """How much stands before and behind so many features that are not identities."""
        missing = self.degrees.shape[0] - features
        return (missing, 0) if self.is_wide else (0, missing)

    @property
    def num_features(self) -> int:
        """Rows of the sums, padding included."""
        return self.identity * self.tiles.shape[-2] + self.degrees.shape[0]


def _most_whole(dtype: torch.dtype, device: torch.device) -> int:
    """Of how many groups the directions and sums fit the shared memory: see `Plan.whole`."""
    return 3 if dtype.itemsize == 2 and is_roomy(device) else 1


@torch.compiler.assume_constant_result
def is_roomy(device: torch.device) -> bool:
    """Whether a GPU has the shared memory of Hopper's, which some tiles need; the interpreter has any."""
    return device.type != "cuda" or _shared_memory(device) >= HOPPER_MEMORY


@cache
def _shared_memory(device: torch.device) -> int:
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


_PLANS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan_for(
    blocks: Blocks,
    weight: Tensor,
    dtype: torch.dtype,
    block_d: int,
    bidirectional: bool = False,
    wide: bool = False,
) -> Plan:
    """The plan of a map, kept as long as its `weight` lives; a map that changes has another one."""
    # What makes no difference makes no other plan.
    bidirectional = bidirectional and blocks.num_pairs > 0
    wide = wide and (not blocks.num_pairs or bool(blocks.linear.shape[-1] or blocks.degrees))
    form = dtype, block_d, bidirectional, wide
    make = partial(make_plan, blocks, weight, *form)
    if not may_reuse(weight):
        return make()
    plans = _PLANS.setdefault(weight, {})
    if form in plans:
        return reuse(plans[form], weight)
    if not may_keep(weight):
        return make()
    with torch.inference_mode(False):  # what is kept may be needed for training later
        plans[form] = make()
    return plans[form]


def make_plan(
    blocks: Blocks,
    weight: Tensor,
    dtype: torch.dtype,
    block_d: int,
    bidirectional: bool = False,
    wide: bool = False,
) -> Plan:
    """Directions in the rows' dtype, zeros where there is nothing.

    Only bidirectional kernels take pairs of y = Pᵀx, and only of maps that are WHOLE there; for narrow heads
    in one wide group. In loops over groups, and in causal kernels, such products give wrong gradients or
    illegal accesses.
    """
    blocks = _spelt_out(blocks, block_d)
    maps, dim = max(weight.shape[0], blocks.quadratic.shape[0]), blocks.quadratic.shape[-2]
    most_whole = _most_whole(dtype, weight.device) if bidirectional and blocks.identity else 0
    layout = _made_once(_layout, *_counts(blocks), block_d, bidirectional, wide, most_whole, weight.device)
    columns = torch.cat([*blocks.maps, blocks.linear.new_zeros(*blocks.linear.shape[:-1], 1)], dim=-1)
    tiles = F.pad(columns.to(dtype), (0, 0, 0, block_d - dim)).index_select(-1, layout.columns)
    tiles = tiles.unflatten(-1, (layout.num_tiles, layout.group)).transpose(-3, -2)
    selection = layout.selection.to(dtype).expand(tiles.shape[0], -1, -1, -1)
    tiles = torch.cat([tiles, selection], dim=1).expand(maps, -1, -1, -1)
    roots = weight.expand(maps, -1).sqrt()
    identities = dim if blocks.identity else 0
    plan = Plan(
        tiles.contiguous(),
        roots[:, identities:],
        F.pad(roots[:, :identities], (0, block_d - identities)).contiguous(),
        layout.degrees,
        layout.first,
        blocks.identity,
        layout.quadratic,
        int(weight.shape[-1]),
        layout.held,
    )
    roots = plan.root_weight
    return plan._replace(root_weight=F.pad(roots, plan.padding(int(roots.shape[-1]))).contiguous())


def _spelt_out(blocks: Blocks, block_d: int) -> Blocks:
    """The identity of heads beyond `WIDEST_IDENTITY` as directions, in groups: nothing holds all its sums."""
    if not blocks.identity or block_d <= WIDEST_IDENTITY:
        return blocks
    eye = torch.eye(blocks.linear.shape[-2], dtype=blocks.linear.dtype, device=blocks.linear.device)
    return blocks._replace(linear=eye.expand(*blocks.linear.shape[:-1], -1), identity=False)


def trained_map(blocks: Blocks, weight: Tensor, block_d: int) -> list[Tensor]:
    """The four tensors of a map that get gradients, then where the columns of three are: see `take_out`."""
    linear, *others = _made_once(_places, *_counts(_spelt_out(blocks, block_d)), weight.device)
    return [*blocks.maps, weight, linear[: blocks.linear.shape[-1]], *others]  # an identity gets none


def narrowed(plan: Plan) -> Plan:
    """The same with pairs in groups of GROUP, too: kernels of trained maps have no registers for more."""
    if plan.is_wide:
        raise ValueError("a map of several degrees that is trained is laid out in narrow groups")
    parts = plan.group // GROUP
    if parts == 1:
        return plan
    tiles = plan.tiles
    if plan.quadratic > 1:
        chosen = tiles[0, 1:].argmax(1).flatten()
        tiles = tiles[:, 0].index_select(-1, chosen).unflatten(-1, (-1, plan.group)).transpose(1, 2)
    tiles = tiles.unflatten(-1, (parts, GROUP)).unflatten(1, (-1, 2))
    tiles = tiles.permute(0, 1, 4, 2, 3, 5).flatten(1, 3).contiguous()
    first = torch.arange(0, tiles.shape[1] + 1, 2, dtype=torch.int32, device=tiles.device)
    return plan._replace(tiles=tiles, first=first, quadratic=1)


def take_out(to_tiles: Tensor, places: Tensor) -> Tensor:
    """The gradient ``(M, block_d, columns)`` of one of a map's tensors from that of a narrowed plan's tiles.

    A column's places are added up in a fixed order, unlike by an index that adds.
    """
    flat = F.pad(to_tiles.transpose(1, 2).flatten(2), (1, 0))
    return flat.index_select(-1, places.flatten()).unflatten(-1, places.shape).sum(-1)


def _counts(blocks: Blocks) -> tuple[int, int, int, tuple[int, ...]]:
    # Numbers under torch.jit.trace, too, where sizes are tensors.
    return int(blocks.linear.shape[-1]), int(blocks.quadratic.shape[-1]), blocks.num_pairs, blocks.degrees


def _made_once(make: Callable[..., Any], *arguments: Any) -> Any:
    """What was made of these arguments before; new where a compiler traces or tensors are fake."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return make(*arguments)
    with torch.inference_mode(False):  # what is kept may be needed for training later
        made: Any = _KEPT[make](*arguments)
    return reuse(made, made[-1])


def _layout(
    num_linear: int,
    directions: int,
    num_pairs: int,
    tail: tuple[int, ...],
    block_d: int,
    bidirectional: bool,
    wide: bool,
    most_whole: int,
    device: torch.device,
) -> Layout:
    factors = _factor_columns(num_linear, directions, num_pairs, tail)
    quadratic = int(0 < num_pairs == len(factors))
    group = WIDE_GROUP if wide else GROUP
    if quadratic:
        one = bidirectional and block_d <= 32 and GROUP_OF_PAIRS < num_pairs <= WIDE_GROUP_OF_PAIRS
        group = WIDE_GROUP_OF_PAIRS if one else GROUP_OF_PAIRS
    is_wide, nothing, held = wide and not quadratic, num_linear + directions + sum(tail), 0
    if is_wide:
        factors = [[]] * (-len(factors) % group) + factors
    columns, first = _arrange(factors, group, nothing)
    if is_wide and block_d == WIDE_GROUP and len(first) == 3:
        packed, packing = _pack(factors, first[1], nothing)
        columns, first, held = columns + packed, [*first, *packing], packing.narrow + PACKED_TILES
    chosen = torch.zeros(0, group, dtype=torch.int64)
    width = padded(directions)
    if quadratic and num_pairs <= most_whole * group and width < block_d:
        # What does not exist is chosen from the zeros behind P.
        quadratic, chosen = width, torch.tensor(columns).view(-1, group)
        columns, first[-1] = [*range(directions), *[directions] * (group - directions)], 1
    selection = torch.arange(block_d)[:, None] == chosen[:, None]
    degrees = [len(member) for member in factors]
    degrees += [0] * (-len(degrees) % group)
    return Layout(
        group,
        len(columns) // group,
        held,
        quadratic,
        torch.tensor(columns, dtype=torch.int64, device=device),
        selection.to(device),
        torch.tensor(degrees, dtype=torch.int32, device=device),
        torch.tensor(first, dtype=torch.int32, device=device),
    )


def _places(
    num_linear: int, directions: int, num_pairs: int, tail: tuple[int, ...], device: torch.device
) -> list[Tensor]:
    """For linear, quadratic, tail ``(columns, ·)``: 1 + where a column is in narrow tiles, 0 for nowhere."""
    sizes = num_linear, directions, sum(tail)
    factors = _factor_columns(num_linear, directions, num_pairs, tail)
    found: list[list[int]] = [[] for _ in range(sum(sizes) + 1)]
    for place, column in enumerate(_arrange(factors, GROUP, sum(sizes))[0]):
        found[column].append(1 + place)
    places, start = [], 0
    for size in sizes:
        own = found[start : start + size]
        most, start = max([0, *(len(member) for member in own)]), start + size
        filled = [place for member in own for place in member + [0] * (most - len(member))]
        places.append(torch.tensor(filled, dtype=torch.int64, device=device).view(size, most))
    return places


def _arrange(factors: list[list[int]], group: int, nothing: int) -> tuple[list[int], list[int]]:
    """The columns at all places of all tiles, `nothing` where there is none; the first tile of each group."""
    columns, first = [], [0]
    for start in range(0, len(factors), group):
        members = factors[start : start + group]
        levels = max(len(member) for member in members)
        for level in range(levels):
            columns += _level(members, level, nothing) + [nothing] * (group - len(members))
        first.append(first[-1] + levels)
    return columns, first


def _level(members: list[list[int]], level: int, nothing: int) -> list[int]:
    return [member[level] if level < len(member) else nothing for member in members]


def _pack(factors: list[list[int]], middle: int, nothing: int) -> tuple[list[int], Packing]:
    """The columns of the last tiles, of two groups, of which the second begins with the tile `middle`.

    Some level of each group is not packed, so that there is one to begin with.
    """
    groups = factors[:WIDE_GROUP], factors[WIDE_GROUP:]
    first, second = ([len(member) for member in group] for group in groups)
    sizes, narrow = level_sizes(second), 1
    while len(sizes) - narrow > len(PACKED) or any(
        size > most for size, most in zip(sizes[narrow:], PACKED, strict=False)
    ):
        narrow += 1
    short = middle - int(middle > 1 and level_sizes(first)[-1] <= PACKED_OF_FIRST)
    columns: list[int] = []
    for level, most in enumerate(PACKED, narrow):
        columns += _level(groups[1][-most:], level, nothing)
    columns += _level(groups[0][-PACKED_OF_FIRST:], short, nothing)
    full_first, full_second = min(filter(None, first)), middle + min(second)
    return columns, Packing(middle + narrow, short, full_first, full_second)


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


# Not without end: maps that are drawn again and again may have other degrees each time.
_KEPT = {make: lru_cache(maxsize=256)(make) for make in (_layout, _places)}
