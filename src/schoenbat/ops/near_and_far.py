"""Exact near, linear far: which keys are near, and how the far ones are seen. Names are those of `window`."""

from typing import NamedTuple

from torch import Tensor


class Window(NamedTuple):
    """The keys within ±w are near."""

    width: int  # w
    is_causal: bool
    first: int  # the position of the first query among the keys: 0, or at most w where keys came before
    log_weight: Tensor  # (H, G, 1, 1): log g
    query_map: Tensor | None = None  # (H, G, d, d): what the features are given is qA
    key_map: Tensor | None = None  # (H, 1, d, d): and kB; both or none

    def far_rows(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_map is None or self.key_map is None:
            return query, key
        return map_rows(query, key, self.query_map, self.key_map)


def map_rows(query: Tensor, key: Tensor, query_map: Tensor, key_map: Tensor) -> tuple[Tensor, Tensor]:
    """qA and kB, in the dtype of the rows."""
    return query @ query_map.to(query.dtype), key @ key_map.to(key.dtype)
