"""MultiheadSchoenbAt: what takes the place of nn.MultiheadAttention in a model that exists already."""

from typing import Any

import torch
from torch import Tensor, nn

from schoenbat.inputs import check_tensors
from schoenbat.modules import SchoenbAt
from schoenbat.ops.keeping import is_concrete
from schoenbat.options import check_count, check_dtype, check_flag, check_number
from schoenbat.packed import refuse_mask_beside_jagged
from schoenbat.state import State

# Of masks that are given in float16, too, whose least number is -65504.
_AS_GOOD_AS_MINUS_INFINITY = -1e4


class MultiheadSchoenbAt(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with linear attention inside: constructor, call, masks and weights are its own.

    It stands in for ``self_attn`` in `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, and
    loads an `nn.MultiheadAttention`'s state dict (the map and ppSBN then keep the values they have).

    What differs: `need_weights` defaults to False, since the weights are a quadratic matrix; `dropout` acts
    on the attention's output, since weights are never formed; a dense `attn_mask` must be causal, for
    nothing else can be done in linear time.

    `nn.TransformerEncoder(layer, n)` copies its layer, map and all: `schoenbat.reseed(model, seed)` gives
    every layer a map of its own.

    Args:
        embed_dim: width of the model.
        num_heads: number of heads.
        dropout: on the attention's output, before the output projection.
        bias: add biases to the projections.
        add_bias_kv: add a learned key and value to every sequence.
        add_zero_attn: add a key and a value of zeros to every sequence.
        kdim: width of the keys' input. None: embed_dim.
        vdim: width of the values' input. None: embed_dim.
        batch_first: inputs are ``(B, n, E)`` and not ``(n, B, E)``.
        device: of the parameters.
        dtype: of the parameters.
        **options: those of `SchoenbAt`.

    Example:
        >>> layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> layer.self_attn = MultiheadSchoenbAt(32, 4, batch_first=True, num_features=64)
        >>> layer(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        place = {"device": device, "dtype": dtype}
        for name, size in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            ("kdim", embed_dim if kdim is None else kdim),
            ("vdim", embed_dim if vdim is None else vdim),
        ):
            check_count(name, size)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        check_number("dropout", dropout, 0, 1)
        check_dtype("dtype", dtype)
        for name, flag in (
            ("bias", bias),
            ("add_bias_kv", add_bias_kv),
            ("add_zero_attn", add_zero_attn),
            ("batch_first", batch_first),
        ):
            check_flag(name, flag)
        for name in ("value_dim", "num_key_heads"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name} follows from embed_dim and num_heads here, got {options[name]!r}; leave it out, "
                    "or take SchoenbAt, which takes heads as they are"
                )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, **place
        )
        # nn.TransformerEncoderLayer in eval mode would take the weights and compute softmax itself.
        self._qkv_same_embed_dim = False
        if options.get("process_group") is not None and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "add_bias_kv and add_zero_attn add a key to every sequence, and each rank of a process_group "
                "would add it again; leave them out"
            )
        if options.get("window") is not None and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "add_bias_kv and add_zero_attn add a key that has no place in the sequence, and a window "
                "tells near keys from far ones by their places; leave them out"
            )
        self.attention = SchoenbAt(embed_dim // num_heads, num_heads, **{**place, **options})
        self.register_load_state_dict_pre_hook(_keep_own_attention)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as `nn.MultiheadAttention` does.

        Args:
            query: ``(n_q, B, E)``, with `batch_first` ``(B, n_q, E)``, or without a batch ``(n_q, E)``.
            key: likewise.
            value: likewise.
            key_padding_mask: ``(B, n_k)``, bool with **True = ignore** (the opposite of `SchoenbAt`'s
                key_mask), or float of 0 and −inf, for which −10⁴ and less stand, too. Other values are a
                ValueError on the CPU in eager mode; where nobody looks at them they stand for 0.
            need_weights: also return the attention matrix (quadratic): the weights before post-SBN.
            attn_mask: None, or a causal mask, whose last query sees all keys; anything else is a ValueError.
                Its values are looked at in eager mode, but elsewhere than on the CPU not where
                ``is_causal=True`` stands beside it; under `torch.compile` it needs that.
            average_attn_weights: average the weights over the heads.
            is_causal: attend causally, whether or not there is an attn_mask.

        Returns:
            The output, shaped like the query, and the weights ``(B, n_q, n_k)`` or ``(B, H, n_q, n_k)``, or
            None.
        """
        if isinstance(query, Tensor) and query.is_nested:
            refuse_mask_beside_jagged(key_padding_mask, attn_mask)
            return self._forward_nested(query, key, value, need_weights, average_attn_weights, is_causal)
        self._check(query, key, value)
        _check_masks(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        check_flag("need_weights", need_weights)
        batched, is_self_attention = query.dim() == 3, query is key
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if attn_mask is not None:
            maps = query.shape[0] * self.num_heads
            _check_size(attn_mask, maps, query.shape[1], key.shape[1], self.batch_first)
        causal = _is_causal(attn_mask, is_causal)
        q, k, v = self._project(query, key, value)
        key_mask = _key_mask(key_padding_mask, key.shape[:2])
        query_mask = key_mask if is_self_attention else None
        queries, keys = query.shape[1], key.shape[1]
        blind = queries - keys if causal and queries > keys else 0
        k, v, key_mask = self._add_keys(k, v, key_mask, blind)
        out = self.attention(q, k, v, key_mask=key_mask, query_mask=query_mask, is_causal=causal)
        out, weights = self._merge(out), None
        if need_weights:
            weights = self._weights(q, k, query_mask, key_mask, causal, average_attn_weights)
            added = (self.bias_k is not None) + self.add_zero_attn  # nn.MultiheadAttention has them last
            own = weights[..., k.shape[-2] - keys :]
            weights = torch.cat([own, weights[..., :added].flip(-1)], dim=-1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Decode n new tokens, causally: `SchoenbAt.step` between this layer's projections.

        Args:
            query: ``(n, B, E)``, or with `batch_first` ``(B, n, E)``.
            key: likewise, of the same tokens.
            value: likewise.
            state: what the last step returned; None where nothing came before.
            key_padding_mask: as in `forward`, of the new tokens: **True = ignore**.

        Returns:
            The output, shaped like the query, and the state after these tokens.

        Example:
            >>> layer = MultiheadSchoenbAt(32, 4, batch_first=True).eval()
            >>> prompt, token = torch.randn(2, 10, 32), torch.randn(2, 1, 32)
            >>> with torch.no_grad():
            ...     out, state = layer.step(prompt, prompt, prompt)
            ...     out, state = layer.step(token, token, token, state)
            >>> out.shape, state.count.tolist()
            (torch.Size([2, 1, 32]), [11, 11])
        """
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "a layer with add_bias_kv or add_zero_attn does not decode: its added keys are no tokens"
            )
        self._check(query, key, value)
        _check_masks(key_padding_mask=key_padding_mask)
        if query.dim() != 3:
            raise ValueError(f"a step takes a batch of tokens, got a query {tuple(query.shape)}")
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._project(query, key, value)
        out, state = self.attention.step(q, k, v, state, key_mask=_key_mask(key_padding_mask, key.shape[:2]))
        out = self._merge(out)
        return (out if self.batch_first else out.transpose(0, 1)), state

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of either layout: an `nn.TransformerEncoder` built with another attention makes strided ones."""
        if query is not key or key is not value:
            raise ValueError("nested tensors are taken for self-attention only; pad them to dense tensors")
        query = query.contiguous()  # without holes between rows, as narrow() leaves them
        lengths = [row.shape[0] for row in query.unbind()]
        dense = query.to_padded_tensor(0.0)[:, : max(lengths)]
        ends = torch.tensor(lengths, device=dense.device)[:, None]
        ignored = torch.arange(dense.shape[1], device=dense.device) >= ends
        dense = dense if self.batch_first else dense.transpose(0, 1)
        out, weights = self.forward(dense, dense, dense, ignored, need_weights, None, average, is_causal)
        rows = out if self.batch_first else out.transpose(0, 1)
        parts = [x[:n] for x, n in zip(rows, lengths, strict=True)]
        if query.layout == torch.jagged:
            starts: Tensor = query.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(torch.cat(parts), starts), weights
        return torch.nested.as_nested_tensor(parts), weights

    def _reset_parameters(self) -> None:
        """As the parent does, which asks a flag that is False here where the weights are one."""
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        check_tensors(query=query, key=key, value=value)
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(
                    f"expected a {name} of width {width} and of 2 or 3 dimensions, as many as the query's, "
                    f"got {tuple(x.shape)}" + (f" beside {tuple(query.shape)}" if x is not query else "")
                )
        # Under autocast the projections bring all of them to one dtype.
        if not torch.is_autocast_enabled(query.device.type) and query.dtype != self.out_proj.weight.dtype:
            raise TypeError(f"query is {query.dtype}, the parameters are {self.out_proj.weight.dtype}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            weights: tuple[Tensor, ...] = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (
            nn.functional.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        q, k, v = projected
        return q, k, v

    def _merge(self, heads: Tensor) -> Tensor:
        """``(B, H, n, d) -> (B, n, E)``."""
        heads = nn.functional.dropout(heads, self.dropout, self.training)
        merged: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return merged

    def _add_keys(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None, blind: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put bias and zero keys first: there every query sees them, causal or not.

        Behind them stands a key that takes no part for each of the `blind` queries before the first key.
        """
        if self.bias_k is None and not self.add_zero_attn:
            return key, value, key_mask
        if blind:
            mask = key_mask if key_mask is not None else key.new_ones(1, key.shape[-2], dtype=torch.bool)
            key_mask = nn.functional.pad(mask, (blind, 0), value=False)
            key, value = (nn.functional.pad(x, (0, 0, blind, 0)) for x in (key, value))
        before = key.shape[-2]
        if self.bias_k is not None and self.bias_v is not None:
            bias_key, bias_value = (
                x.view(1, self.num_heads, 1, -1).expand(key.shape[0], -1, -1, -1)
                for x in (self.bias_k, self.bias_v)
            )
            key, value = torch.cat([bias_key, key], dim=-2), torch.cat([bias_value, value], dim=-2)
        if self.add_zero_attn:
            key, value = (nn.functional.pad(x, (0, 0, 1, 0)) for x in (key, value))
        if key_mask is not None:
            key_mask = nn.functional.pad(key_mask, (key.shape[-2] - before, 0), value=True)
        return key, value, key_mask

    def _weights(
        self,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        causal: bool,
        average: bool,
    ) -> Tensor:
        """The attention matrix is the attention of one-hot values."""
        attention = self.attention
        query, key = attention._normalize(query, key, query_mask, key_mask, track=False)
        one_hot = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
        causal = causal or attention.always_causal
        weights = attention.attend(query, key, one_hot, key_mask=key_mask, is_causal=causal)
        return weights.mean(1) if average else weights


def _check_masks(**masks: Tensor | None) -> None:
    for name, mask in masks.items():
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise TypeError(
                f"{name} must be a tensor of bool, or of 0 and -inf, got {getattr(mask, 'dtype', mask)!r}"
            )


def _key_mask(key_padding_mask: Tensor | None, keys: torch.Size) -> Tensor | None:
    """True = ignore, or 0 / −inf, becomes True = takes part.

    What softmax would make zero of counts as −inf. Only on the CPU is it looked at whether a mask holds
    nothing else: a GPU would have to be waited for.
    """
    if key_padding_mask is None:
        return None
    # Not `in`, here and below, which takes a symbol of torch.compile for no number that it stands for.
    if key_padding_mask.shape != keys and key_padding_mask.shape != (1, keys[1]):
        raise ValueError(
            f"key_padding_mask must be (B, n_k) = {tuple(keys)}, got {tuple(key_padding_mask.shape)}"
        )
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    hidden = key_padding_mask <= _AS_GOOD_AS_MINUS_INFINITY
    if _may_look(key_padding_mask) and not bool((hidden | (key_padding_mask == 0)).all()):
        other = key_padding_mask[~hidden & (key_padding_mask != 0)][0].item()
        raise ValueError(
            f"a float key_padding_mask must hold 0 and -inf only, got {other:g}: other biases need the "
            "weights; pass mask == 0 for one of ones (takes part) and zeros"
        )
    return ~hidden


def _is_of_zero_and_minus_infinity(mask: Tensor) -> bool:
    return bool((mask.isneginf() | (mask == 0)).all())


def _check_size(attn_mask: Tensor, maps: int, queries: int, keys: int, batch_first: bool) -> None:
    for_all, for_each = (queries, keys), (maps, queries, keys)
    advice = "" if batch_first else "; a batch is (n, B, E), unless the layer is made with batch_first=True"
    if attn_mask.shape != for_all and attn_mask.shape != for_each:
        raise ValueError(
            f"attn_mask must have shape {for_all} or {for_each}, got {tuple(attn_mask.shape)}{advice}"
        )


def _is_causal(attn_mask: Tensor | None, hint: bool) -> bool:
    """By the mask's values; where looking would wait for a GPU, or cannot be, by the hint if there is one."""
    if attn_mask is None or (hint and not _may_look(attn_mask)):
        return hint
    return _is_causal_mask(attn_mask) or hint


def _may_look(mask: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device."""
    return mask.device.type == "cpu" and is_concrete(mask)


def _is_causal_mask(attn_mask: Tensor) -> bool:
    """Whether a dense mask is causal (True) or masks nothing (False); any other is a ValueError."""
    advice = "pass is_causal=True for causal attention, key_padding_mask for padding"
    if torch.compiler.is_compiling():
        raise ValueError(f"the values of attn_mask cannot be looked at under torch.compile; {advice}")
    masked = attn_mask if attn_mask.dtype == torch.bool else attn_mask.isneginf()
    known = attn_mask.dtype == torch.bool or _is_of_zero_and_minus_infinity(attn_mask)
    if known and not masked.any():
        return False
    rows, columns = attn_mask.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=attn_mask.device).triu(1 + columns - rows)
    if known and bool((masked == future).all()):
        return True
    aligned = "" if rows == columns else " with the last query aligned with the last key"
    raise ValueError(
        f"attn_mask of shape {tuple(attn_mask.shape)} is not causal{aligned}, and a dense mask cannot be "
        f"applied in linear time{'' if known else ' (nor can biases other than 0 and -inf)'}; {advice}"
    )


def _keep_own_attention(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A state dict without any entry of the attention's own is an nn.MultiheadAttention's."""
    own = module.attention.state_dict(prefix=f"{prefix}attention.")
    if not any(name in state_dict for name in own):
        state_dict.update(own)
