"""What the paper printed, to stand beside what was measured here."""

import json
import re
from functools import cache
from importlib import resources
from typing import Any

Figures = dict[str, dict[str, float]]


@cache
def figures(quantity: str) -> Figures:
    """A table of the paper, by method and then by task, with the ``"average"`` that it prints.

    Args:
        quantity: ``"accuracy"`` in percent, ``"time"`` of training over that of softmax, ``"memory"`` in MB.

    >>> figures("memory")["softmax"]["average"]
    10420
    """
    known = list(_tables()["units"])
    if quantity not in known:
        raise ValueError(f"the paper has no table of {quantity!r}; it has {', '.join(known)}")
    return {method: dict(row) for method, row in _tables()[quantity].items()}


def ablation() -> Figures:
    """The paper's table of what RMFA and ppSBN each do on Text: ``"time"`` and ``"accuracy"`` by setting.

    >>> ablation()["base + ppSBN"]
    {'time': 0.785, 'accuracy': 65.1}
    """
    return _tables()["ablation"]


def method_of(attention: str) -> str | None:
    """The row of the paper's tables that an attention belongs to, None where it has none.

    Options other than SchoenbAt's kernel have no rows of their own.

    >>> method_of("softmax:naive=true"), method_of("schoenbat:causal=true,kernel=inv"), method_of("mean")
    ('softmax', 'schoenbat:kernel=inv', None)
    """
    name, _, options = attention.partition(":")
    if name == "schoenbat":
        kernel = re.search(r"(?:^|,)\s*kernel\s*=\s*([^\s,]+)", options)
        name = f"schoenbat:kernel={kernel.group(1) if kernel else 'exp'}"
    return name if name in figures("accuracy") else None


def name_of(method: str) -> str:
    """How the paper prints a row's name.

    >>> name_of("schoenbat:kernel=inv")
    'SchoenbAt inv'
    """
    return _tables()["names"][method]


def printed(quantity: str, attention: str, task: str) -> float | None:
    """The paper's figure for an attention as the registry names it, None where it has none.

    >>> printed("accuracy", "schoenbat:causal=true,kernel=inv", "listops"), printed("time", "mean", "text")
    (38.56, None)
    """
    method = method_of(attention)
    if method is None:
        return None
    # All kernels take the same memory and share one row.
    row = figures(quantity).get(method.partition(":")[0] if quantity == "memory" else method)
    return row[task] if row else None


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("schoenbat.report").joinpath("paper.json").read_text(encoding="utf-8")
    return json.loads(text)
