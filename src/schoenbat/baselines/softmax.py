"""Softmax attention, exact and quadratic: the baseline of every comparison."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.masking import zero_masked
from schoenbat.kernels import kernel
from schoenbat.learned_scale import scale_of
from schoenbat.normalization import PostSBN, PreSBN
from schoenbat.options import check_count, check_flag, check_number
from schoenbat.precision import at_least_float32, without_autocast

# A logit of which softmax makes zero beside any other, and which float16 can hold.
_HIDDEN = -1e4
# From this scale on, what makes such a logit of a query's channel is in the range of float16, too.
_LEAST_SCALE = 1e-4


class Softmax(Baseline):
    """``softmax(Q Kᵀ / √d) V`` by ``F.scaled_dot_product_attention``.

    A row that sees no key gives zeros and finite gradients. Causal attention aligns the last query with the
    last key. Without a window, masked keys get a logit of −10⁴: those of other keys must lie well above it.

    Args:
        head_dim: d.
        num_heads: H.
        naive: form the scores in float32 and form them again in the backward pass, as the attention did that
            the paper of SchoenbAt normalises its times by.
        qk_norm: compute ``postSBN(softmax(s · preSBN(Q) preSBN(K)ᵀ) V)`` with the normalisations of
            `SchoenbAt` and its learned scale of each head, ``s = 4·exp(20ρ)``: all that `SchoenbAt` does but
            for its feature map. Values are then of width head_dim. True stands for the normalisation
            ``"token"``; ``"l2"`` divides rows by their norms alone, ``"batch"`` takes statistics of
            the batch.
        scale: ``"auto"``: learned with ``qk_norm``, else ``1/√d``; None for ``1/√d``; a float.
        window: keys further than so many positions from a query are left out: what `SchoenbAt` with a window
            does without its linear part. Scores are masked, not skipped.
        dropout: the share of attention weights set to zero in training.

    Example:
        >>> attention = Softmax(head_dim=8, num_heads=2)
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        naive: bool = False,
        qk_norm: bool | str = False,
        scale: str | float | None = "auto",
        window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(head_dim, num_heads)
        self.naive, self.dropout = check_flag("naive", naive), check_number("dropout", dropout, 0, 1)
        self.window = None if window is None else check_count("window", window, least=0)
        if qk_norm not in (False, True, "token", "l2", "batch"):
            raise ValueError(f"qk_norm is True, False, 'token', 'l2' or 'batch', got {qk_norm!r}")
        if isinstance(scale, str) and scale != "auto":
            raise ValueError(f"scale is 'auto', a float or None, got {scale!r}")
        self.query_norm, self.key_norm = (
            PreSBN("token" if qk_norm is True else str(qk_norm), num_heads, head_dim) if qk_norm else None
            for _ in range(2)
        )
        learned = bool(qk_norm) and scale == "auto"
        self.rho = nn.Parameter(torch.zeros(num_heads)) if learned else None
        self._fixed_scale = check_number(
            "scale", 1 / math.sqrt(head_dim) if scale in ("auto", None) else scale
        )
        self.post = PostSBN(num_heads, head_dim) if qk_norm else None

    @property
    def scale(self) -> float | Tensor:
        """The logit scale: a float, or a tensor ``(num_heads,)`` where it is learned."""
        if self.rho is None:
            return self._fixed_scale
        return scale_of(self.rho, kernel("exp"))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        if key_mask is not None:
            key, value = (zero_masked(x, key_mask) for x in (key, value))
        if self.query_norm is not None and self.key_norm is not None:
            if is_causal and self.training and self.query_norm.mode == "batch":
                raise ValueError("qk_norm='batch' leaks the future into causal training; use 'token' or 'l2'")
            query, key = self.query_norm(query, query_mask), self.key_norm(key, key_mask)
        scale = self.scale
        if isinstance(scale, Tensor):
            query, scale = (query * scale[:, None, None]).to(key.dtype), 1.0
        rate = self.dropout if self.training else 0.0
        lengths = query.shape[-2], key.shape[-2]
        if self.naive:
            visible = self._visible(lengths, key_mask, is_causal, key.device)
            output = checkpoint(_form_scores, query, key, value, visible, scale, rate, use_reentrant=False)
        elif self.window is None and (not is_causal or lengths[0] == lengths[1]) and scale >= _LEAST_SCALE:
            # The fastest kernels take no mask, and skip the future where they are told so.
            rows = query, key, value
            if key_mask is not None:
                rows = _hide_keys(*rows, key_mask, scale)
            output = F.scaled_dot_product_attention(*rows, is_causal=is_causal, scale=scale, dropout_p=rate)[
                ..., : value.shape[-1]
            ]
        else:
            visible = self._visible(lengths, key_mask, is_causal, key.device)
            output = attend_visible(query, key, value, visible, scale, rate)
        return output if self.post is None else self.post(output)

    def _visible(
        self, lengths: tuple[int, int], key_mask: Tensor | None, is_causal: bool, device: torch.device
    ) -> Tensor | None:
        """None where every query sees every key; else bool ``(B or 1, 1, n_q or 1, n_k)``."""
        visible = None if key_mask is None else key_mask[:, None, None, :]
        if is_causal or self.window is not None:
            num_queries, num_keys = lengths
            last = num_keys - num_queries
            positions = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
            if is_causal:
                positions = positions.tril(last)
            if self.window is not None:
                positions = positions.tril(last + self.window).triu(last - self.window)
            visible = positions if visible is None else positions & visible
        return visible

    def extra_repr(self) -> str:
        options: dict[str, object] = {"naive": self.naive, "dropout": self.dropout}
        if self.query_norm is not None:
            scale = self.scale if self.rho is None else "learned"
            options |= {"qk_norm": self.query_norm.mode, "scale": scale}
        options |= {} if self.window is None else {"window": str(self.window)}
        return super().extra_repr() + "".join(f", {name}={value}" for name, value in options.items() if value)


