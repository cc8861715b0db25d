"""What `SchoenbAt.calibrate` fits to the rows of a trained model, one function each; rows are normalised."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from schoenbat import learned_scale
from schoenbat.functional import kernelized_attention
from schoenbat.inputs import arrange, without_masked
from schoenbat.options import check_number
from schoenbat.precision import at_least_float32

if TYPE_CHECKING:
    from schoenbat.modules import SchoenbAt

# Of the target's scale. A smaller one is nearer to averaging, and easier for the features to follow.
_SHARES = tuple(step / 20 for step in range(1, 41))
# A truncated series gives far keys of large logits less than their due.
_WEIGHTS = tuple(2 ** (step / 4) for step in range(-12, 33))


@contextmanager
def all_or_nothing(attention: "SchoenbAt") -> Iterator[None]:
    """Where something cannot be fitted, what was fitted before it is undone."""
    before = copy.deepcopy(attention.state_dict())
    try:
        yield
    except BaseException:
        attention.load_state_dict(before)
        raise


def in_one_batch(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows ``(..., H, n, ·)``, checked, as ``(B, H, n, ·)``, and their mask as ``(B, n)``."""
    mask = arrange(query, key, value, key_mask, enable_gqa=True).mask
    query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    return query, key, value, None if mask is None else mask[:, 0, 0, :, 0]


def mean_row(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the rows that take part, ``(..., H, n, d) -> (..., H, 1, d)``, in float32 at least."""
    dtype = at_least_float32(rows.dtype)
    if mask is None:
        return rows.mean(-2, keepdim=True, dtype=dtype)
    mask = mask[..., None, :, None]
    total = torch.where(mask, rows, 0.0).sum(-2, keepdim=True, dtype=dtype)
    return total / mask.sum(-2, keepdim=True).clamp(min=1)


def check_target(attention: "SchoenbAt", target: float) -> None:
    """A scale that the module has, or can have."""
    check_number("target_scale", target)
    if attention.rho is not None:
        learned_scale.rho_of(torch.tensor([target]), attention.kernel)
    elif abs(attention.features.scale - target) > 1e-6 * target:
        raise ValueError(
            f"the scale is fixed at {attention.features.scale:.4g} and cannot become {target:.4g}; make the "
            "module with scale='learned' or the target's"
        )


def fit_centre(attention: "SchoenbAt", key: Tensor, key_mask: Tensor | None) -> None:
    """A learned centre becomes the mean of all keys."""
    if attention.key_center is None:
        return
    mask = None if key_mask is None else key_mask.flatten()
    by_head = key.transpose(0, 1).flatten(1, 2)  # (H, B·n, d)
    if not (by_head.shape[1] if mask is None else mask.any()):
        raise ValueError(f"no key takes part, of {tuple(key.shape)}, so there is no mean to be centred by")
    mean = mean_row(by_head, mask).squeeze(-2)
    if not mean.isfinite().all():
        raise ValueError("key holds NaN or infinite numbers, and so has no mean to be centred by")
    attention.key_center.copy_(mean)


def fit_directions(attention: "SchoenbAt", query: Tensor, key: Tensor, key_mask: Tensor | None) -> None:
    """The directions of an ``"exact-low"`` map become the main ones of queries and (centred) keys."""
    if attention.features.construction != "exact-low":
        return
    batch, heads, _, width = key.shape
    attention.features.calibrate(query.reshape(batch, heads, -1, width), without_masked(key, key_mask))


def fit_scale(attention: "SchoenbAt", call: "Call", target: float) -> None:
    """Each head gets the share of the target's scale at which it comes closest to softmax at that scale.

    Where a window sees near keys exactly, it is the target's scale that they are seen at; the features have a
    scale of their own through separate maps, and a weight for each head besides, which is fitted as well.
    """
    if attention.rho is not None:
        attention.set_scale(torch.full((attention.num_heads,), target))
    exact = call.exact(attention, target)
    shares = [share for share in _SHARES if share * target < attention.kernel.radius]
    if attention.query_map is not None:
        identity = torch.eye(attention.query_map.shape[-1])
        query_map = attention.query_map
        _choose(attention, call, exact, shares, lambda s: query_map.copy_(s[:, None, None] * identity))
    elif attention.window is None and attention.rho is not None:
        _choose(attention, call, exact, shares, lambda share: attention.set_scale(target * share))
    if attention.window is not None:
        _choose(attention, call, exact, _WEIGHTS, attention.set_far_weight)


class Call(NamedTuple):
    """One call of an attention, with normalised rows."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    is_causal: bool

    @property
    def options(self) -> dict[str, Any]:
        grouped = self.query.shape[1] != self.key.shape[1]
        return {"key_mask": self.key_mask, "is_causal": self.is_causal, "enable_gqa": grouped}

    def exact(self, attention: "SchoenbAt", scale: float) -> Tensor:
        return kernelized_attention(*self[:3], attention.kernel, scale=scale, **self.options)

    def approximate(self, attention: "SchoenbAt") -> Tensor:
        return attention.attend(*self[:3], **self.options)


def _choose(
    attention: "SchoenbAt",
    call: Call,
    exact: Tensor,
    candidates: Sequence[float],
    give: Callable[[Tensor], Any],
) -> None:
    """`give` each head the candidate with which its output has the least square error.

    Candidates stay in float64, where those below a radius are not rounded up to it; errors are summed up in
    float32 at least, as in float16 they would not fit.
    """
    among, dtype = torch.tensor(candidates, dtype=torch.float64), at_least_float32(exact.dtype)
    errors = []
    for candidate in among:
        give(candidate.expand(attention.num_heads))
        errors.append((call.approximate(attention).to(dtype) - exact).square().sum((0, 2, 3)))
    # argmin takes a NaN for the least of all numbers.
    found = torch.stack(errors).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if found.isinf().all(0).any():
        raise ValueError(
            "query, key or value hold NaN or infinite numbers, or outputs are beyond the range of "
            f"{exact.dtype}, so that nothing comes closest to softmax"
        )
    give(among[found.argmin(0).cpu()])
