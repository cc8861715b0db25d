"""SchoenbAt, the attention module: pre-SBN, feature attention, post-SBN."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schoenbat import calibration, learned_scale, parallel
from schoenbat.calibration import mean_row
from schoenbat.collectives import WithProcessGroup, check_group
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import attend, rmfa, step
from schoenbat.inputs import arrange_mask, autocast_rounds, check_sizes, check_window, without_masked
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel
from schoenbat.normalization import NORMALIZATIONS, PostSBN, PreSBN
from schoenbat.ops.near_and_far import map_rows
from schoenbat.ops.unit_rows import UnitRows
from schoenbat.options import check_centring, check_count, check_flag, check_heads, check_sharded
from schoenbat.packed import attend_packed, from_jagged, refuse_mask_beside_jagged, to_jagged
from schoenbat.state import RMFAState, RMFAWindowState, State
from schoenbat.windowed import rmfa_window
from schoenbat.windowed import step as window_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SchoenbAt(WithProcessGroup):
    """Attention in linear time: pre-SBN, random Maclaurin feature attention, post-SBN.

    ``SchoenbAt(Q, K, V) = postSBN(RMFA(preSBN(Q), preSBN(K), V))``; a drop-in for scaled dot-product
    attention on ``(B, H, n, d)``, with one map shared by all heads.

    The defaults are made for training: an ``"unbiased"`` map at a learned scale that starts at 4. Another
    choice for it is ``construction="exact-low"`` with ``kernel=polynomial(2, offset=1.0)``: see RESULTS.md.
    To stay close to a trained softmax, choose ``construction="exact-low"`` and its scale.

    Args:
        head_dim: d.
        num_heads: H, of the queries.
        num_features: D.
        kernel: a name or a `DotProductKernel`.
        construction: as in `MaclaurinFeatures`.
        value_dim: None for head_dim.
        normalization: ``"token"``, ``"batch"``, ``"l2"`` or None, as in `PreSBN`. With None you keep the rows
            short yourself: the map is planned for unit rows. Rotary positions go onto queries and keys before
            the call. A rotation keeps norms, so with ``"l2"`` and None logits still depend on the distance of
            two positions alone (what the map leaves out or adds by chance does not); ``"token"`` and
            ``"batch"`` subtract from a rotated row what does not turn with it, and logits come to depend on
            the positions themselves.
        scale: ``"learned"``: one per head, ``4·exp(20ρ)``, or ``R·sigmoid(20ρ + logit 0.9)`` for a kernel of
            finite radius R, ρ starting at 0; a float; or None for ``1 / sqrt(head_dim)``, the paper's.
        post: apply post-SBN.
        trainable_features: train the map's directions and a gain for each degree.
        window: an integer w: keys within ±w of a query are attended to exactly, all others by features, under
            one denominator, where the far keys have a learned weight for each head that starts at 1 (see
            `rmfa_window`). None: all keys by features.
        center_keys: take from all keys, once normalised, what they have in common: for the kernel ``"exp"``
            that changes nothing but how much is left for the features to do. True: the mean of a sequence's
            keys, which a causal call cannot know; ``"learned"``: a parameter, from 0 or from `calibrate`.
        map_per_head: a map for each key head, instead of one for all.
        separate_maps: a trained matrix for each head in front of the map, one for queries, one for keys:
            ``φ(qA)·φ(kB)``, both from the identity. Near keys never meet it.
        num_key_heads: how many heads the keys have, where something is kept for each. None: num_heads.
        eps: of pre-SBN.
        seed: of the map. None draws one from torch's global generator; ranks of DDP want the same one, since
            sizes of ``"unbiased"`` maps depend on it.
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

    rho: nn.Parameter | None  # (H,): of the learned scale
    far_rho: nn.Parameter | None  # (H,): of far keys' weight
    key_center: nn.Parameter | None  # (H_kv, d)
    query_map: nn.Parameter | None  # (H, d, d)
    key_map: nn.Parameter | None  # (H_kv, d, d)
    query_norm: PreSBN | None
    key_norm: PreSBN | None

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
        window: int | None = None,
        center_keys: bool | str = False,
        map_per_head: bool = False,
        separate_maps: bool = False,
        num_key_heads: int | None = None,
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
        self.window, self.center_keys = window, center_keys
        self._check_group(normalization)
        self.num_heads, self.num_key_heads = check_heads(num_heads, num_key_heads)
        check_count("head_dim", head_dim)
        self.value_dim = check_count("value_dim", head_dim if value_dim is None else value_dim)
        for name, flag in (("post", post), ("map_per_head", map_per_head), ("separate_maps", separate_maps)):
            check_flag(name, flag)
        self.always_causal = False
        self.kernel = get_kernel(kernel)
        learned = isinstance(scale, str)
        first = learned_scale.first_scale(self.kernel) if isinstance(scale, str) else scale
        self.features = MaclaurinFeatures(
            head_dim,
            num_features,
            self.kernel,
            construction=construction,
            num_heads=self.num_key_heads if map_per_head else None,
            scale=first,
            trainable=check_flag("trainable_features", trainable_features),
            seed=seed,
            device=device,
            dtype=dtype,
        )
        if window is not None:
            check_window(self.features, window)
        check_centring(center_keys, self.kernel)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_parameters(learned, separate_maps, place)
        self.query_norm = self.key_norm = None
        if normalization is not None:
            self.query_norm, self.key_norm = (
                PreSBN(normalization, heads, head_dim, eps=eps, **place)
                for heads in (self.num_heads, self.num_key_heads)
            )
        self.post = PostSBN(num_heads, self.value_dim, **place) if post else None

    def _make_parameters(self, has_learned_scale: bool, separate_maps: bool, place: dict[str, Any]) -> None:
        """None for each that the options do not ask for."""
        heads, key_heads, head_dim = self.num_heads, self.num_key_heads, self.features.head_dim
        self.rho = nn.Parameter(torch.zeros(heads, **place)) if has_learned_scale else None
        self.far_rho = None if self.window is None else nn.Parameter(torch.zeros(heads, **place))
        self.key_center = self.query_map = self.key_map = None
        if self.center_keys == "learned":
            self.key_center = nn.Parameter(torch.zeros(key_heads, head_dim, **place))
        if separate_maps:
            identity = torch.eye(head_dim, **place)
            self.query_map = nn.Parameter(identity.repeat(heads, 1, 1))
            self.key_map = nn.Parameter(identity.repeat(key_heads, 1, 1))

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
        return learned_scale.scale_of(self.rho, self.kernel)

    @property
    def far_weight(self) -> Tensor:
        """What far keys weigh beside near ones, ``(num_heads,)``; ones where nothing is near."""
        if self.far_rho is None:
            return torch.ones(self.num_heads, device=self.features.feature_weights.device)
        return learned_scale.weight_of(self.far_rho)

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
            query: ``(B, H, n_q, d)``; or all three nested, ``(B, H, jagged, ·)`` of layout torch.jagged, as
                the output then is.
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
        if isinstance(query, Tensor) and query.is_nested:
            refuse_mask_beside_jagged(key_mask, query_mask)
            return self._forward_jagged(query, key, value, is_causal, enable_gqa)
        self._check(query, key, value)
        arrange_mask("query_mask", query_mask, query.shape[:-3], query)  # whether it is looked at or not
        self._refuse_leak(is_causal)
        self._check_group(None if self.query_norm is None else self.query_norm.mode)
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
        if self.window is None and (rows := self._unit_rows(query, key)) is not None:
            out = attend(query, key, value, self.features, scale=self.scale, unit_rows=rows, **options)
        else:
            query, key = self._normalize(query, key, query_mask, key_mask)
            out = self.attend(query, key, value, **options)
        return out if self.post is None else self.post(out)

    def _unit_rows(self, query: Tensor, key: Tensor) -> UnitRows | None:
        """All that happens before attention, if it happens to each row for itself: kernels do it, too."""
        if self.query_norm is None or self.query_norm.mode == "batch" or self.process_group is not None:
            return None
        # Rows are to be normalised before autocast rounds them: a row's mean goes before its digits do.
        if autocast_rounds(query, key) or self.center_keys:
            return None
        if self.window is None and self._far_maps is not None:
            return None
        return self.query_norm.unit_rows

    def _forward_jagged(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        """What works on rows sees all sequences as one; what works on sequences sees each of them alone."""
        if self.process_group is not None:
            raise ValueError("a process_group splits dense sequences; pad jagged ones")
        self._refuse_leak(is_causal)
        packed = from_jagged(query, key, value)
        q, k, v = (x.rows.transpose(0, 1)[None] for x in packed)  # (1, H, total, d)
        self._check(q, k, v)
        q, k = (x[0].transpose(0, 1) for x in self._normalize(q, k, None, None))

        def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor) -> Tensor:
            return self.attend(
                query, key, value, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa
            )

        out = attend_packed(attend, q, k, packed[2].rows, packed[0].starts, packed[1].starts)
        if self.post is not None:
            out = self.post(out.transpose(0, 1)).transpose(0, 1)
        return to_jagged(out, packed[0].starts)

    def _refuse_leak(self, is_causal: bool) -> None:
        if is_causal and self.training and self.query_norm is not None and self.query_norm.mode == "batch":
            raise ValueError(
                "normalization='batch' takes its statistics from the whole sequence and so leaks the future "
                "into causal training; use normalization='token'"
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What stands between pre-SBN and post-SBN: `forward` for rows that are normalised already."""
        key = self._center(key, key_mask, is_causal)
        options: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "scale": self.scale,
            "enable_gqa": enable_gqa,
        }
        if self.window is not None:
            options |= {"far_weight": self.far_weight, "far_maps": self._far_maps}
            return rmfa_window(query, key, value, self.features, self.window, **options)
        query, key = self._map(query, key, key_mask)
        if self.process_group is None:
            return rmfa(query, key, value, self.features, **options)
        return parallel.rmfa(query, key, value, self.features, group=self.process_group, **options)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Decode n new tokens; the state of fixed size stands for all before them (None: nothing before).

        Call it under `torch.no_grad()` unless gradients are wanted, which need all that a state came from.
        With a window it is an `RMFAWindowState`, else an `RMFAState`.

        Example:
            >>> attention = SchoenbAt(8, 4, 64).eval()
            >>> q, k, v = torch.randn(3, 2, 4, 1, 8).unbind()
            >>> out, state = attention.step(q, k, v)
            >>> out, state = attention.step(q, k, v, state)
            >>> state.count.tolist()
            [2, 2]
        """
        self._check(query, key, value)
        if self.training and self.query_norm is not None and self.query_norm.mode == "batch":
            raise ValueError("normalization='batch' decodes with its running averages: call .eval() first")
        if (rows := self._unit_rows(query, key)) is None:
            query, key = self._normalize(query, key, None, key_mask)
            key = self._center(key, key_mask, is_causal=True)
        options: dict[str, Any] = {
            "key_mask": key_mask,
            "scale": self.scale,
            "enable_gqa": query.shape[-3] != key.shape[-3],
        }
        state = self._first_state(key) if state is None else state
        if isinstance(state, RMFAWindowState) != (self.window is not None):
            raise TypeError(f"a module with window={self.window} does not go on from {type(state).__name__}")
        if isinstance(state, RMFAWindowState):
            if state.key.shape[-2] != self.window:
                raise ValueError(
                    f"a module with window={self.window} does not go on from a state that remembers "
                    f"{state.key.shape[-2]} tokens"
                )
            options |= {"far_weight": self.far_weight, "far_maps": self._far_maps, "unit_rows": rows}
            out, state = window_step(query, key, value, self.features, state, **options)
        else:
            query, key = self._map(query, key, key_mask)
            out, state = step(query, key, value, self.features, state, unit_rows=rows, **options)
        return (out if self.post is None else self.post(out)), state

    def _first_state(self, key: Tensor) -> State:
        sizes = math.prod(key.shape[:-3]), key.shape[-3], self.value_dim
        place: dict[str, Any] = {"device": key.device, "dtype": key.dtype}
        if self.window is None:
            return RMFAState.zeros(self.features, *sizes, **place)
        return RMFAWindowState.zeros(self.features, self.window, *sizes, **place)

    @torch.no_grad()
    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        target_scale: float | None = None,
    ) -> None:
        """Fit the module to the inputs of a trained softmax attention, without gradients.

        A learned centre becomes the mean key, the directions of an ``"exact-low"`` map the main ones of
        queries and keys, and with a `target_scale` each head gets the scale at which its output comes closest
        to that of softmax at the target's. Where a window sees near keys exactly, at the target's scale, the
        features' own can differ from it through separate maps only, but far keys get the weight that they are
        best seen with. Quadratic in n.

        Args:
            query: ``(B, H, n, d)``, or with other leading dimensions, as `forward` takes them.
            key: likewise; fewer heads if they are shared.
            value: ``(B, H, n, d_v)``.
            key_mask: bool ``(B, n)``, **True = takes part**.
            is_causal: fit causal attention.
            target_scale: of the softmax to come close to, ``1 / sqrt(d)`` mostly. None: leave all scales.

        Example:
            >>> options = {"construction": "exact-low", "normalization": None, "center_keys": "learned"}
            >>> attention = SchoenbAt(8, 4, 64, **options)
            >>> q, k, v = torch.randn(3, 2, 4, 50, 8).unbind()
            >>> attention.calibrate(q, k + 3, v, is_causal=True, target_scale=8**-0.5)
            >>> attention.key_center.round().unique().tolist(), attention.scale.shape
            ([3.0], torch.Size([4]))
        """
        self._check(query, key, value)
        is_causal = check_flag("is_causal", is_causal) or self.always_causal
        if target_scale is not None:
            calibration.check_target(self, target_scale)
        elif self.key_center is None and self.features.construction != "exact-low":
            raise ValueError(
                f"there is nothing to fit: no learned centre, and a map of construction "
                f"{self.features.construction!r} has no directions to turn; give a target_scale, or make the "
                "module with construction='exact-low' or center_keys='learned'"
            )
        query, key, value, key_mask = calibration.in_one_batch(query, key, value, key_mask)
        query, key = self._normalize(query, key, None, key_mask, track=False)
        with calibration.all_or_nothing(self):
            calibration.fit_centre(self, key, key_mask)
            calibration.fit_directions(self, query, self._center(key, key_mask, is_causal), key_mask)
            if target_scale is not None:
                call = calibration.Call(query, key, value, key_mask, is_causal)
                calibration.fit_scale(self, call, target_scale)

    def set_scale(self, scale: Tensor) -> None:
        """Give each head the logit scale it is to go on from, ``(num_heads,)``, where it is learned.

        A scale lies between 0 and the kernel's radius, both excluded.
        """
        if self.rho is None:
            raise ValueError(
                f"the scale is fixed at {self.features.scale:.4g}; make the module with scale='learned'"
            )
        rho = learned_scale.rho_of(scale, self.kernel)
        with torch.no_grad():
            self.rho.copy_(self._for_each_head("scale", rho))

    def set_far_weight(self, weight: Tensor) -> None:
        """Give each head the weight of far keys that it is to go on from, ``(num_heads,)``."""
        if self.far_rho is None:
            raise ValueError("without a window all keys are far; make the module with window=w")
        rho = learned_scale.rho_of_weight(weight)
        with torch.no_grad():
            self.far_rho.copy_(self._for_each_head("weight", rho))

    def _for_each_head(self, name: str, numbers: Tensor) -> Tensor:
        if numbers.shape != (self.num_heads,):
            raise ValueError(
                f"{name} must be of shape ({self.num_heads},), one for each head, got {tuple(numbers.shape)}"
            )
        return numbers

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
        key = without_masked(key, key_mask)
        return self.query_norm(query, query_mask, track=track), self.key_norm(key, key_mask, track=track)

    def _center(self, key: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.key_center is not None:
            return key - self.key_center.to(key.dtype)[:, None]
        if not self.center_keys:
            return key
        if is_causal:
            raise ValueError(
                "center_keys=True takes the mean of the whole sequence, which leaks the future into a causal "
                "call; use center_keys='learned' and calibrate() or train it"
            )
        return (key - mean_row(key, key_mask)).to(key.dtype)

    def _map(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._far_maps is None:
            return query, key
        query_map, key_map = self._far_maps
        return map_rows(query, without_masked(key, key_mask), query_map, key_map)

    @property
    def _far_maps(self) -> tuple[Tensor, Tensor] | None:
        return None if self.query_map is None or self.key_map is None else (self.query_map, self.key_map)

    def _check_group(self, normalization: str | None) -> None:
        if self.process_group is not None:
            check_group(self.process_group)
            check_sharded(self.window, self.center_keys, normalization)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        kept = self.key_center is not None or self.key_map is not None or self.features.num_heads is not None
        key_heads = self.num_key_heads if kept else None
        check_sizes(query, key, value, self.num_heads, key_heads, self.features.head_dim, self.value_dim)
