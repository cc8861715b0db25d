"""The cache of a converted layer: a state of fixed size in the place of all keys and values."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from schoenbat.integrations.huggingface.name import NAME
from schoenbat.state import State


class RMFALayer(CacheLayerMixin):
    """One layer of a transformers cache that holds a state of SchoenbAt.

    A cache layer does not know the map. So `update` only hands the new keys on, and the attention, which
    `enter_cache` tells of the layer, adds them to its `state`. Nothing else is kept: the millionth token
    costs what the tenth did.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # New tensors: a slice would hold on to the whole prompt.
        self._no_keys, self._no_values = (
            rows.new_empty(*rows.shape[:-2], 0, rows.shape[-1]) for rows in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.arrived = key_states.shape[-2]
        self.seen += self.arrived
        return key_states, value_states

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """None of them: what cross attention finds here from its second call on."""
        return self._no_keys if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._no_values if self.is_initialized else None

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state: State | None = None
        self.seen = self.arrived = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state.reorder(indices.to(self._no_keys.device))
            self._no_keys, self._no_values = (
                empty.new_empty(len(indices), *empty.shape[1:]) for empty in (self._no_keys, self._no_values)
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self._no_keys.shape[0]) if self.is_initialized else torch.arange(0)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"cannot take {abs(tokens_to_remove)} tokens back out of a state that sums over them all; "
                "assisted decoding needs a model with a key-value cache"
            )

    def offload(self) -> None:
        """The state stays where it is: it is small, and the next token needs it."""

    def prefetch(self) -> None:
        """See `offload`."""


def enter_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a converted attention runs: note on it the `RMFALayer` of its cache that it is to work with.

    Without a cache, that there is none: a call that raised may have left its own.
    """
    # Modules have several names for it.
    cache = next((x for x in (*kwargs.values(), *args) if isinstance(x, Cache)), None)
    module.rmfa_layer = None if cache is None else _layer_for(module, cache)  # type: ignore[assignment]


def leave_cache(module: nn.Module) -> RMFALayer | None:
    """The layer noted for this one call; a second of the same forward finds one that no key went into."""
    layer = getattr(module, "rmfa_layer", None)
    if layer is not None:
        module.rmfa_layer = RMFALayer()  # type: ignore[assignment]
    return layer


def _layer_for(module: nn.Module, cache: Cache) -> RMFALayer | None:
    """The cache's layer, if it is one of ours; one that is still empty becomes so.

    With gradients on, nothing is being decoded, and the ordinary cache stays.
    """
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    causal, index = bool(getattr(module, "is_causal", True)), getattr(module, "layer_idx", None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache if causal else cache.cross_attention_cache
    elif not causal:
        return None
    if not hasattr(module, NAME) or chosen != NAME or not isinstance(index, int):
        return None
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if type(layer) is DynamicLayer and not layer.is_initialized and not torch.is_grad_enabled():
        layer = cache.layers[index] = RMFALayer()
    return layer if isinstance(layer, RMFALayer) else None
