"""Exact near, linear far, as a user calls it: over a whole sequence, and token by token with a state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.inputs import Arranged, arrange, arrange_per_head, check_window, map_for, scale_for
from schoenbat.ops import dispatch, window, window_fused
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.keeping import is_concrete
from schoenbat.ops.near_and_far import Window
from schoenbat.ops.unit_rows import UnitRows
from schoenbat.options import check_flag
from schoenbat.precision import without_autocast
from schoenbat.state import RMFAWindowState


def rmfa_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    width: int,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    far_weight: float | Tensor = 1.0,
    far_maps: tuple[Tensor, Tensor] | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Softmax attention, exact for the keys within ±width of a query and by features for all others.

    ``out = (Σ_near exp(s⟨q, k⟩) v + g·N) / (Σ_near exp(s⟨q, k⟩) + g·f)``: N and f are numerator and floored
    denominator of `rmfa` to the far keys alone, g is `far_weight`. Time ``O(n·(width + D))``. A width of n
    or more is softmax attention. Gradients by recomputation.

    Args:
        query: ``(..., H, n, d)``.
        key: ``(..., H, n, d)``: as many as queries, for nearness is a difference of positions.
        value: ``(..., H, n, d_v)``.
        features: a map of the kernel ``"exp"``.
        width: how many keys on each side of a query (before it, if causal) are near; its own always is.
        key_mask: bool ``(..., n)``, **True = takes part**.
        is_causal: query i sees keys up to i.
        scale: as in `rmfa`.
        far_weight: g > 0, a float or a tensor of one value per query head.
        far_maps: matrices A ``(H, d, d)`` and B ``(H_kv, d, d)``: far keys are seen as ``φ(qA)·φ(kB)``. None:
            as ``φ(q)·φ(k)``.
        enable_gqa: let several query heads share a key head.
        implementation: ``"auto"``, ``"reference"`` (the specification; quadratic), ``"eager"`` or
            ``"triton"`` (fused kernels, which ``"auto"`` takes on
            CUDA for heads up to 128 wide, in float16 without gradients; differentiable once).

    Returns:
        ``(..., H, n, d_v)``.

    Example:
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> q, k, v = torch.randn(3, 2, 4, 100, 8).unbind()
        >>> softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> near, all_of_it = (rmfa_window(q, k, v, features, width) for width in (10, 100))
        >>> torch.allclose(all_of_it, softmax, atol=1e-5), torch.allclose(near, softmax, atol=1e-5)
        (True, False)
    """
    check_window(features, width)
    check_flag("is_causal", is_causal)
    inputs = arrange(query, key, value, key_mask, enable_gqa)
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"a window needs as many queries as keys, got {query.shape[-2]} and {key.shape[-2]}: positions "
            "in two sequences cannot be compared (for decoding use rmfa_window_step)"
        )
    with without_autocast(query):
        feature_map = map_for(features, inputs.key)
        others = _tensors(inputs.key, scale, far_weight, *_checked_maps(far_maps))
        obstacle = window_fused.obstacle(inputs.query, inputs.value, feature_map, implementation, others)
        attend = _ATTEND[dispatch.choose(implementation, obstacle, query)]
        if not torch.compiler.is_compiling():  # where it would make every size an expression of the length
            width = min(width, max(key.shape[-2] - 1, 0))
        query_scale = scale_for(features, scale, inputs.query)
        settings = _settings(inputs, width, is_causal, 0, far_weight, far_maps)
        out = attend(*inputs[:4], feature_map, query_scale, settings)
    return inputs.restore(out)


