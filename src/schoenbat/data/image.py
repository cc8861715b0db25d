"""Image: which of ten things does a picture show? CIFAR-10 in grey, pixel by pixel.

Train and test are the official ones; the last 5,000 images of the training set are for validation.
Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
"""

import io
import pickle  # nosec B403 - read by _ArraysOnly alone, which knows nothing but arrays
import re
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from schoenbat.data.arrays import Arrays, consecutive
from schoenbat.data.errors import DataError
from schoenbat.data.parquet import read_columns
from schoenbat.data.progress import Step, silent
from schoenbat.data.source import Layout, Source

PIXELS = 32 * 32
NUM_CLASSES = 10
NUM_TRAIN_BATCHES = 5
BATCH_SIZE = 10_000
VALIDATION_SIZE = 5_000
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
LAYOUT = Layout(
    parquet=("cifar10_grey_train.parquet", "cifar10_grey_test.parquet"),
    archives=("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
    original=re.compile(r"(?:^|/)(data_batch_[1-5]|test_batch)(\.bin)?$"),
    described="an unpacked folder cifar-10-batches-py or cifar-10-batches-bin",
)

Grey = NDArray[np.uint8]
Labels = NDArray[np.int64]


def read(source: Source, on_progress: Step = silent) -> Arrays:
    """The arrays of the task from the Parquet files, or from an original archive or folder."""
    parts = _from_parquet(source) if source.is_parquet else _from_original(source, on_progress)
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not ((labels >= 0) & (labels < NUM_CLASSES)).all():
        raise DataError(
            f"{source.paths[0]} has labels from {labels.min()} to {labels.max()}; CIFAR-10 has 0 to 9"
        )
    train = NUM_TRAIN_BATCHES * BATCH_SIZE
    sizes = {"train": train - VALIDATION_SIZE, "validation": VALIDATION_SIZE, "test": BATCH_SIZE}
    return consecutive(images, np.full(len(images), PIXELS), labels, sizes)


def grey(colours: Grey) -> Grey:
    """What TensorFlow's ``rgb_to_grayscale`` makes of red, green and blue planes ``(..., 3, pixels)``.

    It scales to [0, 1] in float32, adds 0.2989 R + 0.5870 G + 0.1140 B, scales back by 255.5 and truncates.

    >>> grey(np.array([[255, 9], [255, 0], [255, 200]], dtype=np.uint8))
    array([255,  25], dtype=uint8)
    """
    weights = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)
    light = colours.astype(np.float32) * np.float32(1 / 255)
    red, green, blue = (light[..., plane, :] * weights[plane] for plane in range(3))
    return np.minimum((red + green + blue) * np.float32(255.5), np.float32(255)).astype(np.uint8)


def _from_parquet(source: Source) -> list[tuple[Grey, Labels]]:
    sizes = (NUM_TRAIN_BATCHES * BATCH_SIZE, BATCH_SIZE)
    return [_parquet_part(path, size) for path, size in zip(source.paths, sizes, strict=True)]


def _parquet_part(path: Path, size: int) -> tuple[Grey, Labels]:
    images, labels = read_columns(path, ["image", "label"])
    if len(images) != size or {len(image) for image in images} != {PIXELS}:
        raise DataError(
            f"{path} holds {len(images):,} images of {sorted({len(image) for image in images})} bytes, "
            f"not {size:,} of {PIXELS:,}"
        )
    pixels = np.frombuffer(b"".join(images), dtype=np.uint8).reshape(size, PIXELS)
    return pixels, np.array(labels, dtype=np.int64)


def _from_original(source: Source, on_progress: Step) -> list[tuple[Grey, Labels]]:
    names = [*(f"data_batch_{number + 1}" for number in range(NUM_TRAIN_BATCHES)), "test_batch"]
    batches: dict[str, tuple[Grey, Labels]] = {}

    def add(match: re.Match[str], file: IO[bytes]) -> None:
        name, binary = match.groups()
        where = f"{match[0].lstrip('/')} in {source.paths[0]}"
        batches[name] = (_binary_batch if binary else _pickled_batch)(file.read(), where)
        on_progress(len(batches), len(names))

    source.visit(add)
    missing = [name for name in names if name not in batches]
    if missing:
        raise DataError(f"{source.paths[0]} lacks {', '.join(missing)}; get it again")
    return [batches[name] for name in names]


def _binary_batch(content: bytes, where: str) -> tuple[Grey, Labels]:
    """Records of a label and the red, green and blue plane."""
    record = 1 + 3 * PIXELS
    if len(content) != BATCH_SIZE * record:
        raise DataError(f"{where} has {len(content):,} bytes, not {BATCH_SIZE:,} records of {record:,}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(BATCH_SIZE, record)
    return grey(records[:, 1:].reshape(-1, 3, PIXELS)), records[:, 0].astype(np.int64)


def _pickled_batch(content: bytes, where: str) -> tuple[Grey, Labels]:
    """A pickled dictionary with "data", the planes of each image, and "labels"."""
    try:
        # Python 2 wrote these files; with latin1, strings and the bytes of arrays come through unchanged.
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        data, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
    # Damaged pickles fail in every way there is.
    except Exception as error:
        raise DataError(f"{where} is no batch of CIFAR-10 ({type(error).__name__}: {error})") from error
    if data.shape != (BATCH_SIZE, 3 * PIXELS) or data.dtype != np.uint8 or labels.shape != (BATCH_SIZE,):
        raise DataError(
            f"{where} has data {data.dtype} {data.shape} and labels {labels.shape}, "
            f"not uint8 {(BATCH_SIZE, 3 * PIXELS)} and {(BATCH_SIZE,)}"
        )
    return grey(data.reshape(-1, 3, PIXELS)), labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Reads plain containers and NumPy arrays. A pickle that asks for anything else could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NEEDED_BY_ARRAYS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which arrays do not need")
        return _NEEDED_BY_ARRAYS[module, name]


_reconstruct = np.zeros(0).__reduce__()[0]
_NEEDED_BY_ARRAYS = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}
