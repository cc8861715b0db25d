"""Skyformer: Gaussian-kernel attention through landmarks drawn from queries and keys."""

import torch
from torch import Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.drawing import drawn
from schoenbat.baselines.landmarks import newton_schulz, segments, take
from schoenbat.baselines.masking import hide, present
from schoenbat.options import MOST, check_count, check_number
from schoenbat.precision import StaysPrecise, without_autocast


class Skyformer(StaysPrecise, Baseline):
    """``κ(Q, Z) (κ(Z, Z) + γI)⁻¹ κ(Z, K) V`` with landmarks Z, which approximates ``κ(Q, K) V``.

    ``κ(q, k) = exp(−‖q − k‖² / 2√d)``: softmax attention's exponential between rows made comparable by their
    own lengths. Rows are **not** divided by their sum. Z holds m queries and m keys, since κ is positive
    definite on both together. The inverse is iterative: scaled to ``D^−½ (κ(Z, Z) + γI) D^−½``, D the row
    sums, its spectrum lies in (0, 1], and the steps start from the identity.

    Landmarks are real tokens, one drawn from each of m stretches of equal length; a sequence of at most m has
    all of its tokens. They are drawn anew in training, as the method does, and fixed by the seed in eval.
    Query landmarks are taken where ``query_mask`` is True: with padding, give it along with ``key_mask``.
    There is no causal form, since a landmark knows what comes later.

    Yifan Chen, Qi Zeng, Heng Ji, Yun Yang: *Skyformer: Remodel Self-Attention with Gaussian Kernel and
    Nyström Method*, NeurIPS 2021.

    Args:
        head_dim: d.
        num_heads: H, of the queries.
        num_landmarks: m, of the queries and of the keys.
        iterations: steps of the inverse.
        regularization: γ > 0.
        seed: of the landmarks in eval.

    Example:
        >>> attention = Skyformer(head_dim=8, num_heads=2)
        >>> query, key, value = torch.randn(3, 1, 2, 100, 8).unbind()
        >>> attention(query, key, value).shape
        torch.Size([1, 2, 100, 8])
    """

    has_causal_form = False
    # Where in its stretch a query's, a key's landmark lies, in [0, 1); rounded, some would be others.
    offsets: Tensor  # (2, num_landmarks)

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        iterations: int = 6,
        regularization: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(head_dim, num_heads)
        if not check_number("regularization", regularization) > 0:
            raise ValueError(f"regularization must be positive, got {regularization}")
        self.num_landmarks = check_count("num_landmarks", num_landmarks, most=MOST)
        self.iterations = check_count("iterations", iterations, 0, MOST)
        self.regularization = regularization
        self.register_buffer("offsets", drawn(torch.rand, 2, num_landmarks, seed=seed))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        with without_autocast(query):
            query, key, values = hide(query, query_mask), hide(key, key_mask), hide(value, key_mask)
            scale = self.head_dim**-0.25
            is_query, is_key = present(query, query_mask), present(key, key_mask)
            output = self._mix(query * scale, key * scale, values, is_query, is_key)
        return output.to(value.dtype)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, is_query: Tensor, is_key: Tensor) -> Tensor:
        offsets = torch.rand_like(self.offsets) if self.training else self.offsets
        of_queries, is_query_landmark = _landmarks(query, is_query, offsets[0])
        of_keys, is_key_landmark = _landmarks(key, is_key, offsets[1])
        landmarks = torch.cat([of_queries, of_keys], dim=-2)  # (B, H, 2m, d)
        absent = ~torch.cat([is_query_landmark, is_key_landmark], dim=-1)[:, None, None, :]
        to_landmarks = _gaussian(query, landmarks).masked_fill(absent, 0.0)  # (B, H, n_q, 2m)
        between = _gaussian(landmarks, landmarks).masked_fill(absent | absent.mT, 0.0)
        # Masked keys have values of zero: without a denominator that is all it takes.
        summary = _gaussian(landmarks, key) @ value  # (B, H, 2m, d_v)
        return to_landmarks @ (self._inverse(between) @ summary)

    def _inverse(self, matrix: Tensor) -> Tensor:
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        regular = matrix + self.regularization * identity
        scale = regular.sum(-1, keepdim=True).rsqrt()
        scaling = scale * scale.mT
        return newton_schulz(regular * scaling, identity, self.iterations) * scaling

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_landmarks={self.num_landmarks}, iterations={self.iterations}, "
            f"regularization={self.regularization}"
        )


def _landmarks(x: Tensor, mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each stretch, ``(B, H, m, d)``, and which stretches have one, ``(B, m)``."""
    start, size = segments(mask, offsets.shape[-1])
    # In float64 an offset below 1 stays below the end of its stretch.
    places = start + (offsets.double() * size).long()
    return take(x, mask, places.masked_fill(size == 0, x.shape[-2])), size > 0


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    """``exp(−‖x_i − y_j‖² / 2)``: ``(..., n, d), (..., m, d) -> (..., n, m)``."""
    halves = [z.square().sum(-1, keepdim=True) / 2 for z in (x, y)]
    return (x @ y.mT - halves[0] - halves[1].mT).exp()
