"""Retrieval: pairs over one store of papers, from Parquet and TSV files, and what needs no reading."""

import numpy as np
import pytest

from schoenbat.data import DataError, Split, retrieval
from schoenbat.data.arrays import fingerprint
from schoenbat.data.source import find

PAPERS = {"P3": 'it\'s "three"\\ ü', "P1": "one", "P2": 5000 * "t", "P9": "nine\tand a tab"}
PAIRS = [
    ("train", 1, "P1", "P2"),
    ("train", 0, "P1", "P3"),
    ("eval", 1, "P2", "P9"),
    ("test", 0, "P3", "P1"),
    ("test", 1, "P9", "P3"),
]


def read(path, pairs="matched"):
    return retrieval.read(find(path, retrieval.layout(pairs)))


@pytest.fixture
def folder(tmp_path, make):
    make.parquet(tmp_path / "in" / "aan_papers.parquet", id=list(PAPERS), text=list(PAPERS.values()))
    for name, pairs in (("aan_pairs_matched", PAIRS), ("aan_pairs", PAIRS[::-1])):
        split, label, first, second = zip(*pairs, strict=True)
        make.parquet(tmp_path / "in" / f"{name}.parquet", split=split, label=label, id1=first, id2=second)
    return tmp_path / "in"


def tsv_files(quote):
    files = {}
    for split in ("train", "eval", "test"):
        rows = [
            [
                f"{label}.0".encode(),
                first.encode(),
                second.encode(),
                quote(PAPERS[first]),
                quote(PAPERS[second]),
            ]
            for half, label, first, second in PAIRS
            if half == split
        ]
        files[f"lra_release/new_aan_pairs.{split}.tsv"] = b"".join(b"\t".join(row) + b"\n" for row in rows)
    return files


def test_splits_share_one_store(folder):
    arrays = read(folder)
    assert arrays["sequences"].shape == (4, 4096)
    ids = sorted(PAPERS)
    for split, name in (("train", "train"), ("validation", "eval"), ("test", "test")):
        found = [(ids[first], ids[second]) for first, second in arrays[f"{split}_members"]]
        assert found == [pair[2:] for pair in PAIRS if pair[0] == name]
        assert arrays[f"{split}_labels"].tolist() == [pair[1] for pair in PAIRS if pair[0] == name]
    assert arrays["sequence_lengths"].tolist() == [3, 4096, len(PAPERS["P3"].encode()), 14]
    assert bytes(arrays["sequences"][2, : arrays["sequence_lengths"][2]]).decode() == PAPERS["P3"]


def test_pairs_are_chosen_by_name(folder):
    assert read(folder, "uniform")["test_labels"].tolist() == [1, 0]
    assert read(folder, "matched")["test_labels"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="pairs must be one of matched, uniform, lra; got 'all'"):
        read(folder, "all")
    with pytest.raises(DataError, match=r"aan_pairs\.parquet is not one of the files"):
        read(folder / "aan_pairs.parquet", "matched")


def test_tsv_files_give_the_same_arrays(folder, tmp_path, make):
    files = tsv_files(lambda words: repr(words.encode()).encode())
    for source in (
        make.folder(tmp_path / "tsv", files),
        tmp_path / "tsv" / "lra_release" / "new_aan_pairs.test.tsv",
        make.tar(tmp_path / "lra.tar.gz", files),
    ):
        assert fingerprint(read(source, "lra")) == fingerprint(read(folder))


def test_texts_without_quotes_are_taken_as_they_are(tmp_path, make):
    files = tsv_files(lambda words: words.replace("\t", " ").encode())
    arrays = read(make.folder(tmp_path, files), "lra")
    assert bytes(arrays["sequences"][2, : arrays["sequence_lengths"][2]]).decode() == PAPERS["P3"]


@pytest.mark.parametrize("literal", [b"b'", b"b'unfinished", b"b\"mixed'", b"b'bad \\x escape'", b"b", b""])
def test_what_only_looks_like_a_literal_is_text(literal):
    assert retrieval._unquoted(literal) == literal


@pytest.mark.parametrize("line", [b"1.0\tP1\tP2\tone", b"label\tP1\tP2\ta\tb", b"2.0\tP1\tP2\ta\tb"])
def test_lines_that_are_no_pairs_are_named(tmp_path, make, line):
    files = tsv_files(str.encode) | {"lra_release/new_aan_pairs.eval.tsv": line + b"\n"}
    with pytest.raises(DataError, match=r"line 1 of new_aan_pairs\.eval\.tsv"):
        read(make.folder(tmp_path, files), "lra")


def test_missing_files_papers_and_splits(folder, tmp_path, make):
    files = tsv_files(lambda words: repr(words.encode()).encode())
    del files["lra_release/new_aan_pairs.test.tsv"]
    with pytest.raises(DataError, match="no pairs of the split 'test'"):
        read(make.folder(tmp_path / "tsv", files), "lra")
    with pytest.raises(
        FileNotFoundError, match=r"does not hold aan_papers.parquet and .*--pairs lra new_aan"
    ):
        read(tmp_path / "tsv")
    make.parquet(folder / "aan_papers.parquet", id=["P1", "P2", "P9"], text=["a", "b", "c"])
    with pytest.raises(DataError, match=r"names 1 papers that .* lacks, such as 'P3'"):
        read(folder)
    make.cut_off(folder / "aan_pairs_matched.parquet")
    with pytest.raises(DataError, match=r"aan_pairs_matched\.parquet is no complete Parquet file"):
        read(folder)


def split_of(pairs, labels):
    return Split(np.ones((50, 1), np.uint8), np.ones(50, int), np.array(pairs), np.array(labels))


def test_floors_find_popularity():
    rng = np.random.default_rng(0)
    positive = np.stack([rng.integers(50, size=400), rng.integers(5, size=400)], axis=1)
    negative = np.stack([rng.integers(50, size=400), rng.integers(50, size=400)], axis=1)
    pairs, labels = np.concatenate([positive, negative]), np.repeat([1, 0], 400)
    order = rng.permutation(800)
    train = split_of(pairs[order[:600]], labels[order[:600]])
    test = split_of(pairs[order[600:]], labels[order[600:]])
    # A negative is one of the five famous papers in one case out of ten.
    assert retrieval.floors(train, test).citations == pytest.approx(0.95, abs=0.03)
    assert retrieval.floors(train, test).majority == pytest.approx(0.5, abs=0.1)


def test_floors_do_not_count_a_pairs_own_citation():
    """Nothing is cited twice, so numbers teach nothing; its own citation would give a pair away."""
    train = split_of([[0, paper] for paper in range(40)], np.repeat([1, 0], [30, 10]))
    test = split_of([[1, paper] for paper in range(25, 40)], np.repeat([1, 0], [5, 10]))
    floors = retrieval.floors(train, test)
    assert floors.citations == floors.majority == 1 / 3
