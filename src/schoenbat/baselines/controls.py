"""Two attentions that look at no logits: what a model reaches with them, it owes to its other parts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mean(nn.Module):
    """Every query gets the plain average of the values it may see, whatever the logits.

    A row that sees no key gives zeros. Causal averaging aligns the last query with the last key.

    >>> attention = Mean(head_dim=1, num_heads=1)
    >>> value = torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
    >>> attention(value, value, value, is_causal=True).flatten().tolist()
    [1.0, 2.0, 4.0]
    """

    def __init__(self, head_dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Average ``value`` ``(B, H, n_k, d)`` over the keys where ``key_mask`` ``(B, n_k)`` is True."""
        num_queries, num_keys = query.shape[-2], value.shape[-2]
        # Sums of many 16-bit values would lose most of them.
        values = _for_each_head(value, query, enable_gqa).to(torch.promote_types(value.dtype, torch.float32))
        taking_part = values.new_ones(1, 1, num_keys, 1)
        if key_mask is not None:
            taking_part = key_mask[:, None, :, None].to(values.dtype)
            # Not a product: a masked value may be NaN, and NaN times zero is NaN.
            values = values.masked_fill(~key_mask[:, None, :, None], 0.0)
        if is_causal:
            last_key = torch.arange(num_keys - num_queries, num_keys, device=query.device)
            total = _prefix_sum(values, last_key)
            count = _prefix_sum(taking_part, last_key)
        else:
            total = values.sum(-2, keepdim=True).expand(*values.shape[:-2], num_queries, -1)
            count = taking_part.sum(-2, keepdim=True)
        return (total / count.clamp(min=1)).to(value.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}"


class NoMixing(nn.Module):
    """Every position gets its own value back, so that nothing passes from one token to another.

    It is attention in which a token sees itself alone: a position that ``key_mask`` leaves out gives zeros.

    >>> value = torch.randn(1, 2, 5, 8)
    >>> torch.equal(NoMixing(head_dim=8, num_heads=2)(value, value, value), value)
    True
    """

    def __init__(self, head_dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return ``value`` ``(B, H, n, d)``, zero where ``key_mask`` ``(B, n)`` is False."""
        if query.shape[-2] != value.shape[-2]:
            raise ValueError(
                f"no mixing gives each query its own value, but there are {query.shape[-2]} queries and "
                f"{value.shape[-2]} values; use it for self-attention only"
            )
        values = _for_each_head(value, query, enable_gqa)
        return values if key_mask is None else values.masked_fill(~key_mask[:, None, :, None], 0.0)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}"


def _for_each_head(value: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """The values of every query head; with ``enable_gqa`` a group of them shares one head of values."""
    return value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3) if enable_gqa else value


def _prefix_sum(x: Tensor, last: Tensor) -> Tensor:
    """Sums of ``x`` over dimension -2 up to and with the positions ``last``; zero for a negative one."""
    sums = F.pad(x.cumsum(-2), (0, 0, 1, 0))
    return sums.index_select(-2, (last + 1).clamp(min=0))
