"""The calls a user writes: exact kernelized attention, its linear approximation, decoding with a state."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.inputs import arrange, arrange_query, arrange_scale, check_per_head, refuse_overflow
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel
from schoenbat.ops import dispatch, exact
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.sums import Before, Sums
from schoenbat.ops.unit_rows import UnitRows
from schoenbat.options import check_count, check_dtype, check_flag
from schoenbat.packed import attend_jagged, refuse_mask_beside_jagged
from schoenbat.precision import without_autocast


def kernelized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: str | DotProductKernel = "exp",
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Exact attention with any dot-product kernel, quadratic in n.

    ``out = Σ_j f(s⟨q, k_j⟩) v_j / Σ_j f(s⟨q, k_j⟩)`` with s the scale.

    For ``"exp"`` it is softmax attention. Logits at or beyond a kernel's radius raise on the CPU and give
    NaN rows on a GPU, where looking at them would synchronise (`DotProductKernel.check` looks on request).

    Args:
        query: ``(..., H, n_q, d)``.
        key: ``(..., H, n_k, d)``.
        value: ``(..., H, n_k, d_v)``.
        kernel: a name or a `DotProductKernel`.
        key_mask: bool ``(..., n_k)``, **True = takes part**. A row with no key gives zeros.
        is_causal: query i sees keys up to ``i + n_k − n_q``: the last query is aligned with the last key.
        scale: None for ``1 / sqrt(d)``, a float, or a tensor of one value per query head.
        enable_gqa: let several query heads share a key head.

    Returns:
        ``(..., H, n_q, d_v)``.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> torch.allclose(kernelized_attention(q, k, v), softmax, atol=1e-6)
        True
    """
    inputs = arrange(query, key, value, key_mask, enable_gqa)
    check_flag("is_causal", is_causal)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    check_per_head("scale", scale, math.prod(inputs.query.shape[1:3]))
    with without_autocast(query):
        if isinstance(scale, Tensor):
            scale = arrange_scale(scale, inputs.query, 1.0)
        out = exact.attend(*inputs[:4], get_kernel(kernel), scale, is_causal=is_causal)
    return inputs.restore(out)


