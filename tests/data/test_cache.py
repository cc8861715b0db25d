"""The cache: written as a whole or not at all, checked when it is read."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from schoenbat.data import DataError, cache
from schoenbat.data.arrays import NAMES, consecutive, fingerprint


def some_arrays(value=1):
    store = np.full((6, 4), value, dtype=np.uint8)
    sizes = {"train": 3, "validation": 1, "test": 2}
    return consecutive(store, np.full(6, 4), np.arange(6), sizes)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "root" / "text"


@pytest.fixture
def written(folder):
    cache.write(folder, some_arrays(), {"pairs": "matched"}, {"file": "abc"})
    return folder


def test_what_is_written_is_read(written):
    arrays, manifest = cache.read(written)
    assert fingerprint(arrays) == fingerprint(some_arrays()) == manifest.fingerprint
    assert manifest.options == {"pairs": "matched"}
    assert manifest.source == {"file": "abc"}
    assert all(isinstance(array, np.memmap) and not array.flags.writeable for array in arrays.values())
    assert sorted(file.name for file in written.iterdir()) == sorted(
        [*(f"{name}.npy" for name in NAMES), "manifest.json"]
    )
    assert [file.name for file in written.parent.iterdir()] == ["text"]


def test_a_cache_is_replaced_as_a_whole(written):
    cache.write(written, some_arrays(2), {}, {})
    arrays, manifest = cache.read(written)
    assert (arrays["sequences"] == 2).all()
    assert manifest.options == {}
    assert [file.name for file in written.parent.iterdir()] == ["text"]


@pytest.mark.parametrize("name", ["sequences", "test_labels"])
@pytest.mark.parametrize("change", ["cut", "grown", "gone", "garbage"])
def test_damaged_arrays_are_named(written, name, change):
    path = written / f"{name}.npy"
    content = path.read_bytes()
    path.unlink()
    new = {"cut": content[:-3], "grown": content + b"1", "garbage": bytes(len(content))}.get(change)
    if new is not None:
        path.write_bytes(new)
    with pytest.raises(DataError, match=rf"{name}\.npy .*delete .*text and prepare it again"):
        cache.read(written)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is no manifest"),
        ('{"format": 1, "fing', "is no manifest"),
        ("[]", "is no manifest"),
        ('{"format": 1, "more": 2}', "is no manifest"),
        ('{"format": 0}', "has the format 0, this version reads 1; prepare it again"),
    ],
)
def test_damaged_manifests_are_named(written, content, problem):
    (written / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=rf"manifest\.json {problem}"):
        cache.read(written)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_leaves_what_was_there(folder, monkeypatch, error, exists):
    if exists:
        cache.write(folder, some_arrays(1), {}, {})
    save, saved = np.save, []

    def fail_at_the_fourth(path, array):
        saved.append(path)
        if len(saved) == 4:
            raise error
        save(path, array)

    monkeypatch.setattr(np, "save", fail_at_the_fourth)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else DataError):
        cache.write(folder, some_arrays(2), {}, {})
    assert len(saved) == 4
    assert [file.name for file in folder.parent.iterdir()] == (["text"] if exists else [])
    if exists:
        assert (cache.read(folder)[0]["sequences"] == 1).all()


KILLED = """
import sys, time
from pathlib import Path
import numpy as np
from schoenbat.data import cache
from schoenbat.data.arrays import consecutive

def wait(done, total):
    if done == 4:
        print("half", flush=True)
        time.sleep(60)

arrays = consecutive(
    np.ones((6, 4), np.uint8), np.full(6, 4), np.arange(6), {"train": 3, "validation": 1, "test": 2}
)
cache.write(Path(sys.argv[1]), arrays, {}, {}, wait)
"""


def test_a_killed_writer_leaves_no_cache_and_its_leftovers_go(folder):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert not folder.exists()
    leftovers = list(folder.parent.iterdir())
    assert len(leftovers) == 1
    assert len(list(leftovers[0].iterdir())) >= 4
    cache.write(folder, some_arrays(), {}, {})
    assert [file.name for file in folder.parent.iterdir()] == ["text"]
    cache.read(folder)


def test_folders_of_others_are_not_replaced(folder):
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="text is in the way and no prepared task"):
        cache.write(folder, some_arrays(), {}, {})
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_a_place_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(DataError, match="root cannot be made"):
        cache.write(tmp_path / "root" / "text", some_arrays(), {}, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_is_read_only(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(DataError, match="may not be written to"):
        cache.write(tmp_path / "text", some_arrays(), {}, {})


def test_the_manifest_is_plain_json(written):
    content = json.loads((written / "manifest.json").read_text())
    assert content["bytes"]["sequences.npy"] == (written / "sequences.npy").stat().st_size
    assert content["format"] == cache.FORMAT


def test_values_that_changed_under_the_checksum_are_found(written):
    path = written / "sequences.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=((later := (written / "manifest.json").stat().st_mtime_ns + 10**9), later))
    with pytest.raises(DataError, match=r"were changed since they were prepared.*delete .*prepare it again"):
        cache.read(written)


def test_a_copy_with_new_times_is_read(written):
    for path in written.glob("*.npy"):
        os.utime(path, ns=((later := (written / "manifest.json").stat().st_mtime_ns + 10**9), later))
    assert fingerprint(cache.read(written)[0]) == fingerprint(some_arrays())


def test_a_cache_that_stepped_aside_for_one_that_never_came_steps_back(written):
    before = cache.read_manifest(written)
    written.rename(written.with_name(".text-old.part"))  # as after a kill between two renames
    cache.claim(written)
    assert cache.read_manifest(written) == before


def test_a_cache_that_cannot_be_put_in_place_leaves_the_old_one(written, monkeypatch):
    before, rename = cache.read_manifest(written), Path.rename

    def refuse(path, target):
        if path.name.startswith(".text-") and not path.name.endswith("-old.part"):
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DataError, match="what was there before is kept"):
        cache.write(written, some_arrays(2), {}, {})
    assert cache.read_manifest(written) == before
