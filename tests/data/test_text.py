"""Text: the same arrays from every source, the hold-out, damage."""

import hashlib

import numpy as np
import pytest

from schoenbat.data import DataError, text
from schoenbat.data.arrays import fingerprint
from schoenbat.data.source import find

pytestmark = pytest.mark.usefixtures("tiny")


def read(path):
    return text.read(find(path, text.LAYOUT))


@pytest.fixture
def arrays(review_parquet):
    return read(review_parquet)


def texts(arrays, split):
    rows = arrays[f"{split}_members"]
    lengths = arrays["sequence_lengths"][rows]
    return [bytes(row[:n]) for row, n in zip(arrays["sequences"][rows], lengths, strict=True)]


def test_every_source_gives_the_same_arrays(arrays, review_parquet, review_files, tmp_path, make):
    archive = make.tar(tmp_path / "reviews.tar.gz", review_files)
    folder = make.folder(tmp_path / "unpacked", review_files)
    make.tar(tmp_path / "aclImdb_v1.tar.gz", review_files)
    for source in (review_parquet.parent, archive, folder, folder / "aclImdb", tmp_path):
        assert fingerprint(read(source)) == fingerprint(arrays), source


def test_tokens_are_the_bytes_of_the_reviews(arrays, reviews):
    assert arrays["sequences"].shape == (16, 4096)
    assert arrays["sequences"].dtype == np.uint8
    for split, half in (("test", "test"), ("train", "train"), ("validation", "train")):
        labelled = {
            (row[1], row[3].encode()[:4095].replace(b"\0", b" ")) for row in reviews if row[0] == half
        }
        found = set(zip(arrays[f"{split}_labels"].tolist(), texts(arrays, split), strict=True))
        assert found <= labelled
    every = [*texts(arrays, "train"), *texts(arrays, "validation")]
    assert 4095 * b"a" in every
    assert b"a b" in every


def test_validation_has_the_smallest_hashes_of_the_training_half(arrays, reviews):
    words = [row[3].encode()[:4095].replace(b"\0", b" ") for row in reviews if row[0] == "train"]
    smallest = sorted(words, key=lambda each: hashlib.sha256(each).hexdigest())[:3]
    assert sorted(texts(arrays, "validation")) == sorted(smallest)
    assert [len(arrays[f"{split}_labels"]) for split in ("train", "validation", "test")] == [5, 3, 8]
    assert not set(arrays["train_members"]) & set(arrays["validation_members"])


@pytest.mark.parametrize(
    ("mode", "share"), [("w", 0.02), ("w", 0.5), ("w:gz", 0.02), ("w:gz", 0.5), ("w:gz", 0.97)]
)
def test_an_archive_that_is_cut_off(review_files, tmp_path, make, mode, share):
    # Noise, which a compressor cannot swallow whole.
    noise = np.random.default_rng(0).bytes(60_000)
    path = make.tar(tmp_path / "reviews.tar.gz", {"aclImdb/noise": noise} | review_files, mode)
    with pytest.raises(DataError, match=r"reviews\.tar\.gz (is damaged|holds)"):
        read(make.cut_off(path, share))


def test_an_archive_with_reviews_missing(review_files, tmp_path, make):
    del review_files["aclImdb/test/pos/10_8.txt"]
    path = make.tar(tmp_path / "reviews.tar.gz", review_files)
    with pytest.raises(DataError, match=r"holds 8 reviews for training and 7 for testing .* not 8 and 8"):
        read(path)


def test_a_file_that_is_no_archive(tmp_path):
    path = tmp_path / "reviews.tar.gz"
    path.write_text("<html>404</html>")
    with pytest.raises(DataError, match=r"reviews\.tar\.gz is damaged, cut off, or no archive"):
        read(path)


def test_a_parquet_file_that_is_cut_off(review_parquet, make):
    with pytest.raises(DataError, match=r"imdb_reviews\.parquet is no complete Parquet file"):
        read(make.cut_off(review_parquet))


def test_a_parquet_file_without_a_column(tmp_path, make):
    path = make.parquet(tmp_path / "imdb_reviews.parquet", text=["a"], stars=[1], split=["train"])
    with pytest.raises(DataError, match=r"lacks the columns label, id; it has text, stars, split"):
        read(path)


@pytest.mark.parametrize(
    ("labels", "problem"), [(8 * [0, 2], r"labels \[0, 2\]"), ([None, *15 * [1]], "1 missing values")]
)
def test_a_parquet_file_with_wrong_labels(tmp_path, make, labels, problem):
    path = make.parquet(
        tmp_path / "imdb_reviews.parquet",
        text=16 * ["a"],
        label=labels,
        id=list(range(16)),
        split=8 * ["train", "test"],
    )
    with pytest.raises(DataError, match=problem):
        read(path)


def test_other_places_are_named(tmp_path, make):
    with pytest.raises(
        FileNotFoundError, match=r"does not hold imdb_reviews\.parquet or aclImdb_v1\.tar\.gz"
    ):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no "):
        read(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"other\.parquet is not one of the files"):
        read(make.parquet(tmp_path / "other.parquet", text=["a"]))
