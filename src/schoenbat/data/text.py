"""Text: is a film review positive? The reviews of the Large Movie Review Dataset (IMDb), byte by byte.

Train and test are the official halves. Validation are the reviews of the training half whose text has the
smallest SHA-256, so that it does not depend on the order of the files and equal texts stay together. Texts
are cut to 4,096 bytes.
Maas et al., "Learning Word Vectors for Sentiment Analysis" (2011).
"""

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from schoenbat.data.arrays import Arrays, selected
from schoenbat.data.byte_tokens import encode
from schoenbat.data.errors import DataError
from schoenbat.data.parquet import read_columns
from schoenbat.data.progress import Step, silent
from schoenbat.data.source import Layout, Source

MAX_LENGTH = 4096
HALF_SIZE = 25_000
VALIDATION_SIZE = 2_500
URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
LAYOUT = Layout(
    parquet=("imdb_reviews.parquet",),
    archives=("aclImdb_v1.tar.gz",),
    original=re.compile(r"(?:^|/)(train|test)/(pos|neg)/(\d+)_\d+\.txt$"),
    described="its unpacked folder aclImdb",
)


class Review(NamedTuple):
    """One review; sorted, they have the same order whatever they were read from."""

    half: str
    label: int
    id: int
    text: bytes


def read(source: Source, on_progress: Step = silent) -> Arrays:
    """The arrays of the task from the Parquet file, or from the original archive or folder."""
    reviews = _from_parquet(source.paths[0]) if source.is_parquet else _from_original(source, on_progress)
    sizes = Counter(review.half for review in reviews)
    if sizes != {"train": HALF_SIZE, "test": HALF_SIZE}:
        raise DataError(
            f"{source.paths[0]} holds {sizes['train']:,} reviews for training and {sizes['test']:,} for "
            f"testing ({sizes.total():,} in all), not {HALF_SIZE:,} and {HALF_SIZE:,}; get it again"
        )
    reviews.sort()
    sequences, lengths = encode([review.text for review in reviews], MAX_LENGTH)
    labels = np.array([review.label for review in reviews], dtype=np.int64)
    is_train = np.array([review.half == "train" for review in reviews])
    rows = np.flatnonzero(is_train)
    hashes = [hashlib.sha256(sequences[row, : lengths[row]].tobytes()).hexdigest() for row in rows]
    order = np.argsort(hashes, kind="stable")
    members = {
        "train": np.sort(rows[order[VALIDATION_SIZE:]]),
        "validation": np.sort(rows[order[:VALIDATION_SIZE]]),
        "test": np.flatnonzero(~is_train),
    }
    return selected(sequences, lengths, members, {split: labels[rows] for split, rows in members.items()})


def _from_parquet(path: Path) -> list[Review]:
    columns = read_columns(path, ["split", "label", "id", "text"])
    labels = set(columns[1])
    if not labels <= {0, 1}:
        raise DataError(f"{path} has the labels {sorted(labels)}; reviews are negative (0) or positive (1)")
    return [
        Review(half, label, number, text.encode()) for half, label, number, text in zip(*columns, strict=True)
    ]


def _from_original(source: Source, on_progress: Step) -> list[Review]:
    reviews: list[Review] = []

    def add(match: re.Match[str], file: IO[bytes]) -> None:
        half, sign, number = match.groups()
        reviews.append(Review(half, int(sign == "pos"), int(number), file.read()))
        if len(reviews) % 500 == 0:
            on_progress(len(reviews), 2 * HALF_SIZE)

    source.visit(add)
    return reviews
