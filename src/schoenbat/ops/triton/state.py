"""The sums of a state, as the kernels lay them out.

A state's sums are those of `sums.Sums`, ``(B, H, 1, ...)``, features without weights. Kernels want
``(B·H, ...)`` in float32, padded, and features times the roots of their weights, as those of rows are: in 16
bits a product of many factors would not fit without.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.ops.triton.call import Shape
from schoenbat.ops.triton.plan import Plan


def roots(shape: Shape, plan: Plan) -> Tensor:
    """What each feature of a state is multiplied by for the kernels, ``(M, F)``."""
    identities = _identities(shape, plan)
    before, _ = plan.padding(plan.monomials - identities)
    rest = plan.root_weight[:, before:][:, : plan.monomials - identities]
    return torch.cat([plan.root_linear[:, :identities], rest], dim=-1)


def inverse_roots(shape: Shape, plan: Plan) -> Tensor:
    """The inverse, and 1 for a feature of weight zero, of which the kernels keep zeros."""
    root = roots(shape, plan)
    return torch.where(root > 0, root, 1.0).reciprocal()


def lay_out(sums: Sequence[Tensor], factor: Tensor, shape: Shape, plan: Plan) -> list[Tensor]:
    """A state's sums (or their gradients) for the kernels, features times `factor`."""
    identities, (feature_value, feature_sum, key_sum, value_sum) = _identities(shape, plan), sums
    columns = shape.block_v - shape.value_dim

    def pad_features(x: Tensor) -> Tensor:
        x = (x.float() * factor[:, None, :, None]).flatten(0, 2)
        first, rest = x.split([identities, plan.monomials - identities], dim=-2)
        first = F.pad(first, (0, 0, 0, plan.identity * shape.block_d - identities))
        return torch.cat([first, F.pad(rest, (0, 0, *plan.padding(rest.shape[-2])))], dim=-2)

    return [
        F.pad(pad_features(feature_value), (0, columns)).contiguous(),
        pad_features(feature_sum).squeeze(-1),
        F.pad(key_sum.float().flatten(0, 3), (0, shape.block_d - shape.dim)).contiguous(),
        F.pad(value_sum.float().flatten(0, 3), (0, columns)).contiguous(),
    ]


def take_out(sums: Sequence[Tensor], factor: Tensor, shape: Shape, plan: Plan) -> list[Tensor]:
    """The way back: what the kernels made, ``(B·H, ...)``, as sums of a state or their gradients."""
    heads, identities = (shape.batch, shape.heads, 1), _identities(shape, plan)
    before, _ = plan.padding(plan.monomials - identities)
    first = plan.identity * shape.block_d + before

    def features(x: Tensor) -> Tensor:
        rest = x[..., first : first + plan.monomials - identities, :]
        return (
            torch.cat([x[..., :identities, :], rest], dim=-2).unflatten(0, heads) * factor[:, None, :, None]
        )

    products, totals, keys, rows = sums
    return [
        features(products[..., : shape.value_dim]),
        features(totals[..., None]),
        keys[:, None, : shape.dim].unflatten(0, heads).contiguous(),
        rows[:, None, : shape.value_dim].unflatten(0, heads).contiguous(),
    ]


def empty_state(key: Tensor, value: Tensor, plan: Plan) -> list[Tensor]:
    """Four sums as those of a state, not filled."""
    shapes = (plan.monomials, value.shape[-1]), (plan.monomials, 1), (1, key.shape[-1]), (1, value.shape[-1])
    return [key.new_empty(*key.shape[:2], 1, *shape, dtype=torch.float32) for shape in shapes]


def _identities(shape: Shape, plan: Plan) -> int:
    return shape.dim if plan.identity else 0
