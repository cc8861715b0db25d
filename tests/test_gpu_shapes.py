"""The program that looks for shapes that go wrong: in the interpreter, where none does."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
import gpu_shapes

from schoenbat.ops.triton import launch_causal, launch_map


def test_cases_are_told_apart_by_their_text():
    cases = gpu_shapes.every_case()
    assert len({str(case) for case in cases}) == len(cases)
    assert [gpu_shapes.Case.parse(str(case)) for case in cases] == cases


@pytest.mark.parametrize(
    "text", ["16,32,18,exact-low,causal trained", "16,8,32,unbiased,window", "16,16,8,unbiased,bidirectional"]
)
def test_a_case_is_run_and_compared(text, monkeypatch):
    monkeypatch.setattr(gpu_shapes, "LENGTH", 40)
    assert max(gpu_shapes.run(gpu_shapes.Case.parse(text)).values()) < 1e-5


def test_columns_that_change_places_are_found(monkeypatch):
    backward = launch_causal.attend_backward

    def wrong(grad, *others):
        return backward(grad.flip(-1), *others)

    monkeypatch.setattr(gpu_shapes, "LENGTH", 40)
    monkeypatch.setattr(launch_causal, "attend_backward", wrong)
    problem = gpu_shapes.too_large(gpu_shapes.run(gpu_shapes.Case.parse("16,16,18,exact-low,causal")))
    assert "of q" in problem
    assert "of output" not in problem


def test_a_gain_that_is_off_is_found(monkeypatch):
    coefficients = launch_map._coefficients
    monkeypatch.setattr(gpu_shapes, "LENGTH", 40)
    monkeypatch.setattr(launch_map, "_coefficients", lambda *arguments: 1.2 * coefficients(*arguments))
    problem = gpu_shapes.too_large(gpu_shapes.run(gpu_shapes.Case.parse("16,32,18,exact-low,causal trained")))
    assert problem.count(" of ") == 1
    assert "of gains" in problem


def test_what_is_not_a_number_is_too_large():
    assert gpu_shapes.too_large({"output": 0.01, "q": float("nan")}) == "error nan of q, above 0.05"
    assert gpu_shapes.too_large({"output": 0.01}) is None


def test_what_goes_wrong_is_reported(tmp_path, monkeypatch):
    def fail(case):
        return "error 6e-01, above 0.05" if case.form == "causal" else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_shapes, "problem_of", fail)
    monkeypatch.setattr(sys, "argv", ["gpu_shapes.py", str(tmp_path / "shapes.xml"), "--cases", "30"])
    with pytest.raises(SystemExit) as ended:
        gpu_shapes.main()
    assert ended.value.code == 1
    report = (tmp_path / "shapes.xml").read_text()
    assert report.count("<testcase") == 30
    assert 0 < report.count("error 6e-01") == report.count(",causal&quot;") + report.count(',causal"')


def test_what_was_reached_is_reported_when_a_run_is_ended_early(tmp_path, monkeypatch):
    left = iter([None, "error 6e-01, above 0.05"])

    def fail_or_end(case):
        try:
            return next(left)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_shapes, "problem_of", fail_or_end)
    monkeypatch.setattr(
        sys, "argv", ["gpu_shapes.py", str(tmp_path / "shapes.xml"), "--cases", "5", "--jobs", "1"]
    )
    with pytest.raises(KeyboardInterrupt):
        gpu_shapes.main()
    report = (tmp_path / "shapes.xml").read_text()
    assert (report.count("<testcase"), report.count("<failure")) == (2, 1)


def test_a_process_that_dies_is_a_problem(monkeypatch):
    for stderr, message in [
        ("", "exit code -11: no message"),
        ("RuntimeError: illegal access\nCompile with DSA\n", "exit code -11: RuntimeError: illegal access"),
    ]:
        dead = subprocess.CompletedProcess([], -11, "", stderr)
        monkeypatch.setattr(gpu_shapes.subprocess, "run", lambda *arguments, dead=dead, **options: dead)
        assert gpu_shapes.problem_of(gpu_shapes.every_case()[0]) == message
