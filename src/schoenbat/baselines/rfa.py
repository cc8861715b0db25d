"""RFA: attention by random Fourier features of unit rows, with a learned bandwidth and an optional gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.drawing import drawn
from schoenbat.baselines.linear_attention import weighted_sums, with_ones
from schoenbat.baselines.masking import hide, present
from schoenbat.options import MOST, check_count, check_flag
from schoenbat.precision import StaysPrecise, without_autocast

# The denominator's floor is exp(−2/σ²) a key, but not less than this: a small σ would leave no floor.
_LOWEST_EXPONENT = -10.0
# Gates start at 0.95: a memory of about twenty tokens.
_FIRST_GATE = 3.0


class RFA(StaysPrecise, Baseline):
    """Random feature attention: ``exp(⟨q, k⟩ / σ²)`` on unit rows, by sines and cosines.

    For rows of norm 1 the exponential is the Gaussian kernel times a constant, which leaves with the
    denominator, and

    ``exp(−‖q − k‖² / 2σ²) = E φ(q)·φ(k)``, ``φ(x) = √(2/D) [sin(⟨ω_r, x⟩ / σ), cos(⟨ω_r, x⟩ / σ)]``

    for normal ω, drawn for each head and saved with the model; σ is learned, one per head, and starts at 1.
    Such features are signed and their sum over the keys can come out too small; the exact one is never below
    ``exp(−2/σ²)`` a key, so that this is its floor.

    With `gate` the causal sums forget: with ``g_t = sigmoid(⟨w, k_t⟩ + b)``, w and b learned for each head,
    ``S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ``, and the denominator likewise. (The authors compute the gate
    from the layer's input, of which the key row is what an attention sees.)

    Hao Peng, Nikolaos Pappas, Dani Yogatama, Roy Schwartz, Noah A. Smith, Lingpeng Kong: *Random Feature
    Attention*, ICLR 2021.

    Args:
        head_dim: d.
        num_heads: H, of the queries.
        num_features: D, half of them sines, half cosines.
        gate: forget in favour of what is recent; for causal attention alone.
        seed: of the frequencies.

    Example:
        >>> attention = RFA(head_dim=8, num_heads=2, gate=True)
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([1, 2, 5, 8])
    """

    frequencies: Tensor  # (num_heads, num_features / 2, head_dim); rounded, they would be others

    def __init__(
        self, head_dim: int, num_heads: int, *, num_features: int = 128, gate: bool = False, seed: int = 0
    ) -> None:
        super().__init__(head_dim, num_heads)
        if check_count("num_features", num_features, 2, MOST) % 2:
            raise ValueError(f"num_features must be even, half sines and half cosines, got {num_features}")
        self.num_features = num_features
        self.gate = check_flag("gate", gate)
        shape = num_heads, num_features // 2, head_dim
        self.register_buffer("frequencies", drawn(torch.randn, *shape, seed=seed, precision=torch.float64))
        self.log_sigma = nn.Parameter(torch.zeros(num_heads))
        if gate:
            self.gate_weight = nn.Parameter(torch.zeros(num_heads, head_dim))
            self.gate_bias = nn.Parameter(torch.full((num_heads,), _FIRST_GATE))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        if self.gate and not is_causal:
            raise ValueError(
                "RFA with gate=True forgets along the sequence: use is_causal=True or gate=False"
            )
        with without_autocast(query):
            is_real = present(key, key_mask)[:, None, :, None]
            query, key, values = hide(query, query_mask), hide(key, key_mask), hide(value, key_mask)
            weight, log_decay = self._weigh(key, is_real)
            sums = weighted_sums(
                self._features(query),
                self._features(key) * weight,
                with_ones(values),
                is_causal=is_causal,
                log_decay=log_decay,
            )
            per_query, per_key = torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1])
            count = weighted_sums(per_query, weight, per_key, is_causal=is_causal, log_decay=log_decay)
            output = sums[..., :-1] / torch.maximum(sums[..., -1:], self._floor(count))
        return output.to(value.dtype)

    def _weigh(self, key: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor | None]:
        """How much of each key enters the sums, and the log of what it leaves: ``(B, H, n, 1)`` each."""
        if not self.gate:
            return is_real.to(key.dtype).expand(*key.shape[:-1], 1), None
        weight, bias = self.gate_weight.to(key.dtype), self.gate_bias.to(key.dtype)
        logit = key @ weight[:, :, None] + bias[:, None, None]
        return (-logit).sigmoid().masked_fill(~is_real, 0.0), F.logsigmoid(logit).masked_fill(~is_real, 0.0)

    def _features(self, x: Tensor) -> Tensor:
        """``(B, H, n, d) -> (B, H, n, D)``."""
        frequencies = self.frequencies.to(x.dtype) / self._sigma(x.dtype)
        phase = F.normalize(x, dim=-1) @ frequencies.mT
        return torch.cat([phase.sin(), phase.cos()], dim=-1) * (2 / self.num_features) ** 0.5

    def _floor(self, count: Tensor) -> Tensor:
        """The denominator's floor, given how much has entered; 1 where nothing has."""
        exponent = (-2 / self._sigma(count.dtype).square()).clamp(min=_LOWEST_EXPONENT)
        return count * exponent.exp() + (count == 0)

    def _sigma(self, dtype: torch.dtype) -> Tensor:
        return self.log_sigma.to(dtype).exp()[:, None, None]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.num_features}, gate={self.gate}"
