"""A feature map in the form the kernels take: tiles of directions and roots of weights.

A map that is not trained is laid out once: see `plan_for`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from schoenbat.ops.blocks import Blocks
from schoenbat.ops.keeping import may_keep, may_reuse, reuse
from schoenbat.ops.triton.layout import GROUP, WIDE_GROUP, Counts, Form, layout_for, places_for
from schoenbat.ops.triton.shared_memory import is_roomy

WIDEST_IDENTITY = 128
NUM_TENSORS = 5  # of a plan


class Plan(NamedTuple):
    """A map as the kernels take it; M is 1 or the number of key heads.

    If all features are pairs, `quadratic` is not 0. Above 1 it is the width of P, to which y = Pᵀx is padded:
    the first tile begins with the columns of P, and for each group two follow, each of which selects a column
    of y for each pair. Narrow products then do the work of two wide ones.

    Maps of two wide groups have their highest levels twice: the last two tiles are those of `layout.PACKED`.
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
        return [self.tiles, self.root_weight, self.root_linear, self.degrees, self.first]

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
    form = Form(block_d, bidirectional, wide, most_whole)
    layout = layout_for(Counts.of(blocks), form, weight.device)
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
    linear, *others = places_for(Counts.of(_spelt_out(blocks, block_d)), weight.device)
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
