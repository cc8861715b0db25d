"""Tasks by name: prepare and load, options, and what is said when data are missing."""

import builtins
import subprocess
import sys

import numpy as np
import pytest

from schoenbat import data
from schoenbat.data import DataError, MissingDataError, cache, download, listops, pathfinder, text

pytestmark = pytest.mark.usefixtures("tiny")


def same(first, second):
    return first.fingerprint == second.fingerprint and all(
        np.array_equal(getattr(first, split).tokens, getattr(second, split).tokens)
        and np.array_equal(getattr(first, split).labels, getattr(second, split).labels)
        and np.array_equal(getattr(first, split).lengths, getattr(second, split).lengths)
        for split in ("train", "validation", "test")
    )


def test_prepared_and_direct_are_the_same(review_parquet, tmp_path):
    prepared = data.prepare("text", tmp_path / "root", review_parquet)
    direct = data.load("text", review_parquet.parent)
    assert same(prepared, direct)
    assert same(prepared, data.load("text", str(tmp_path / "root")))
    assert (prepared.vocab_size, prepared.num_classes, prepared.max_length, prepared.paired) == (
        256,
        2,
        4096,
        False,
    )
    assert prepared.train.sequences is prepared.test.sequences
    assert isinstance(prepared.train.sequences, np.memmap)


def test_a_folder_with_parquet_files_may_be_read_only(review_parquet):
    review_parquet.chmod(0o444)
    review_parquet.parent.chmod(0o555)
    before = set(review_parquet.parent.iterdir())
    assert len(data.load("text", review_parquet.parent).test) == 8
    assert set(review_parquet.parent.iterdir()) == before
    review_parquet.parent.chmod(0o755)


def test_the_manifest_names_the_source(review_parquet, review_files, tmp_path, make):
    archive = make.tar(tmp_path / "aclImdb_v1.tar.gz", review_files)
    folder = make.folder(tmp_path / "unpacked", review_files)
    sources = {}
    for source in (review_parquet, archive, folder):
        data.prepare("text", tmp_path / "root", source)
        sources |= cache.read_manifest(tmp_path / "root" / "text").source
    assert list(sources) == ["imdb_reviews.parquet", "aclImdb_v1.tar.gz", "unpacked"]
    assert len(set(sources.values())) == 3
    (folder / "aclImdb/train/pos/0_8.txt").write_text("changed")
    data.prepare("text", tmp_path / "root", folder)
    assert cache.read_manifest(tmp_path / "root" / "text").source["unpacked"] != sources["unpacked"]


def test_masks_follow_the_rule(tmp_path):
    data.prepare("pathfinder", tmp_path)
    hidden, all_real = (data.load("pathfinder", tmp_path, hide_zeros=rule).test for rule in (True, False))
    assert (hidden.mask(slice(None)) == (hidden.tokens != 0)).all()
    assert not hidden.mask(0).all()
    assert all_real.mask(slice(None)).all()
    assert all_real.mask(slice(None)).shape == (2, 1024)


def test_pathfinder_is_one_stream(tmp_path):
    task = data.prepare("pathfinder", tmp_path)
    images, labels = pathfinder.generate(10, seed=0)
    splits = (task.train, task.validation, task.test)
    assert (np.concatenate([split.tokens for split in splits]) == images.reshape(10, 1024)).all()
    assert np.concatenate([split.labels for split in splits]).tolist() == labels.tolist()
    assert (task.vocab_size, task.num_classes, task.max_length) == (256, 2, 1024)


def test_listops_is_one_stream_and_a_large_test_set_begins_with_the_small_one(tmp_path):
    told = []
    small = data.prepare("listops", tmp_path, test_size=2, on_progress=lambda *what: told.append(what))
    large = data.prepare("listops", tmp_path, test_size=4)
    tokens, lengths, labels = listops.generate(12, seed=0)
    assert (large.test.tokens[:2] == small.test.tokens).all()
    assert (
        np.concatenate([large.train.tokens, large.validation.tokens, large.test.tokens])[:, :2000] == tokens
    ).all()
    assert large.test.labels.tolist() == labels[8:].tolist()
    assert large.validation.lengths.tolist() == lengths[6:8].tolist()
    assert (large.max_length, large.train.tokens.shape) == (2048, (6, 2048))
    assert large.vocab_size == 16 > large.train.tokens.max()
    assert ("generating", 10, 10) in told
    assert told[-1] == ("writing", 8, 8)


def test_options_must_agree_with_what_was_prepared(tmp_path):
    data.prepare("listops", tmp_path, test_size=3)
    assert len(data.load("listops", tmp_path).test) == 3
    assert len(data.load("listops", tmp_path, test_size=3).test) == 3
    with pytest.raises(DataError, match=r"prepared with test_size=3, not test_size=5; .*--test-size 5"):
        data.load("listops", tmp_path, test_size=5)


