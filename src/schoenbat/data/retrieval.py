"""Retrieval: does one paper cite the other? Pairs of papers of the ACL Anthology Network, byte by byte.

Three sets of pairs are known by name. "matched" and "uniform" come as Parquet files, which share their
positive pairs; in "uniform" a paper that is not cited was drawn from all papers alike, in "matched" in
proportion to how often papers are cited, so that fame alone does not tell (see :func:`floors`). "lra" are the
files ``new_aan_pairs.*.tsv`` of the Long Range Arena.
Radev et al., "The ACL Anthology Network Corpus" (2013).
"""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

import numpy as np

from schoenbat.data.arrays import Arrays, selected
from schoenbat.data.byte_tokens import encode
from schoenbat.data.errors import DataError
from schoenbat.data.parquet import read_columns
from schoenbat.data.progress import Step, silent
from schoenbat.data.source import Layout, Source
from schoenbat.data.task import Split

MAX_LENGTH = 4096
PAIRS = ("matched", "uniform", "lra")
_PARQUET = {"matched": "aan_pairs_matched.parquet", "uniform": "aan_pairs.parquet"}
_SPLITS = {"train": "train", "validation": "eval", "test": "test"}
_TSV = re.compile(r"(?:^|/)new_aan_pairs\.(train|eval|test)\.tsv$")


class Pair(NamedTuple):
    split: str
    label: int
    first: str
    second: str


class Floors(NamedTuple):
    """Accuracies on test that need no reading, as shares."""

    majority: float
    citations: float


def layout(pairs: str = "matched") -> Layout:
    """What a set of pairs is read from.

    >>> layout("uniform").parquet
    ('aan_papers.parquet', 'aan_pairs.parquet')
    """
    if pairs not in PAIRS:
        raise ValueError(f"pairs must be one of {', '.join(PAIRS)}; got {pairs!r}")
    tsv = "new_aan_pairs.{train,eval,test}.tsv, in a folder or a tar archive"
    if pairs == "lra":
        return Layout((), (), _TSV, tsv)
    return Layout(("aan_papers.parquet", _PARQUET[pairs]), (), None, f"with --pairs lra {tsv}")


def read(source: Source, on_progress: Step = silent) -> Arrays:
    """The arrays of the task: papers in the order of their ids, and pairs of their rows."""
    papers, pairs = _from_parquet(source) if source.is_parquet else _from_tsv(source, on_progress)
    ids = sorted(papers)
    sequences, lengths = encode([papers[name] for name in ids], MAX_LENGTH)
    rows = {name: row for row, name in enumerate(ids)}
    members, labels = {}, {}
    for split, name in _SPLITS.items():
        some = [pair for pair in pairs if pair.split == name]
        if not some:
            raise DataError(f"{source.paths[-1]} has no pairs of the split {name!r}")
        members[split] = np.array([(rows[pair.first], rows[pair.second]) for pair in some], dtype=np.int64)
        labels[split] = np.array([pair.label for pair in some], dtype=np.int64)
    return selected(sequences, lengths, members, labels)


def floors(train: Split, test: Split) -> Floors:
    """What can be had on test without reading a paper.

    ``majority`` always answers the more frequent label of train. ``citations`` knows one number: in how many
    pairs of train the second paper is cited; it answers "cites" from that threshold on which is best on
    train, where a pair's own citation is not counted.

    >>> store = np.ones((3, 1), dtype=np.uint8)
    >>> pairs, labels = np.array([[0, 1], [2, 1], [1, 0], [0, 2]]), np.array([1, 1, 0, 0])
    >>> split = Split(store, np.ones(3, int), pairs, labels)
    >>> floors(split, split)
    Floors(majority=0.5, citations=1.0)
    """
    second = train.members[:, 1]
    cited = np.bincount(second[train.labels == 1], minlength=len(train.sequences))
    others = cited[second] - train.labels
    accuracies = [
        np.mean((others >= threshold) == train.labels) for threshold in range(int(others.max()) + 2)
    ]
    answers = cited[test.members[:, 1]] >= np.argmax(accuracies)
    most = np.bincount(train.labels).argmax()
    return Floors(float(np.mean(test.labels == most)), float(np.mean(answers == test.labels)))


def _from_parquet(source: Source) -> tuple[Mapping[str, bytes], Sequence[Pair]]:
    papers_path, pairs_path = source.paths
    ids, texts = read_columns(papers_path, ["id", "text"])
    papers = {name: text.encode() for name, text in zip(ids, texts, strict=True)}
    columns = read_columns(pairs_path, ["split", "label", "id1", "id2"])
    pairs = [Pair(*values) for values in zip(*columns, strict=True)]
    unknown = {name for pair in pairs for name in pair[2:]} - papers.keys()
    if unknown:
        raise DataError(
            f"{pairs_path} names {len(unknown)} papers that {papers_path} lacks, such as {min(unknown)!r}"
        )
    labels = {pair.label for pair in pairs}
    if not labels <= {0, 1}:
        raise DataError(f"{pairs_path} has the labels {sorted(labels)}; a pair has 0 or 1")
    return papers, pairs


def _from_tsv(source: Source, on_progress: Step) -> tuple[Mapping[str, bytes], Sequence[Pair]]:
    papers: dict[str, bytes] = {}
    pairs: list[Pair] = []

    def add(match: re.Match[str], file: IO[bytes]) -> None:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5 or fields[0] not in (b"0", b"1", b"0.0", b"1.0"):
                raise DataError(
                    f"line {number} of {match[0].lstrip('/')} in {source.paths[0]} is not a label 0.0 or "
                    f"1.0, two ids and two texts, separated by tabs; it has {len(fields)} fields and begins "
                    f"with {line[:20]!r}"
                )
            first, second = (name.decode() for name in fields[1:3])
            for name, text in ((first, fields[3]), (second, fields[4])):
                if name not in papers:
                    papers[name] = _unquoted(text)
            pairs.append(Pair(match[1], int(float(fields[0])), first, second))
            if len(pairs) % 1000 == 0:
                on_progress(len(pairs), None)

    source.visit(add)
    return papers, pairs


def _unquoted(text: bytes) -> bytes:
    """The text itself where it was written as the literal of Python bytes, ``b'...'``."""
    if text[:1] != b"b" or text[1:2] not in (b"'", b'"') or text[-1:] != text[1:2] or len(text) < 3:
        return text
    try:
        return bytes(ast.literal_eval(text.decode("ascii")))
    except (ValueError, SyntaxError):
        return text
