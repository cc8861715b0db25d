"""The example of a language model of bytes: run whole on a small stream, and decoding against one call."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("lightning")

FILE = Path(__file__).parents[2] / "examples" / "charlm.py"
if not FILE.exists():  # a source distribution has tests without examples
    pytest.skip("examples/ is not here", allow_module_level=True)
spec = importlib.util.spec_from_file_location("charlm", FILE)
charlm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(charlm)

TINY = [
    "--context",
    "64",
    "--width",
    "16",
    "--layers",
    "2",
    "--heads",
    "2",
    "--features",
    "16",
    "--batch",
    "4",
]


@pytest.fixture
def data(tmp_path):
    from pyarrow import parquet

    reviews = ["the quick brown fox jumps over the lazy dog, again and again. " * 3] * 40
    splits = ["train"] * 30 + ["test"] * 10
    parquet.write_table(pyarrow.table({"text": reviews, "split": splits}), tmp_path / "imdb_reviews.parquet")
    papers = [f"Abstract. This is paper {i} of many papers. " * 4 for i in range(60)]
    parquet.write_table(pyarrow.table({"text": papers}), tmp_path / "aan_papers.parquet")
    return tmp_path


@pytest.mark.parametrize("window", [[], ["--window", "4"]], ids=["linear", "window"])
def test_it_runs_and_learns(data, tmp_path, window):
    out = tmp_path / "out" / "charlm.json"
    more = ["--steps", "40", "--learning-rate", "0.01", "--evaluation-crops", "3", "--generate", "3"]
    charlm.main(["--data", str(data), "--out", str(out), *TINY, *more, *window])
    rows = json.loads(out.read_text())["rows"]
    assert [row["attention"] for row in rows] == ["schoenbat", "sdpa"]
    extra = rows[0]["parameters"] - rows[1]["parameters"]
    assert extra == (2 if window else 1) * 2 * 2  # one number, or two, for each of two heads in two layers
    for row in rows:
        assert 0 < row["bits_per_byte"] < 0.7 * 8, "the bytes are those of few words"
        assert row["bytes_per_second"] > 0
        assert [each["position"] for each in row["generation"]] == [1, 16, 32, 48, 64]


@pytest.mark.slow
def test_processes_that_hold_all_or_a_part_of_the_weights_learn_the_same(data, tmp_path):
    found = []
    for strategy in ("ddp", "fsdp"):
        out = tmp_path / f"{strategy}.json"
        more = ["--steps", "10", "--evaluation-crops", "3", "--generate", "2", "--strategy", strategy]
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FILE)]
        command = [sys.executable, *run, "--data", str(data), "--out", str(out), *TINY, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text())["rows"])
    for one, other in zip(*found, strict=True):
        for name in ("parameters", "bits_per_byte", "train_bits_per_byte"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        assert len(other["generation"]) == 5


def test_streams_hold_whole_texts_out(data):
    train, held_out = charlm.read_streams(data, "both", seed=0)
    parts = [set(bytes(x.numpy()).split(b"\0")) - {b""} for x in (train, held_out)]
    papers = [{text for text in part if text.startswith(b"Abstract")} for part in parts]
    assert len(papers[0]) + len(papers[1]) == 60
    assert papers[1]
    assert not papers[0] & papers[1]
    assert bytes(train.numpy()).count(b"\0") == 30 + len(papers[0])


@pytest.mark.parametrize("name", ["schoenbat", "sdpa"])
@pytest.mark.parametrize("window", [None, 5])
def test_decoding_continues_what_one_call_does(name, window):
    options = charlm.parse_arguments(TINY)
    options.window = window
    model = charlm.build(name, options).double().eval()
    tokens = torch.randint(256, (2, 30))
    logits, states = model.decode(tokens[:, :12], None, 0)
    rows = [logits]
    for i in range(12, 30):
        logits, states = model.decode(tokens[:, i : i + 1], states, i)
        rows.append(logits)
    torch.testing.assert_close(torch.cat(rows, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


def test_bits_are_those_of_a_uniform_guess():
    target = torch.randint(256, (2, 5))
    assert math.isclose(float(charlm.bits(torch.zeros(2, 5, 256), target)), 8.0, rel_tol=1e-6)


def test_a_context_longer_than_the_stream_is_an_error(data):
    with pytest.raises(SystemExit, match="longer than a stream"):
        charlm.main(["--data", str(data), *TINY, "--context", "1000000"])
