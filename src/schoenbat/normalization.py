"""ppSBN: bring rows into the unit ball before the feature map, give the output its scale back after it."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from schoenbat.collectives import WithProcessGroup, check_group, sum_over_ranks
from schoenbat.inputs import arrange_mask, check_tensors
from schoenbat.ops.odd_power import odd_power
from schoenbat.ops.unit_rows import UnitRows
from schoenbat.options import check_count, check_dtype, check_number
from schoenbat.precision import StaysPrecise, at_least_float32, without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NORMALIZATIONS = ("token", "batch", "l2", None)


class PreSBN(StaysPrecise, WithProcessGroup):
    """Pre-SBN: rows of norm 1 (or 0), as Schoenberg's theorem asks for.

    - ``"token"``: ``u = x − mean over the channels``, then ``u / ‖u‖``. What the authors of the paper ran.
    - ``"batch"``: ``(x − μ) / √(σ² + ε)`` with statistics per head and channel over batch and sequence, then
      ``/ ‖·‖``. What the paper's text says. Running averages in eval mode; statistics of the whole sequence
      leak the future into causal training.
    - ``"l2"``: ``x / ‖x‖``, for rotary positions, which a mean subtraction would destroy.

    Everything is computed in float32 at least; a constant (for ``"l2"``: a zero) row gives zeros, not NaN.

    Args:
        mode: one of the above.
        num_heads: H, for the statistics of ``"batch"``.
        head_dim: d, likewise.
        eps: ε; norms are taken as at least √(d·ε).
        momentum: of the running averages.
        device: of the running averages.
        dtype: of the running averages; float32 at least.
        process_group: the ranks over whose tokens ``"batch"`` takes its statistics in training; None for this
            process alone. See `synchronize_statistics`.

    Shape:
        ``(..., H, n, d) -> (..., H, n, d)``, mask bool ``(..., n)`` with True = takes part.

    Example:
        >>> normalize = PreSBN("token")
        >>> normalize(torch.randn(2, 4, 10, 8)).norm(dim=-1).allclose(torch.ones(2, 4, 10))
        True
    """

    running_mean: Tensor  # in half precision an average with momentum 0.1 would stand still
    running_variance: Tensor

    def __init__(
        self,
        mode: str = "token",
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        eps: float = 1e-13,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__()
        if mode not in NORMALIZATIONS or mode is None:
            raise ValueError(f"unknown normalization {mode!r}; known: 'token', 'batch', 'l2'")
        self.mode, self.eps = mode, check_number("eps", eps, 1e-30)
        self.momentum = check_number("momentum", momentum, 0, 1)
        check_dtype("dtype", dtype)
        if process_group is not None:
            check_group(process_group)
            self.process_group = process_group
        if mode == "batch":
            if num_heads is None or head_dim is None:
                raise ValueError("normalization='batch' keeps statistics: it needs num_heads and head_dim")
            check_count("num_heads", num_heads)
            check_count("head_dim", head_dim)
            dtype = at_least_float32(dtype or torch.get_default_dtype())
            shape = num_heads, 1, head_dim
            self.register_buffer("running_mean", torch.zeros(shape, device=device, dtype=dtype))
            self.register_buffer("running_variance", torch.ones(shape, device=device, dtype=dtype))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, track: bool = True) -> Tensor:
        """Normalise the rows of x; with `track`, the running averages of ``"batch"`` follow in training."""
        check_tensors(x=x)
        with without_autocast(x):
            if self.mode != "batch":
                return self.unit_rows(x)
            rows = self._standardize(x.to(at_least_float32(x.dtype)), mask, track)
            return self.unit_rows(rows).to(x.dtype)

    @property
    def unit_rows(self) -> UnitRows:
        """What is done to each row for itself; but for ``"batch"`` it is all that is done."""
        return UnitRows(self.mode == "token", self.eps)

    def _standardize(self, rows: Tensor, mask: Tensor | None, track: bool) -> Tensor:
        shape = rows.shape
        if rows.dim() < 3 or shape[-3] != self.running_mean.shape[0]:
            raise ValueError(
                f"normalization='batch' keeps statistics for {self.running_mean.shape[0]} heads: expected "
                f"(..., heads, n, d), got {tuple(shape)}; where query heads share key heads pass "
                "num_key_heads"
            )
        arranged = arrange_mask("mask", mask, shape[:-3], rows)
        mask = None if arranged is None else arranged[:, 0]  # (B, 1, n, 1)
        rows = rows.reshape(math.prod(shape[:-3]), *shape[-3:])
        mean, variance = self.running_mean.to(rows.dtype), self.running_variance.to(rows.dtype)
        if self.training:
            if mask is not None:  # here, not in the statistics alone: a NaN would reach every row's gradient
                rows = torch.where(mask, rows, 0.0)
            mean, variance = self._batch_statistics(rows, mask, mean, variance, track)
        return ((rows - mean) * (variance + self.eps).rsqrt()).reshape(shape)

    def _batch_statistics(
        self, rows: Tensor, mask: Tensor | None, mean: Tensor, variance: Tensor, track: bool
    ) -> tuple[Tensor, Tensor]:
        """Masked mean and biased variance ``(H, 1, d)``; where no token takes part, the running averages."""
        everywhere = rows.new_ones(rows.shape[0], 1, rows.shape[2], 1)
        weight = everywhere if mask is None else mask.to(rows.dtype)
        total, count = self._over_ranks(rows.sum((0, 2)).unsqueeze(1), weight.sum())
        divisor = count.clamp(min=1)
        batch_mean = total / divisor
        (squares,) = self._over_ranks(((rows - batch_mean).square() * weight).sum((0, 2)).unsqueeze(1))
        batch_variance = squares / divisor
        momentum = torch.where(count > 0, self.momentum if track else 0.0, 0.0)
        with torch.no_grad():
            self.running_mean.lerp_(batch_mean.detach().to(self.running_mean.dtype), momentum.to(mean.dtype))
            self.running_variance.lerp_(
                batch_variance.detach().to(self.running_variance.dtype), momentum.to(mean.dtype)
            )
        seen = count > 0
        return torch.where(seen, batch_mean, mean), torch.where(seen, batch_variance, variance)

    def _over_ranks(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Each summed over the ranks of the group, in one message."""
        if self.process_group is None:
            return sums
        message = torch.cat([part.flatten() for part in sums])
        parts = sum_over_ranks(message, self.process_group).split([part.numel() for part in sums])
        return tuple(whole.view_as(part) for whole, part in zip(parts, sums, strict=True))

    def extra_repr(self) -> str:
        return f"{self.mode!r}, eps={self.eps:g}"


