"""What the paper printed of the Long Range Arena, to stand beside what was measured here."""

import json
import re
from functools import cache
from importlib import resources

TASKS = ("text", "listops", "retrieval", "pathfinder", "image")
"""In the order of the paper's table."""
Figures = dict[str, dict[str, float]]


@cache
def figures(quantity: str) -> Figures:
    """A table of the paper, by method and then by task, with the ``"average"`` that it prints.

    Args:
        quantity: ``"accuracy"`` in percent, ``"time"`` of training over that of softmax, ``"memory"`` in MB.

    >>> figures("memory")["softmax"]["average"]
    10420
    """
    text = resources.files("schoenbat.report").joinpath("paper.json").read_text(encoding="utf-8")
    tables = json.loads(text)
    known = list(tables["units"])
    if quantity not in known:
        raise ValueError(f"the paper has no table of {quantity!r}; it has {', '.join(known)}")
    return {method: dict(row) for method, row in tables[quantity].items()}


def printed(quantity: str, attention: str, task: str) -> float | None:
    """The paper's figure for an attention as the registry names it, None where it has none.

    Options other than SchoenbAt's kernel have no rows of their own in the paper.

    >>> printed("accuracy", "schoenbat:causal=true,kernel=inv", "listops"), printed("time", "mean", "text")
    (38.56, None)
    """
    name, _, options = attention.partition(":")
    if name == "schoenbat":
        kernel = re.search(r"(?:^|,)\s*kernel\s*=\s*([^\s,]+)", options)
        name = f"schoenbat:kernel={kernel.group(1) if kernel else 'exp'}"
    if name not in figures("accuracy"):
        return None
    # All kernels take the same memory and share one row.
    row = figures(quantity).get(name.partition(":")[0] if quantity == "memory" else name)
    return row[task] if row else None
