"""How long work tells how far it is."""

from collections.abc import Callable

Step = Callable[[int, int | None], None]
"""Called with what is done and with the total, None where it is not known."""


def silent(done: int, total: int | None) -> None:
    """Tell nobody."""
