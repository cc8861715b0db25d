"""What all baselines share: the call of ``SchoenbAt``, with its checks."""

from typing import ClassVar

from torch import Tensor, nn

from schoenbat.inputs import arrange, arrange_mask
from schoenbat.options import MOST, check_count


class Baseline(nn.Module):
    """An attention with the call of ``SchoenbAt``; a method is what a subclass does in `attend`."""

    has_causal_form: ClassVar[bool] = True
    needs_equal_lengths: ClassVar[bool] = False
    """Whether it is self-attention only: queries and keys are the same positions."""

    def __init__(self, head_dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = check_count("head_dim", head_dim, most=MOST)
        self.num_heads = check_count("num_heads", num_heads, most=MOST)

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
        """Attend over the keys: ``(B, H, n_q, value_dim)``.

        Args:
            query: ``(B, H, n_q, head_dim)``.
            key: ``(B, H, n_k, head_dim)``.
            value: ``(B, H, n_k, value_dim)``.
            key_mask: bool ``(B, n_k)``, True where a key takes part.
            query_mask: bool ``(B, n_q)``, True where a query is real; methods that choose among the queries
                leave the others out.
            is_causal: let each query see the keys up to its own position only, the last query aligned with
                the last key.
            enable_gqa: let groups of query heads share one head of keys and values.
        """
        name = type(self).__name__
        arranged = arrange(query, key, value, key_mask, enable_gqa)
        num_heads = arranged.query.shape[1] * arranged.query.shape[2]
        if query.shape[-1] != self.head_dim or num_heads != self.num_heads:
            raise ValueError(
                f"{name} was built for {self.num_heads} heads of {self.head_dim}, "
                f"got a query with {num_heads} heads of {query.shape[-1]}"
            )
        if is_causal and not self.has_causal_form:
            raise ValueError(f"{name} has no causal form; use is_causal=False or another attention")
        if self.needs_equal_lengths and query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"{name} is self-attention: it needs as many queries as keys, "
                f"got {query.shape[-2]} and {key.shape[-2]}"
            )
        groups = arranged.query.shape[2]
        q, k, v = (x.expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in arranged[:3])
        real = arranged.mask, arrange_mask("query_mask", query_mask, query.shape[:-3], query)
        keys, queries = (None if mask is None else mask[:, 0, 0, :, 0] for mask in real)
        return arranged.restore(self.attend(q, k, v, keys, queries, is_causal)[:, :, None])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """The method itself, on checked inputs of ``num_heads`` heads each: ``(B, H, n_q, value_dim)``."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}"
