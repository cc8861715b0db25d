"""Launch the sums of wide heads on Hopper, where a call is of the kind they are for."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from schoenbat.ops.triton.call import Shape, Unit
from schoenbat.ops.triton.hopper_calls import widths
from schoenbat.ops.triton.launch_degrees import form_sums
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
    """See `launch_degrees.form_sums`."""
    from schoenbat.ops.triton.hopper import bidirectional_wide

    of_map = plan.tiles, plan.root_weight, plan.root_linear, plan.tiles.shape[1]
    compiled_for = constants(shape, plan, x.shape[1], unit)
    call = x, rows, mask, by_row, shape, plan, query_scale, key_scale, unit
    return form_sums(bidirectional_wide.summarize, of_map, compiled_for, *call)
