"""Runs that are timed wait for one another."""

import threading

import pytest

from schoenbat.training import turns
from schoenbat.training.interruption import StopRequest
from schoenbat.training.turns import turn


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "_lock", lambda: tmp_path / "lock")


def test_one_at_a_time():
    inside, most = [], []

    def run(number: int) -> None:
        for _ in range(20):
            with turn(StopRequest()):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80


def test_a_run_that_is_asked_to_stop_waits_no_longer():
    stop = StopRequest()
    with turn(StopRequest()):
        waiting = threading.Thread(target=lambda: turn(stop).__enter__())
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        stop.number = 15
        waiting.join(5)
        assert not waiting.is_alive()


def test_an_exception_ends_a_turn():
    with pytest.raises(RuntimeError, match="a step failed"), turn(StopRequest()):
        raise RuntimeError("a step failed")
    with turn(StopRequest()):
        pass
