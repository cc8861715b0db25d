"""What attention remembers of keys and values it has seen, of a fixed size however many they were."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.inputs import (
    arrange,
    arrange_query,
    check_is_map,
    check_tensors,
    check_window,
    map_for,
    refuse_overflow,
    scale_for,
)
from schoenbat.ops import dispatch
from schoenbat.ops.sums import Before, Sums
from schoenbat.ops.window import Carried
from schoenbat.ops.window_fused import Remembered
from schoenbat.options import check_count, check_dtype
from schoenbat.precision import at_least_float32, without_autocast


@dataclass
class RMFAState:
    """What attention remembers of the keys and values it has seen: sums of fixed size, per key head.

    Features are those of the map without their weights; keys are multiplied by the square root of the map's
    planned scale. All sums are float32 at least.

    Example:
        >>> from schoenbat import rmfa
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> state = RMFAState.zeros(features, batch=2, kv_heads=4, value_dim=8)
        >>> k, v, q = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> out = state.update(k, v, features).read(q, features)
        >>> torch.allclose(out, rmfa(q, k, v, features), atol=1e-5)
        True
    """

    feature_value: Tensor  # (B, H, F, d_v): Σ φ(k) vᵀ
    feature_sum: Tensor  # (B, H, F): Σ φ(k)
    key_sum: Tensor  # (B, H, d)
    value_sum: Tensor  # (B, H, d_v)
    count: Tensor  # (B,) int64

    @classmethod
    def zeros(
        cls,
        features: MaclaurinFeatures,
        batch: int,
        kv_heads: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "RMFAState":
        """A state that has seen nothing; device defaults to the map's, dtype is float32 at least."""
        check_is_map(features)
        for name, size in (("batch", batch), ("kv_heads", kv_heads), ("value_dim", value_dim)):
            check_count(name, size, 0)
        check_dtype("dtype", dtype)
        device = features.feature_weights.device if device is None else torch.device(device)
        dtype = at_least_float32(dtype or torch.float32)
        monomials = _monomials(features)
        shapes = (monomials, value_dim), (monomials,), (features.head_dim,), (value_dim,)
        sums = [torch.zeros(batch, kv_heads, *shape, device=device, dtype=dtype) for shape in shapes]
        return cls(*Sums(*sums), torch.zeros(batch, dtype=torch.int64, device=device))

    def update(
        self,
        key: Tensor,
        value: Tensor,
        features: MaclaurinFeatures,
        key_mask: Tensor | None = None,
        *,
        implementation: str = "auto",
    ) -> "RMFAState":
        """Add keys ``(B, H, n, d)`` and values ``(B, H, n, d_v)``, in place; returns the state itself.

        `implementation` is ``"auto"``, ``"eager"`` or ``"triton"``, here and in `read`.
        """
        check_tensors(key=key, value=value)
        inputs = arrange(key, key, value, key_mask, enable_gqa=False)
        self._check(inputs.key, inputs.value, features)
        with without_autocast(key):
            feature_map = map_for(features, inputs.key)
            more, count = dispatch.accumulate(*inputs[1:4], feature_map, implementation=implementation)
            sums = Sums(*(old + new for old, new in zip(self._sums(), more, strict=True)))
        refuse_overflow(sums, self._sums(), [inputs.key, inputs.value], inputs.mask)
        # One by one: not every version of torch.compile knows how to walk through the fields.
        after = self._from_sums(sums, self.count + count.flatten())
        self.feature_value, self.feature_sum = after.feature_value, after.feature_sum
        self.key_sum, self.value_sum, self.count = after.key_sum, after.value_sum, after.count
        return self

    def read(
        self,
        query: Tensor,
        features: MaclaurinFeatures,
        scale: float | Tensor | None = None,
        *,
        implementation: str = "auto",
    ) -> Tensor:
        """Attention of queries ``(B, H_q, n, d)`` to everything seen so far, as in cross attention."""
        grouped, lead = arrange_query(query, *self.key_sum.shape[:2])
        self._check_map(features)
        dtype = grouped.dtype
        state, (grouped,) = self._at_one_precision(grouped, implementation=implementation)
        with without_autocast(query):
            feature_map = map_for(features, grouped)
            query_scale = scale_for(features, scale, grouped)
            out = dispatch.read(
                grouped, state._before(), feature_map, query_scale, implementation=implementation
            )
        refuse_overflow([out], [grouped, *state._sums()], [], None)
        return out.reshape(*lead, *out.shape[-2:]).to(dtype)

    def reorder(self, index: Tensor) -> "RMFAState":
        """Take the given batch rows, in place, as beam search does; returns the state itself."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
            raise TypeError(f"index must be a tensor of batch rows, int64 (rows,), got {index!r}")
        try:
            taken = {name: tensor.index_select(0, index) for name, tensor in vars(self).items()}
        except IndexError as error:
            rows = self.count.shape[0]
            raise ValueError(
                f"index must hold batch rows from 0 to {rows - 1}, got {index.tolist()}"
            ) from error
        vars(self).update(taken)
        return self

    def copy_(self, other: "RMFAState") -> "RMFAState":
        """Become what another state is, in the memory that is there, where a CUDA graph looks for it.

        Example:
            >>> features = MaclaurinFeatures(8, 64, seed=0)
            >>> kept, seen = (RMFAState.zeros(features, batch=2, kv_heads=4, value_dim=8) for _ in range(2))
            >>> k, v = torch.randn(2, 2, 4, 10, 8)
            >>> kept.copy_(seen.update(k, v, features)).count.tolist()
            [10, 10]
        """
        _copy_all(self, other)
        return self

    def _at_one_precision(self, *rows: Tensor, implementation: str) -> tuple["RMFAState", list[Tensor]]:
        """Where state or rows are float64, both of them; fused kernels, asked for by name, refuse float64."""
        alike = (self.key_sum.dtype == torch.float64) == (rows[0].dtype == torch.float64)
        if alike or implementation == "triton":
            return self, list(rows)
        sums = Sums(*(x.double() for x in self._sums()))
        return self._from_sums(sums, self.count), [x.double() for x in rows]

    def _sums(self) -> Sums:
        return Sums(
            self.feature_value[:, :, None],
            self.feature_sum[:, :, None, :, None],
            self.key_sum[:, :, None, None],
            self.value_sum[:, :, None, None],
        )

    def _before(self) -> Before:
        return Before(self._sums(), self.count.view(-1, 1, 1, 1, 1))

    @classmethod
    def _from_sums(cls, sums: Sums, count: Tensor) -> "RMFAState":
        return cls(
            sums.feature_value[:, :, 0],
            sums.feature_sum[:, :, 0, :, 0],
            sums.key_sum[:, :, 0, 0],
            sums.value_sum[:, :, 0, 0],
            count,
        )

    def _check(self, key: Tensor, value: Tensor, features: MaclaurinFeatures) -> None:
        expected = (*self.key_sum.shape[:2], self.value_sum.shape[-1])
        got = (*key.shape[:2], value.shape[-1])
        if expected != got:
            raise ValueError(f"the state was made for (batch, kv_heads, value_dim) = {expected}, got {got}")
        self._check_map(features)

    def _check_map(self, features: MaclaurinFeatures) -> None:
        check_is_map(features)
        made_for = self.feature_sum.shape[-1], self.key_sum.shape[-1]
        got = _monomials(features), features.head_dim
        if made_for != got:
            raise ValueError(
                f"the state was made for a map of (features without the constant, head_dim) = {made_for}, "
                f"this one has {got}; use the map that it was begun with"
            )


def _tensors_of(state: "RMFAState | RMFAWindowState") -> list[Tensor]:
    own = [x for x in vars(state).values() if isinstance(x, Tensor)]
    return own + (_tensors_of(state.far) if isinstance(state, RMFAWindowState) else [])


@torch.no_grad()
def _copy_all(state: "RMFAState | RMFAWindowState", other: Any) -> None:
    """All or nothing: a tensor of another size would be spread over what is there."""
    if type(other) is not type(state):
        raise TypeError(f"expected a {type(state).__name__} to copy, got {type(other).__name__}")
    pairs = list(zip(_tensors_of(state), _tensors_of(other), strict=True))
    for mine, theirs in pairs:
        if mine.shape != theirs.shape:
            raise ValueError(
                f"a state of another size: a tensor of shape {tuple(theirs.shape)} does not go into one of "
                f"shape {tuple(mine.shape)}; batch, heads, widths, map and window must be the same"
            )
    for mine, theirs in pairs:
        mine.copy_(theirs)


def _monomials(features: MaclaurinFeatures) -> int:
    """How many features a map has without the constant."""
    return features.num_features - features.degrees.count(0)


@dataclass
class RMFAWindowState:
    """What windowed attention remembers: the last `width` keys and values, and the sums of all before them.

    Example:
        >>> features = MaclaurinFeatures(8, 64, seed=0)
        >>> RMFAWindowState.zeros(features, 16, batch=2, kv_heads=4, value_dim=8).key.shape
        torch.Size([2, 4, 16, 8])
    """

    key: Tensor  # (B, H, width, d)
    value: Tensor  # (B, H, width, d_v)
    mask: Tensor  # bool (B, width)
    far: RMFAState

    @classmethod
    def zeros(
        cls,
        features: MaclaurinFeatures,
        width: int,
        batch: int,
        kv_heads: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "RMFAWindowState":
        """A state that has seen nothing; sums are float32 at least.

        Keys and values begin in `dtype` and take that of the tokens that enter, under autocast its own.
        """
        check_window(features, width)
        dtype = dtype or torch.float32
        far = RMFAState.zeros(features, batch, kv_heads, value_dim, device=device, dtype=dtype)
        kept: dict[str, Any] = {"device": far.key_sum.device, "dtype": dtype}
        key = torch.zeros(batch, kv_heads, width, features.head_dim, **kept)
        value = torch.zeros(batch, kv_heads, width, value_dim, **kept)
        mask = torch.zeros(batch, width, dtype=torch.bool, device=key.device)
        return cls(key, value, mask, far)

    @property
    def count(self) -> Tensor:
        """How many keys were seen, ``(B,)`` int64."""
        return self.far.count + self.mask.sum(-1)

    def reorder(self, index: Tensor) -> "RMFAWindowState":
        """Take the given batch rows, in place, as beam search does; returns the state itself."""
        self.far.reorder(index)  # which checks the index
        for name in ("key", "value", "mask"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        return self

    def copy_(self, other: "RMFAWindowState") -> "RMFAWindowState":
        """As `RMFAState.copy_`."""
        _copy_all(self, other)
        return self

    def _remembered(self) -> Remembered:
        return Remembered(self.key, self.value, self.mask, self.far._before())

    @classmethod
    def _from_remembered(cls, after: Remembered) -> "RMFAWindowState":
        sums, count = after.far
        return cls(*after[:3], RMFAState._from_sums(sums, count.flatten()))

    def _carried(self) -> Carried:
        far = self.far
        features = torch.cat([far.feature_value, far.feature_sum[..., None]], dim=-1)
        count = far.count.to(far.key_sum.dtype)[:, None, None].expand(*far.key_sum.shape[:2], 1)
        rows = torch.cat([far.key_sum, far.value_sum, count], dim=-1)
        return Carried(features[:, :, None, None], rows[:, :, None, None, None])


State = RMFAState | RMFAWindowState
