"""Two attentions that look at no logits: what a model reaches with them, it owes to its other parts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.masking import zero_masked
from schoenbat.precision import at_least_float32


class Mean(Baseline):
    """Every query gets the plain average of the values it may see, whatever the logits.

    A row that sees no key gives zeros. Causal averaging aligns the last query with the last key.

    >>> attention = Mean(head_dim=1, num_heads=1)
    >>> value = torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
    >>> attention(value, value, value, is_causal=True).flatten().tolist()
    [1.0, 2.0, 4.0]
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return average(value, key_mask, query.shape[-2], is_causal)


class NoMixing(Baseline):
    """Every position gets its own value back, so that nothing passes from one token to another.

    It is attention in which a token sees itself alone: a position that ``key_mask`` leaves out gives zeros.

    >>> value = torch.randn(1, 2, 5, 8)
    >>> torch.equal(NoMixing(head_dim=8, num_heads=2)(value, value, value), value)
    True
    """

    needs_equal_lengths = True

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return value if key_mask is None else zero_masked(value, key_mask)


def average(value: Tensor, key_mask: Tensor | None, num_queries: int, is_causal: bool) -> Tensor:
    """The mean of the values that each query sees: ``(B, H, n_k, d) -> (B, H, n_q, d)``."""
    num_keys = value.shape[-2]
    # Sums of many 16-bit values would lose most of them.
    values = value.to(at_least_float32(value.dtype))
    taking_part = values.new_ones(1, 1, num_keys, 1)
    if key_mask is not None:
        taking_part = key_mask[:, None, :, None].to(values.dtype)
        values = zero_masked(values, key_mask)
    if is_causal:
        last_key = torch.arange(num_keys - num_queries, num_keys, device=value.device)
        total = _prefix_sum(values, last_key)
        count = _prefix_sum(taking_part, last_key)
    else:
        total = values.sum(-2, keepdim=True).expand(*values.shape[:-2], num_queries, -1)
        count = taking_part.sum(-2, keepdim=True)
    return (total / count.clamp(min=1)).to(value.dtype)


def _prefix_sum(x: Tensor, last: Tensor) -> Tensor:
    """Sums of ``x`` over dimension -2 up to and with the positions ``last``; zero for a negative one."""
    sums = F.pad(x.cumsum(-2), (0, 0, 1, 0))
    return sums.index_select(-2, (last + 1).clamp(min=0))