def rmfa_window_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    state: RMFAWindowState,
    *,
    key_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
    far_weight: float | Tensor = 1.0,
    far_maps: tuple[Tensor, Tensor] | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, RMFAWindowState]:
    """Decode: n new tokens attend causally, exactly to the last `width` tokens and linearly to all before.

    Args:
        query: ``(B, H, n, d)``; n = 1 for one token, more for a prompt.
        key: ``(B, H_kv, n, d)``.
        value: ``(B, H_kv, n, d_v)``.
        features: a map of the kernel ``"exp"``.
        state: what came before; it is left as it is.
        key_mask: bool ``(B, n)``, **True = takes part**; False for left padding.
        scale: as in `rmfa`.
        far_weight: as in `rmfa_window`.
        far_maps: as in `rmfa_window`.
        enable_gqa: let several query heads share a key head.
        implementation: ``"auto"``, ``"eager"`` or ``"triton"`` (one fused kernel for one token without
            gradients, heads at most 128 wide, which ``"auto"`` takes on CUDA).

    Returns:
        The output ``(B, H, n, d_v)`` and the state after these tokens.

    Example:
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> state = RMFAWindowState.zeros(features, 3, batch=2, kv_heads=4, value_dim=8)
        >>> prompt, state = rmfa_window_step(q[..., :7, :], k[..., :7, :], v[..., :7, :], features, state)
        >>> rest, state = rmfa_window_step(q[..., 7:, :], k[..., 7:, :], v[..., 7:, :], features, state)
        >>> whole = rmfa_window(q, k, v, features, 3, is_causal=True)
        >>> torch.allclose(torch.cat([prompt, rest], dim=-2), whole, atol=1e-5)
        True
    """
    return step(
        *(query, key, value, features, state),
        key_mask=key_mask,
        scale=scale,
        far_weight=far_weight,
        far_maps=far_maps,
        enable_gqa=enable_gqa,
        implementation=implementation,
    )


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    state: RMFAWindowState,
    *,
    key_mask: Tensor | None,
    scale: float | Tensor | None,
    far_weight: float | Tensor,
    far_maps: tuple[Tensor, Tensor] | None,
    enable_gqa: bool,
    implementation: str = "auto",
    unit_rows: UnitRows | None = None,
) -> tuple[Tensor, RMFAWindowState]:
    """`rmfa_window_step`, with queries and keys normalised by `unit_rows` on the way."""
    tokens = arrange(query, key, value, key_mask, enable_gqa)
    if not isinstance(state, RMFAWindowState):
        raise TypeError(
            f"state must be an RMFAWindowState, got {type(state).__name__}; begin with "
            "RMFAWindowState.zeros(features, width, ...)"
        )
    width, length, before = state.key.shape[-2], key.shape[-2], state._remembered()
    check_window(features, width)
    if query.shape[-2] != length:
        raise ValueError(f"a step takes one query for each key, got {query.shape[-2]} and {length}")
    state.far._check(tokens.key, tokens.value, features)
    others = _tensors(tokens.key, scale, far_weight, *_checked_maps(far_maps))
    with without_autocast(query):
        feature_map = map_for(features, tokens.key)
        obstacle = window_fused.step_obstacle(tokens.query, tokens.value, before, feature_map, others)
        if dispatch.choose_with_sums(implementation, obstacle, query) == "triton":
            logit_scale = arrange_per_head(features.scale if scale is None else scale, tokens.query)
            weight = _arrange_weight(tokens, far_weight)
            maps = None if far_maps is None else _arrange_maps(tokens, far_maps)
            out, after = window_fused.step(
                *tokens[:4], before, feature_map, logit_scale, weight, maps, unit_rows
            )
            return tokens.restore(out), RMFAWindowState._from_remembered(after)
        if state.far.key_sum.dtype == torch.float64 != tokens.key.dtype:
            raise TypeError(f"the state is float64, tokens are {tokens.key.dtype}: cast them, or begin anew")
        if unit_rows is not None:
            key = unit_rows.of_keys(tokens.key, tokens.mask)
            tokens = tokens._replace(query=unit_rows(tokens.query), key=key)
        query_scale = scale_for(features, scale, tokens.query)
        settings = _settings(tokens, width, True, width, far_weight, far_maps)
        return _step_eagerly(tokens, features, feature_map, query_scale, settings, state, implementation)


def _checked_maps(far_maps: Any) -> tuple[Tensor, ...]:
    """None, or two tensors."""
    if far_maps is None:
        return ()
    if isinstance(far_maps, (tuple, list)) and [isinstance(x, Tensor) for x in far_maps] == [True, True]:
        return tuple(far_maps)
    raise TypeError(
        f"far_maps must be two tensors, for queries and keys, or None, got {type(far_maps).__name__}"
    )


