"""What several operators return, as compilers are told."""

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Shape, summary_shapes
from schoenbat.ops.triton.plan import Plan


def output_and_summary(query: Tensor, value: Tensor, plan: Plan) -> list[Tensor]:
    shapes = summary_shapes(Shape.of(query, value), plan)
    sums, *others = ((query.shape[0] * query.shape[1], *shape) for shape in shapes)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return [out, query.new_empty(sums), *(query.new_empty(s, dtype=torch.float32) for s in others)]


def empty_gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]
