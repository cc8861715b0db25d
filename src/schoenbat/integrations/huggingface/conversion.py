"""`register` makes SchoenbAt known to transformers; `convert` puts it into a loaded model."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from schoenbat.features import reseed
from schoenbat.integrations.huggingface import layers
from schoenbat.integrations.huggingface.attention import attend
from schoenbat.integrations.huggingface.masks import compact_mask
from schoenbat.integrations.huggingface.name import NAME
from schoenbat.modules import SchoenbAt
from schoenbat.stored_map import degrees_in

DEFAULTS: Mapping[str, Any] = {
    "num_features": "auto",
    "kernel": "exp",
    "construction": "exact-low",
    "normalization": None,
    "scale": None,
    "center_keys": "auto",
    "post": False,
    "seed": 0,
}
"""What stays closest to a trained softmax: rows as they are, the model's own scale, low degrees exact."""

OF_THE_MODEL = frozenset(
    ("head_dim", "num_heads", "num_key_heads", "value_dim", "device", "dtype", "process_group")
)
"""Options of `SchoenbAt` that a model's own modules decide."""

LAYERS = "layers"
"""Beside the options in a saved model's config: which layers are converted, where others could be."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: which modules carry a SchoenbAt, and which were left alone, for what reason."""

    converted: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} attention layers converted, {len(self.left)} left as they were"]
        return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in self.left.items())])


def register() -> None:
    """Make ``attn_implementation="schoenbat"`` known to transformers.

    Models that are built from then on with that implementation (``from_config``, ``from_pretrained``), and
    saved models that `convert` had converted, get a `SchoenbAt` in each attention module. Options are read
    from the config's entry ``schoenbat`` (``from_pretrained(path, schoenbat={"num_features": 256})`` sets
    it); what is not said there is as in `convert`. To load a converted model with its softmax instead:
    ``from_pretrained(path, attn_implementation="sdpa")``. Calling it again changes nothing.

    Example:
        >>> from transformers import AutoModel, BertConfig
        >>> register()
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = AutoModel.from_config(config, attn_implementation="schoenbat")
        >>> model.encoder.layer[0].attention.self.schoenbat.features.construction
        'exact-low'
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, compact_mask)
    setattr(PreTrainedConfig, NAME, None)  # from_pretrained takes as options what its config knows
    _follow_construction()


@functools.cache
def _follow_construction() -> None:
    """Once: transformers has no place of its own between a model's construction and its loading."""
    kind = PreTrainedModel
    kind.post_init = _then_attach(kind.post_init)  # type: ignore[method-assign]
    kind._initialize_weights = _then_fill(kind._initialize_weights)  # type: ignore[method-assign]
    kind._check_and_adjust_attn_implementation = _by_record(kind._check_and_adjust_attn_implementation)  # type: ignore[method-assign]
    kind.save_pretrained = _with_record(kind.save_pretrained)  # type: ignore[method-assign]


