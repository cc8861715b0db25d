"""BigBird's block-sparse attention: a window, a few random blocks, and two global ones."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.masking import zero_masked
from schoenbat.baselines.selection import spread, take_rows, taking_part_first
from schoenbat.baselines.softmax import attend_visible
from schoenbat.precision import refuse_half

# Query blocks beyond so many use the rows of the table again, for other blocks of the sequence.
_TABLE_ROWS = 1024


class BigBird(Baseline):
    """Softmax attention over blocks: a query block sees its neighbours, both ends and some random blocks.

    With the sequence cut into blocks of m tokens, block i sees

        ``{i−1, i, i+1} ∪ {first, last} ∪ {r random others}``

    and the first and the last block see all. The cost is ``O(n (5 + r) m d)``; up to ``4 + r`` blocks it is
    softmax attention. When causal, the same mask is cut off at each query's own position.

    Blocks are cut from the tokens that ``key_mask`` lets take part, left in their order: padding changes
    nothing wherever it stands. A token left out gives zeros. The random blocks, one from each of r equal
    stretches of the others, differ by head and are fixed by the seed.

    The blocks that a block sees are gathered and given to ``F.scaled_dot_product_attention``. A FlexAttention
    mask would read them in place, but is of use only where compiled and must be built again for every batch
    of lengths; this is one code for all devices and lengths.

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
    offsets: Tensor  # (H, rows, r), in [0, 1)

    def __init__(
        self, head_dim: int, num_heads: int, *, block_size: int = 64, num_random: int = 3, seed: int = 0
    ) -> None:
        super().__init__(head_dim, num_heads)
        self.block_size, self.num_random = block_size, num_random
        generator = torch.Generator("cpu").manual_seed(seed)
        offsets = torch.rand(num_heads, _TABLE_ROWS, num_random, generator=generator, device="cpu")
        self.register_buffer("offsets", offsets)

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
        num_blocks = -(-num_tokens // size)
        padding = num_blocks * size - num_tokens
        blocks = (F.pad(x, (0, 0, 0, padding)).unflatten(-2, (num_blocks, size)) for x in (query, key, value))
        query, key, value = blocks  # (B, H, C, m, d)
        last = (length - 1).clamp(min=0) // size
        output = self._sparse_rows(query, key, value, length, last, is_causal)
        ends = F.pad(last, (1, 0))  # (B or 1, 1, 1, 2): the first block and the last
        first_rows, last_rows = _full_rows(query, key, value, length, ends, is_causal).split(1, dim=2)
        block = torch.arange(num_blocks, device=query.device)[:, None, None]
        output = torch.where(block == last.unsqueeze(-1), last_rows, output)
        output = torch.where(block == 0, first_rows, output)
        return output.flatten(2, 3)[:, :, :num_tokens]

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BigBird":
        """Half precision would move the random blocks."""
        return super()._apply(refuse_half(fn), recurse)

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
