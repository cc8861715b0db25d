"""Multi30k: captions of photographs in German, with their English translations.

It is task 1 with its own three splits, raw text; test is the one of 2016 (Flickr). Training pairs whose
German is only "@@" (two in the published files) are left out: they translate nothing.
Elliott et al., "Multi30K: Multilingual English-German Image Descriptions" (2016).
"""

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from schoenbat.data.errors import DataError
from schoenbat.data.parquet import read_columns
from schoenbat.data.source import Layout, Source, find

LAYOUT = Layout(
    parquet=("multi30k_de_en.parquet",),
    archives=(),
    original=re.compile(r"(?:^|/)(train|val|test_2016_flickr)\.(de|en)(\.gz)?$"),
    described="the folder data/task1/raw of github.com/multi30k/dataset, with train.de.gz and five others",
)
NO_TEXT = "@@"
# The name of each split in the Parquet file, and in the names of the original files.
_SPLITS = {"train": ("train", "train"), "validation": ("val", "val"), "test": ("test", "test_2016_flickr")}


@dataclass(frozen=True)
class Sentences:
    """German sentences and, in the same order, their English translations."""

    german: list[str]
    english: list[str]

    def __len__(self) -> int:
        return len(self.german)

    def first(self, count: int | None) -> "Sentences":
        """The first ``count`` pairs; all for None.

        >>> Sentences(["Ein Hund.", "Zwei Katzen."], ["A dog.", "Two cats."]).first(1).english
        ['A dog.']
        """
        return Sentences(self.german[:count], self.english[:count])


@dataclass(frozen=True)
class Multi30k:
    """The three splits, and the checksum of each file they were read from."""

    train: Sentences
    validation: Sentences
    test: Sentences
    sha256: dict[str, str]


def load(path: str | Path = "data") -> Multi30k:
    """The corpus from a Parquet file, from the published files, or from a folder with either.

    >>> load("nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    schoenbat.data.errors.MissingDataError: there is no nowhere; wanted is multi30k_de_en.parquet or ...
    """
    source = find(Path(path), LAYOUT)
    splits = dict(_from_parquet(source.paths[0]) if source.is_parquet else _from_original(source))
    for name, sentences in splits.items():
        if not len(sentences):
            raise DataError(f"{source.paths[0]} holds no sentences of the split {name}; get it again")
    splits["train"] = _with_text(splits["train"])
    return Multi30k(**splits, sha256=source.sha256())


def _from_parquet(path: Path) -> Iterator[tuple[str, Sentences]]:
    rows = list(zip(*read_columns(path, ["split", "de", "en"]), strict=True))
    for name, (split, _) in _SPLITS.items():
        chosen = [row for row in rows if row[0] == split]
        yield name, Sentences([row[1] for row in chosen], [row[2] for row in chosen])


def _from_original(source: Source) -> Iterator[tuple[str, Sentences]]:
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)

    def add(match: re.Match[str], file: IO[bytes]) -> None:
        split, language, compressed = match.groups()
        try:
            content = gzip.decompress(file.read()) if compressed else file.read()
            lines[split, language] = content.decode().removesuffix("\n").split("\n")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{match[0]} in {source.paths[0]} is damaged ({error}); get it again") from error

    source.visit(add)
    for name, (_, split) in _SPLITS.items():
        german, english = lines[split, "de"], lines[split, "en"]
        if len(german) != len(english):
            raise DataError(
                f"{source.paths[0]} has {len(german):,} German and {len(english):,} English sentences of "
                f"{split}; get both files again"
            )
        yield name, Sentences(german, english)


def _with_text(sentences: Sentences) -> Sentences:
    pairs = zip(sentences.german, sentences.english, strict=True)
    kept = [pair for pair in pairs if pair[0].strip() != NO_TEXT]
    return Sentences([german for german, _ in kept], [english for _, english in kept])
