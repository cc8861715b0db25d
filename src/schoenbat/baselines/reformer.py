"""Reformer's attention: tokens that hash alike are sorted next to each other and attend in chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.drawing import drawn
from schoenbat.baselines.masking import zero_masked
from schoenbat.baselines.selection import take_rows
from schoenbat.options import MOST, check_count
from schoenbat.precision import StaysPrecise, at_least_float32, without_autocast

# More would make the hash cost more than the attention: it is an n × d × buckets product.
_MOST_BUCKETS = 512
# Lower than any logit, so that a token weighs itself only where it sees nothing else...
_ITSELF = -1e5
# ... and this still lower, yet finite: rows that see nothing have gradients of zero and not NaN.
_INVISIBLE = -1e30


class Reformer(StaysPrecise, Baseline):
    """LSH attention: softmax among tokens with like hashes, with queries that are the keys as well.

    **The key argument is not used**: queries and keys are shared, ``k_j = q_j / ‖q_j‖``. In each round,

    1. a token's bucket is the largest of ``[qR; −qR]`` for a random rotation R of the head and round;
    2. tokens are sorted by bucket, within one by position, and cut into chunks of m;
    3. each attends to its own chunk and the one before, by ``softmax(⟨q_i, k_j⟩ / √d)``, and to itself only
       where it sees nothing else.

    The rounds' outputs are averaged by the rounds' sums of exponentials: ``Σ_r exp(z_r − z) o_r`` with
    ``z = log Σ_r exp z_r``; a pair that meets in several rounds counts several times. The cost is
    ``O(rounds · n · m · d)``.

    There are as many buckets as chunks, less one if that is odd; one for one chunk; at most 512. Tokens that
    ``key_mask`` leaves out are counted nowhere and sorted behind all others, so padding changes nothing
    wherever it stands; they give zeros. Rotations are drawn anew at each call in training and fixed by the
    seed in eval. When causal, no token mixes its future, but the tokens after it move the bounds of chunks
    and so decide which of its past it meets, as in the paper.

    Kitaev, Kaiser, Levskaya: "Reformer: The Efficient Transformer", 2020.

    Args:
        head_dim: d.
        num_heads: H.
        num_rounds: the number of hashes.
        chunk_size: m.
        seed: of the rotations.

    Example:
        >>> attention = Reformer(head_dim=8, num_heads=2, chunk_size=16)
        >>> query, key, value = torch.randn(3, 1, 2, 100, 8).unbind()
        >>> attention(query, key, value).shape
        torch.Size([1, 2, 100, 8])
    """

    needs_equal_lengths = True
    rotations: Tensor  # (H, rounds, d, most buckets / 2); rounded, they would move tokens to other buckets

    def __init__(
        self, head_dim: int, num_heads: int, *, num_rounds: int = 2, chunk_size: int = 64, seed: int = 0
    ) -> None:
        super().__init__(head_dim, num_heads)
        self.num_rounds = check_count("num_rounds", num_rounds, most=MOST)
        self.chunk_size = check_count("chunk_size", chunk_size, most=MOST)
        shape = num_heads, num_rounds, head_dim, _MOST_BUCKETS // 2
        self.register_buffer("rotations", drawn(torch.randn, *shape, seed=seed))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        num_tokens = query.shape[-2]
        dtype = at_least_float32(query.dtype)
        if key_mask is None:
            key_mask = torch.ones(query.shape[0], num_tokens, dtype=torch.bool, device=query.device)
        padding = -num_tokens % self.chunk_size
        query, values = (
            F.pad(zero_masked(x, key_mask).to(dtype), (0, 0, 0, padding)) for x in (query, value)
        )
        real = F.pad(key_mask, (0, padding))
        with without_autocast(query):
            order = self._hash(query, real).argsort(stable=True)  # (B, H, rounds, n)
            outputs, log_sums = self._attend_sorted(query, values, real, order, is_causal)
        rank = order.argsort().flatten(1, 2)
        rounds = self.num_heads, self.num_rounds
        outputs, log_sums = (
            take_rows(x.flatten(1, 2), rank).unflatten(1, rounds) for x in (outputs, log_sums)
        )
        output = (log_sums.softmax(2) * outputs).sum(2)[:, :, :num_tokens]
        return zero_masked(output, key_mask).to(value.dtype)

    @torch.no_grad()
    def _hash(self, query: Tensor, real: Tensor) -> Tensor:
        """The bucket of each token, ``(B, H, rounds, n)``, beyond all buckets for one that takes no part."""
        most = min(max(query.shape[-2] // self.chunk_size // 2, 1), _MOST_BUCKETS // 2)
        rotations = self.rotations[..., :most]
        if self.training:
            rotations = torch.randn_like(rotations)
        rotated = query.unsqueeze(2) @ rotations.to(query.dtype)  # (B, H, rounds, n, most)
        # Half as many columns as buckets. A zero is the largest in size only where all are: in bucket 0.
        num_chunks = (real.sum(-1) + self.chunk_size - 1) // self.chunk_size
        used = torch.arange(most, device=query.device) < (num_chunks // 2).view(-1, 1, 1, 1, 1)
        rotated = rotated.masked_fill(~used, 0.0)
        column = rotated.abs().argmax(-1, keepdim=True)
        bucket = column + most * (rotated.gather(-1, column) < 0)
        return bucket.squeeze(-1).masked_fill(~real[:, None, None], 2 * most)

    def _attend_sorted(
        self, query: Tensor, value: Tensor, real: Tensor, order: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``(B, H, rounds, n, d_v)`` and log Σ exp ``(B, H, rounds, n, 1)``, in the sorted order."""
        num_tokens = query.shape[-2]
        chunks = num_tokens // self.chunk_size, self.chunk_size

        def arrange(x: Tensor) -> Tensor:  # (B, H, n, f) -> (B, H, rounds, C, m, f)
            return take_rows(x, order).unflatten(-2, chunks)

        # Positions from 1, with 0 for no token: where there is none, and before the first chunk.
        position = torch.arange(1, num_tokens + 1, device=query.device) * real
        query_position = arrange(position[:, None, :, None].expand(-1, self.num_heads, -1, -1))
        key_position = _with_chunk_before(query_position).mT
        rows = arrange(query)
        keys = _with_chunk_before(F.normalize(rows, dim=-1))
        logits = rows @ keys.mT / self.head_dim**0.5  # (B, H, rounds, C, m, 2m)
        visible = key_position > 0
        if is_causal:
            visible = visible & (key_position <= query_position)
        logits = logits.masked_fill(key_position == query_position, _ITSELF).masked_fill(~visible, _INVISIBLE)
        log_sums = logits.logsumexp(-1, keepdim=True)
        outputs = (logits - log_sums).exp() @ _with_chunk_before(arrange(value))
        return outputs.flatten(3, 4), log_sums.flatten(3, 4)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_rounds={self.num_rounds}, chunk_size={self.chunk_size}"


def _with_chunk_before(chunks: Tensor) -> Tensor:
    """Put before each chunk the one before it, zeros before the first: ``(…, C, m, f) -> (…, C, 2m, f)``."""
    before = F.pad(chunks, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    return torch.cat([before, chunks], dim=-2)
