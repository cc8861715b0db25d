"""The one place where attention's inputs are checked and brought into the layout that `ops` work on."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Arranged(NamedTuple):
    """Inputs with leading dimensions flattened and query heads grouped by the key head they share."""

    query: Tensor  # (B, H, G, n_q, d)
    key: Tensor  # (B, H, 1, n_k, d)
    value: Tensor  # (B, H, 1, n_k, d_v)
    mask: Tensor | None  # bool (B, 1, 1, n_k, 1)
    lead: tuple[int, ...]  # the query's own shape up to its rows

    def restore(self, out: Tensor) -> Tensor:
        """``(B, H, G, n_q, d_v) -> (..., n_q, d_v)``."""
        return out.reshape(*self.lead, *out.shape[-2:])


def arrange(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, enable_gqa: bool) -> Arranged:
    """Check everything that can be checked without looking at values."""
    query, key, value = to_autocast(query, key, value)
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _check_kind(name, tensor, query)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same head dimension, got {query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}"
        )
    batch = query.shape[:-3]
    for name, tensor in tensors.items():
        if tensor.shape[:-3] != batch:
            raise ValueError(
                f"{name} has leading dimensions {tuple(tensor.shape[:-3])}, query has {tuple(batch)}; "
                "they must agree"
            )
    query_heads, heads = _heads(query), _heads(key)
    if _heads(value) != heads:
        raise ValueError(f"key has {heads} heads and value {_heads(value)}; they must agree")
    if query_heads != heads and not enable_gqa:
        raise ValueError(
            f"query has {query_heads} heads and key {heads}; pass enable_gqa=True to share key heads"
        )
    if heads == 0 or query_heads % heads:
        raise ValueError(f"{query_heads} query heads cannot share {heads} key heads evenly")
    size = math.prod(batch)
    return Arranged(
        query.reshape(size, heads, query_heads // heads, *query.shape[-2:]),
        key.reshape(size, heads, 1, *key.shape[-2:]),
        value.reshape(size, heads, 1, *value.shape[-2:]),
        arrange_mask("key_mask", key_mask, batch, key),
        tuple(query.shape[:-2]),
    )


def arrange_query(query: Tensor, heads: int) -> tuple[Tensor, tuple[int, ...]]:
    """A query alone, for keys that are sums already: ``(B, heads, G, n_q, d)`` and its lead."""
    (query,) = to_autocast(query)
    _check_kind("query", query, query)
    if _heads(query) % heads:
        raise ValueError(f"{_heads(query)} query heads cannot share {heads} key heads evenly")
    size = math.prod(query.shape[:-3])
    grouped = query.reshape(size, heads, _heads(query) // heads, *query.shape[-2:])
    return grouped, tuple(query.shape[:-2])


def arrange_scale(scale: float | Tensor, query: Tensor, planned: float) -> Tensor:
    """What the queries are multiplied by, ``(H, G, 1, 1)``.

    The planned scale is split evenly over both sides; what a call's scale differs from it goes to the
    queries.
    """
    heads, groups = query.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if not isinstance(scale, Tensor):
        return torch.full((heads, groups, 1, 1), scale / math.sqrt(planned), dtype=dtype, device=query.device)
    if scale.numel() not in (1, heads * groups) or scale.dim() > 1:
        raise ValueError(
            f"scale must be a float or a tensor of one value per query head ({heads * groups},), "
            f"got shape {tuple(scale.shape)}"
        )
    return scale.to(dtype).expand(heads * groups).reshape(heads, groups, 1, 1) / math.sqrt(planned)


def to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, inputs go to its dtype, as those of torch's own attention do; float64 stays."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _check_kind(name: str, tensor: Tensor, query: Tensor) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    if tensor.dtype != query.dtype:
        raise TypeError(f"{name} is {tensor.dtype} but query is {query.dtype}; convert one of them")
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device} but query is on {query.device}; move one of them")
    if tensor.dim() < 2 or tensor.dim() != query.dim():
        raise ValueError(
            f"{name} must be (..., heads, length, dim) with as many dimensions as query, "
            f"got {tuple(tensor.shape)} beside {tuple(query.shape)}"
        )


def _heads(tensor: Tensor) -> int:
    return tensor.shape[-3] if tensor.dim() > 2 else 1


def arrange_mask(name: str, mask: Tensor | None, batch: torch.Size, rows: Tensor) -> Tensor | None:
    """A mask of `rows` as bool ``(B, 1, 1, n, 1)``."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be bool with True = takes part, got {mask.dtype}")
    expected = (*batch, rows.shape[-2])
    if mask.shape != expected and mask.shape != (1,) * len(batch) + expected[-1:]:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(mask.shape)}")
    return mask.expand(expected).reshape(math.prod(batch), 1, 1, rows.shape[-2], 1)
