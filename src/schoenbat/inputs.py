"""The one place where attention's inputs are checked and brought into the layout that `ops` work on."""

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.keeping import is_concrete
from schoenbat.options import check_count, check_flag
from schoenbat.precision import at_least_float32

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Arranged(NamedTuple):
    """Inputs with leading dimensions flattened and query heads grouped by the key head they share."""

    query: Tensor  # (B, H, G, n_q, d)
    key: Tensor  # (B, H, 1, n_k, d)
    value: Tensor  # (B, H, 1, n_k, d_v)
    mask: Tensor | None  # bool (B, 1, 1, n_k, 1)
    lead: tuple[int, ...]  # the query's own shape up to its rows

    def restore(self, out: Tensor) -> Tensor:
        """``(B, H, G, n_q, d_v) -> (..., n_q, d_v)``, unless it does not fit its dtype."""
        refuse_overflow([out], [self.query], [self.key, self.value], self.mask)
        return out.reshape(*self.lead, *out.shape[-2:])


def arrange(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, enable_gqa: bool) -> Arranged:
    """Check everything that can be checked without looking at values."""
    check_tensors(query=query, key=key, value=value)
    check_flag("enable_gqa", enable_gqa)
    first = "key" if query is key else "query"  # a state's update has no query
    query, key, value = to_autocast(query, key, value)
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _check_kind(name, tensor, first, query)
    if query.shape[-1] == 0:
        raise ValueError(f"query and key need a head dimension of at least 1, got {tuple(query.shape)}")
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
                f"{name} has leading dimensions {tuple(tensor.shape[:-3])}, {first} has {tuple(batch)}; "
                "they must agree"
            )
    query_heads, heads = _heads(query), _heads(key)
    if _heads(value) != heads:
        raise ValueError(f"key has {heads} heads and value {_heads(value)}; they must agree")
    if heads == 0 or query_heads % heads:
        raise ValueError(
            f"{query_heads} query heads cannot share {heads} key heads evenly: query {tuple(query.shape)} "
            f"and key {tuple(key.shape)} are taken for (..., heads, n, d)"
        )
    if query_heads != heads and not enable_gqa:
        raise ValueError(
            f"query has {query_heads} heads and key {heads}; pass enable_gqa=True to share key heads"
        )
    size = math.prod(batch)
    return Arranged(
        query.reshape(size, heads, query_heads // heads, *query.shape[-2:]),
        key.reshape(size, heads, 1, *key.shape[-2:]),
        value.reshape(size, heads, 1, *value.shape[-2:]),
        arrange_mask("key_mask", key_mask, batch, key),
        tuple(query.shape[:-2]),
    )


def arrange_query(query: Tensor, batch: int, heads: int) -> tuple[Tensor, tuple[int, ...]]:
    """A query alone, for keys that are sums already: ``(B, heads, G, n_q, d)`` and its lead."""
    check_tensors(query=query)
    (query,) = to_autocast(query)
    _check_kind("query", query, "query", query)
    if heads == 0 or _heads(query) % heads:
        raise ValueError(f"{_heads(query)} query heads cannot share {heads} key heads evenly")
    size = math.prod(query.shape[:-3])
    if size != batch:
        raise ValueError(f"the state holds {batch} batch rows, query has {size}: {tuple(query.shape)}")
    grouped = query.reshape(size, heads, _heads(query) // heads, *query.shape[-2:])
    return grouped, tuple(query.shape[:-2])


def arrange_scale(scale: float | Tensor, query: Tensor, planned: float) -> Tensor:
    """What the queries are multiplied by, ``(H, G, 1, 1)``.

    The planned scale is split evenly over both sides; what a call's scale differs from it goes to the
    queries.
    """
    check_per_head("scale", scale, query.shape[1] * query.shape[2])
    if isinstance(scale, Tensor):
        return arrange_per_head(scale, query) / math.sqrt(planned)
    return arrange_per_head(scale / math.sqrt(planned), query)


def scale_for(features: MaclaurinFeatures, scale: float | Tensor | None, query: Tensor) -> Tensor:
    """`arrange_scale` for a map; None stands for the scale that it is planned for."""
    return arrange_scale(features.scale if scale is None else scale, query, features.scale)


def arrange_per_head(number: float | Tensor, query: Tensor, name: str = "scale") -> Tensor:
    """One number for all query heads, or for each, as ``(H, G, 1, 1)``; it may be a view."""
    heads, groups = query.shape[1:3]
    check_per_head(name, number, heads * groups)
    dtype = at_least_float32(query.dtype)
    if not isinstance(number, Tensor):
        return torch.full((heads, groups, 1, 1), number, dtype=dtype, device=query.device)
    if number.device != query.device:
        raise ValueError(f"{name} is on {number.device} but query is on {query.device}; move one of them")
    return number.to(dtype).expand(heads * groups).reshape(heads, groups, 1, 1)


def check_per_head(name: str, number: Any, query_heads: int) -> None:
    """A finite number, or a real tensor of one number for all query heads or for each."""
    if isinstance(number, Tensor):
        # Not `in (1, query_heads)`, which takes a symbol of torch.compile for no number that it stands for.
        fits = number.numel() == 1 or number.numel() == query_heads
        if not fits or number.dim() > 1 or number.is_complex():
            raise ValueError(
                f"{name} must be a float or a tensor of one value per query head ({query_heads},), "
                f"got shape {tuple(number.shape)} of {number.dtype}"
            )
    elif torch.compiler.is_compiling():  # where a number may be a symbol
        return
    elif not isinstance(number, numbers.Real):
        raise TypeError(
            f"{name} must be a number or a tensor, got {number!r} of type {type(number).__name__}"
        )
    elif not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")


def refuse_overflow(
    results: Sequence[Tensor], rows: Sequence[Tensor], masked: Sequence[Tensor], mask: Tensor | None
) -> None:
    """ValueError where finite inputs gave numbers beyond the range of a dtype, in any batch row.

    Only where looking costs little: on a GPU it would synchronise, and such rows are NaN or infinite. All
    tensors begin with the batch; `masked` are those that `mask`, bool ``(B, 1, 1, n, 1)``, belongs to.
    """
    if results[0].device.type != "cpu" or not is_concrete(*results, *rows, *masked):
        return
    # One pass over memory; a sum of numbers that all fit may not, which the second look finds out.
    if all(math.isfinite(x.detach().sum(dtype=at_least_float32(x.dtype)).item()) for x in results):
        return
    taking_part = masked if mask is None else [torch.where(mask, x, 0.0) for x in masked]
    overflowed = _finite_rows([*rows, *taking_part]) & ~_finite_rows(results)
    if overflowed.any():
        batch_row = int(overflowed.nonzero()[0])
        raise ValueError(
            f"the result of batch row {batch_row} is beyond the range of {results[0].dtype}, or something on "
            "the way to it is: query, key or value are too large, or a learned scale has run away; normalise "
            "rows, lower the scale (or its learning rate), or use a wider dtype"
        )


def to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, inputs go to its dtype, as those of torch's own attention do; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def autocast_rounds(*tensors: Tensor) -> bool:
    """Whether `to_autocast` takes any of them to another dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return False
    kept = torch.float64, torch.get_autocast_dtype(device)
    return any(t.dtype not in kept for t in tensors)


def _finite_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Which batch rows are finite in all of the tensors."""
    return torch.stack([x.detach().isfinite().flatten(1).all(1) for x in tensors]).all(0)


def check_tensors(**tensors: Any) -> None:
    """Dense tensors of dtypes that attention is computed in, on one device and of as many dimensions."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        _check_dense(name, tensor)
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be a floating-point tensor, got {tensor.dtype}; known are float64, float32, "
                "bfloat16 and float16"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no values; move it to a real one")
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} but {first_name} is on {first.device}; move one of them"
            )
        if tensor.dim() != first.dim():
            raise ValueError(
                f"{name} must have as many dimensions as {first_name}, got {tuple(tensor.shape)} beside "
                f"{tuple(first.shape)}"
            )


def check_sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    num_key_heads: int | None,
    head_dim: int,
    value_dim: int,
) -> None:
    """What a module was made for; `num_key_heads` is None where nothing is kept for each key head."""
    check_tensors(query=query, key=key, value=value)
    if query.dim() < 3 or query.shape[-3] != num_heads:
        raise ValueError(
            f"expected query (B, {num_heads}, n, {head_dim}), got {tuple(query.shape)}"
            f"{_layout_hint(query, num_heads, head_dim)}"
        )
    if query.shape[-1] != head_dim or key.shape[-1] != head_dim:
        raise ValueError(
            f"the map was made for head_dim = {head_dim}, query and key have {query.shape[-1]} and "
            f"{key.shape[-1]}"
        )
    if num_key_heads is not None and key.shape[-3] != num_key_heads:
        raise ValueError(
            f"a centre, a matrix or a map is kept for each of {num_key_heads} key heads, got keys "
            f"{tuple(key.shape)}; pass num_key_heads={key.shape[-3]} where the module is made"
        )
    if value.shape[-1] != value_dim:
        raise ValueError(f"expected values of width {value_dim}, got {tuple(value.shape)}")


def _layout_hint(query: Tensor, num_heads: int, head_dim: int) -> str:
    """For what is not the layout asked for, but somebody's."""
    if query.shape[-2:] == (num_heads, head_dim):
        return "; heads come before positions: pass query.transpose(-3, -2), keys and values likewise"
    if query.shape[-1] == num_heads * head_dim:
        return "; divide rows into heads first, or take MultiheadSchoenbAt, which does"
    return ""


def _check_dense(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got one of layout {tensor.layout}; pad or densify it"
        )


def _check_kind(name: str, tensor: Tensor, first_name: str, first: Tensor) -> None:
    if tensor.dtype != first.dtype:
        raise TypeError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}; convert one of them")
    if tensor.dim() < 2:
        raise ValueError(f"{name} must be (..., heads, length, dim), got {tuple(tensor.shape)}")


def _heads(tensor: Tensor) -> int:
    return tensor.shape[-3] if tensor.dim() > 2 else 1


def arrange_mask(name: str, mask: Tensor | None, batch: torch.Size, rows: Tensor) -> Tensor | None:
    """A mask of `rows` as bool ``(B, 1, 1, n, 1)``."""
    if mask is None:
        return None
    _check_dense(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} must be bool with True = takes part, got {mask.dtype}: pass mask.bool() for ones and "
            "zeros, mask == 0 for a float mask of 0 and -inf"
        )
    expected = (*batch, rows.shape[-2])
    if mask.shape != expected and mask.shape != (1,) * len(batch) + expected[-1:]:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(mask.shape)}")
    if mask.device != rows.device:
        raise ValueError(f"{name} is on {mask.device} but query is on {rows.device}; move one of them")
    return mask.expand(expected).reshape(math.prod(batch), 1, 1, rows.shape[-2], 1)


def without_masked(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros for keys that take no part: a NaN in one would reach gradients."""
    mask = arrange_mask("key_mask", key_mask, key.shape[:-3], key)
    return key if mask is None else torch.where(mask.reshape(*key.shape[:-3], 1, key.shape[-2], 1), key, 0.0)


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
    return features.map(at_least_float32(rows.dtype))


def check_window(features: MaclaurinFeatures, width: int) -> None:
    """An error unless exact near, linear far can be done with this map and width."""
    check_is_map(features)
    check_count("the window's width", width, 0)
    if not features.kernel.is_exponential:
        raise ValueError(
            f"a window needs the kernel 'exp', this map's is {features.kernel.name!r}: near and far weights "
            "are brought under one row maximum as logarithms"
        )
