"""Where the factors of each feature lie in tiles of directions: by degrees alone, worked out once."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from schoenbat.ops.blocks import Blocks, level_sizes
from schoenbat.ops.keeping import reuse

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


def padded(size: int) -> int:
    """A width that kernels work with, a power of two."""
    return max(16, 1 << (int(size) - 1).bit_length())


class Counts(NamedTuple):
    """How many columns linear and quadratic have, of how many pairs, and the degrees of the tail."""

    linear: int
    directions: int
    pairs: int
    tail: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Blocks) -> "Counts":
        # Numbers under torch.jit.trace, too, where sizes are tensors.
        columns = int(blocks.linear.shape[-1]), int(blocks.quadratic.shape[-1])
        return cls(*columns, blocks.num_pairs, blocks.degrees)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many columns linear, quadratic and tail have."""
        return self.linear, self.directions, sum(self.tail)

    @property
    def nothing(self) -> int:
        """The column behind them, of zeros."""
        return sum(self.sizes)


class Form(NamedTuple):
    """What a layout is for."""

    block_d: int
    bidirectional: bool
    wide: bool
    most_whole: int  # see `Plan.whole`


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


def layout_for(counts: Counts, form: Form, device: torch.device) -> Layout:
    made: Layout = _made_once(_layout, counts, form, device)
    return made


def places_for(counts: Counts, device: torch.device) -> list[Tensor]:
    """For linear, quadratic, tail ``(columns, ·)``: 1 + where a column is in narrow tiles, 0 for nowhere."""
    made: list[Tensor] = _made_once(_places, counts, device)
    return made


def _made_once(make: Callable[..., Any], *arguments: Any) -> Any:
    """What was made of these arguments before; new where a compiler traces or tensors are fake."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return make(*arguments)
    with torch.inference_mode(False):  # what is kept may be needed for training later
        made: Any = _KEPT[make](*arguments)
    return reuse(made, made[-1])


def _layout(counts: Counts, form: Form, device: torch.device) -> Layout:
    factors = _factor_columns(counts)
    is_of_pairs = 0 < counts.pairs == len(factors)
    is_wide = form.wide and not is_of_pairs
    group = _group_of_pairs(counts, form) if is_of_pairs else WIDE_GROUP if is_wide else GROUP
    if is_wide:
        factors = [[]] * (-len(factors) % group) + factors
    columns, first = _arrange(factors, group, counts.nothing)
    held, quadratic, chosen = 0, int(is_of_pairs), torch.zeros(0, group, dtype=torch.int64)
    if is_wide and form.block_d == WIDE_GROUP and len(first) == 3:
        packed, packing = _pack(factors, first[1], counts.nothing)
        columns, first, held = columns + packed, [*first, *packing], packing.narrow + PACKED_TILES
    width = padded(counts.directions)
    if is_of_pairs and counts.pairs <= form.most_whole * group and width < form.block_d:
        # What does not exist is chosen from the zeros behind P.
        quadratic, chosen = width, torch.tensor(columns).view(-1, group)
        columns = [*range(counts.directions), *[counts.directions] * (group - counts.directions)]
        first[-1] = 1
    degrees = [len(member) for member in factors]
    degrees += [0] * (-len(degrees) % group)
    return Layout(
        group,
        len(columns) // group,
        held,
        quadratic,
        torch.tensor(columns, dtype=torch.int64, device=device),
        (torch.arange(form.block_d)[:, None] == chosen[:, None]).to(device),
        torch.tensor(degrees, dtype=torch.int32, device=device),
        torch.tensor(first, dtype=torch.int32, device=device),
    )


def _group_of_pairs(counts: Counts, form: Form) -> int:
    is_narrow = form.bidirectional and form.block_d <= 32
    one = is_narrow and GROUP_OF_PAIRS < counts.pairs <= WIDE_GROUP_OF_PAIRS
    return WIDE_GROUP_OF_PAIRS if one else GROUP_OF_PAIRS


def _places(counts: Counts, device: torch.device) -> list[Tensor]:
    found: list[list[int]] = [[] for _ in range(counts.nothing + 1)]
    for place, column in enumerate(_arrange(_factor_columns(counts), GROUP, counts.nothing)[0]):
        found[column].append(1 + place)
    places, start = [], 0
    for size in counts.sizes:
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


def _factor_columns(counts: Counts) -> list[list[int]]:
    """For each feature but identities the columns of linear | quadratic | tail that it multiplies."""
    num_linear, directions, num_pairs, tail = counts
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
