"""Launch the decoding step: one program for some value columns of a key head."""

from collections.abc import Sequence

import triton
from torch import Tensor

from schoenbat.ops.triton import decode
from schoenbat.ops.triton.launch import as_rows, flat, map_arguments, padded, per_map
from schoenbat.ops.triton.plan import Plan

# Value columns of a program, and its warps: the fewer warps, the more programs are at work at once.
_OF_ONE_QUERY = 64, 2
_OF_SEVERAL = 32, 8


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
) -> list[Tensor]:
    """Outputs and the sums after this token."""
    batch, heads, groups, _, dim = query.shape
    value_dim = value.shape[-1]
    most, warps = _OF_ONE_QUERY if groups == 1 else _OF_SEVERAL
    columns = min(most, padded(value_dim))
    q, k, v = as_rows(query), as_rows(key), as_rows(value)
    before = [x.contiguous() for x in sums]
    out = query.new_empty(*query.shape[:-1], value_dim)
    after = [x.new_empty(x.shape) for x in before]
    decode.step[(batch * heads, triton.cdiv(value_dim, columns))](
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
        *(before[0].shape[-2], *map_arguments(plan)),
        HEADS=heads,
        GROUPS=groups,
        MAPS=plan.tiles.shape[0],
        HAS_MASK=mask is not None,
        IDENTITY=int(plan.identity),
        QUADRATIC=plan.quadratic,
        DIM=dim,
        DV=value_dim,
        BLOCK_D=padded(dim),
        BLOCK_V=columns,
        ROWS=2 if groups == 1 else max(16, triton.next_power_of_2(groups + 1)),
        GROUP=plan.group,
        num_warps=warps,
        num_stages=2,
    )
    return [out, *after]