def synchronize_statistics(model: nn.Module, process_group: "ProcessGroup") -> nn.Module:
    """Let every ``normalization="batch"`` of a model take its statistics over all ranks of a group.

    What `torch.nn.SyncBatchNorm` is to batch normalisation. Tokens that take part are counted and added up on
    all ranks, in two messages of about ``H·d`` numbers for the queries and two for the keys; outputs,
    gradients and running averages are those of one process that sees the joined batch. Every rank must call
    the model, and backward, as often as the others: one that stays away leaves them waiting. Eval mode sends
    nothing.

    Args:
        model: changed in place, before or after data parallelism wraps it.
        process_group: the ranks that share the batch, ``torch.distributed.group.WORLD`` for all there are.

    Returns:
        The model.

    Example:
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )
        >>> norm = synchronize_statistics(PreSBN("batch", 4, 8), torch.distributed.group.WORLD)
        >>> norm(torch.randn(2, 4, 10, 8)).shape
        torch.Size([2, 4, 10, 8])
        >>> torch.distributed.destroy_process_group()
    """
    check_group(process_group)
    for module in model.modules():
        if isinstance(module, PreSBN) and module.mode == "batch":
            module.process_group = process_group
    return model


class PostSBN(nn.Module):
    """Post-SBN: the paper's ``γ · att^β``, made odd and smooth so that negative outputs have a power.

        ``γ · a · (a² + ε²)^((β − 1) / 2)``,  ε = 1e-3, computed in float32 at least

    It is the identity at γ = β = 1, where it starts. β enters by its absolute value, so it stays positive.

    Args:
        num_heads: H.
        value_dim: d_v.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        ``(..., H, n, d_v) -> (..., H, n, d_v)``; γ and β are ``(H, d_v)``.

    Example:
        >>> x = torch.randn(2, 4, 10, 8)
        >>> torch.allclose(PostSBN(4, 8)(x), x)
        True
    """

    epsilon = 1e-3

    def __init__(
        self,
        num_heads: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        check_count("value_dim", value_dim, 0)
        check_dtype("dtype", dtype)
        self.gamma = nn.Parameter(torch.ones(num_heads, value_dim, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.ones(num_heads, value_dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if x.dim() < 3 or (x.shape[-3], x.shape[-1]) != self.gamma.shape:
            heads, width = self.gamma.shape
            raise ValueError(f"expected (..., {heads}, n, {width}), got {tuple(x.shape)}")
        if x.device != self.gamma.device:  # a kernel would read addresses that are not its GPU's
            raise ValueError(
                f"γ and β are on {self.gamma.device}, but rows are on {x.device}; move the module with .to()"
            )
        with without_autocast(x):
            return odd_power(x, self.gamma, self.beta, self.epsilon)