def test_retrieval_by_name(tmp_path, make):
    make.parquet(tmp_path / "aan_papers.parquet", id=["A", "B"], text=["one", "two"])
    columns = {"split": ["train", "eval", "test"], "id1": 3 * ["A"], "id2": 3 * ["B"]}
    make.parquet(tmp_path / "aan_pairs_matched.parquet", label=[0, 0, 0], **columns)
    make.parquet(tmp_path / "aan_pairs.parquet", label=[1, 1, 1], **columns)
    assert data.load("retrieval", tmp_path).test.labels.tolist() == [0]
    assert data.load("retrieval", tmp_path, pairs="uniform").test.labels.tolist() == [1]
    task = data.prepare("retrieval", tmp_path / "root", tmp_path, pairs="uniform")
    assert task.paired
    assert task.train.sequences.shape == (2, 4096)
    assert task.train.tokens.shape == (1, 2, 4096)
    with pytest.raises(DataError, match="prepared with pairs=uniform, not pairs=matched"):
        data.load("retrieval", tmp_path / "root", pairs="matched")


def test_urls_are_fetched(review_files, tmp_path, make, server, monkeypatch):
    name = "aclImdb_v1.tar.gz"
    content = make.tar(tmp_path / name, review_files).read_bytes()
    server.files[name] = content
    with pytest.raises(DataError, match="not the published 7c2ac02c03563afcf9b574c7e56c153a"):
        data.prepare("text", tmp_path / "root", server.url(name))
    assert not (tmp_path / "root" / "text").exists()
    monkeypatch.delitem(download.CHECKSUMS, name)
    task = data.prepare("text", tmp_path / "root", server.url(name))
    assert same(task, data.prepare("text", tmp_path / "other", tmp_path / name))


def test_parquet_files_that_go_together_are_fetched_together(tmp_path, make, server):
    columns = {"split": ["train", "eval", "test"], "id1": 3 * ["A"], "id2": 3 * ["B"], "label": [0, 1, 0]}
    paths = [
        make.parquet(tmp_path / "aan_papers.parquet", id=["A", "B"], text=["one", "two"]),
        make.parquet(tmp_path / "aan_pairs_matched.parquet", **columns),
    ]
    server.files |= {path.name: path.read_bytes() for path in paths}
    task = data.prepare("retrieval", tmp_path / "root", server.url("aan_papers.parquet"))
    assert same(task, data.load("retrieval", tmp_path))


def test_without_a_source_the_official_address_is_asked(tmp_path, server, monkeypatch):
    assert text.URL == "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
    asked = []
    monkeypatch.setattr(
        data.catalogue, "download", lambda url, *more: asked.append(url) or tmp_path / "nothing"
    )
    with pytest.raises(MissingDataError):
        data.prepare("text", tmp_path / "root")
    assert asked == [text.URL]


@pytest.mark.parametrize("damage", ["cut off", "wrong"])
def test_a_damaged_source_leaves_no_cache_and_keeps_the_old_one(review_parquet, tmp_path, make, damage):
    root = tmp_path / "root"
    bad = make.parquet(tmp_path / "bad" / "imdb_reviews.parquet", text=["a"])
    if damage == "cut off":
        make.cut_off(bad)
    with pytest.raises(DataError, match=r"bad/imdb_reviews\.parquet"):
        data.prepare("text", root, bad)
    assert list(root.iterdir()) == []
    good = data.prepare("text", root, review_parquet)
    with pytest.raises(DataError):
        data.prepare("text", root, bad)
    assert same(data.load("text", root), good)


def test_missing_data_say_what_was_looked_for_and_what_helps(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"text does not exist, nor does .* hold imdb_reviews\.parquet"
    ):
        data.load("text", tmp_path)
    with pytest.raises(FileNotFoundError, match="schoenbat data prepare text --data"):
        data.load("text", tmp_path / "nowhere")
    # Nobody may publish these, so that the command would ask where they are.
    with pytest.raises(FileNotFoundError, match="data prepare retrieval --from FILE_OR_URL --data"):
        data.load("retrieval", tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"schoenbat data prepare listops --data .* --test-size 20000$"
    ):
        data.load("listops", tmp_path, test_size=20_000)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("words", {}, "no task 'words'; known are listops, text, retrieval, pathfinder, image"),
        ("text", {"test_size": 5}, "text has no test_size; got test_size=5"),
        ("image", {"pairs": "lra"}, "image has no pairs"),
        ("listops", {"source": "file"}, "listops is generated and has no source; got file"),
        ("listops", {"test_size": 0}, "needs an example at least; got test_size=0"),
        ("retrieval", {}, "retrieval has no public address; give a source"),
        ("retrieval", {"pairs": "all"}, "pairs must be one of"),
    ],
)
def test_wrong_calls(tmp_path, name, options, problem):
    with pytest.raises(ValueError, match=problem):
        data.prepare(name, tmp_path, **options)


def test_without_pyarrow_the_install_command_is_shown(review_parquet, monkeypatch):
    load = builtins.__import__

    def refuse(name, *more):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"pip install '\.\[cli\]' in a checkout"):
        data.load("text", review_parquet.parent)


def test_without_numpy_the_install_command_is_shown():
    code = "import sys; sys.modules['numpy'] = None; import schoenbat; schoenbat.data"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "needs numpy; install it with: pip install '.[cli]' in a checkout" in result.stderr


def test_a_source_that_changes_does_not_change_what_was_prepared(review_parquet, tmp_path, make):
    root = tmp_path / "root"
    data.prepare("text", root, review_parquet)
    before = data.load("text", root)
    content = review_parquet.read_bytes()
    review_parquet.write_bytes(content[: len(content) // 2])
    assert data.load("text", root).fingerprint == before.fingerprint
    with pytest.raises(DataError):
        data.prepare("text", root, review_parquet)
    assert data.load("text", root).fingerprint == before.fingerprint