def convert(model: PreTrainedModel, **options: Any) -> Conversion:
    """Replace the attention of a loaded model by SchoenbAt, in place; its own weights stay as they are.

    One walk over the modules: whatever looks its attention up in transformers' `AttentionInterface` and
    needs nothing that linear attention cannot do gets a `SchoenbAt`, with a map of its own. The rest is named
    in the result and keeps its softmax. Options are written to ``model.config.schoenbat``, so that the model
    can be saved, shared, and loaded after `register`.

    The defaults stay closest to softmax attention without training: no normalisation, the model's own scale,
    an ``"exact-low"`` map. For `distill` afterwards, add ``scale="learned", post=True,
    trainable_features=True``.

    Args:
        model: a transformers model.
        **options: of `SchoenbAt`: ``num_features`` (``"auto"``: 128, or twice the width of wider heads, whose
            linear part alone would take 128), ``kernel`` (a name), ``construction``, ``normalization``,
            ``scale`` (None: the model's own), ``center_keys`` (``"auto"``: the mean key where attention is
            bidirectional, a learned one where it is causal), ``window``, ``post``, ``trainable_features``,
            ``seed``, ...

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> print(convert(BertModel(config), num_features=64))
        2 attention layers converted, 0 left as they were
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a model of transformers, got {type(model).__name__}: load one first, as with "
            "AutoModel.from_pretrained; elsewhere MultiheadSchoenbAt takes the place of nn.MultiheadAttention"
        )
    register()
    options = _checked({**DEFAULTS, **options})
    found = list(layers.find(model))
    left = {item.name: item.obstacle for item in found if item.obstacle is not None}
    fit = [item for item in found if item.obstacle is None]
    conversion = Conversion(tuple(item.name for item in fit), left)
    if fit:
        _attach_all(model, [item.module for item in fit], options)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                setattr(part.config, NAME, options)
        model.set_attn_implementation(NAME)
    if left or not fit:
        _log.warning("%s", conversion)
    return conversion


def _attach_all(model: nn.Module, modules: list[nn.Module], options: Mapping[str, Any]) -> None:
    """All or none: an option that does not fit raises before the first module is changed."""
    built = [layers.build(module, options, _device(module)) for module in modules]
    for module, attention in zip(modules, built, strict=True):
        layers.attach(module, attention)
    with torch.device("cpu"):  # transformers builds models on the meta device, where no seed can be drawn
        reseed(model, options["seed"])


def _device(module: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in module.parameters()), None)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    if refused := sorted(OF_THE_MODEL & options.keys()):
        raise TypeError(f"no options here, since the model's own modules decide them: {', '.join(refused)}")
    if not isinstance(options["kernel"], str):
        raise TypeError(
            f"kernel must be a name, so that the model's config can be saved, got {options['kernel']!r}"
        )
    if options["normalization"] == "batch":
        raise ValueError(
            "normalization='batch' needs to know which queries are padding, which transformers does not tell "
            "its attention; use None, 'token' or 'l2'"
        )
    if not isinstance(options["seed"], int):
        raise TypeError(
            f"seed must be an integer, so that a saved model can be rebuilt, got {options['seed']!r}"
        )
    return options


def _by_record(choose: Callable[..., str]) -> Callable[..., str]:
    """Where nobody names an implementation, a model that was saved with SchoenbAt gets it again."""

    @functools.wraps(choose)
    def wrapped(self: PreTrainedModel, named: str | None, *rest: Any, **more: Any) -> str:
        if (recorded := _recorded(self.config)) is not None and named in (None, NAME):
            named = NAME
            for part in (getattr(self.config, name, None) for name in self.config.sub_configs):
                if isinstance(part, PreTrainedConfig) and _recorded(part) is None:
                    setattr(part, NAME, recorded)
        return choose(self, named, *rest, **more)

    return wrapped


def _with_record(save: Callable[..., None]) -> Callable[..., None]:
    """A model is saved with what says how to build it again: its layers by name, if not all are converted."""

    @functools.wraps(save)
    def wrapped(self: PreTrainedModel, *rest: Any, **more: Any) -> None:
        parts: dict[int, PreTrainedModel] = {}
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and _recorded(part.config) is not None:
                parts.setdefault(id(part.config), part)  # the outermost of those that share a config
        before = [(part.config, getattr(part.config, NAME)) for part in parts.values()]
        for part in parts.values():
            setattr(part.config, NAME, _record_of(part, getattr(part.config, NAME)))
        try:
            save(self, *rest, **more)
        finally:
            for config, options in before:
                setattr(config, NAME, options)

    return wrapped


def _record_of(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any] | None:
    if model.config._attn_implementation != NAME:  # set back to its softmax since
        return None
    record = {name: value for name, value in options.items() if name != LAYERS}
    fit = [item for item in layers.find(model) if item.obstacle is None and _is_chosen(item.module)]
    names = [item.name for item in fit if hasattr(item.module, NAME)]
    return record if len(names) == len(fit) else {**record, LAYERS: names}


def _is_recorded(name: str, record: Mapping[str, Any] | None) -> bool:
    """Whether a layer was converted; of the two models, of record and layer, one may be part of the other."""
    names = (record or {}).get(LAYERS)
    return names is None or any(f".{a}".endswith(f".{b}") for x in names for a, b in ((name, x), (x, name)))


def _recorded(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """The options that a config has for SchoenbAt."""
    recorded = getattr(config, NAME, None)
    if recorded is not None and not isinstance(recorded, Mapping):
        raise TypeError(f"{NAME} must be options by name, or None, got {recorded!r}")
    return recorded


def _options(config: PreTrainedConfig) -> dict[str, Any]:
    recorded = {name: value for name, value in (_recorded(config) or {}).items() if name != LAYERS}
    return _checked({**DEFAULTS, **recorded})


def _then_attach(post_init: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    """The end of a model's construction: the one moment before its weights are loaded."""

    @functools.wraps(post_init)
    def wrapped(self: PreTrainedModel) -> None:
        post_init(self)
        ours = rf"(^|\.){NAME}\."
        # A converted model may be loaded with its softmax,
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), ours}
        if self.config._attn_implementation != NAME:
            if _recorded(self.config) is not None:
                setattr(self.config, NAME, None)  # else the next one to load it would have SchoenbAt again
            return
        # and one that was never converted with SchoenbAt, whose maps are then drawn.
        self._keys_to_ignore_on_load_missing = {*(self._keys_to_ignore_on_load_missing or ()), ours}
        options, record = _options(self.config), _recorded(self.config)
        found = [item for item in layers.find(self) if _is_chosen(item.module)]
        for item in found:  # a part of the model, built before, did not know its own name in it
            if hasattr(item.module, NAME) and not _is_recorded(item.name, record):
                delattr(item.module, NAME)
        found = [item for item in found if _is_recorded(item.name, record)]
        left = {item.name: item.obstacle for item in found if item.obstacle is not None}
        new = [item for item in found if item.obstacle is None and not hasattr(item.module, NAME)]
        _attach_all(self, [item.module for item in new], options)
        if new:  # saved with the model
            setattr(self.config, NAME, options | {x: y for x, y in (record or {}).items() if x == LAYERS})
        if left and (new or len(left) == len(found)):
            _log.warning("%s", Conversion(tuple(item.name for item in new), left))

    return wrapped


