"""BigBird's block-sparse attention: a window, a few random blocks, and two global ones."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.drawing import drawn
from schoenbat.baselines.masking import zero_masked
from schoenbat.baselines.selection import spread, take_rows, taking_part_first
from schoenbat.baselines.softmax import attend_visible
from schoenbat.ops.flex import compiled_flex, has_fast_path
from schoenbat.options import MOST, check_count
from schoenbat.precision import StaysPrecise

# Query blocks beyond so many use the rows of the table again, for other blocks of the sequence.
_TABLE_ROWS = 1024
# FlexAttention's own tiles must divide the blocks.
_FLEX_TILE = 64
_FLEX_TILES = {
    "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32,
}  # fmt: skip


class BigBird(StaysPrecise, Baseline):
    """Softmax attention over blocks: a query block sees its neighbours, both ends and some random blocks.

    With the sequence cut into blocks of m tokens, block i sees

        ``{i−1, i, i+1} ∪ {first, last} ∪ {r random others}``

    and the first and the last block see all. The cost is ``O(n (5 + r) m d)``; up to ``4 + r`` blocks it is
    softmax attention. When causal, the same mask is cut off at each query's own position.

    Blocks are cut from the tokens that ``key_mask`` lets take part, left in their order: padding changes
    nothing wherever it stands. A token left out gives zeros. The random blocks, one from each of r equal
    stretches of the others, differ by head and are fixed by the seed.

    On CUDA, FlexAttention reads the blocks that a block sees in place, by a ``BlockMask``. Where it has no
    fast path (other devices, float64, blocks that are no multiple of 64, widths that are no power of 2), or
    where every block is seen, the blocks are gathered and given to ``F.scaled_dot_product_attention``.

    Zaheer, Guruganesh, Dubey, Ainslie, Alberti, Ontanon, Pham, Ravula, Wang, Yang, Ahmed: "Big Bird:
    Transformers for Longer Sequences", 2020.

    Args:
        head_dim: d.
        num_heads: H.
        block_size: m.
        num_random: r.
        seed: of the random blocks.

    Example:
        >>> attention = BigBird(head_dim=8, num_heads=2, block_size=4)
        >>> query, key, value = torch.randn(3, 1, 2, 50, 8).unbind()
        >>> attention(query, key, value).shape
        torch.Size([1, 2, 50, 8])
    """

    needs_equal_lengths = True
    offsets: Tensor  # (H, rows, r), in [0, 1); rounded, they would be other blocks

    def __init__(
        self, head_dim: int, num_heads: int, *, block_size: int = 64, num_random: int = 3, seed: int = 0
    ) -> None:
        super().__init__(head_dim, num_heads)
        self.block_size = check_count("block_size", block_size, most=MOST)
        self.num_random = check_count("num_random", num_random, 0, MOST)
        self.register_buffer("offsets", drawn(torch.rand, num_heads, _TABLE_ROWS, num_random, seed=seed))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        num_tokens = query.shape[-2]
        if num_tokens == 0:
            return value
        if key_mask is None:
            length = torch.full((1, 1, 1, 1), num_tokens, device=query.device)
            return self._attend_packed(query, key, value, length, is_causal)
        order = taking_part_first(key_mask)[:, None]
        query, key, value = (take_rows(zero_masked(x, key_mask), order) for x in (query, key, value))
        length = key_mask.sum(-1).view(-1, 1, 1, 1)
        output = self._attend_packed(query, key, value, length, is_causal)
        return zero_masked(take_rows(output, order.argsort()), key_mask)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, length: Tensor, is_causal: bool
    ) -> Tensor:
        """Attend where the first ``length``, ``(B or 1, 1, 1, 1)``, tokens of each row are all that count."""
        num_tokens, size = query.shape[-2], self.block_size
        padding = -num_tokens % size
        query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
        is_sparse = query.shape[-2] // size > 4 + self.num_random
        if is_sparse and has_fast_path(query, value) and size % _FLEX_TILE == 0:
            output = self._attend_in_place(query, key, value, length, is_causal, compiled_flex())
        else:
            output = self._attend_gathered(query, key, value, length, is_causal)
        return output[:, :, :num_tokens]

    def _attend_in_place(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        length: Tensor,
        is_causal: bool,
        flex: Callable[..., Tensor],
    ) -> Tensor:
        """By FlexAttention, on whole blocks."""
        mask = self._block_mask(query.shape[0], query.shape[-2], length, is_causal)
        output: Tensor = flex(query, key, value, block_mask=mask, kernel_options=_FLEX_TILES)
        return output

    def _block_mask(self, batch: int, num_tokens: int, length: Tensor, is_causal: bool) -> BlockMask:
        """Which blocks each block sees: wholly, or (the last of a sequence, its own when causal) in part."""
        size = self.block_size
        num_blocks = num_tokens // size
        # A sequence of no tokens sees one, a zero, so that no row is without keys.
        length = length.clamp(min=1).expand(batch, 1, 1, 1)
        last = (length - 1) // size
        seen, exists = self._seen_blocks(num_blocks, last)
        column = torch.arange(num_blocks, device=length.device)
        row = column[:, None]
        # Of block j, block i sees the keys that stand before until[i, j]: the end of the sequence, or 0. The
        # mask reads it inside of FlexAttention's kernel. So a kernel of its own must have written it, such
        # as a scatter: anything else Inductor would fuse into the mask, if no gradient asks for it, and fail.
        sees_all = ((row == 0) | (row == last)) & (column <= last)
        until = (sees_all * length).expand(*seen.shape[:3], num_blocks)
        until = until.scatter_reduce(-1, seen, exists * length, "amax")
        visible = until > 0
        whole = visible & ((column + 1) * size <= length)
        if is_causal:
            visible, whole = visible & (column <= row), whole & (column < row)

        def takes_part(b: Tensor, h: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
            within = key_index < until[b, h, query_index // size, key_index // size]
            return within & (key_index <= query_index) if is_causal else within

        return BlockMask.from_kv_blocks(
            *_ordered(visible & ~whole), *_ordered(whole), BLOCK_SIZE=size, mask_mod=takes_part
        )

    def _attend_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, length: Tensor, is_causal: bool
    ) -> Tensor:
        """By SDPA on copies of the blocks that each block sees."""
        size = self.block_size
        num_blocks = query.shape[-2] // size
        blocks = (x.unflatten(-2, (num_blocks, size)) for x in (query, key, value))
        query, key, value = blocks  # (B, H, C, m, d)
        last = (length - 1).clamp(min=0) // size
        output = self._sparse_rows(query, key, value, length, last, is_causal)
        ends = F.pad(last, (1, 0))  # (B or 1, 1, 1, 2): the first block and the last
        first_rows, last_rows = _full_rows(query, key, value, length, ends, is_causal).split(1, dim=2)
        block = torch.arange(num_blocks, device=query.device)[:, None, None]
        output = torch.where(block == last.unsqueeze(-1), last_rows, output)
        output = torch.where(block == 0, first_rows, output)
        return output.flatten(2, 3)

    def _sparse_rows(
        self, query: Tensor, key: Tensor, value: Tensor, length: Tensor, last: Tensor, is_causal: bool
    ) -> Tensor:
        """What a block between the ends attends to, ``(B, H, C, m, d_v)``; the ends' rows are of no use."""
        num_blocks, size = query.shape[2:4]
        seen, exists = self._seen_blocks(num_blocks, last)  # (B or 1, H, C, S)
        position = _positions(seen, size).unsqueeze(-2)  # (B or 1, H, C, 1, S·m)
        visible = (position < length.unsqueeze(-1)) & exists.repeat_interleave(size, -1).unsqueeze(-2)
        if is_causal:
            own = torch.arange(num_blocks * size, device=query.device).view(num_blocks, size, 1)
            visible = visible & (position <= own)
        key, value = (_take_blocks(x, seen).flatten(3, 4) for x in (key, value))  # (B, H, C, S·m, d)
        visible = visible.expand(*query.shape[:2], *visible.shape[2:])
        # Fused attention takes four dimensions: the blocks stand in the place of the heads.
        flat = [x.flatten(0, 1) for x in (query, key, value, visible)]
        return attend_visible(flat[0], flat[1], flat[2], flat[3]).unflatten(0, query.shape[:2])

    def _seen_blocks(self, num_blocks: int, last: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct blocks that each block sees, and which of these are any: ``(B or 1, H, C, 5 + r)``.

        Window and random blocks lie strictly between the first and the last, which have places of their own.
        """
        block = torch.arange(num_blocks, device=last.device)[:, None]
        window = block + torch.arange(-1, 2, device=last.device)  # (C, 3)
        lowest = (block - 1).clamp(min=1)
        width = (torch.minimum(block + 1, last - 1) - lowest + 1).clamp(min=0)
        free = (last - 1 - width).clamp(min=0)  # (B or 1, 1, C, 1)
        rank, is_drawn = spread(self.offsets[:, block[:, 0] % _TABLE_ROWS], free)  # (B or 1, H, C, r)
        drawn = 1 + rank
        drawn = drawn + width * (drawn >= lowest)  # past the window
        ends = F.pad(last, (1, 0))
        shape = (*rank.shape[:-1], -1)
        seen = [x.expand(shape) for x in (ends, window, drawn)]
        exists = [
            x.expand(shape) for x in (F.pad(last > 0, (1, 0), value=True), (window >= 1) & (window < last))
        ]
        return torch.cat(seen, -1).clamp(0, num_blocks - 1), torch.cat([*exists, is_drawn], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, num_random={self.num_random}"


def _full_rows(
    query: Tensor, key: Tensor, value: Tensor, length: Tensor, blocks: Tensor, is_causal: bool
) -> Tensor:
    """Attention of some query blocks, ``(B or 1, 1, 1, b)``, to all keys: ``(B, H, b, m, d_v)``."""
    size = query.shape[3]
    rows = _take_blocks(query, blocks.squeeze(2))
    position = torch.arange(key.shape[2] * size, device=key.device)
    visible = position < length
    if is_causal:
        visible = visible & (position <= _positions(blocks, size).mT)
    output = attend_visible(rows.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), visible)
    return output.unflatten(2, (-1, size))


def _positions(blocks: Tensor, size: int) -> Tensor:
    """The positions of the tokens of blocks, ``(..., b) -> (..., b·m)``."""
    inside = torch.arange(size, device=blocks.device)
    return (blocks.unsqueeze(-1) * size + inside).flatten(-2)


def _take_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of ``x`` ``(B, H, C, m, d)`` by number ``(B or 1, H or 1, ...)``: ``(B, H, ..., m, d)``."""
    return take_rows(x.flatten(3), blocks).unflatten(-1, x.shape[3:])


def _ordered(visible: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each block sees, ``(B, H, C)``, and their numbers, first in ``(B, H, C, C)``."""
    numbers = (~visible).to(torch.int8).argsort(dim=-1, stable=True)
    return visible.sum(-1, dtype=torch.int32), numbers.to(torch.int32)
