"""Properties that hold for every case of a strategy, and how they are run.

A property takes one case, whose repr is all that is needed to make it again, and raises where the library
is wrong. What the library may refuse is decided by the property: `refusal` catches a ValueError or TypeError
and nothing else.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

# No case is large: what takes as long as this does not end.
TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Property:
    name: str
    check: Callable[[Any], None]
    cases: SearchStrategy
    share: float


PROPERTIES: dict[str, Property] = {}


def holds_for(cases: SearchStrategy, share: float) -> Callable[[Callable[[Any], None]], Callable]:
    """Register a property; `share` is its weight among all when the number of cases is handed out."""

    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        PROPERTIES[check.__name__] = Property(check.__name__, check, cases, share)
        return check

    return register


def allot(total: int) -> dict[str, int]:
    """How many cases each property gets, in all exactly `total`."""
    whole = sum(item.share for item in PROPERTIES.values())
    exact = {name: total * item.share / whole for name, item in PROPERTIES.items()}
    counts = {name: int(number) for name, number in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def run(name: str, count: int, seed: int) -> int:
    """Run a property on so many cases; returns how many there were, raises with a shrunk case."""
    item = PROPERTIES[name]
    ran = 0

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(case=item.cases)
    def check(case: Any) -> None:
        nonlocal ran
        ran += 1
        torch.manual_seed(0)
        with _time_limit(TIME_LIMIT):
            item.check(case)

    if count:
        check()
    return ran


def refusal(call: Callable[[], Any], mentions: str = "") -> str | None:
    """The message of the ValueError or TypeError that a call raises, which says what is wrong; else None."""
    message = None
    try:
        call()
    except (ValueError, TypeError) as error:
        message = str(error)
    assert message is None or mentions in message, f"the error does not mention {mentions!r}: {message!r}"
    assert message is None or len(message) > 10, f"the error does not say what is wrong: {message!r}"
    return message


def must_refuse(call: Callable[[], Any], mentions: str = "") -> None:
    assert refusal(call, mentions) is not None, f"nothing was raised about {mentions!r}"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what hangs, where the platform can."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"no end after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
