"""What cases are made of: shapes, strides, dtypes, masks, magnitudes, kernels and maps."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from schoenbat import DotProductKernel, MaclaurinFeatures, kernel, polynomial
from schoenbat.constructions import CONSTRUCTIONS

SEEDS = st.integers(0, 2**31 - 1)
DTYPES = ("float64", "float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "transposed", "columns", "strided", "offset", "expanded")
MASKS = (None, "random", "nothing", "everything", "one row empty")
# Half of the draws are ordinary; the others reach from 1e-30 to 1e30.
MAGNITUDES = st.one_of(
    st.sampled_from([1.0, 0.3, 3.0]),
    st.sampled_from([0.0, 1e-30, 1e-20, 1e-10, 1e-4, 10.0, 1e3, 1e5, 1e10, 1e20, 1e30]),
    st.floats(-30, 30).map(lambda exponent: 10.0**exponent),
)
LENGTHS = st.one_of(st.integers(0, 3), st.integers(2, 20), st.sampled_from([63, 128, 129, 300]))
KERNELS = (
    *("exp", "inv", "logi", "trigh", "sqrt", "polynomial 1", "polynomial 2", "polynomial 5"),
    *("2 - sqrt(1 - x)", "cosh(x)", "exp(x**2)", "1/(1 - x/2)"),
)


@cache
def make_kernel(text: str) -> DotProductKernel:
    name, _, degree = text.partition(" ")
    if name == "polynomial":
        return polynomial(int(degree))
    if "x" not in text or text == "exp":
        return kernel(text)
    return DotProductKernel.from_expression(
        text, {"2 - sqrt(1 - x)": 1.0, "1/(1 - x/2)": 2.0}.get(text, math.inf)
    )


def draw_tensor(
    shape: tuple[int, ...], magnitude: float, dtype: torch.dtype, layout: str, generator: torch.Generator
) -> Tensor:
    """Normal numbers of this size in the given memory layout."""
    if dtype == torch.float16:
        magnitude = min(magnitude, 1e4)
    *lead, rows, width = shape
    stored = {
        "transposed": (*lead[:-1], rows, *lead[-1:], width),
        "columns": (*lead, width, rows),
        "strided": (*lead, rows, 2 * width),
        "offset": (math.prod(shape) + 3,),
        "expanded": (*lead, 1, width),
    }.get(layout, shape)
    x = (torch.randn(stored, generator=generator, dtype=torch.float64) * magnitude).to(dtype)
    match layout:
        case "transposed":
            return x.transpose(-2, -3) if lead else x
        case "columns":
            return x.mT
        case "strided":
            return x[..., ::2]
        case "offset":
            return x[3:].view(shape)
        case "expanded":
            return x.expand(shape)
    return x


def draw_mask(kind: str | None, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    if kind is None:
        return None
    mask = torch.rand(shape, generator=generator) > 0.4
    if kind in ("nothing", "everything"):
        return torch.full_like(mask, kind == "everything")
    if kind == "one row empty" and mask.dim() > 1 and mask.shape[0]:
        mask[0] = False
    return mask


@dataclass(frozen=True)
class Attention:
    """The inputs of a call of attention."""

    batch: tuple[int, ...]
    heads: int
    groups: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str
    magnitudes: tuple[float, float, float]
    layouts: tuple[str, str, str]
    mask: str | None
    is_causal: bool
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        shapes = (
            (*self.batch, self.heads * self.groups, self.queries, self.head_dim),
            (*self.batch, self.heads, self.keys, self.head_dim),
            (*self.batch, self.heads, self.keys, self.value_dim),
        )
        query, key, value = (
            draw_tensor(shape, magnitude, dtype, layout, generator)
            for shape, magnitude, layout in zip(shapes, self.magnitudes, self.layouts, strict=True)
        )
        return query, key, value

    def options(self) -> dict:
        generator = torch.Generator().manual_seed(self.seed + 1)
        mask = draw_mask(self.mask, (*self.batch, self.keys), generator)
        return {"key_mask": mask, "is_causal": self.is_causal, "enable_gqa": self.groups > 1}


@st.composite
def attentions(
    draw, magnitudes=MAGNITUDES, dtypes=DTYPES, one_batch_dim=False, equal_lengths=False
) -> Attention:
    batch = (
        (draw(st.integers(0, 3)),) if one_batch_dim else tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    )
    queries = draw(LENGTHS)
    keys = queries if equal_lengths else draw(st.one_of(st.just(queries), LENGTHS))
    return Attention(
        batch=batch,
        heads=draw(st.integers(1, 3)),
        groups=draw(st.sampled_from([1, 1, 2])),
        queries=queries,
        keys=keys,
        head_dim=draw(st.sampled_from([1, 2, 3, 6, 16])),
        value_dim=draw(st.sampled_from([1, 2, 5, 16])),
        dtype=draw(st.sampled_from(dtypes)),
        magnitudes=draw(st.tuples(magnitudes, magnitudes, magnitudes)),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        mask=draw(st.sampled_from(MASKS)),
        is_causal=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class Map:
    """The options of a `MaclaurinFeatures`, without what must fit the inputs."""

    kernel: str
    construction: str
    num_features: int
    share_of_radius: float | None
    per_head: bool
    trainable: bool
    dtype: str
    seed: int

    def scale(self) -> float | None:
        """None for 1/√d where that is inside the radius."""
        radius = make_kernel(self.kernel).radius
        if self.share_of_radius is None:
            return None
        if not math.isfinite(radius):
            return self.share_of_radius * 4.0
        # Close to a radius beyond 1 powers of the scale do not fit into float32, and maps are refused.
        return radius * (self.share_of_radius if radius <= 1 else min(self.share_of_radius, 0.9))

    def build(self, head_dim: int, heads: int) -> MaclaurinFeatures:
        scale = self.scale()
        if scale is None and head_dim**-0.5 >= make_kernel(self.kernel).radius:
            scale = 0.5
        features = MaclaurinFeatures(
            head_dim,
            self.num_features,
            make_kernel(self.kernel),
            construction=self.construction,
            num_heads=heads if self.per_head else None,
            scale=scale,
            trainable=self.trainable,
            seed=self.seed,
            dtype=getattr(torch, self.dtype),
        )
        if features.gains is not None:
            with torch.no_grad():
                noise = torch.randn(features.gains.shape, generator=torch.Generator().manual_seed(self.seed))
                features.gains += 0.1 * noise
        return features


MAPS = st.builds(
    Map,
    kernel=st.sampled_from(KERNELS),
    construction=st.sampled_from(sorted(CONSTRUCTIONS)),
    num_features=st.one_of(st.integers(2, 40), st.sampled_from([2, 3, 64, 200, 500])),
    share_of_radius=st.one_of(st.none(), st.sampled_from([1e-3, 0.25, 0.5, 0.9, 0.999, 1 - 1e-9])),
    per_head=st.booleans(),
    trainable=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=SEEDS,
)
