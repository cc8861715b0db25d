"""Multi30k: the same sentences from every source, and what is wrong with damaged ones."""

import gzip

import pytest

from schoenbat.data import DataError, MissingDataError
from schoenbat.data.multi30k import load
from schoenbat.data.source import checksum

SPLITS = {
    "train": [("Ein Hund läuft.", "A dog runs."), ("@@", "A man."), ("Sie sagt: @@", "She says: @@")],
    "val": [("@@", "Nothing.")],
    "test": [("Zwei Katzen.\u2028", "Two cats.")],
}


@pytest.fixture
def parquet(tmp_path, make):
    rows = [(split, *pair) for split, pairs in SPLITS.items() for pair in pairs]
    split, de, en = map(list, zip(*rows, strict=True))
    return make.parquet(tmp_path / "parquet" / "multi30k_de_en.parquet", en=en, de=de, split=split)


@pytest.fixture
def files():
    names = {"train": "train", "val": "val", "test": "test_2016_flickr"}
    return {
        f"{names[split]}.{language}.gz": gzip.compress("".join(f"{pair[i]}\n" for pair in pairs).encode())
        for split, pairs in SPLITS.items()
        for i, language in enumerate(("de", "en"))
    }


def test_training_pairs_without_german_are_left_out(parquet):
    corpus = load(parquet)
    assert corpus.train.german == ["Ein Hund läuft.", "Sie sagt: @@"]
    assert corpus.train.english == ["A dog runs.", "She says: @@"]
    assert corpus.validation.german == ["@@"]
    assert corpus.sha256 == {parquet.name: checksum(parquet, "sha256")}


def test_every_source_gives_the_same_sentences(parquet, files, tmp_path, make):
    expected = load(parquet)
    folder = make.folder(tmp_path / "raw", files)
    plain = make.folder(
        tmp_path / "plain", {name[:-3]: gzip.decompress(content) for name, content in files.items()}
    )
    for source in (parquet.parent, folder, folder / "train.de.gz", plain):
        found = load(source)
        assert (found.train, found.validation, found.test) == (
            expected.train,
            expected.validation,
            expected.test,
        )
        assert len(found.sha256) == 1


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(MissingDataError, match=r"does not hold multi30k_de_en\.parquet or the folder"):
        load(tmp_path)


def test_a_language_that_is_shorter_than_the_other(files, tmp_path, make):
    files["train.en.gz"] = gzip.compress(b"A dog runs.\n")
    with pytest.raises(DataError, match="3 German and 1 English sentences of train"):
        load(make.folder(tmp_path / "raw", files))


def test_a_file_that_is_missing_or_cut_off(files, tmp_path, make):
    folder = make.folder(tmp_path / "raw", files)
    make.cut_off(folder / "val.de.gz")
    with pytest.raises(DataError, match=r"val\.de\.gz in .* is damaged"):
        load(folder)
    for language in ("de", "en"):
        (folder / f"val.{language}.gz").unlink()
    with pytest.raises(DataError, match="no sentences of the split validation"):
        load(folder)
