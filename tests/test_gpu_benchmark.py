"""benchmarks/gpu.py without a GPU: what a run keeps of the one before it, and what an interruption leaves."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The script, on a CPU and with a folder of its own, measuring nothing."""
    specification = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(script, "__file__", str(tmp_path / "gpu.py"))
    monkeypatch.setattr(script, "_copy_speed", lambda: 1.0)
    monkeypatch.setattr(script, "LENGTHS", ())
    (tmp_path / "results").mkdir()
    return script


def measuring(script, monkeypatch, revision, until=None):
    """Pretend that this revision is measured, up to a shape; a list of the shapes that were."""
    shapes = []

    def rows(shape, speed):
        if shape == until:
            raise KeyboardInterrupt
        shapes.append(shape)
        yield script.Row(str(shape), "triton", "forward", 1.0, 1.0, 1.0, 2.0, 0.5, None, revision, "2.11")

    monkeypatch.setattr(script, "revision", lambda: revision)
    monkeypatch.setattr(script, "rows", rows)
    return shapes


def revisions(folder):
    (path,) = (folder / "results").iterdir()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["shape"]: row["revision"] for row in rows}


def test_an_interrupted_run_keeps_what_it_measured_and_goes_on(gpu, monkeypatch, tmp_path):
    shapes = [*gpu.SHAPES, gpu.DECODING]
    assert measuring(gpu, monkeypatch, "a") == []
    gpu.main()
    assert revisions(tmp_path) == dict.fromkeys(map(str, shapes), "a")

    measuring(gpu, monkeypatch, "b", until=shapes[2])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert list(revisions(tmp_path).items()) == [
        (str(shape), "b" if place < 2 else "a") for place, shape in enumerate(shapes)
    ]

    rest = measuring(gpu, monkeypatch, "b")
    gpu.main()
    assert rest == shapes[2:]
    assert set(revisions(tmp_path).values()) == {"b"}


@pytest.mark.parametrize("unsure", ["b+", None])
def test_code_that_no_revision_names_is_measured_anew(gpu, monkeypatch, unsure):
    for _ in range(2):
        shapes = measuring(gpu, monkeypatch, unsure)
        gpu.main()
        assert shapes == [*gpu.SHAPES, gpu.DECODING]
