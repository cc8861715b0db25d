import json
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "minilm.py"
WORDS = [f"word{i}" for i in range(40)]


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
    out = files / "minilm.json"
    options = f"--texts 6 --steps 10 10 --batch 4 --length 16 --features 40 --device cpu --out {out}"
    arguments = ["--model", str(files / "model"), "--data", str(files), *options.split()]
    monkeypatch.setattr(sys, "argv", ["minilm.py", *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = {(row["stage"], row["corpus"]): row for row in json.loads(out.read_text())["rows"]}
    assert [stage for stage, corpus in rows if corpus == "aan"] == [
        "original", "converted", "calibrated", "distilled",
    ]  # fmt: skip
    assert rows["original", "imdb"]["cosine"] == pytest.approx(1)
    assert rows["original", "imdb"]["spearman"] == pytest.approx(1)
    for corpus in ("imdb", "aan"):
        assert rows["converted", corpus]["cosine"] < rows["distilled", corpus]["cosine"] < 1
    assert "distilled" in capsys.readouterr().out
