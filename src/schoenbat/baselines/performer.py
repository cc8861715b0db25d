"""Performer: softmax attention by positive orthogonal random features."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.linear_attention import linear_attention
from schoenbat.baselines.masking import hide
from schoenbat.options import MOST, check_count, check_seed
from schoenbat.precision import StaysPrecise, at_least_float32, without_autocast


class Performer(StaysPrecise, Baseline):
    """FAVOR+: softmax attention in linear time by features that are positive and unbiased.

    With ``x = q / d^¼`` and ``y = k / d^¼``,

    ``exp(⟨q, k⟩ / √d) = E φ(x)·φ(y)``, ``φ_r(x) = exp(⟨ω_r, x⟩ − ‖x‖² / 2)``,

    where the directions ω are normal, those of one block of d orthogonal to each other, and shared by the
    heads. Exponents are stabilised: a query row by its own maximum, keys by the maximum over the real keys
    (in the causal form: over those so far). Both leave with the denominator.

    The variance of a weight grows like ``exp(‖x + y‖²)``: for long rows D must be very large.

    Krzysztof Choromanski, Valerii Likhosherstov, David Dohan, Xingyou Song, Andreea Gane, Tamas Sarlos,
    Peter Hawkins, Jared Davis, Afroz Mohiuddin, Lukasz Kaiser, David Belanger, Lucy Colwell, Adrian Weller:
    *Rethinking Attention with Performers*, ICLR 2021.

    Args:
        head_dim: d.
        num_heads: H, of the queries.
        num_features: D, the number of directions.
        seed: of the directions, which are saved with the model and change by `redraw` alone.

    Example:
        >>> attention = Performer(head_dim=8, num_heads=2)
        >>> query, key, value = F.normalize(torch.randn(3, 1, 2, 5, 8), dim=-1).unbind()
        >>> softmax = F.scaled_dot_product_attention(query, key, value)
        >>> torch.allclose(attention(query, key, value), softmax, atol=0.1)
        True
    """

    directions: Tensor  # (num_features, head_dim); rounded, they would not be orthogonal

    def __init__(self, head_dim: int, num_heads: int, *, num_features: int = 128, seed: int = 0) -> None:
        super().__init__(head_dim, num_heads)
        self.num_features = check_count("num_features", num_features, most=MOST)
        dtype = at_least_float32(torch.get_default_dtype())
        self.register_buffer("directions", torch.empty(num_features, head_dim, dtype=dtype))
        self.redraw(seed)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw the directions anew, in place; the same seed gives the same directions on every device.

        Example:
            >>> attention = Performer(head_dim=8, num_heads=2, seed=0)
            >>> attention.redraw(1)
            >>> torch.equal(attention.directions, Performer(head_dim=8, num_heads=2, seed=1).directions)
            True
        """
        generator = Generator("cpu").manual_seed(check_seed(seed))
        self.directions.copy_(_orthogonal_normal(self.num_features, self.head_dim, generator))

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
            query_features = self._query_features(hide(query, query_mask))
            exponents = self._key_exponents(hide(key, key_mask), key_mask)
            peak, log_decay = _peaks(exponents.detach().amax(-1, keepdim=True), is_causal)
            output = linear_attention(
                query_features,
                (exponents - peak).exp(),
                hide(value, key_mask),
                is_causal=is_causal,
                log_decay=log_decay,
            )
        return output.to(value.dtype)

    def _query_features(self, query: Tensor) -> Tensor:
        # Without ‖x‖² / 2, the same for all features of a row: it would leave with the maximum.
        exponents = self._project(query * self.head_dim**-0.25)
        return (exponents - exponents.detach().amax(-1, keepdim=True)).exp()

    def _key_exponents(self, key: Tensor, key_mask: Tensor | None) -> Tensor:
        scaled = key * self.head_dim**-0.25
        exponents = self._project(scaled) - scaled.square().sum(-1, keepdim=True) / 2
        return (
            exponents if key_mask is None else exponents.masked_fill(~key_mask[:, None, :, None], -torch.inf)
        )

    def _project(self, x: Tensor) -> Tensor:
        return x @ self.directions.to(x.dtype).mT

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.num_features}"


def _peaks(highest: Tensor, is_causal: bool) -> tuple[Tensor, Tensor | None]:
    """What key exponents are lowered by, and the causal sums' decay, given each key's highest one.

    In the causal form a key is measured against the highest exponent so far, and the sum before it falls when
    that rises: a maximum over the whole sequence would let a later key press earlier ones to zero.
    """
    nothing = torch.finfo(highest.dtype).min
    highest = F.pad(highest, (0, 0, 1, 0), value=nothing)
    if not is_causal:
        return highest.amax(-2, keepdim=True), None
    running = highest.cummax(-2).values
    before, peak = running[..., :-1, :], running[..., 1:, :]
    # Before the first real key there is nothing to lower, and its jump would swallow the ones that follow.
    return peak, (before - peak).masked_fill(before == nothing, 0.0)


def _orthogonal_normal(count: int, dim: int, generator: Generator) -> Tensor:
    """Normal rows ``(count, dim)``, orthogonal within each block of `dim`; float64 on the CPU."""
    blocks = -(-count // dim)
    randn = partial(torch.randn, dtype=torch.float64, generator=generator, device="cpu")
    q, r = torch.linalg.qr(randn(blocks, dim, dim))
    # QR leaves the signs to the library; made unique, the frame is uniformly distributed.
    rows = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).mT.flatten(0, 1)[:count]
    return rows * randn(count, dim).norm(dim=-1, keepdim=True)
