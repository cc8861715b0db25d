"""Image: the grey formula, the same arrays from every source, pickles that cannot run code."""

import pickle
import struct

import numpy as np
import pytest

from schoenbat.data import DataError, image
from schoenbat.data.arrays import fingerprint
from schoenbat.data.source import find

pytestmark = pytest.mark.usefixtures("tiny")
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def read(path):
    return image.read(find(path, image.LAYOUT))


def python_2_pickle(data, labels):
    """A batch as Python 2 wrote it: byte strings, and an array that is rebuilt from one."""

    def string(content):
        return b"T" + struct.pack("<i", len(content)) + content

    def integer(value):
        return b"J" + struct.pack("<i", value)

    kind = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR"
    kind += b"(K\x03" + string(b"|") + b"NNN" + integer(-1) + integer(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + string(b"b") + b"tR"
    array += (
        b"(K\x01("
        + b"".join(map(integer, data.shape))
        + b"t"
        + kind
        + b"\x89"
        + string(data.tobytes())
        + b"tb"
    )
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    entries = string(b"data") + array + string(b"labels") + numbers
    return b"\x80\x02}(" + string(b"batch_label") + string(b"batch 1") + entries + b"u."


@pytest.fixture
def batches():
    """Names with red, green and blue planes and labels."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 256, (4, 3072), dtype=np.uint8), rng.integers(0, 10, 4).tolist())
        for name in NAMES
    }


@pytest.fixture
def pickled(batches):
    # The official archive is not in the order of its batches either.
    shuffled = [NAMES[index] for index in (3, 5, 2, 0, 4, 1)]
    files = {f"cifar-10-batches-py/{name}": python_2_pickle(*batches[name]) for name in shuffled}
    return {"cifar-10-batches-py/batches.meta": b"not read", **files}


@pytest.fixture
def binary(batches):
    return {
        f"cifar-10-batches-bin/{name}.bin": b"".join(
            bytes([label]) + row.tobytes() for row, label in zip(data, labels, strict=True)
        )
        for name, (data, labels) in batches.items()
    }


def test_every_source_gives_the_same_arrays(batches, pickled, binary, tmp_path, make):
    parts = {"train": NAMES[:5], "test": NAMES[5:]}
    for part, names in parts.items():
        data = np.concatenate([batches[name][0] for name in names]).reshape(-1, 3, 1024)
        labels = np.concatenate([batches[name][1] for name in names])
        pixels = [bytes(row) for row in image.grey(data)]
        make.parquet(tmp_path / "parquet" / f"cifar10_grey_{part}.parquet", image=pixels, label=labels)
    sources = [
        tmp_path / "parquet" / "cifar10_grey_test.parquet",
        make.tar(tmp_path / "a.tar.gz", pickled),
        make.tar(tmp_path / "b.tar.gz", binary),
        make.folder(tmp_path / "python", pickled),
        make.folder(tmp_path / "binary", binary) / "cifar-10-batches-bin",
    ]
    arrays = read(tmp_path / "parquet")
    assert {fingerprint(read(source)) for source in sources} == {fingerprint(arrays)}
    assert arrays["sequences"].shape == (24, 1024)
    assert arrays["train_members"].tolist() == list(range(14))
    assert arrays["validation_members"].tolist() == list(range(14, 20))
    assert arrays["test_labels"].tolist() == batches["test_batch"][1]
    assert (arrays["sequence_lengths"] == 1024).all()


def test_grey_is_the_rounded_weighted_sum():
    """Against whole numbers, on many colours, all but those at the edge between two levels."""
    levels = np.arange(0, 256, 5)
    red, green, blue = (axis.reshape(-1) for axis in np.meshgrid(levels, levels, levels, indexing="ij"))
    exact = (2989 * red + 5870 * green + 1140 * blue) * 511  # in units of 1 / (10,000 · 2 · 255)
    expected, rest = np.divmod(exact, 10_000 * 510)
    clear = (rest > 100) & (rest < 10_000 * 510 - 100)
    found = image.grey(np.stack([red, green, blue]).astype(np.uint8))
    assert clear.mean() > 0.999
    assert (found[clear] == expected[clear]).all()


def test_grey_of_grey_and_of_the_brightest():
    levels = np.arange(256, dtype=np.uint8)
    found = image.grey(np.stack([levels, levels, levels])).astype(int)
    # The weights add up to 0.9999, the scale back to 255.5 / 255: nothing moves.
    assert (found == levels).all()


class Evil:
    def __reduce__(self):
        return (print, ("code of the pickle ran",))


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), pickle.dumps({"data": Evil(), "labels": [1]})])
def test_a_pickle_cannot_run_code(pickled, tmp_path, make, capsys, content):
    pickled["cifar-10-batches-py/data_batch_2"] = content
    path = make.tar(tmp_path / "cifar.tar.gz", pickled)
    with pytest.raises(DataError, match=r"data_batch_2 in .*cifar\.tar\.gz .*asks for builtins\.print"):
        read(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("data_batch_3", lambda content: content[:2000], "data_batch_3 in .* is no batch"),
        ("data_batch_3", lambda content: b"", "data_batch_3 in .* is no batch"),
        ("test_batch", lambda content: pickle.dumps([1, 2]), "test_batch in .* is no batch"),
        (
            "test_batch",
            lambda content: python_2_pickle(np.zeros((3, 3072), np.uint8), [0, 0, 0]),
            r"test_batch in .* \(3, 3072\) and labels \(3,\), not uint8 \(4, 3072\)",
        ),
        (
            "data_batch_1",
            lambda content: python_2_pickle(np.zeros((4, 3072), np.uint8), [0, 0, 0, 10]),
            "labels from 0 to 10",
        ),
    ],
)
def test_damaged_batches_are_named(pickled, tmp_path, make, name, change, problem):
    key = f"cifar-10-batches-py/{name}"
    pickled[key] = change(pickled[key])
    with pytest.raises(DataError, match=problem):
        read(make.tar(tmp_path / "cifar.tar.gz", pickled))


def test_missing_and_short_binary_batches(binary, tmp_path, make):
    short = binary | {"cifar-10-batches-bin/test_batch.bin": b"1234"}
    with pytest.raises(DataError, match=r"test_batch\.bin in .* has 4 bytes, not 4 records of 3,073"):
        read(make.tar(tmp_path / "short.tar.gz", short))
    del binary["cifar-10-batches-bin/data_batch_5.bin"]
    with pytest.raises(DataError, match="lacks data_batch_5"):
        read(make.tar(tmp_path / "missing.tar.gz", binary))
    with pytest.raises(DataError, match="is damaged"):
        read(make.cut_off(make.tar(tmp_path / "cut.tar.gz", binary)))


def test_one_of_two_parquet_files(tmp_path, make):
    path = make.parquet(tmp_path / "cifar10_grey_train.parquet", image=[bytes(1024)], label=[0])
    with pytest.raises(FileNotFoundError, match=r"cifar10_grey_test\.parquet are missing"):
        read(path)
    make.parquet(tmp_path / "cifar10_grey_test.parquet", image=[bytes(1024)], label=[0])
    with pytest.raises(DataError, match=r"train\.parquet holds 1 images of \[1024\] bytes, not 20 of 1,024"):
        read(path)
