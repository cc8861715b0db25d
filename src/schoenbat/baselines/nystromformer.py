"""Nyströmformer: softmax attention through landmarks, the means of stretches of the sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.landmarks import newton_schulz, segments, take
from schoenbat.baselines.masking import hide, present
from schoenbat.options import MOST, check_count
from schoenbat.precision import without_autocast


class Nystromformer(Baseline):
    """``softmax(Q K̃ᵀ/√d) · softmax(Q̃ K̃ᵀ/√d)⁺ · softmax(Q̃ Kᵀ/√d) · V`` with m landmarks Q̃ and K̃.

    A landmark is the mean of a stretch of the real tokens, which are cut into m stretches of equal length.
    The pseudo-inverse is iterative, started from ``Aᵀ / (‖A‖₁ ‖A‖∞)`` of each matrix by itself. A sequence of
    at most m real keys needs no approximation: every key is its own landmark, the result exact softmax.

    Query landmarks are taken where ``query_mask`` is True: with padding, give it along with ``key_mask``.
    There is no causal form, since a landmark knows what comes later.

    Yunyang Xiong, Zhanpeng Zeng, Rudrasis Chakraborty, Mingxing Tan, Glenn Fung, Yin Li, Vikas Singh:
    *Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention*, AAAI 2021.

    Args:
        head_dim: d.
        num_heads: H, of the queries.
        num_landmarks: m.
        iterations: steps of the pseudo-inverse.
        conv_kernel_size: None, or the odd width of a depthwise convolution over the values, one filter for
            each head, that is added to the output. Self-attention only.

    Example:
        >>> attention = Nystromformer(head_dim=8, num_heads=2, num_landmarks=16)
        >>> query, key, value = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> softmax = F.scaled_dot_product_attention(query, key, value)
        >>> torch.allclose(attention(query, key, value), softmax, atol=1e-5)
        True
    """

    has_causal_form = False

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 128,
        iterations: int = 6,
        conv_kernel_size: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        if (
            conv_kernel_size is not None
            and check_count("conv_kernel_size", conv_kernel_size, 1, MOST) % 2 != 1
        ):
            raise ValueError(
                f"conv_kernel_size must be odd, to be centred on a token, got {conv_kernel_size}"
            )
        self.num_landmarks = check_count("num_landmarks", num_landmarks, most=MOST)
        self.iterations = check_count("iterations", iterations, 0, MOST)
        self.conv: nn.Conv2d | None = None
        if conv_kernel_size is not None:
            width, reach = (conv_kernel_size, 1), (conv_kernel_size // 2, 0)
            self.conv = nn.Conv2d(num_heads, num_heads, width, padding=reach, groups=num_heads, bias=False)

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
            is_query, is_key = present(query, query_mask), present(key, key_mask)
            output = self._mix(query * self.head_dim**-0.5, key, values, is_query, is_key)
            if self.conv is not None and value.shape[-2]:
                output = output + self._convolve(values, query.shape[-2], self.conv)
        return output.to(value.dtype)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, is_query: Tensor, is_key: Tensor) -> Tensor:
        query_landmarks, is_query_landmark = self._landmarks(query, is_query)
        key_landmarks, is_key_landmark = self._landmarks(key, is_key)
        to_landmarks = _softmax(query @ key_landmarks.mT, is_key_landmark)  # (B, H, n_q, m)
        between = _softmax(query_landmarks @ key_landmarks.mT, is_key_landmark)  # (B, H, m, m)
        between = between.masked_fill(~is_query_landmark[:, None, :, None], 0.0)
        from_landmarks = _softmax(query_landmarks @ key.mT, is_key)  # (B, H, m, n_k)
        approximate = _pseudo_inverse(between, self.iterations) @ (from_landmarks @ value)
        places = torch.arange(self.num_landmarks, device=key.device).expand(len(is_key), -1)
        exact = take(value, is_key, places)
        is_short = is_key.sum(-1) <= self.num_landmarks
        return to_landmarks @ torch.where(is_short[:, None, None, None], exact, approximate)

    def _landmarks(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The means of the stretches, ``(B, H, m, d)``, and which of them have a token, ``(B, m)``."""
        start, size = segments(mask, self.num_landmarks)
        longest = max(1, -(-x.shape[-2] // self.num_landmarks))
        offset = torch.arange(longest, device=x.device)
        places = torch.where(offset < size[..., None], start[..., None] + offset, x.shape[-2])
        tokens = take(x, mask, places.flatten(1)).unflatten(-2, (self.num_landmarks, longest))
        return tokens.sum(-2) / size.clamp(min=1)[:, None, :, None], size > 0

    def _convolve(self, value: Tensor, num_queries: int, conv: nn.Conv2d) -> Tensor:
        if num_queries != value.shape[-2]:
            raise ValueError(
                "Nystromformer with a convolution is self-attention: it needs as many queries as keys, "
                f"got {num_queries} and {value.shape[-2]}"
            )
        weight = conv.weight.to(value.dtype)
        return F.conv2d(value, weight, padding=conv.padding, groups=self.num_heads)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_landmarks={self.num_landmarks}, iterations={self.iterations}"


def _softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the columns where the mask ``(B, m)`` is True.

    Where there is none it is uniform, not NaN: the values behind it are zero.
    """
    return logits.masked_fill(~mask[:, None, None, :], torch.finfo(logits.dtype).min).softmax(-1)


def _pseudo_inverse(matrix: Tensor, iterations: int) -> Tensor:
    sizes = matrix.abs()
    bound = sizes.sum(-1).amax(-1) * sizes.sum(-2).amax(-1)
    return newton_schulz(matrix, matrix.mT / bound.clamp(min=1e-30)[..., None, None], iterations)
