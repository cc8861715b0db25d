"""Softmax attention, exact and quadratic: the baseline of every comparison."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Softmax(nn.Module):
    """``softmax(Q Kᵀ / √d) V`` by ``F.scaled_dot_product_attention``.

    A row that sees no key gives zeros and finite gradients. Causal attention aligns the last query with the
    last key.

    >>> attention = Softmax(head_dim=8, num_heads=2)
    >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    >>> attention(query, key, value, is_causal=True).shape
    torch.Size([1, 2, 5, 8])
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
        """Attend over the keys.

        Args:
            query: ``(B, H, n_q, head_dim)``.
            key: ``(B, H, n_k, head_dim)``.
            value: ``(B, H, n_k, value_dim)``.
            key_mask: bool ``(B, n_k)``, True where a key takes part.
            query_mask: has no effect here; other attentions leave padded queries out of their statistics.
            is_causal: let each query see the keys up to its own position only.
            enable_gqa: let groups of query heads share one head of keys and values.
        """
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        if key_mask is None and (not is_causal or num_queries == num_keys):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, enable_gqa=enable_gqa
            )
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        if is_causal:
            mask = mask.tril(num_keys - num_queries)
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, :]
        # Some backends give NaN for a row without a key, so it attends everywhere and is then cleared.
        sees_a_key = mask.any(-1, keepdim=True)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask | ~sees_a_key, enable_gqa=enable_gqa
        )
        return output.masked_fill(~sees_a_key, 0.0)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}"
