"""The calls a user writes: exact kernelized attention, its linear approximation, decoding with a state."""

import math
from typing import Any

from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.inputs import arrange, arrange_scale, check_per_head, map_for, refuse_overflow, scale_for
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel
from schoenbat.ops import dispatch, exact
from schoenbat.ops.unit_rows import UnitRows
from schoenbat.options import check_flag
from schoenbat.packed import attend_jagged, refuse_mask_beside_jagged
from schoenbat.precision import without_autocast
from schoenbat.state import RMFAState


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
        >>> import torch
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
        query: ``(..., H, n_q, d)``, best of rows of norm 1: a map serves logits of about its scale, not of
            many times that. Or all three nested, ``(B, H, jagged, ·)`` of layout torch.jagged, as the output
            then is.
        key: ``(..., H, n_k, d)``, likewise.
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
        >>> import torch
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
    state: RMFAState | None = None,
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
        query_scale = scale_for(features, scale, inputs.query)
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
        >>> import torch
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
            f"state must be an RMFAState, got {type(state).__name__}; "
            "begin with RMFAState.zeros(features, ...)"
        )
    state._check(inputs.key, inputs.value, features)
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"a step takes one query for each key, got {query.shape[-2]} and {key.shape[-2]}; for keys of "
            "another sequence there are RMFAState.update and read"
        )
    dtype = inputs.query.dtype
    state, (q, k, v) = state._at_one_precision(*inputs[:3], implementation=implementation)
    inputs = inputs._replace(query=q, key=k, value=v)
    with without_autocast(query):
        feature_map = map_for(features, inputs.key)
        query_scale = scale_for(features, scale, inputs.query)
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
