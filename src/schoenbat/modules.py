"""SchoenbAt, the attention module: pre-SBN, feature attention, post-SBN."""

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schoenbat import parallel
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import RMFAState, attend, rmfa_step
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel
from schoenbat.normalization import NORMALIZATIONS, PostSBN, PreSBN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FIRST_SCALE = 4.0
_FIRST_SHARE_OF_RADIUS = 0.9
# ρ moves by about the learning rate a step; twenty times that is what a scale needs.
SCALE_SPEED = 20.0


class SchoenbAt(nn.Module):
    """Attention in linear time: pre-SBN, random Maclaurin feature attention, post-SBN.

    ``SchoenbAt(Q, K, V) = postSBN(RMFA(preSBN(Q), preSBN(K), V))``; a drop-in for scaled dot-product
    attention on ``(B, H, n, d)``, with one map shared by all heads.

    The defaults are what trained best so far: an ``"unbiased"`` map at a learned scale that starts at 4. To
    stay close to a trained softmax, choose ``construction="exact-low"`` and its scale instead.

    Args:
        head_dim: d.
        num_heads: H, of the queries.
        num_features: D.
        kernel: a name or a `DotProductKernel`.
        construction: as in `MaclaurinFeatures`.
        value_dim: None for head_dim.
        normalization: ``"token"``, ``"batch"``, ``"l2"`` or None, as in `PreSBN`. With None you keep the rows
            short yourself: the map is planned for unit rows.
        scale: ``"learned"``: one per head, ``4·exp(20ρ)``, or ``R·sigmoid(20ρ + logit 0.9)`` for a kernel of
            finite radius R, ρ starting at 0; a float; or None for ``1 / sqrt(head_dim)``, the paper's.
        post: apply post-SBN.
        trainable_features: train the map's directions and a gain for each degree.
        eps: of pre-SBN.
        seed: of the map. None draws one from torch's global generator.
        device: of parameters and map.
        dtype: of parameters; the map is float32 at least.
        process_group: the ranks over which each sequence is split, as in `schoenbat.parallel.rmfa`; None for
            whole sequences. It may be set later; it is shared by a copy and left out of what is saved. `step`
            takes no notice of it.

    Example:
        >>> attention = SchoenbAt(head_dim=8, num_heads=4, num_features=64)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> attention(q, k, v, key_mask=torch.ones(2, 10, dtype=torch.bool)).shape
        torch.Size([2, 4, 10, 8])
    """

    process_group: "ProcessGroup | None" = None

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_features: int = 128,
        kernel: str | DotProductKernel = "exp",
        *,
        construction: str = "unbiased",
        value_dim: int | None = None,
        normalization: str | None = "token",
        scale: str | float | None = "learned",
        post: bool = True,
        trainable_features: bool = False,
        eps: float = 1e-13,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__()
        if normalization not in NORMALIZATIONS:
            raise ValueError(
                f"unknown normalization {normalization!r}; known: {', '.join(map(repr, NORMALIZATIONS))}"
            )
        if isinstance(scale, str) and scale != "learned":
            raise ValueError(f"scale must be 'learned', a float or None, got {scale!r}")
        self.process_group = process_group
        self._check_group(normalization)
        self.num_heads = num_heads
        self.value_dim = head_dim if value_dim is None else value_dim
        self.always_causal = False
        self.kernel = get_kernel(kernel)
        learned = isinstance(scale, str)
        first = _first_scale(self.kernel) if isinstance(scale, str) else scale
        self.features = MaclaurinFeatures(
            head_dim,
            num_features,
            self.kernel,
            construction=construction,
            scale=first,
            trainable=trainable_features,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        self.rho = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if learned else None
        self.query_norm: PreSBN | None = None
        self.key_norm: PreSBN | None = None
        if normalization is not None:
            self.query_norm, self.key_norm = (
                PreSBN(normalization, num_heads, head_dim, eps=eps, device=device, dtype=dtype)
                for _ in range(2)
            )
        self.post = PostSBN(num_heads, self.value_dim, device=device, dtype=dtype) if post else None

    @classmethod
    def paper(
        cls,
        head_dim: int,
        num_heads: int,
        num_features: int = 128,
        kernel: str | DotProductKernel = "exp",
        reading: str = "text",
        **more: Any,
    ) -> "SchoenbAt":
        """The paper's method, in one of its two readings.

        - ``"text"``: batch statistics, i.i.d. map, bidirectional, scale ``1 / sqrt(d)``.
        - ``"code"``: what its authors ran: token statistics, exact constant, always causal.

        Example:
            >>> SchoenbAt.paper(8, 4, 64).features.construction
            'paper'
        """
        readings = {"text": ("batch", "paper"), "code": ("token", "paper-code")}
        if reading not in readings:
            raise ValueError(f"unknown reading {reading!r}; known: 'text', 'code'")
        normalization, construction = readings[reading]
        options = {"normalization": normalization, "construction": construction, "scale": None, **more}
        module = cls(head_dim, num_heads, num_features, kernel, **options)
        module.always_causal = reading == "code"
        return module

    @property
    def scale(self) -> float | Tensor:
        """The logit scale: a float, or a tensor ``(num_heads,)`` where it is learned."""
        if self.rho is None:
            return self.features.scale
        rho = SCALE_SPEED * self.rho.to(torch.promote_types(self.rho.dtype, torch.float32))
        if self.kernel.radius == math.inf:
            return FIRST_SCALE * rho.exp()
        share = math.log(_FIRST_SHARE_OF_RADIUS / (1 - _FIRST_SHARE_OF_RADIUS))
        # In float32 a sigmoid reaches 1.
        return self.kernel.radius * torch.sigmoid(rho + share).clamp(max=1 - 1e-6)

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
        """Attend.

        Args:
            query: ``(B, H, n_q, d)``.
            key: ``(B, H, n_k, d)``; fewer heads with `enable_gqa`.
            value: ``(B, H, n_k, d_v)``.
            key_mask: bool ``(B, n_k)``, **True = takes part**.
            query_mask: bool ``(B, n_q)``, **True = takes part**: only ``"batch"`` looks at it, for its
                statistics.
            is_causal: query i sees keys up to ``i + n_k − n_q``.
            enable_gqa: let several query heads share a key head.

        Returns:
            ``(B, H, n_q, d_v)``.
        """
        is_causal = is_causal or self.always_causal
        self._check(query, value)
        if is_causal and self.training and self.query_norm is not None and self.query_norm.mode == "batch":
            raise ValueError(
                "normalization='batch' takes its statistics from the whole sequence and so leaks the future "
                "into causal training; use normalization='token'"
            )
        self._check_group(None if self.query_norm is None else self.query_norm.mode)
        unit_rows = None
        if self.query_norm is not None and self.query_norm.mode != "batch" and self.process_group is None:
            unit_rows = self.query_norm.unit_rows
        else:
            query, key = self._normalize(query, key, query_mask, key_mask)
        options: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "scale": self.scale,
            "enable_gqa": enable_gqa,
        }
        if self.process_group is None:
            out = attend(query, key, value, self.features, unit_rows=unit_rows, **options)
        else:
            out = parallel.rmfa(query, key, value, self.features, group=self.process_group, **options)
        return out if self.post is None else self.post(out)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: RMFAState | None,
        *,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, RMFAState]:
        """Decode n new tokens; the state of fixed size stands for all before them (None: nothing before).

        Example:
            >>> attention = SchoenbAt(8, 4, 64).eval()
            >>> q, k, v = torch.randn(3, 2, 4, 1, 8).unbind()
            >>> out, state = attention.step(q, k, v, None)
            >>> out, state = attention.step(q, k, v, state)
            >>> state.count.tolist()
            [2, 2]
        """
        self._check(query, value)
        if self.training and self.query_norm is not None and self.query_norm.mode == "batch":
            raise ValueError("normalization='batch' decodes with its running averages: call .eval() first")
        if state is None:
            batch, kv_heads = key.shape[:2]
            state = RMFAState.zeros(
                self.features, batch, kv_heads, self.value_dim, device=key.device, dtype=key.dtype
            )
        query, key = self._normalize(query, key, None, key_mask)
        grouped = query.shape[-3] != key.shape[-3]
        out, state = rmfa_step(
            query,
            key,
            value,
            self.features,
            state,
            key_mask=key_mask,
            scale=self.scale,
            enable_gqa=grouped,
        )
        return (out if self.post is None else self.post(out)), state

    def _normalize(
        self,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        *,
        track: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query, query_mask, track=track), self.key_norm(key, key_mask, track=track)

    def __getstate__(self) -> dict[str, Any]:
        """Without the group, which means nothing outside the processes that made it."""
        return {name: value for name, value in vars(self).items() if name != "process_group"}

    def __deepcopy__(self, memo: dict[int, Any]) -> "SchoenbAt":
        """With the same group: layers that are copied split the same sequence."""
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.process_group = self.process_group
        return new

    def _check_group(self, normalization: str | None) -> None:
        if self.process_group is None:
            return
        parallel.check_group(self.process_group)
        if normalization == "batch":
            raise ValueError(
                "normalization='batch' takes its statistics from the whole sequence, of which a rank of the "
                "process_group holds a shard; use normalization='token', 'l2' or None"
            )

    def _check(self, query: Tensor, value: Tensor) -> None:
        if query.dim() < 3 or query.shape[-3] != self.num_heads:
            raise ValueError(
                f"expected query (B, {self.num_heads}, n, {self.features.head_dim}), got {tuple(query.shape)}"
            )
        if value.shape[-1] != self.value_dim:
            raise ValueError(f"expected values of width {self.value_dim}, got {tuple(value.shape)}")


def _first_scale(kernel: DotProductKernel) -> float:
    return FIRST_SCALE if kernel.radius == math.inf else _FIRST_SHARE_OF_RADIUS * kernel.radius
