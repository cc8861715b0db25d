"""Launch the kernels of bidirectional attention in two halves, with the sums of a state between them.

What holds for `launch` holds here. Sums are those of `sums.Sums`, which add up over pieces.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.ops.sums import key_count
from schoenbat.ops.triton import launch
from schoenbat.ops.triton.call import Shape, Unit, as_rows
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.state import inverse_roots, lay_out, roots, take_out


def summarize(
    key: Tensor, value: Tensor, mask: Tensor | None, plan: Plan, key_scale: float, unit: Unit
) -> list[Tensor]:
    """Σφ(k)vᵀ, Σφ(k), Σk and Σv."""
    shape = Shape.of(key, value)
    parts = launch.summarize(as_rows(key), as_rows(value), mask, shape, plan, key_scale, unit)
    sums = [part.unflatten(0, (shape.batch * shape.heads, -1)).sum(1) for part in parts]
    return take_out(sums, inverse_roots(shape, plan), shape, plan)


def summarize_backward(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    to_sums: Sequence[Tensor],
    value_sum: Tensor,
    plan: Plan,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Gradients of key and value.

    With S' and z' those of Σφ(k)vᵀ and Σφ(k), that of φ(k) is S'v + z' = S'(v − c) + (z' + S'c) for any c.
    The mean of these values is taken: z' takes most of S'c away again, but not what S'v was rounded by.
    """
    shape = Shape.of(key, value)
    sums, totals, keys, rows = lay_out(to_sums, inverse_roots(shape, plan), shape, plan)
    centre = value_sum / key_count(key, mask).clamp(min=1)
    centre = F.pad(centre.flatten(0, 3), (0, shape.block_v - shape.value_dim))
    totals = torch.baddbmm(totals[..., None], sums, centre[..., None]).squeeze(-1)
    to_summary = sums.to(shape.dtype), totals, keys, rows
    return launch.key_backward(key, value, mask, to_summary, centre, shape, plan, key_scale, unit)


def read(
    query: Tensor,
    sums: Sequence[Tensor],
    count: Tensor,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
) -> list[Tensor]:
    """Outputs, then what the backward pass starts from: see `launch.finish`."""
    shape = Shape.of(query, sums[3])
    laid_out = lay_out(sums, roots(shape, plan), shape, plan)
    summary = launch.finish(laid_out, count.flatten().contiguous(), 0, shape, plan, query)
    return [launch.read(query, summary, shape, plan, coefficients, query_scale, Unit()), *summary]


def read_backward(
    grad: Tensor,
    query: Tensor,
    summary: Sequence[Tensor],
    count: Tensor,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
) -> list[Tensor]:
    """Gradients of query, query_scale and the four sums."""
    shape = Shape.of(query, grad)
    small = plan, coefficients, query_scale, Unit()
    grad_query, to_scale, parts, _ = launch.read_backward(grad, query, summary, shape, *small)
    # Not rounded: the gradient of Σφ(k) is given for centred values, and this is how they were centred.
    to_sums, to_totals, to_keys, to_rows = launch.finish_backward(
        parts, count.flatten().contiguous(), 0, summary[1], shape, plan, torch.float32
    )
    value_mean = summary[3][..., None]
    to_totals = torch.baddbmm(to_totals[..., None], to_sums, value_mean, alpha=-1).squeeze(-1)
    to_state = take_out([to_sums, to_totals, to_keys, to_rows], roots(shape, plan), shape, plan)
    return [grad_query, to_scale, *to_state]
