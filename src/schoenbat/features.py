"""MaclaurinFeatures: an explicit feature map of a dot-product kernel, drawn once and kept."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from schoenbat.constructions import CONSTRUCTIONS, MAX_DEGREE, Plan, draw
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel
from schoenbat.ops.blocks import Blocks, FeatureMap, monomials, weigh
from schoenbat.ops.keeping import may_keep, may_reuse, reuse
from schoenbat.options import MOST, check_count, check_dtype, check_flag, check_seed
from schoenbat.precision import at_least_float32, without_autocast
from schoenbat.stored_map import DIRECTIONS, StoredMap, whole

# The most that a₁ / a₀ can be in a denominator's floor: it fits into float32, and exponents end at -80.
_STEEPEST = 1e30


class MaclaurinFeatures(StoredMap):
    """Features whose inner products approximate a kernel: ``features(x) @ features(y) ≈ kernel(x @ y)``.

    With a₀, a₁, ... the kernel's Maclaurin coefficients, a feature of degree n is a product of n
    projections of x, and the features of degree n together stand for ``a_n ⟨x, y⟩ⁿ``. How the features are
    spent:

    - ``"exact-low"``: constant and linear part exact, the rest exact pair monomials on r directions.
      Biased, and closest to a given kernel: take it to convert a trained model.
    - ``"unbiased"``: constant exact, random products of orthogonal projections, as many of degree n as
      ``a_n sⁿ`` asks for at the planned scale s. High degrees at a large scale: what trains well from
      scratch.
    - ``"paper"``: every degree drawn with P[N = n] ∝ 2^-(n+1), Rademacher projections.
    - ``"paper-code"``: as ``"paper"``, but with an exact constant, as the paper's authors ran it.

    Args:
        head_dim: d, the width of a row.
        num_features: D ≥ 2, the constant included.
        kernel: a name, or a `DotProductKernel` with a₀ > 0.
        construction: one of the above.
        num_heads: None for one map for all heads; else one map per head, for inputs ``(..., num_heads, n,
            d)``.
        scale: the logit scale the map is planned for (rows taken as unit rows). None: ``1 / sqrt(head_dim)``.
        trainable: make the directions, and a gain for each degree, parameters. A gain enters by its square;
            without the constant's the denominator has no floor. A saved map that was not trained is loaded
            with ``strict=False``; the gains of its degrees are 1.
        seed: None draws one from torch's global generator, once. The same seed gives the same map on any
            device.
        device: where the map lives.
        dtype: of the map, float32 or float64; half precision is never used for it, nor does a module-wide
            cast to half precision reach it.

    Example:
        >>> features = MaclaurinFeatures(64, 128, "exp", seed=0)
        >>> x, y = torch.full((2, 64), 0.1).unbind()
        >>> features(x).shape
        torch.Size([128])
        >>> torch.allclose(features(x) @ features(y), torch.exp(x @ y), rtol=0.3)
        True
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int = 128,
        kernel: str | DotProductKernel = "exp",
        *,
        construction: str = "exact-low",
        num_heads: int | None = None,
        scale: float | None = None,
        trainable: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype("dtype", dtype)
        super().__init__(
            check_count("num_features", num_features, 2, MOST),
            None if num_heads is None else check_count("num_heads", num_heads),
            check_flag("trainable", trainable),
            torch.empty(0, device=device, dtype=at_least_float32(dtype or torch.get_default_dtype())),
        )
        self.kernel = get_kernel(kernel)
        self.head_dim = check_count("head_dim", head_dim, most=MOST)
        if not isinstance(construction, str) or construction not in CONSTRUCTIONS:
            raise ValueError(f"unknown construction {construction!r}; known: {', '.join(CONSTRUCTIONS)}")
        self.construction = construction
        self.scale = planned_scale(self.kernel, head_dim, scale)
        self._low_coefficients = tuple(self.kernel.coefficients(1).tolist())
        if not self._low_coefficients[0] > 0:
            raise ValueError(
                f"kernel {self.kernel.name!r} has no constant term (a₀ = 0), so attention's denominator has "
                "no floor; add an offset to it, for example polynomial(degree, offset=1.0)"
            )
        self._made: dict[torch.dtype, tuple[list[tuple[Tensor, int]], FeatureMap]] = {}
        self.resample(seed)

    @torch.no_grad()
    def resample(self, seed: int | None = None) -> None:
        """Draw the map anew, and set the gains of a trainable one back to 1.

        Example:
            >>> features = MaclaurinFeatures(8, 16, seed=0)
            >>> before = features.quadratic.clone()
            >>> features.resample(1)
            >>> torch.equal(before, features.quadratic)
            False
        """
        with torch.device("cpu"):  # whatever the default device is: a seed means the same map everywhere
            self.seed = int(torch.randint(2**62, ())) if seed is None else check_seed(seed)
            generator = torch.Generator().manual_seed(self.seed)
            coefficients = self.kernel.coefficients(MAX_DEGREE)
            construct = CONSTRUCTIONS[self.construction]
            plan = construct(coefficients, self.head_dim, self.num_features, self.scale, generator)
            self._check_range(plan, coefficients.tolist())
            drawn = draw(plan, self.head_dim, self.num_heads or 1, generator)
            for name, tensor in zip(DIRECTIONS, drawn, strict=True):
                self._replace(name, tensor)
            self._replace("feature_weights", torch.tensor(plan.weights, dtype=torch.float64))
            self._replace("degree_table", torch.tensor(plan.degrees))
            if self.gains is not None:
                self._replace("gains", torch.ones(self.num_heads or 1, max(plan.degrees) + 1))
        self.degrees = plan.degrees

    def _check_range(self, plan: Plan, coefficients: Sequence[float]) -> None:
        """What a map's dtype cannot hold: any number that is too large, a constant that is too small."""
        dtype = self.feature_weights.dtype
        limits = torch.finfo(dtype)
        for degree, weight in zip(plan.degrees, plan.weights, strict=True):
            value = max(coefficients[degree], weight)
            if value > limits.max or (degree == 0 and coefficients[0] < limits.tiny):
                raise ValueError(
                    f"kernel {self.kernel.name!r} gives degree {degree} the weight {value:.6g}, which is "
                    f"beyond the range of {dtype}; multiply the kernel by a number, which changes no "
                    "attention, or rescale x"
                )

    @torch.no_grad()
    def calibrate(self, query: Tensor, key: Tensor) -> None:
        """Turn the directions of an ``"exact-low"`` map towards the data.

        The pair monomials then lie on the top eigenvectors of ``E[qqᵀ + kkᵀ]``: 2–4 times less error on
        clustered or low-rank data. Give rows as the map will see them (normalised, without scale).

        Args:
            query: ``(..., n, d)``, or ``(..., num_heads, n, d)`` where each head has its own map.
            key: likewise.

        Example:
            >>> features = MaclaurinFeatures(8, 16, seed=0)
            >>> features.calibrate(torch.randn(2, 4, 100, 8), torch.randn(2, 4, 100, 8))
        """
        if self.construction != "exact-low":
            raise ValueError(
                f"calibrate() turns the directions of an 'exact-low' map; this one is {self.construction!r}, "
                "whose random directions must stay as they were drawn"
            )
        moment = self._second_moment("query", query) + self._second_moment("key", key)
        top = torch.linalg.eigh(moment).eigenvectors.flip(-1)  # (maps, d, d), largest eigenvalue first
        self.quadratic.copy_(top[..., : self.quadratic.shape[-1]])
        self.linear.copy_(top[..., : self.linear.shape[-1]] * math.sqrt(self.head_dim))

    def _second_moment(self, name: str, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {getattr(x, 'dtype', x)!r}")
        rows = self._by_map(x).double()
        moment = (rows.mT @ rows).sum((0, 2)) / max(1, rows.shape[0] * rows.shape[3])
        if not (moment.isfinite().all() and moment.any()):
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} has no directions: it needs rows that are not all zero, "
                "and no NaN or infinite ones"
            )
        return moment

    def _by_map(self, x: Tensor) -> Tensor:
        """``(..., d) -> (B, maps, 1, n, d)``."""
        if x.shape[-1:] != (self.head_dim,):
            raise ValueError(f"expected rows of width head_dim = {self.head_dim}, got shape {tuple(x.shape)}")
        if self.num_heads is None:
            return x.reshape(1, 1, 1, -1, self.head_dim)
        if x.dim() < 3 or x.shape[-3] != self.num_heads:
            raise ValueError(
                f"this map has num_heads = {self.num_heads}: expected (..., {self.num_heads}, n, "
                f"{self.head_dim}), got {tuple(x.shape)}"
            )
        return x.reshape(math.prod(x.shape[:-3]), self.num_heads, 1, *x.shape[-2:])

    def forward(self, x: Tensor) -> Tensor:
        """The features of the rows of x: ``(..., head_dim) -> (..., num_features)``, no scale inside."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"expected rows as a tensor of floats, got {found}")
        rows = self._by_map(x)
        dtype = at_least_float32(x.dtype)
        with without_autocast(x):
            amplitude, constants = self._amplitudes(dtype), self.degrees.count(0)
            phi = weigh(monomials(rows.to(dtype), self._blocks(dtype)), amplitude[:, constants:])
            constant = amplitude[:, None, :constants, None].expand(*rows.shape[:3], -1, rows.shape[-2])
            both = torch.cat([constant, *phi], dim=-2).mT
        return both.reshape(*x.shape[:-1], self.num_features).to(x.dtype)

    def map(self, dtype: torch.dtype) -> FeatureMap:
        """The map in the form in which attention executes it, in the given dtype.

        One that is not trained is made once and kept until its buffers change, in place or by assignment;
        what is written through ``.data`` is not noticed. A CUDA graph of fused kernels keeps the map it was
        captured with; one of the eager path, or of a compiled call, reads the buffers themselves where they
        have this dtype: it then follows what is loaded into them, if sizes and degrees stay, and must be
        captured again after `resample`, which makes new ones.
        """
        buffers = [getattr(self, name) for name in (*DIRECTIONS, "feature_weights")]
        if self.trainable or not may_reuse(*buffers):
            return self._make_map(dtype)
        made_from = [(buffer, buffer._version) for buffer in buffers]
        if dtype in self._made:
            known, feature_map = self._made[dtype]
            if all(a is b and i == j for (a, i), (b, j) in zip(known, made_from, strict=True)):
                return reuse(feature_map, *buffers)
        if not may_keep(*buffers):
            return self._make_map(dtype)
        with torch.inference_mode(False):  # what is kept may be needed for training later
            feature_map = self._make_map(dtype)
        self._made[dtype] = made_from, feature_map
        return feature_map

    def _make_map(self, dtype: torch.dtype) -> FeatureMap:
        weights = self._weights(dtype)
        constants = self.degrees.count(0)
        # Filled on the device, not copied to it: a copy would synchronise and break a CUDA graph's capture.
        constant, first = self._low_coefficients
        zeroth = weights.new_full((weights.shape[0],), constant)
        slope = torch.full_like(zeroth, min(first / constant, _STEEPEST))
        if self.gains is not None:
            low = self.gains.to(dtype)[:, :2]  # a map of constants alone has one gain
            squares = nn.functional.pad(low, (0, 2 - low.shape[-1])).square()
            zeroth, slope = zeroth * squares[:, 0], slope * squares[:, 1] / squares[:, 0].clamp(min=1e-12)
        coefficients = torch.stack([weights[:, :constants].sum(-1), zeroth, slope], dim=-1)
        return FeatureMap(self._blocks(dtype), weights[:, constants:], coefficients, self.scale)

    def _blocks(self, dtype: torch.dtype) -> Blocks:
        linear, quadratic, tail = (getattr(self, name).to(dtype) for name in DIRECTIONS)
        identity = not self.linear.shape[-1] and 1 in self.degrees
        pairs = self.degrees.count(2) if self.quadratic.shape[-1] else 0
        in_tail = tuple(n for n in self.degrees if n > (2 if pairs else 1))
        if sum(in_tail) != tail.shape[-1]:
            raise ValueError(
                f"the map has {tail.shape[-1]} directions for degrees that need {sum(in_tail)}: parts of two "
                "maps were mixed, as DDP does where ranks drew maps of other sizes; give all of them one seed"
            )
        return Blocks(linear, quadratic, tail, identity, pairs, in_tail)

    def _weights(self, dtype: torch.dtype) -> Tensor:
        """Squared weights ``(maps, num_features)``, gains included."""
        weights = self.feature_weights.to(dtype)
        if self.gains is None:
            return weights.expand(1, -1)
        return weights * self.gains.to(dtype).square()[:, whole(self.degree_table)]

    def _amplitudes(self, dtype: torch.dtype) -> Tensor:
        """What a feature is multiplied by. Not the root of `_weights`: a gain of 0 would have no gradient."""
        amplitudes = self.feature_weights.to(dtype).sqrt()
        if self.gains is None:
            return amplitudes.expand(1, -1)
        return amplitudes * self.gains.to(dtype)[:, whole(self.degree_table)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._made.clear()  # what was made lies where the map was
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": {}}

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return (
            f"{self.head_dim}, {self.num_features}, kernel={self.kernel.name!r}, "
            f"construction={self.construction!r}{heads}, scale={self.scale:.4g}, "
            f"max_degree={max(self.degrees)}"
        )


def reseed(model: nn.Module, seed: int) -> None:
    """Redraw every map of a model, each from a seed of its own that follows from `seed`.

    Example:
        >>> model = nn.ModuleList(MaclaurinFeatures(8, 16) for _ in range(2))
        >>> reseed(model, 0)
        >>> torch.equal(model[0].quadratic, model[1].quadratic)
        False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    for module in model.modules():
        if isinstance(module, MaclaurinFeatures):
            module.resample(int(torch.randint(2**62, (), generator=generator, device="cpu")))


def planned_scale(kernel: DotProductKernel, head_dim: int, scale: float | None) -> float:
    """The scale as a float (None: 1/√d), after checking that unit rows stay inside the kernel's radius."""
    value = 1 / math.sqrt(head_dim) if scale is None else scale
    if not isinstance(value, numbers.Real):
        raise ValueError(f"scale must be a number or None, got {scale!r} of type {type(scale).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"scale must be positive and finite, got {scale!r}")
    value = float(value)
    if value >= kernel.radius:
        raise ValueError(
            f"scale {value:.6g} lets the logits of unit rows reach the radius {kernel.radius:g} of kernel "
            f"{kernel.name!r}; choose a scale below it, for example {0.9 * kernel.radius:g}"
        )
    return value
