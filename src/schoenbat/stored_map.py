"""The tensors of a feature map: how they are held, replaced, moved, saved and loaded."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from schoenbat.ops.keeping import may_keep, without_transforms
from schoenbat.precision import StaysPrecise, at_least_float32

DIRECTIONS = ("linear", "quadratic", "tail")
_TRAINED = (*DIRECTIONS, "gains")


class StoredMap(StaysPrecise):
    """Directions, squared weights and degrees of D features; trained or not, whole or not loaded at all.

    Args:
        num_features: D.
        num_heads: None for one map for all heads.
        trainable: whether directions, and a gain for each degree, are parameters.
        like: an empty tensor of the device and dtype that all have.
    """

    # Rounded once, it would be another map.
    linear: Tensor
    quadratic: Tensor
    tail: Tensor
    degree_table: Tensor
    feature_weights: Tensor

    gains: nn.Parameter | None

    def __init__(self, num_features: int, num_heads: int | None, trainable: bool, like: Tensor) -> None:
        super().__init__()
        self.num_features, self.num_heads, self.trainable = num_features, num_heads, trainable
        # Degrees are kept as floats: an average of equal integers, as in a moving average of a model with its
        # buffers, may be cut off to the one below.
        for name in (*DIRECTIONS, "feature_weights", "degree_table"):
            self._hold(name, like, trainable and name in DIRECTIONS)
        self.gains = nn.Parameter(like.clone()) if trainable else None
        self._degrees: tuple[int, ...] = ()
        self._degrees_from: tuple[Tensor, int] | None = None

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degree of each feature, in order.

        Read anew where its table was written in place, as DDP does on all ranks but one, or is another for
        the time of a call, as in `torch.func.functional_call`; not by a compiled call, and on a GPU not once
        it was read: DDP writes it at every step, and to look at it is to wait.
        """
        table = self.degree_table
        if (values := without_transforms(table)) is not None and not values.is_cuda:
            return _degrees_of_all(values)
        if may_keep(table) and not table.is_meta:
            known = self._degrees_from
            is_written = known is not None and known[1] != table._version and not table.is_cuda
            if known is None or known[0] is not table or is_written:
                self._degrees, self._degrees_from = degrees_in(table), (table, table._version)
        return self._degrees

    @degrees.setter
    def degrees(self, degrees: tuple[int, ...]) -> None:
        self._degrees, self._degrees_from = degrees, None

    def _hold(self, name: str, tensor: Tensor, is_parameter: bool) -> None:
        if is_parameter:
            self.register_parameter(name, nn.Parameter(tensor.clone()))
        else:
            self.register_buffer(name, tensor)

    def _replace(self, name: str, tensor: Tensor) -> None:
        old = getattr(self, name)
        # Contiguous, as a loaded map is: other strides would be rounded differently.
        tensor = tensor.to(device=old.device, dtype=old.dtype).contiguous()
        # A block without directions has nothing to train, and FSDP2 cannot split an empty parameter.
        is_parameter = self.trainable and name in _TRAINED and tensor.numel() > 0
        if is_parameter != isinstance(old, nn.Parameter):
            delattr(self, name)
            self._hold(name, tensor, is_parameter)
            # In one order, whatever map was there: an optimizer's state knows parameters by their places.
            for known in filter(self._parameters.__contains__, _TRAINED):
                self._parameters[known] = self._parameters.pop(known)
        elif is_parameter:
            old.data = tensor  # the same Parameter: an optimizer that holds it keeps it
            old.grad = None  # it was that of other directions, perhaps of another number of them
        else:
            setattr(self, name, tensor)

    def __getstate__(self) -> dict[str, Any]:
        """In a copy the versions of buffers begin anew, and do not tell them apart."""
        return {**super().__getstate__(), "_degrees_from": None}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take a saved map, which may have other degrees and sizes, whole or not at all.

        A map of the same sizes is written into the memory of this one: a CUDA graph may be reading it.
        """
        own = {name: getattr(self, name) for name in self._buffers | self._parameters}
        state_dict = _as_kept(state_dict, prefix, own)
        saved = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        degrees = self._degrees_of(saved)
        is_other = degrees != self.degrees or any(saved[name].shape != own[name].shape for name in saved)
        lacking = sorted(own.keys() - saved.keys() - {"gains"})
        if is_other and lacking:
            error_msgs.append(
                f"{prefix}{lacking[0]} is missing beside parts of another map, which is loaded whole or not "
                "at all: add it to the state dict"
            )
        rest = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        if (is_other and lacking) or not all(_fits(name, saved[name], own[name]) for name in saved):
            # What is wrong is found out on a copy.
            super(StoredMap, copy.deepcopy(self))._load_from_state_dict(state_dict, prefix, *rest)
            return
        if self.gains is not None and degrees != self.degrees:
            saved.setdefault("gains", torch.ones(self.num_heads or 1, max(degrees) + 1))
        for name in saved:
            if saved[name].shape != own[name].shape:
                self._replace(name, own[name].new_ones(saved[name].shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.degrees = degrees

    def _degrees_of(self, saved: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The degrees of a map that is being loaded; this one's own where it does not say."""
        table = saved.get("degree_table")
        if table is None or table.is_meta or table.shape != (self.num_features,):
            return self.degrees
        return degrees_in(table)


def _as_kept(state_dict: Mapping[str, Any], prefix: str, names: Iterable[str]) -> dict[str, Any]:
    """Of a state dict that was cast to half precision as a whole, or has integers for degrees: in float32."""
    kept = dict(state_dict)
    for key in {prefix + name for name in names} & kept.keys():
        kept[key] = kept[key].to(at_least_float32(kept[key].dtype))
    return kept


def _fits(name: str, saved: Tensor, own: Tensor) -> bool:
    """Whether a saved tensor can be loaded in place of a map's own: of some, the last size is free."""
    return saved.shape == own.shape or (name in _TRAINED and saved.shape[:-1] == own.shape[:-1])


def degrees_in(table: Tensor) -> tuple[int, ...]:
    """The degrees that a map's table of floats stands for."""
    return tuple(whole(table).tolist())


def _degrees_of_all(tables: Tensor) -> tuple[int, ...]:
    """The degrees of maps that `torch.vmap` goes through at once, ``(..., num_features)``."""
    first, *rest = tables.flatten(0, -2) if tables.dim() > 1 else (tables,)
    if any(not torch.equal(other, first) for other in rest):
        raise ValueError(
            "maps of different degrees cannot be gone through at once: call one after the other, or draw all "
            "of them from one seed"
        )
    return degrees_in(first)


def whole(table: Tensor) -> Tensor:
    return table.round().long()
