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


def measuring(script, monkeypatch, revision, until=None, methods=("triton",)):
    """Pretend that this revision is measured, up to a shape's last pass; a list of the passes that were."""
    passes = []

    def rows(shape, direction, speed):
        if shape == until and direction == script.passes_of(shape)[-1]:
            raise KeyboardInterrupt
        passes.append((shape, direction))
        for method in methods:
            yield script.Row(str(shape), method, direction, 1.0, 1.0, 1.0, 2.0, 0.5, None, revision, "2.11")

    monkeypatch.setattr(script, "revision", lambda: revision)
    monkeypatch.setattr(script, "rows", rows)
    return passes


def revisions(folder):
    (path,) = (folder / "results").iterdir()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["shape"], row["method"], row["direction"]): row["revision"] for row in rows}


def all_passes(script):
    shapes = *script.SHAPES, script.DECODING
    return [(shape, direction) for shape in shapes for direction in script.passes_of(shape)]


def test_an_interrupted_run_keeps_what_it_measured_and_goes_on(gpu, monkeypatch, tmp_path):
    passes = all_passes(gpu)
    assert measuring(gpu, monkeypatch, "a") == []
    gpu.main([])
    keys = [(str(shape), "triton", direction) for shape, direction in passes]
    assert revisions(tmp_path) == dict.fromkeys(keys, "a")

    done = measuring(gpu, monkeypatch, "b", until=gpu.SHAPES[2])
    with pytest.raises(KeyboardInterrupt):
        gpu.main([])
    assert done == passes[:11]
    assert list(revisions(tmp_path).items()) == [
        (key, "b" if place < 11 else "a") for place, key in enumerate(keys)
    ]

    rest = measuring(gpu, monkeypatch, "b")
    gpu.main([])
    assert rest == passes[11:]
    assert set(revisions(tmp_path).values()) == {"b"}


@pytest.mark.parametrize("unsure", ["b+", None])
def test_code_that_no_revision_names_is_measured_anew(gpu, monkeypatch, unsure):
    for _ in range(2):
        passes = measuring(gpu, monkeypatch, unsure)
        gpu.main([])
        assert passes == all_passes(gpu)


def test_causal_passes_alone_leave_all_others_and_what_is_not_installed(gpu, monkeypatch, tmp_path):
    measuring(gpu, monkeypatch, "a", methods=("triton", "fla"))
    gpu.main([])
    before = list(revisions(tmp_path))
    measuring(gpu, monkeypatch, "b")
    gpu.main(["--causal"])
    after = revisions(tmp_path)
    assert list(after) == before
    renewed = {key for key, revision in after.items() if revision == "b"}
    assert renewed == {key for key in before if key[1] == "triton" and key[2].startswith("causal")}


def test_only_some_shapes_are_measured_if_asked(gpu, monkeypatch, capsys):
    passes = measuring(gpu, monkeypatch, "a")
    gpu.main(["--causal", "--only", "unbiased"])
    assert [direction for _, direction in passes] == [gpu.CAUSAL_FORWARD, gpu.CAUSAL_BACKWARD]
    assert {shape.construction for shape, _ in passes} == {"unbiased"}
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
    assert "no shape has 'nothing' in its name" in capsys.readouterr().err


@pytest.mark.parametrize("direction", ["forward", "causal forward+backward"])
def test_the_module_is_measured_as_models_call_it(gpu, direction):
    (cell,) = (c for c in gpu.cells(gpu.WINDOWED) if (c.method, c.direction) == ("module", direction))
    inputs = [torch.randn(1, gpu.HEADS, 20, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    cell.call(inputs)()
    assert cell.attention.post is not None
    assert isinstance(cell.attention.scale, torch.Tensor)
