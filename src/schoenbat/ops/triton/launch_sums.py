"""Launch the sums of wide heads on Hopper, where a call is of the kind they are for."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from schoenbat.ops.triton.call import Shape, Unit, mask_bytes
from schoenbat.ops.triton.hopper_calls import widths
from schoenbat.ops.triton.launch_degrees import empty_sums, split
from schoenbat.ops.triton.plan import Plan


def constants(shape: Shape, plan: Plan, heads: int, unit: Unit) -> dict[str, Any]:
    """What the kernel is compiled for."""
    own = {"GROUPS": shape.groups, "F": plan.num_groups * plan.group}
    return widths(shape, plan, heads, unit) | own | {"num_warps": 8}


def summarize(
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: Sequence[Tensor] | None,
    shape: Shape,
    plan: Plan,
    query_scale: Tensor | None,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """As in `launch`: parts of the sums over keys, or over queries with what they have `by_row`."""
    from schoenbat.ops.triton import bidirectional_hopper_wide

    batch, heads, n, _ = x.shape
    splits, each = split(n, batch * heads)
    sums = empty_sums(x, splits, shape, plan)
    bidirectional_hopper_wide.summarize[(splits * batch * heads,)](
        *(x, rows, mask_bytes(mask), query_scale, *(by_row or (None, None, None)), *sums),
        *(*x.stride()[:3], *rows.stride()[:3], n, each, splits, key_scale, unit.eps),
        *(plan.tiles, plan.root_weight, plan.root_linear, plan.tiles.shape[1]),
        **constants(shape, plan, heads, unit),
    )
    return sums
