import importlib
import json
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
WORDS = [f"word{i}" for i in range(40)]


@pytest.fixture
def minilm(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("minilm")


def run(name, files, out, options, monkeypatch):
    """The rows that an example writes for the model and the texts of `files`."""
    monkeypatch.syspath_prepend(EXAMPLES)
    arguments = ["--model", str(files / "model"), "--data", str(files), "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [name, *arguments, *options.split()])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return json.loads(out.read_text())["rows"]


@pytest.fixture
def files(tmp_path):
    """A random encoder with its tokenizer, and texts of random words in the two corpora's format."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes)
    BertModel(config).save_pretrained(tmp_path / "model")
    numbers = torch.randint(len(WORDS), (24, 30), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [" ".join(WORDS[number] for number in row) for row in numbers]
    splits = ["train", "test"] * 12
    parquet.write_table(pa.table({"text": texts, "split": splits}), tmp_path / "imdb_reviews.parquet")
    parquet.write_table(pa.table({"text": texts[::-1]}), tmp_path / "aan_papers.parquet")
    return tmp_path


def test_the_example_measures_every_stage(files, monkeypatch, capsys):
    options = "--texts 6 --steps 10 10 --batch 4 --length 16 --features 40"
    found = run("minilm.py", files, files / "minilm.json", options, monkeypatch)
    rows = {(row["stage"], row["corpus"]): row for row in found}
    assert [stage for stage, corpus in rows if corpus == "aan"] == [
        "original", "converted", "calibrated", "distilled",
    ]  # fmt: skip
    assert rows["original", "imdb"]["cosine"] == pytest.approx(1)
    assert rows["original", "imdb"]["spearman"] == pytest.approx(1)
    for corpus in ("imdb", "aan"):
        assert rows["converted", corpus]["cosine"] < rows["distilled", corpus]["cosine"] < 1
    assert "distilled" in capsys.readouterr().out


def test_a_window_is_measured_beside_the_window_alone(files, monkeypatch):
    options = "--texts 6 --steps 5 5 --batch 4 --length 16 --features 40 --window 3"
    found = run("minilm.py", files, files / "minilm.json", options, monkeypatch)
    rows = {(row["attention"], row["stage"]): row for row in found if row["corpus"] == "imdb"}
    assert list(rows) == [
        ("softmax", "original"),
        ("window + linear", "converted"),
        ("window + linear", "calibrated"),
        ("window + linear", "distilled"),
        ("window only", "converted"),
        ("window only", "distilled"),
    ]
    assert rows["window only", "converted"]["cosine"] < rows["window only", "distilled"]["cosine"] < 1


def band(batch, width):
    """Which keys are within the window of a query and no padding, ``(B, 1, n, n)``."""
    positions = torch.arange(batch["input_ids"].shape[1])
    near = (positions[:, None] - positions).abs() <= width
    return near & batch["attention_mask"].bool()[:, None, None, :]


def test_the_window_alone_is_masked_exact_attention(minilm, files):
    model = BertModel.from_pretrained(files / "model").eval()
    tokens = torch.randint(5, 45, (3, 200), generator=torch.Generator().manual_seed(1))
    batch = {
        "input_ids": tokens,
        "attention_mask": (torch.arange(200) < torch.tensor([[200], [150], [9]])).long(),
    }
    taking_part = batch["attention_mask"].bool()
    with torch.no_grad():
        dense = {"input_ids": tokens, "attention_mask": band(batch, 4)}
        expected = model(**dense).last_hidden_state[taking_part]
        everything = model(**batch).last_hidden_state[taking_part]
    minilm.convert(model, minilm.WINDOW_ONLY, window=4, num_features=64, **minilm.TRAINED)
    with torch.no_grad():
        found = model(**batch).last_hidden_state[taking_part]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (everything - expected).abs().max() > 0.1

    minilm.huggingface.distill(
        model, [batch], steps=(3, 3), output=minilm.sentence_embeddings, progress=False
    )
    for layer in model.encoder.layer:
        weight = layer.attention.self.schoenbat.far_weight
        torch.testing.assert_close(weight, torch.full_like(weight, minilm.NOTHING), rtol=1e-4, atol=0)


def test_the_curves_meet_where_they_are_the_same_model(minilm, files, monkeypatch):
    curves = importlib.import_module("minilm_curves")
    for name, values in {"FEATURES": (16, 40), "WIDTHS": (2, 64), "FACTORS": (0.5, 1.0)}.items():
        monkeypatch.setattr(curves, name, values)
    monkeypatch.setattr(curves, "NUM_FEATURES", 40)
    out = files / "curves.json"
    arguments = f"--model {files / 'model'} --data {files} --texts 6 --batch 3 --length 16 --device cpu"
    monkeypatch.setattr(sys, "argv", ["minilm_curves.py", *arguments.split(), "--out", str(out)])
    curves.main()
    found = json.loads(out.read_text())["rows"]
    assert out.with_suffix(".svg").read_text().count("<svg") == 1
    rows = {
        (row["against"], row["value"], row["attention"], row["calibrated"]): row
        for row in found
        if row["corpus"] == "imdb"
    }
    assert 2 * len(rows) == len(found) == 2 * (2 * 2 + 3 * 2 + 2 * 1 + 2 + 2 * 2)
    for calibrated in (False, True):
        common = [
            rows[*place, "linear", calibrated]["cosine"] for place in (("features", 40), ("window", None))
        ]
        assert common[0] == common[1] == rows["scale", 1.0, "linear", calibrated]["cosine"] < 0.99
        assert rows["window", 64, "window + linear", calibrated]["cosine"] == pytest.approx(1, abs=1e-5)
    assert rows["window", 64, "window only", False]["cosine"] == pytest.approx(1, abs=1e-5)
    assert rows["window", 2, "window only", False]["cosine"] < 0.99
    assert rows["scale", 1.0, "softmax", False]["cosine"] == pytest.approx(1, abs=1e-5)
    assert rows["scale", 0.5, "softmax", False]["cosine"] < 0.999
