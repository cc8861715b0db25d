"""Launch a decoding step: one program for some value columns of a key head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Unit, as_rows, cdiv, flat, map_arguments, per_map
from schoenbat.ops.triton.kernels import decode, decode_window
from schoenbat.ops.triton.layout import padded
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.tiles import FUSED

# Value columns of a program, and its warps: the fewer warps, the more programs are at work at once.
_OF_ONE_QUERY = 64, 2
_OF_SEVERAL = 32, 8
# With a window two warps spill; four have nothing to multiply as a warp group: see `tiles.tiles_for`.
_WITH_WINDOW = 64, 4
# Keys of a window that a program looks at together.
NEAR_KEYS = 32


def step(
    query: Tensor,  # (B, H, G, 1, d)
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    count: Tensor,
    sums: Sequence[Tensor],
    plan: Plan,  # in float32
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Outputs and the sums after this token."""
    q, k, v = as_rows(query), as_rows(key), as_rows(value)
    before = [x.contiguous() for x in sums]
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    after = [x.new_empty(x.shape) for x in before]
    programs, constants = _programs(query, value, mask, plan, _OF_ONE_QUERY)
    decode.step[programs](
        *(
            q,
            k,
            v,
            flat(mask, q),
            count.contiguous(),
            query_scale,
            per_map(coefficients, plan),
        ),
        *(out, *before, *after, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], key_scale),
        *(unit.eps, before[0].shape[-2], *map_arguments(plan)),
        UNIT=unit.code,
        **constants,
    )
    return [out, *after]


def step_with_window(
    query: Tensor,  # (B, H, G, 1, d)
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    far: Sequence[Tensor],
    near: Sequence[Tensor],
    count: Tensor,
    sums: Sequence[Tensor],
    plan: Plan,  # in float32
    coefficients: Tensor,
    scale: Tensor,
    far_weight: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Outputs, and after this token: keys, values and mask of the window, the four sums, and their count.

    `far` holds the query and the leaving key as the features see them, or nothing where they see the same.
    """
    q, k, v = as_rows(query), as_rows(key), as_rows(value)
    near_keys, near_values, near_mask = (x.contiguous() for x in near)
    width = near_keys.shape[-2]
    # Without a window a key leaves as it comes.
    leaving_key, leaving_value = (near_keys, near_values) if width else (k, v)
    leaving_mask = near_mask.view(torch.uint8) if width else flat(mask, q)
    far_query, leaving_key = (as_rows(x) for x in far) if far else (q, leaving_key)
    before = [x.contiguous() for x in sums]
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    new_near = empty_window(key, value, near)
    after = [x.new_empty(x.shape) for x in (*before, count)]
    strides = [step for x in (q, k, v, far_query, leaving_key, leaving_value) for step in x.stride()[:2]]
    programs, constants = _programs(query, value, mask, plan, _WITH_WINDOW)
    decode_window.step[programs](
        *(q, k, v, flat(mask, q), far_query, leaving_key, leaving_value, leaving_mask),
        *(near_keys, near_values, near_mask.view(torch.uint8), count.contiguous()),
        *(scale.contiguous(), far_weight.contiguous()),
        *(per_map(coefficients, plan), out, *new_near[:2], new_near[2].view(torch.uint8), after[-1]),
        *(*before, *after[:-1], *strides, max(width, 1), width, key_scale, unit.eps),
        *(before[0].shape[-2], *map_arguments(plan)),
        HAS_LEAVING_MASK=width > 0 or mask is not None,
        SEPARATE=bool(far),
        UNIT=unit.code,
        BLOCK=NEAR_KEYS,
        **constants,
    )
    return [out, *new_near, *after]


def empty_window(key: Tensor, value: Tensor, near: Sequence[Tensor]) -> list[Tensor]:
    """Keys, values and mask of a window, in the dtype of the token that enters it."""
    keys, values, mask = near
    return [key.new_empty(keys.shape), value.new_empty(values.shape), mask.new_empty(mask.shape)]


def _programs(
    query: Tensor, value: Tensor, mask: Tensor | None, plan: Plan, of_one_query: tuple[int, int]
) -> tuple[tuple[int, int], dict[str, Any]]:
    """How many there are, and how they are compiled."""
    (batch, heads, groups, _, dim), value_dim = query.shape, value.shape[-1]
    most, warps = of_one_query if groups == 1 else _OF_SEVERAL
    columns = min(most, padded(value_dim))
    constants = {
        "HEADS": heads,
        "GROUPS": groups,
        "MAPS": plan.tiles.shape[0],
        "HAS_MASK": mask is not None,
        "IDENTITY": int(plan.identity),
        "QUADRATIC": plan.quadratic,
        "DIM": dim,
        "DV": value_dim,
        "BLOCK_D": padded(dim),
        "BLOCK_V": columns,
        "ROWS": 2 if groups == 1 else padded(groups + 1),
        "GROUP": plan.group,
        "num_warps": warps,
        "num_stages": 2,
        **FUSED,
    }
    return (batch * heads, cdiv(value_dim, columns)), constants