def rmfa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Random Maclaurin feature attention: `kernelized_attention` in time and memory linear in n.

    With Φ the feature map and v̄ the mean value, ``out = v̄ + (Φ(q)Σ Φ(k)vᵀ − z v̄) / max(z, floor)``, where
    ``z = Φ(q)·Σ Φ(k)`` can be small or negative for signed features and is therefore kept above
    ``count · a₀ · exp(min(0, a₁ m / a₀))``, m the logit of q with the mean key. Where the floor is not
    active this is the plain ratio. (The ratio of two unbiased estimates is not unbiased.) Logits beyond a
    kernel's radius are not an error here: the truncated series is what it is.

    Differentiable once (second derivatives raise, except under `torch.func`, where plain PyTorch runs).

    Args:
        query: ``(..., H, n_q, d)``; or all three nested, ``(B, H, jagged, ·)`` of layout torch.jagged, as the
            output then is.
        key: ``(..., H, n_k, d)``.
        value: ``(..., H, n_k, d_v)``.
        features: the map. If it has one map per head, there are as many as key heads.
        key_mask: bool ``(..., n_k)``, **True = takes part**: masked keys leave numerator and denominator. A
            row with no key gives zeros.
        is_causal: query i sees keys up to ``i + n_k − n_q``: the last query is aligned with the last key.
        scale: None for ``features.scale``, a float, or a tensor of one value per query head.
        enable_gqa: let several query heads share a key head.
        implementation: ``"auto"``, ``"reference"`` (the specification; quadratic), ``"eager"`` or
            ``"triton"``.

    Returns:
        ``(..., H, n_q, d_v)``.

    Example:
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> q, k, v = torch.nn.functional.normalize(torch.randn(3, 2, 4, 10, 8), dim=-1).unbind()
        >>> error = rmfa(q, k, v, features) - kernelized_attention(q, k, v)
        >>> bool(error.abs().max() < 0.01)
        True
    """
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "implementation": implementation,
    }
    if isinstance(query, Tensor) and query.is_nested:
        refuse_mask_beside_jagged(key_mask)

        def attend_padded(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor) -> Tensor:
            return attend(query, key, value, features, key_mask=key_mask, **options)

        return attend_jagged(attend_padded, query, key, value)
    return attend(query, key, value, features, key_mask=key_mask, **options)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
    unit_rows: UnitRows | None = None,
    state: "RMFAState | None" = None,
) -> Tensor:
    """`rmfa`, with queries and keys normalised by `unit_rows` on the way; if causal, from a `state` on."""
    inputs = arrange(query, key, value, key_mask, enable_gqa)
    check_flag("is_causal", is_causal)
    dtype = inputs.query.dtype
    if state is not None:
        state._check(inputs.key, inputs.value, features)
        state, (q, k, v) = state._at_one_precision(*inputs[:3], implementation=implementation)
        inputs = inputs._replace(query=q, key=k, value=v)
    with without_autocast(query):
        feature_map = map_for(features, inputs.key)
        query_scale = arrange_scale(features.scale if scale is None else scale, inputs.query, features.scale)
        out = dispatch.attend(
            *inputs[:4],
            feature_map,
            query_scale,
            is_causal=is_causal,
            implementation=implementation,
            unit_rows=unit_rows,
            before=None if state is None else state._before(),
        )
    return inputs.restore(out).to(dtype)


@dataclass
class RMFAState:
    """What attention remembers of the keys and values it has seen: sums of fixed size, per key head.

    Features are those of the map without their weights; keys are multiplied by the square root of the map's
    planned scale. All sums are float32 at least.

    Example:
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> state = RMFAState.zeros(features, batch=2, kv_heads=4, value_dim=8)
        >>> k, v, q = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> out = state.update(k, v, features).read(q, features)
        >>> torch.allclose(out, rmfa(q, k, v, features), atol=1e-5)
        True
    """

    feature_value: Tensor  # (B, H, F, d_v): Σ φ(k) vᵀ
    feature_sum: Tensor  # (B, H, F): Σ φ(k)
    key_sum: Tensor  # (B, H, d)
    value_sum: Tensor  # (B, H, d_v)
    count: Tensor  # (B,) int64

    @classmethod
    def zeros(
        cls,
        features: MaclaurinFeatures,
        batch: int,
        kv_heads: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "RMFAState":
        """A state that has seen nothing; device defaults to the map's, dtype is float32 at least."""
        check_is_map(features)
        for name, size in (("batch", batch), ("kv_heads", kv_heads), ("value_dim", value_dim)):
            check_count(name, size, 0)
        check_dtype("dtype", dtype)
        device = features.feature_weights.device if device is None else torch.device(device)
        dtype = torch.promote_types(dtype or torch.float32, torch.float32)
        monomials = sum(degree > 0 for degree in features.degrees)
        shapes = (monomials, value_dim), (monomials,), (features.head_dim,), (value_dim,)
        sums = [torch.zeros(batch, kv_heads, *shape, device=device, dtype=dtype) for shape in shapes]
        return cls(*Sums(*sums), torch.zeros(batch, dtype=torch.int64, device=device))

    def update(
        self,
        key: Tensor,
        value: Tensor,
        features: MaclaurinFeatures,
        key_mask: Tensor | None = None,
        *,
        implementation: str = "auto",
    ) -> "RMFAState":
        """Add keys ``(B, H, n, d)`` and values ``(B, H, n, d_v)``, in place; returns the state itself.

        `implementation` is ``"auto"``, ``"eager"`` or ``"triton"``, here and in `read`.
        """
        inputs = arrange(key, key, value, key_mask, enable_gqa=False)
        self._check(inputs.key, inputs.value, features)
        with without_autocast(key):
            feature_map = map_for(features, inputs.key)
            more, count = dispatch.accumulate(*inputs[1:4], feature_map, implementation=implementation)
            sums = Sums(*(old + new for old, new in zip(self._sums(), more, strict=True)))
        refuse_overflow(sums, self._sums(), [inputs.key, inputs.value], inputs.mask)
        # One by one: not every version of torch.compile knows how to walk through the fields.
        after = self._from_sums(sums, self.count + count.flatten())
        self.feature_value, self.feature_sum = after.feature_value, after.feature_sum
        self.key_sum, self.value_sum, self.count = after.key_sum, after.value_sum, after.count
        return self

    def read(
        self,
        query: Tensor,
        features: MaclaurinFeatures,
        scale: float | Tensor | None = None,
        *,
        implementation: str = "auto",
    ) -> Tensor:
        """Attention of queries ``(B, H_q, n, d)`` to everything seen so far, as in cross attention."""
        grouped, lead = arrange_query(query, *self.key_sum.shape[:2])
        self._check_map(features)
        dtype = grouped.dtype
        state, (grouped,) = self._at_one_precision(grouped, implementation=implementation)
        with without_autocast(query):
            feature_map = map_for(features, grouped)
            query_scale = arrange_scale(features.scale if scale is None else scale, grouped, features.scale)
            out = dispatch.read(
                grouped, state._before(), feature_map, query_scale, implementation=implementation
            )
        refuse_overflow([out], [grouped, *state._sums()], [], None)
        return out.reshape(*lead, *out.shape[-2:]).to(dtype)

    def reorder(self, index: Tensor) -> "RMFAState":
        """Take the given batch rows, in place, as beam search does; returns the state itself."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
            raise TypeError(f"index must be a tensor of batch rows, int64 (rows,), got {index!r}")
        try:
            taken = {name: tensor.index_select(0, index) for name, tensor in vars(self).items()}
        except IndexError as error:
            rows = self.count.shape[0]
            raise ValueError(
                f"index must hold batch rows from 0 to {rows - 1}, got {index.tolist()}"
            ) from error
        vars(self).update(taken)
        return self

    def _at_one_precision(self, *rows: Tensor, implementation: str) -> tuple["RMFAState", list[Tensor]]:
        """Where state or rows are float64, both of them; fused kernels, asked for by name, refuse float64."""
        alike = (self.key_sum.dtype == torch.float64) == (rows[0].dtype == torch.float64)
        if alike or implementation == "triton":
            return self, list(rows)
        sums = Sums(*(x.double() for x in self._sums()))
        return self._from_sums(sums, self.count), [x.double() for x in rows]

    def _sums(self) -> Sums:
        return Sums(
            self.feature_value[:, :, None],
            self.feature_sum[:, :, None, :, None],
            self.key_sum[:, :, None, None],
            self.value_sum[:, :, None, None],
        )

    def _before(self) -> Before:
        return Before(self._sums(), self.count.view(-1, 1, 1, 1, 1))

    @classmethod
    def _from_sums(cls, sums: Sums, count: Tensor) -> "RMFAState":
        return cls(
            sums.feature_value[:, :, 0],
            sums.feature_sum[:, :, 0, :, 0],
            sums.key_sum[:, :, 0, 0],
            sums.value_sum[:, :, 0, 0],
            count,
        )

    def _check(self, key: Tensor, value: Tensor, features: MaclaurinFeatures) -> None:
        expected = (*self.key_sum.shape[:2], self.value_sum.shape[-1])
        got = (*key.shape[:2], value.shape[-1])
        if expected != got:
            raise ValueError(f"the state was made for (batch, kv_heads, value_dim) = {expected}, got {got}")
        self._check_map(features)

    def _check_map(self, features: MaclaurinFeatures) -> None:
        check_is_map(features)
        made_for = self.feature_sum.shape[-1], self.key_sum.shape[-1]
        got = sum(degree > 0 for degree in features.degrees), features.head_dim
        if made_for != got:
            raise ValueError(
                f"the state was made for a map of (features without the constant, head_dim) = {made_for}, "
                f"this one has {got}; use the map that it was begun with"
            )


def rmfa_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    state: RMFAState,
    *,
    key_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, RMFAState]:
    """Decode: n new tokens attend causally to all before them and to themselves, with a state of fixed size.

    Args:
        query: ``(B, H, n, d)``; n = 1 for one token, more for a prompt.
        key: ``(B, H_kv, n, d)``.
        value: ``(B, H_kv, n, d_v)``.
        features: the map.
        state: what came before; it is left as it is.
        key_mask: bool ``(B, n)``, **True = takes part**; False for left padding.
        scale: as in `rmfa`.
        enable_gqa: as in `rmfa`.
        implementation: as in `rmfa`.

    Returns:
        The output ``(B, H, n, d_v)`` and the state after these tokens.

    Example:
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> state = RMFAState.zeros(features, batch=2, kv_heads=4, value_dim=8)
        >>> prompt, state = rmfa_step(q[..., :7, :], k[..., :7, :], v[..., :7, :], features, state)
        >>> rest, state = rmfa_step(q[..., 7:, :], k[..., 7:, :], v[..., 7:, :], features, state)
        >>> whole = rmfa(q, k, v, features, is_causal=True)
        >>> torch.allclose(torch.cat([prompt, rest], dim=-2), whole, atol=1e-5)
        True
    """
    return step(
        *(query, key, value, features, state),
        key_mask=key_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        implementation=implementation,
    )


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    state: RMFAState,
    *,
    key_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
    unit_rows: UnitRows | None = None,
) -> tuple[Tensor, RMFAState]:
    """`rmfa_step`, with queries and keys normalised by `unit_rows` on the way."""
    inputs = arrange(query, key, value, key_mask, enable_gqa)
    if not isinstance(state, RMFAState):
        raise TypeError(
            f"state must be an RMFAState, got {state!r}; begin with RMFAState.zeros(features, ...)"
        )
    state._check(inputs.key, inputs.value, features)
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(f"a step takes one query for each key, got {query.shape[-2]} and {key.shape[-2]}")
    dtype = inputs.query.dtype
    state, (q, k, v) = state._at_one_precision(*inputs[:3], implementation=implementation)
    inputs = inputs._replace(query=q, key=k, value=v)
    with without_autocast(query):
        feature_map = map_for(features, inputs.key)
        query_scale = arrange_scale(features.scale if scale is None else scale, inputs.query, features.scale)
        out, sums = dispatch.step(
            *inputs[:4],
            state._before(),
            feature_map,
            query_scale,
            implementation=implementation,
            unit_rows=unit_rows,
        )
        new = key.shape[-2] if inputs.mask is None else inputs.mask.flatten(1).sum(1)
    refuse_overflow([out], [inputs.query, *state._sums()], [inputs.key, inputs.value], inputs.mask)
    out = out.reshape(*inputs.lead, *out.shape[-2:]).to(dtype)
    return out, RMFAState._from_sums(sums, state.count + new)


def check_is_map(features: Any) -> None:
    """A TypeError for what is no map."""
    if not isinstance(getattr(features, "_orig_mod", features), MaclaurinFeatures):  # or compiled
        raise TypeError(
            f"features must be a MaclaurinFeatures, got {features!r}; make one with "
            "MaclaurinFeatures(head_dim, num_features, kernel)"
        )


def map_for(features: MaclaurinFeatures, rows: Tensor) -> FeatureMap:
    """The map in the dtype in which rows ``(B, H, G, n, d)`` are computed; an error if it does not fit."""
    check_is_map(features)
    if rows.shape[-1] != features.head_dim:
        raise ValueError(
            f"the map was made for head_dim = {features.head_dim}, query and key have {rows.shape[-1]}"
        )
    if features.feature_weights.device != rows.device:
        raise ValueError(
            f"the map is on {features.feature_weights.device}, but query is on {rows.device}; move the map, "
            "or the module that holds it, with .to()"
        )
    if features.num_heads is not None and features.num_heads != rows.shape[1]:
        raise ValueError(
            f"the map has num_heads = {features.num_heads} maps, but there are {rows.shape[1]} key heads; "
            "make it with as many, or with num_heads=None for one map for all heads"
        )
    return features.map(torch.promote_types(rows.dtype, torch.float32))