def _hide_keys(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with some channels more, in which masked keys get logits so low that they weigh nothing.

    As many channels as make widths multiples of 8, which kernels want. Values that are masked must be zeros:
    a row that sees no other key gets a mean of these.
    """
    more = 8 - query.shape[-1] % 8
    hidden = torch.zeros_like(key[..., :1]).masked_fill(~key_mask[:, None, :, None], _HIDDEN)
    key = torch.cat([key, hidden.expand(*key.shape[:-1], more)], dim=-1)
    return F.pad(query, (0, more), value=1.0 / scale), key, F.pad(value, (0, more))


def attend_visible(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention over the keys where ``visible``, ``(..., n_q or 1, n_k)``, is True (None: over all).

    A row that sees no key gives zeros and finite gradients.
    """
    if visible is None:
        return F.scaled_dot_product_attention(query, key, value, scale=scale, dropout_p=dropout)
    # Some backends give NaN for a row without a key, so it attends everywhere and is then cleared.
    sees_a_key = visible.any(-1, keepdim=True)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible | ~sees_a_key, scale=scale, dropout_p=dropout
    )
    return output.masked_fill(~sees_a_key, 0.0)


def _form_scores(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """The formula as it stands, in float32 at least."""
    dtype = at_least_float32(value.dtype)
    with without_autocast(value):
        scores = query.to(dtype) @ key.to(dtype).mT * scale
        if visible is not None:
            # Of all equal scores comes no NaN, as it would of -inf alone.
            sees_a_key = visible.any(-1, keepdim=True)
            scores = scores.masked_fill(~visible & sees_a_key, -torch.inf)
        weights = F.dropout(scores.softmax(-1), dropout)
        if visible is not None:
            weights = weights.masked_fill(~sees_a_key, 0.0)
        return (weights @ value.to(dtype)).to(value.dtype)