def _is_chosen(module: nn.Module) -> bool:
    """Whether the implementation of a module's own part of the model is ours."""
    return getattr(getattr(module, "config", None), "_attn_implementation", NAME) == NAME


def _then_fill(initialize: Callable[..., None]) -> Callable[..., None]:
    """After loading, transformers initializes what a checkpoint did not have, module by module."""

    @functools.wraps(initialize)
    def wrapped(self: PreTrainedModel, module: nn.Module, *rest: Any, **more: Any) -> None:
        initialize(self, module, *rest, **more)
        attention = getattr(module, NAME, None)
        if isinstance(attention, SchoenbAt):
            _fill(module, attention, _options(self.config))

    return wrapped


@torch.no_grad()
def _fill(module: nn.Module, attention: SchoenbAt, options: Mapping[str, Any]) -> None:
    """Give tensors that were not loaded the values they are built with; take the degrees of a loaded map."""
    with torch.device("cpu"):
        seeded = {**options, "seed": attention.features.seed}
        built = layers.build(module, seeded, torch.device("cpu"))
    fresh = built.state_dict()
    for name, tensor in attention.state_dict(keep_vars=True).items():
        if not getattr(tensor, "_is_hf_initialized", False):
            tensor.copy_(fresh[name])
    table = attention.features.degree_table
    if not table.is_meta:
        attention.features.degrees = degrees_in(table)
