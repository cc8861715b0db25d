"""Runs that are timed wait for one another, and for those that set up."""

import threading
import time

import pytest

from schoenbat.training.interruption import StopRequest
from schoenbat.training.turns import setting_up, turn


def take_turn():
    return turn(StopRequest(), lambda: None)


def in_threads(*runs):
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def waiting_run(came):
    """A run that waits to be timed, and then says so."""
    waits = threading.Event()

    def run():
        with turn(StopRequest(), waits.set):
            came.append("timed")

    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(5)
    return thread


def test_one_at_a_time_is_timed():
    inside, most = set(), []

    def run():
        for _ in range(5):
            with take_turn():
                inside.add(threading.get_ident())
                time.sleep(0.002)
                most.append(len(inside))
                inside.remove(threading.get_ident())

    in_threads(*[run] * 4)
    assert most == [1] * 20


def test_runs_set_up_at_once():
    both = threading.Barrier(2, timeout=5)

    def run():
        with setting_up():
            both.wait()

    in_threads(run, run)
    assert not both.broken


def test_nobody_is_timed_while_another_sets_up():
    came = []
    with setting_up():
        thread = waiting_run(came)
        came.append("set up")
    thread.join()
    assert came == ["set up", "timed"]


def test_who_waits_to_be_timed_comes_before_who_begins_to_set_up():
    came = []

    def begin():
        with setting_up():
            came.append("set up")

    begins = threading.Thread(target=begin)
    with setting_up():
        waits = waiting_run(came)
        time.sleep(0.2)
        begins.start()
        time.sleep(0.2)
    waits.join()
    begins.join()
    assert came == ["timed", "set up"]


def test_a_run_that_is_asked_to_stop_waits_no_longer():
    stop, waits = StopRequest(), threading.Event()
    with take_turn():
        waiting = threading.Thread(target=lambda: turn(stop, waits.set).__enter__())
        waiting.start()
        assert waits.wait(5)
        assert waiting.is_alive()
        stop.number = 15
        waiting.join(5)
        assert not waiting.is_alive()


def test_an_exception_ends_a_turn():
    with pytest.raises(RuntimeError, match="a step failed"), take_turn():
        raise RuntimeError("a step failed")
    with turn(StopRequest(), lambda: pytest.fail("the lock is still held")):
        pass
