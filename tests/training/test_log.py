"""The log of a run."""

from schoenbat.training.log import RunLog, read_log


def test_continuing_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    for step in (10, 20, 30):
        log.write(step=step, loss=1.0 / step)
    log.close()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')
    RunLog(path, step=20).close()
    assert [line["step"] for line in read_log(path)] == [10, 20]


def test_a_new_run_starts_an_empty_log(tmp_path):
    path = tmp_path / "log.jsonl"
    RunLog(path).write(step=10, loss=1.0)
    RunLog(path).close()
    assert read_log(path) == []


def test_no_log_has_no_lines(tmp_path):
    assert read_log(tmp_path / "log.jsonl") == []


def test_lines_that_are_no_report_are_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"loss": 2}\nnonsense\n')
    assert read_log(path) == [{"step": 1}]
