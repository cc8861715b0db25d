"""Sequences of different lengths laid end to end, or as jagged nested tensors, brought to padded batches.

Sequences whose lengths have the same number of binary digits, of queries and of keys, are padded to a batch
together. So there are at most twice as many rows as tokens, and as many calls as lengths have different
numbers of digits: a handful in self-attention, however many sequences there are.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schoenbat.inputs import to_autocast

# query, key, value (B, H, n, ·) and the keys' mask (B, n_k), True = takes part; the output (B, H, n_q, d_v)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_packed(
    attend: Attend,
    query: Tensor,  # (total_q, H, d)
    key: Tensor,  # (total_k, H_kv, d)
    value: Tensor,  # (total_k, H_kv, d_v)
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
) -> Tensor:
    """Each sequence's queries attend to its own keys, ``(total_q, H, d_v)``.

    Padding comes first, so that a causal call finds the last query of every sequence beside its last key.
    """
    query, key, value = to_autocast(query, key, value)
    starts_q = _starts("cu_seqlens_q", cu_seqlens_q, query)
    starts_k = _starts("cu_seqlens_k", cu_seqlens_k, key)
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"cu_seqlens_q holds {len(starts_q) - 1} sequences and cu_seqlens_k {len(starts_k) - 1}; they "
            "must agree"
        )
    if value.shape[0] != key.shape[0]:
        raise ValueError(f"key has {key.shape[0]} rows and value {value.shape[0]}; each key needs its value")
    together = _alike(starts_q, starts_k)
    if not together:  # nothing to attend, but inputs to check, and an output that gradients go through
        q, k, v = (x[None, :0].transpose(1, 2) for x in (query, key, value))
        return attend(q, k, v, q.new_ones(1, 0, dtype=torch.bool))[0].transpose(0, 1)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for members in together:
        of_query, of_key = (_Padding(starts, members, query.device) for starts in (starts_q, starts_k))
        rows = attend(of_query.pad(query), of_key.pad(key), of_key.pad(value), of_key.mask)
        out = out.index_copy(0, of_query.tokens, of_query.unpad(rows).to(out.dtype))
    return out


class Packed(NamedTuple):
    rows: Tensor  # (total, H, d)
    starts: Tensor  # (B + 1,)


def attend_jagged(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same for nested tensors ``(B, H, jagged, ·)`` of layout torch.jagged; the output is one as well."""
    q, k, v = from_jagged(query, key, value)
    return to_jagged(attend_packed(attend, q.rows, k.rows, v.rows, q.starts, k.starts), q.starts)


def from_jagged(query: Any, key: Any, value: Any) -> tuple[Packed, Packed, Packed]:
    """Nested tensors ``(B, H, jagged, d)`` with their sequences laid end to end."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.layout != torch.jagged:
            raise TypeError(
                f"where one is nested all must have layout torch.jagged, {name} has {tensor.layout}; make "
                "them with torch.nested.nested_tensor(..., layout=torch.jagged)"
            )
        if tensor.dim() != 4:
            raise ValueError(f"expected a nested {name} (B, H, jagged, d), got {tensor.dim()} dimensions")
    q, k, v = (_end_to_end(tensor) for tensor in (query, key, value))
    starts_k, starts_v = k.starts.tolist(), v.starts.tolist()
    if starts_k != starts_v:
        raise ValueError(
            f"key and value must have sequences of the same lengths, got offsets {_shown(starts_k)} and "
            f"{_shown(starts_v)}"
        )
    return q, k, v


def _end_to_end(tensor: Any) -> Packed:
    by_token = tensor.transpose(1, 2).contiguous()
    return Packed(by_token.values(), by_token.offsets())


def to_jagged(rows: Tensor, starts: Tensor) -> Tensor:
    """``(total, H, d_v) -> (B, H, jagged, d_v)``, of which each token's heads lie side by side."""
    return torch.nested.nested_tensor_from_jagged(rows.contiguous(), starts).transpose(1, 2)


def refuse_mask_beside_jagged(*masks: Tensor | None) -> None:
    if any(mask is not None for mask in masks):
        raise ValueError(
            "nested tensors say how long each sequence is; leave the masks out, and pass is_causal=True in "
            "place of a causal one"
        )


class _Padding:
    """Where the tokens of some sequences lie, packed and padded."""

    def __init__(self, starts: Sequence[int], members: Sequence[int], device: torch.device) -> None:
        lengths = [starts[i + 1] - starts[i] for i in members]
        self.count, self.longest, total = len(members), max(lengths), sum(lengths)
        places = torch.tensor([[starts[i] for i in members], lengths], device="cpu")
        if device.type == "cuda":  # a copy from other memory would wait for the GPU
            places = places.pin_memory()
        first, length = places.to(device, non_blocking=True).unbind()
        sequence = torch.repeat_interleave(length, output_size=total)
        before = (length.cumsum(0) - length)[sequence]
        position = torch.arange(total, device=device) - before
        self.tokens = first[sequence] + position
        self.places = sequence * self.longest + (self.longest - length)[sequence] + position
        self.mask = torch.arange(self.longest, device=device) >= (self.longest - length)[:, None]

    def pad(self, packed: Tensor) -> Tensor:
        """``(total, H, d) -> (B, H, longest, d)``."""
        rows = packed.new_zeros(self.count * self.longest, *packed.shape[1:])
        rows = rows.index_copy(0, self.places, packed.index_select(0, self.tokens))
        return rows.unflatten(0, (self.count, self.longest)).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """``(B, H, longest, d_v) -> (tokens, H, d_v)``."""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def _starts(name: str, cu_seqlens: Tensor, packed: Tensor) -> list[int]:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be a tensor of integers (B + 1,), got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or not cu_seqlens.numel():
        raise ValueError(
            f"{name} must be a 1-d tensor of integers 0, n₁, n₁ + n₂, ..., got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    starts = cu_seqlens.tolist()
    falling = any(a > b for a, b in pairwise(starts))
    if starts[0] != 0 or starts[-1] != packed.shape[0] or falling:
        raise ValueError(
            f"{name} must rise from 0 to the number of rows, {packed.shape[0]}, got {_shown(starts)}"
        )
    return starts


def _shown(starts: list[int]) -> list[int | str]:
    return [*starts] if len(starts) < 20 else [*starts[:5], "...", *starts[-5:]]


def _alike(starts_q: Sequence[int], starts_k: Sequence[int]) -> list[list[int]]:
    """Sequences that are padded together; those without a query have no output."""
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in range(len(starts_q) - 1):
        queries, keys = (starts[i + 1] - starts[i] for starts in (starts_q, starts_k))
        if queries:
            together[queries.bit_length(), keys.bit_length()].append(i)
    return list(together.values())
