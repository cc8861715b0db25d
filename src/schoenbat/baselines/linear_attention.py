"""Attention whose weights are inner products of features: sums over the keys, in time linear in n.

The causal form works on chunks: inside a chunk the weights are written out, everything before it is one sum
of fixed size. A decay lets a sum forget, or change the unit that its features are measured in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Chunk c keeps c numbers a row for its weights and D·d_v / c for its sum: about the same for D·d_v ≈ 4096.
_CHUNK = 64
# A denominator below this is a row that sees nothing: its reciprocal would overflow in the gradient.
_SMALLEST = 1e-30


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, log_decay: Tensor | None = None
) -> Tensor:
    """``Σ_j w_ij v_j / Σ_j w_ij`` with ``w_ij = ⟨φ(q_i), φ(k_j)⟩`` for features that are nowhere negative.

    A row whose weights are all zero gives zeros.

    Args:
        query: features φ(q), ``(B, H, n_q, D)``.
        key: features φ(k), ``(B, H, n_k, D)``, zero for a masked key.
        value: ``(B, H, n_k, d_v)``.
        is_causal: as in `weighted_sums`.
        log_decay: as in `weighted_sums`.

    Example:
        >>> one, value = torch.ones(1, 1, 2, 1), torch.tensor([2.0, 4.0]).view(1, 1, 2, 1)
        >>> linear_attention(one, one, value, is_causal=True).flatten().tolist()
        [2.0, 3.0]
    """
    sums = weighted_sums(query, key, with_ones(value), is_causal=is_causal, log_decay=log_decay)
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total < _SMALLEST, 1.0)


def with_ones(value: Tensor) -> Tensor:
    """Values with a column of ones, whose weighted sum is the denominator.

    Example:
        >>> with_ones(torch.zeros(1, 2)).tolist()
        [[0.0, 0.0, 1.0]]
    """
    return F.pad(value, (0, 1), value=1.0)


def weighted_sums(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, log_decay: Tensor | None = None
) -> Tensor:
    """``Σ_j ⟨φ(q_i), φ(k_j)⟩ v_j``, over all keys or over those up to the query.

    Args:
        query: features φ(q), ``(B, H, n_q, D)``.
        key: features φ(k), ``(B, H, n_k, D)``, zero for a masked key.
        value: ``(B, H, n_k, d_v)``.
        is_causal: sum over the keys j ≤ i + n_k − n_q only.
        log_decay: ``(B, H, n_k, 1)``, nowhere positive: before key t enters, all that is summed is multiplied
            by ``exp(log_decay_t)``. Causal only.

    Example:
        >>> one, value = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
        >>> weighted_sums(one, one, value, is_causal=True).flatten().tolist()
        [1.0, 3.0, 6.0]
    """
    if not is_causal:
        return query @ (key.mT @ value)
    num_queries = query.shape[-2]
    num_chunks = max(1, -(-max(num_queries, key.shape[-2]) // _CHUNK))
    query, key, value = (_in_chunks(x, num_chunks) for x in (query, key, value))
    if log_decay is None:
        sums = (query @ key.mT).tril() @ value + query @ _sums_before(key.mT @ value)
    else:
        elapsed = _in_chunks(log_decay, num_chunks).cumsum(-2)
        last = elapsed[..., -1:, :]
        # Cut off before the exponential: above the diagonal it could overflow.
        fading = (elapsed - elapsed.mT).tril().exp()
        before = _fading_sums_before((key * (last - elapsed).exp()).mT @ value, last.exp())
        sums = ((query @ key.mT).tril() * fading) @ value + (query * elapsed.exp()) @ before
    return sums.flatten(-3, -2)[..., num_chunks * _CHUNK - num_queries :, :]


def _in_chunks(x: Tensor, num_chunks: int) -> Tensor:
    """``(B, H, n, ·) -> (B, H, chunks, _CHUNK, ·)``, zeros in front: the last row ends a chunk."""
    padded = F.pad(x, (0, 0, num_chunks * _CHUNK - x.shape[-2], 0))
    return padded.unflatten(-2, (num_chunks, _CHUNK))


def _sums_before(added: Tensor) -> Tensor:
    """What stands before each chunk, given what each adds: ``(B, H, chunks, D, d_v)``."""
    return F.pad(added.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _fading_sums_before(added: Tensor, factor: Tensor) -> Tensor:
    """The same where chunk c multiplies all before it by its factor ``(B, H, chunks, 1, 1)``."""
    state, states = torch.zeros_like(added[:, :, 0]), []
    for new, remaining in zip(added.unbind(2), factor.unbind(2), strict=True):
        states.append(state)
        state = remaining * state + new
    return torch.stack(states, dim=2)