def _tensors(*options: object) -> list[Tensor]:
    """Those of them that gradients may be wanted for."""
    return [option for option in options if isinstance(option, Tensor)]


def _step_eagerly(
    tokens: Arranged,
    features: MaclaurinFeatures,
    feature_map: FeatureMap,
    query_scale: Tensor,
    settings: Window,
    state: RMFAWindowState,
    implementation: str,
) -> tuple[Tensor, RMFAWindowState]:
    """`implementation` is that of the sums over far keys."""
    key, value, length = tokens.key, tokens.value, tokens.key.shape[-2]
    new = torch.ones_like(key[:, :1, :, :, :1], dtype=torch.bool) if tokens.mask is None else tokens.mask
    before = state.key.to(key.dtype), state.value.to(value.dtype), state.mask[:, None, :, None]
    key, value, mask = (
        torch.cat([old[:, :, None], x], dim=-2)
        for old, x in zip(before, (key, value, new.expand(len(key), -1, -1, -1, -1)), strict=True)
    )
    tokens = tokens._replace(key=key, value=value, mask=mask)
    out = window.attend(*tokens[:4], feature_map, query_scale, settings, state._carried())
    # The first so many of all keys are no longer among the last `width`.
    leaving = key[..., :length, :]
    if settings.key_map is not None:
        leaving = torch.where(mask[..., :length, :], leaving, 0.0) @ settings.key_map.to(leaving.dtype)
    of_batch = leaving[:, :, 0], value[:, :, 0, :length], features, mask[:, 0, 0, :length, 0]
    far = replace(state.far).update(*of_batch, implementation=implementation)
    # Copies: a view of them would keep the whole prompt in memory.
    last = key[:, :, 0, length:], value[:, :, 0, length:], mask[:, 0, 0, length:, 0]
    key, value, mask = (x.clone() for x in last)
    return tokens.restore(out), RMFAWindowState(key, value, mask, far)


def _settings(
    inputs: Arranged,
    width: int,
    is_causal: bool,
    first: int,
    far_weight: float | Tensor,
    far_maps: tuple[Tensor, Tensor] | None,
) -> Window:
    maps = () if far_maps is None else _arrange_maps(inputs, far_maps)
    return Window(width, is_causal, first, _arrange_weight(inputs, far_weight).log(), *maps)


def _arrange_weight(inputs: Arranged, far_weight: float | Tensor) -> Tensor:
    weight = arrange_per_head(far_weight, inputs.query, "far_weight")
    if not _is_positive(far_weight):
        raise ValueError(f"far_weight must be positive, got {far_weight}")
    return weight


def _is_positive(weight: float | Tensor) -> bool:
    """A tensor is looked at only where that costs nothing: on a GPU it would synchronise."""
    if not isinstance(weight, Tensor):
        return weight > 0
    weight = weight.detach()
    return weight.device.type != "cpu" or not is_concrete(weight) or bool((weight > 0).all())


def _arrange_maps(inputs: Arranged, far_maps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    query_map, key_map = far_maps
    heads, groups, width = *inputs.query.shape[1:3], inputs.query.shape[-1]
    expected = (heads * groups, width, width), (heads, width, width)
    got = tuple(query_map.shape), tuple(key_map.shape)
    if got != expected:
        raise ValueError(
            f"far_maps must have shapes {expected[0]} and {expected[1]}, got {got[0]} and {got[1]}"
        )
    return query_map.reshape(heads, groups, width, width), key_map[:, None]


def _in_full_precision(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    settings: Window,
) -> Tensor:
    q, k, v = (x.to(feature_map.weight.dtype) for x in (query, key, value))
    return window.reference(q, k, v, mask, feature_map, query_scale, settings).to(query.dtype)


_ATTEND: dict[str, Callable[..., Tensor]] = {
    "reference": _in_full_precision,
    "eager": window.attend,
    "triton": window_fused.attend,
}
