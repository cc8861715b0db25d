"""`rmfa` of sequences of different lengths that are laid end to end, as flash-attention takes them."""

from functools import partial

from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import rmfa
from schoenbat.inputs import check_tensors
from schoenbat.packed import attend_packed


def rmfa_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """`rmfa` of packed sequences: each attends to itself alone, whatever lies before and after it.

    Sequences of similar length are padded to one batch, at most twice as many rows as there are tokens, in as
    many calls as there are different numbers of binary digits among the lengths (pairs of them, where queries
    and keys have lengths of their own). Lengths are read on the host:
    hand over `cu_seqlens` on the CPU, and nothing waits for a GPU.

    Args:
        query: ``(total_q, H, d)``.
        key: ``(total_k, H, d)``; fewer heads with `enable_gqa`.
        value: ``(total_k, H, d_v)``.
        features: the map.
        cu_seqlens_q: integers ``(B + 1,)``, on any device: sequence b has the rows from ``cu_seqlens_q[b]``
            up to ``cu_seqlens_q[b + 1]``, which may be none.
        cu_seqlens_k: likewise for keys and values. None: as for the queries.
        is_causal: as in `rmfa`, within each sequence: its last query is aligned with its last key.
        scale: as in `rmfa`.
        enable_gqa: as in `rmfa`.
        implementation: as in `rmfa`.

    Returns:
        ``(total_q, H, d_v)``.

    Example:
        >>> import torch
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> q, k, v = torch.randn(3, 10, 4, 8).unbind()  # one sequence of 7 tokens, one of 3
        >>> out = rmfa_varlen(q, k, v, features, torch.tensor([0, 7, 10]), is_causal=True)
        >>> alone = rmfa(*(x[7:].transpose(0, 1) for x in (q, k, v)), features, is_causal=True)
        >>> torch.allclose(out[7:], alone.transpose(0, 1), atol=1e-5)
        True
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensors(**{name: tensor})
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be packed, (total, heads, dim), got {tuple(tensor.shape)}")
    call = partial(
        rmfa, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, implementation=implementation
    )

    def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor) -> Tensor:
        return call(query, key, value, features, key_mask=key_mask)

    return attend_packed(
        attend, query, key, value, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    )
