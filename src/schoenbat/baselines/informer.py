"""Informer's ProbSparse attention: exact for the queries that seem to need it, an average for the others."""

import torch
from torch import Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.controls import average
from schoenbat.baselines.drawing import drawn
from schoenbat.baselines.masking import zero_masked
from schoenbat.baselines.selection import spread, take_rows, taking_part_first
from schoenbat.baselines.softmax import attend_visible
from schoenbat.options import MOST, check_count
from schoenbat.precision import StaysPrecise, at_least_float32, without_autocast


class Informer(StaysPrecise, Baseline):
    """ProbSparse attention: softmax for the u queries farthest from uniform attention, the mean for the rest.

    Every query is measured on s sampled keys,

        ``M(q) = max_j ⟨q, k_j⟩ / √d − mean_j ⟨q, k_j⟩ / √d``,

    the u queries of largest M attend exactly, and every other one gets the mean of the values it sees. With
    no more than u queries it is softmax attention. The cost is ``O(n (u + s) d)``.

    The s keys are one from each of s equal stretches of the keys that take part (all of them where they are
    few), drawn anew at each call in training and fixed by the seed in eval. When causal, no query mixes keys
    or values of its future, but which queries are chosen depends on the whole sequence, as in the paper.

    Zhou, Zhang, Peng, Zhang, Li, Xiong, Zhang: "Informer: Beyond Efficient Transformer for Long Sequence
    Time-Series Forecasting", 2021.

    Args:
        head_dim: d.
        num_heads: H.
        num_queries: u.
        num_samples: s.
        seed: of the sample.

    Example:
        >>> attention = Informer(head_dim=8, num_heads=2, num_queries=16, num_samples=16)
        >>> query, key, value = torch.randn(3, 1, 2, 100, 8).unbind()
        >>> attention(query, key, value).shape
        torch.Size([1, 2, 100, 8])
    """

    offsets: Tensor  # (H, s), in [0, 1); rounded, they would be another sample

    def __init__(
        self, head_dim: int, num_heads: int, *, num_queries: int = 128, num_samples: int = 128, seed: int = 0
    ) -> None:
        super().__init__(head_dim, num_heads)
        self.num_queries = check_count("num_queries", num_queries, most=MOST)
        self.num_samples = check_count("num_samples", num_samples, most=MOST)
        self.register_buffer("offsets", drawn(torch.rand, num_heads, num_samples, seed=seed))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        if query_mask is not None:
            query = zero_masked(query, query_mask)
        if key_mask is not None:
            key, value = (zero_masked(x, key_mask) for x in (key, value))
        chosen = self._choose(query, key, key_mask, query_mask)  # (B, H, u)
        visible = None if key_mask is None else key_mask[:, None, None, :]
        if is_causal:
            past = torch.arange(num_keys, device=key.device) <= chosen.unsqueeze(-1) + (
                num_keys - num_queries
            )
            visible = past if visible is None else past & visible
        exact = attend_visible(take_rows(query, chosen), key, value, visible)
        others = average(value, key_mask, num_queries, is_causal)
        return others.scatter(-2, chosen.unsqueeze(-1).expand_as(exact), exact)

    @torch.no_grad()
    def _choose(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
    ) -> Tensor:
        """The positions of the queries that attend exactly, ``(B, H, u)``."""
        if query.shape[-2] <= self.num_queries:
            return torch.arange(query.shape[-2], device=query.device).expand(query.shape[:-1])
        measure = self._measure(query, key, key_mask)
        if query_mask is not None:
            measure = measure.masked_fill(~query_mask[:, None], -torch.inf)
        return measure.topk(self.num_queries).indices

    def _measure(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        """M of every query but for the factor ``1/√d``, which orders nothing: ``(B, H, n_q)``."""
        dtype = at_least_float32(query.dtype)
        if key.shape[-2] == 0:
            return query.new_zeros(query.shape[:-1], dtype=dtype)
        position, is_drawn = self._sample(key.shape[-2], key_mask)
        sampled = take_rows(key, position).to(dtype)
        with without_autocast(query):
            logits = query.to(dtype) @ sampled.mT  # (B, H, n_q, s)
        missing = ~is_drawn.unsqueeze(-2)
        count = is_drawn.sum(-1, keepdim=True).clamp(min=1)
        mean = logits.masked_fill(missing, 0.0).sum(-1) / count
        return logits.masked_fill(missing, -torch.inf).amax(-1) - mean

    def _sample(self, num_keys: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Positions of sampled keys, and which of them are any: ``(B or 1, H, s)`` both."""
        offsets = torch.rand_like(self.offsets) if self.training else self.offsets
        if key_mask is None:
            return spread(offsets, torch.full((1, 1, 1), num_keys, device=offsets.device))
        rank, is_drawn = spread(offsets, key_mask.sum(-1).view(-1, 1, 1))
        return torch.take_along_dim(taking_part_first(key_mask)[:, None], rank, -1), is_drawn

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_queries={self.num_queries}, num_samples={self.num_samples}"
