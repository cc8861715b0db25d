"""How many programs share the work."""

from schoenbat.ops.triton.call import cdiv
from schoenbat.ops.triton.layout import padded
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.tiles import Tiles

# Two programs at a time for each of a large GPU's 132 multiprocessors; of two warps, twice as many fit.
_PROGRAMS = 264
_SUM_ROWS = 64


def split(pieces: int, others: int, tiles: Tiles) -> tuple[int, int]:
    """How many programs share a sequence, how many pieces each has; `others`: how many more there are."""
    programs = _PROGRAMS * (2 if tiles.num_warps == 2 else 1)
    wanted = max(1, min(pieces, programs // max(1, others)))
    each = cdiv(pieces, wanted)
    return cdiv(pieces, each), each


def sum_rows(plan: Plan, heads: int) -> int:
    """How many rows of the sums a program adds up: fewer where that gives more multiprocessors work."""
    rows = most_rows(plan)
    while rows > 16 and heads * cdiv(plan.num_features, rows) < _PROGRAMS:
        rows //= 2
    return rows


def most_rows(plan: Plan) -> int:
    """At most so many."""
    return min(_SUM_ROWS, padded(plan.num_features))
