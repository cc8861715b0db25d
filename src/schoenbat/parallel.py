"""One sequence split over the ranks of a process group: only sums of fixed size travel, whatever its length.

Each rank holds a contiguous shard, in the order of the ranks. What the others need of it is its `RMFAState`:
``Σφ(k)vᵀ, Σφ(k), Σk, Σv`` for each key head and the count of its keys. Bidirectional attention reads the sum
of all states; causal attention goes on from the sum of the states of the ranks before.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from schoenbat.collectives import check_group, gather, sum_of_earlier_ranks, sum_over_ranks
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import attend
from schoenbat.functional import rmfa as rmfa_on_one_rank
from schoenbat.inputs import arrange
from schoenbat.options import check_flag
from schoenbat.state import RMFAState

if TYPE_CHECKING:  # not there where torch is built without torch.distributed
    from torch.distributed import ProcessGroup


def rmfa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    *,
    group: "ProcessGroup",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """`schoenbat.rmfa` of one sequence whose shards lie on the ranks of a group, one after the other.

    With ``S_r = Σ over the keys of rank r``, a rank reads ``Σ_r S_r`` with its queries (one all-reduce), or,
    causally, scans its shard from ``Σ_{p < r} S_p`` (one all-gather, added up in the order of the ranks).
    Both hand over ``F·d_v + F + d + d_v`` numbers for each batch row and key head, F < D the features without
    the constant, in float32 at least, and the counts as int64 beside them; the backward pass as many numbers
    again, without the counts. None of it depends on the length.

    Every rank calls it with the same map and scale, and with shards that agree in all but their length. What
    requires a gradient on one rank does on all, and all of them call backward, one that has no loss of its
    own from zero times its output: a rank that stays away leaves the others waiting.

    The gradients are those of the sum of all ranks' losses. Query, key and value get theirs whole; map and
    scale, of which each rank has a copy, get a part on each rank, and the sum over the ranks is the gradient.

    In a ``DeviceMesh`` of data-parallel and sequence-parallel ranks, ``group`` is ``mesh["sp"].get_group()``,
    and gradients are averaged over *all* ranks: by DDP in the default group, by FSDP2 with
    ``fully_shard(model, mesh=mesh)``. Where each rank's loss is the mean over its tokens, as many on each,
    that gives the gradient of the mean over all tokens.

    Differentiable once. A group of one rank is the plain call.

    Args:
        query: ``(..., H, n_q, d)``, this rank's shard; the lengths may differ from rank to rank and be 0.
        key: ``(..., H, n_k, d)``, likewise.
        value: ``(..., H, n_k, d_v)``, likewise.
        features: the map, the same on all ranks.
        group: the ranks that share the sequence, ``torch.distributed.group.WORLD`` for all there are.
        key_mask: bool ``(..., n_k)``, **True = takes part**, of this rank's keys; other ranks may have none.
        is_causal: a query sees the keys up to its own position; each shard has as many queries as keys.
        scale: as in `schoenbat.rmfa`.
        enable_gqa: as in `schoenbat.rmfa`.
        implementation: ``"auto"``, ``"eager"`` or ``"triton"``.

    Returns:
        ``(..., H, n_q, d_v)``, this rank's shard of the output.

    Example:
        A group of one process; ``torchrun`` starts more.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> rmfa(q, k, v, features, group=dist.group.WORLD, is_causal=True).shape
        torch.Size([2, 4, 10, 8])
        >>> dist.destroy_process_group()
    """
    check_group(group)
    if group.size() == 1:
        return rmfa_on_one_rank(
            query,
            key,
            value,
            features,
            key_mask=key_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            implementation=implementation,
        )
    # Every check of a shard comes before the first message: the other ranks would wait for one that raises.
    # Only what overflows raises later, on its rank alone; the others end with the group's timeout.
    inputs = arrange(query, key, value, key_mask, enable_gqa)
    check_flag("is_causal", is_causal)
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            "causal attention over ranks needs as many queries as keys in each shard, rank "
            f"{group.rank()} has {query.shape[-2]} and {key.shape[-2]}; cut both at the same positions"
        )
    batch, kv_heads = inputs.key.shape[:2]
    state = RMFAState.zeros(
        features, batch, kv_heads, value.shape[-1], device=key.device, dtype=inputs.key.dtype
    )
    state.update(key, value, features, key_mask, implementation=implementation)
    if not is_causal:
        whole = _sum_over_ranks(state, group)
        return whole.read(query, features, scale, implementation=implementation)
    return attend(
        query,
        key,
        value,
        features,
        key_mask=key_mask,
        is_causal=True,
        scale=scale,
        enable_gqa=enable_gqa,
        implementation=implementation,
        state=_sum_of_earlier_ranks(state, group),
    )


def _sum_over_ranks(state: RMFAState, group: "ProcessGroup") -> RMFAState:
    """The state of the whole sequence."""
    count = state.count.clone()
    counting = dist.all_reduce(count, group=group, async_op=True)
    sums = sum_over_ranks(_flatten(state), group)
    counting.wait()
    return _unflatten(sums, count, state)


def _sum_of_earlier_ranks(state: RMFAState, group: "ProcessGroup") -> RMFAState:
    """The state before this rank's shard."""
    sums = sum_of_earlier_ranks(_flatten(state), group)
    counts = gather(state.count, group)
    return _unflatten(sums, counts[: group.rank()].sum(0), state)


def _flatten(state: RMFAState) -> Tensor:
    """A state's four sums as one message ``(B, H, F·d_v + F + d + d_v)``; the count is an integer apart.

    In float32 a count would be exact to 2²⁴ only.
    """
    return torch.cat([part.flatten(2) for part in _parts(state)], dim=2)


def _unflatten(flat: Tensor, count: Tensor, like: RMFAState) -> RMFAState:
    parts = _parts(like)
    pieces = flat.split([math.prod(part.shape[2:]) for part in parts], dim=2)
    feature_value, feature_sum, key_sum, value_sum = (
        piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)
    )
    return RMFAState(feature_value, feature_sum, key_sum, value_sum, count)


def _parts(state: RMFAState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return state.feature_value, state.feature_sum, state.key_sum, state.value_sum
