"""The specification: attention by a feature map in a few lines, quadratic in n, for any dtype.

Every faster implementation is tested against these functions in float64, outputs and gradients.
"""

import torch
from torch import Tensor

from schoenbat.ops.blocks import Blocks, apply_to_rows, inner, monomials, sum_over_rows, weigh


def attend(
    query: Tensor,  # (B, H, G, n_q, d), to be multiplied by query_scale
    key: Tensor,  # (B, H, 1, n_k, d), to be multiplied by key_scale
    value: Tensor,  # (B, H, 1, n_k, d_v)
    visible: Tensor,  # bool, broadcastable to (B, 1, 1, n_q, n_k): which key takes part for which query
    blocks: Blocks,
    weight: Tensor,  # (M, F): squared weight of each monomial
    coefficients: Tensor,  # (M, 3): weight of the constant; a₀ and a₁ / a₀, which make the floor
    query_scale: Tensor,  # (H, G, 1, 1)
    key_scale: float,
) -> Tensor:
    """``out = v̄ + (numerator − denominator · v̄) / max(denominator, floor)``; zeros for a row without keys."""
    visible = visible.expand(query.shape[0], 1, 1, query.shape[-2], key.shape[-2])
    # Zeros in place of keys that nobody sees: 0 · NaN would let them through.
    seen = visible.any(-2).unsqueeze(-1)
    key, value = torch.where(seen, key, 0.0), torch.where(seen, value, 0.0)
    query, key = query * query_scale, key * key_scale
    constant, zeroth, slope = coefficients.view(-1, 1, 1, 1, 3).unbind(-1)

    phi_query, phi_key = monomials(query, blocks), monomials(key, blocks)
    scores = torch.where(visible, constant + inner(weigh(phi_query, weight), phi_key), 0.0)
    count = visible.sum(-1, keepdim=True).to(scores.dtype)
    averaging = visible / count.clamp(min=1.0)
    mean_value, mean_key = averaging @ value, averaging @ key
    mean_logit = (query * mean_key).sum(-1, keepdim=True)

    numerator, denominator = scores @ value, scores.sum(-1, keepdim=True)
    floor = count * zeroth * (slope * mean_logit).clamp(-80.0, 0.0).exp()
    floored = torch.where(denominator < floor, floor, denominator)
    floored = torch.where(count > 0, floored, 1.0)
    return mean_value + (numerator - denominator * mean_value) / floored


def step(
    query: Tensor,  # (B, H, G, n, d)
    key: Tensor,  # (B, H, 1, n, d)
    value: Tensor,
    mask: Tensor | None,  # bool (B, 1, 1, n, 1)
    count: Tensor,  # int64 (B, 1, 1, 1, 1)
    blocks: Blocks,
    weight: Tensor,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    sums: tuple[Tensor, Tensor, Tensor, Tensor],  # Σφ(k)vᵀ, Σφ(k), Σk, Σv of the keys seen before
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The recurrence, one token after the other: add a key and a value to the sums, then read them."""
    constant, zeroth, slope = coefficients.view(-1, 1, 1, 1, 3).unbind(-1)
    feature_value, feature_sum, key_sum, value_sum = sums
    rows = []
    for i in range(query.shape[-2]):
        takes_part = torch.ones_like(count, dtype=torch.bool) if mask is None else mask[..., i : i + 1, :]
        k = torch.where(takes_part, key[..., i : i + 1, :] * key_scale, 0.0)
        v = torch.where(takes_part, value[..., i : i + 1, :], 0.0)
        phi = monomials(k, blocks)
        feature_value = feature_value + sum_over_rows(phi, v)
        feature_sum = feature_sum + sum_over_rows(phi, torch.ones_like(v[..., :1]))
        key_sum, value_sum, count = key_sum + k, value_sum + v, count + takes_part

        q = query[..., i : i + 1, :] * query_scale
        phi = weigh(monomials(q, blocks), weight)
        denominator = constant * count + apply_to_rows(phi, feature_sum)
        mean_key, mean_value = key_sum / count.clamp(min=1), value_sum / count.clamp(min=1)
        floor = count * zeroth * (slope * (q @ mean_key.mT)).clamp(-80.0, 0.0).exp()
        floored = torch.where(denominator < floor, floor, denominator)
        numerator = constant * value_sum + apply_to_rows(phi, feature_value)
        out = mean_value + (numerator - denominator * mean_value) / torch.where(count > 0, floored, 1.0)
        rows.append(out)
    out = torch.cat(rows, dim=-2) if rows else query.new_zeros(*query.shape[:-1], value.shape[-1])
    return out, (feature_value, feature_sum, key_sum, value_sum)
