"""Where the data of a task are read from: Parquet files, an archive as it was published, or its folder."""

import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from schoenbat.data.errors import DataError, MissingDataError

Visit = Callable[[re.Match[str], IO[bytes]], None]


@dataclass(frozen=True)
class Layout:
    """What a task can be read from.

    Args:
        parquet: names of the Parquet files, all of which are needed.
        archives: names under which the original was published.
        original: what the path of a file of the original ends with, inside an archive or a folder; None
            where only Parquet files are read.
        described: the original in words.
    """

    parquet: tuple[str, ...]
    archives: tuple[str, ...]
    original: re.Pattern[str] | None
    described: str

    def __str__(self) -> str:
        return " or ".join([*filter(None, [" and ".join(self.parquet)]), *self.archives, self.described])


@dataclass(frozen=True)
class Source:
    """What was found: Parquet files in the order of the layout, or one archive or folder of originals."""

    paths: tuple[Path, ...]
    original: re.Pattern[str] | None = None

    @property
    def is_parquet(self) -> bool:
        return self.original is None

    def visit(self, visit: Visit) -> None:
        """Hand over each original file, with what its path matched; damage is a DataError."""
        (path,) = self.paths
        if self.original is None:
            raise ValueError(f"{path} is a Parquet file, which holds no originals to visit")
        try:
            (_visit_folder if path.is_dir() else _visit_archive)(path, self.original, visit)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{path} is damaged, cut off, or no archive ({reason}); get it again") from error

    def sha256(self) -> dict[str, str]:
        """The checksum of each file by its name; of a folder, that of all its files and their names."""
        if not self.is_parquet and self.paths[0].is_dir():
            digest = hashlib.sha256()

            def add(match: re.Match[str], file: IO[bytes]) -> None:
                digest.update(f"{match[0]}\n".encode())
                digest.update(file.read())

            self.visit(add)
            return {self.paths[0].resolve().name: digest.hexdigest()}
        return {path.name: checksum(path, "sha256") for path in self.paths}


def find(path: Path, layout: Layout) -> Source:
    """What ``path``, a file or a folder, holds of a layout."""
    if not path.exists():
        raise MissingDataError(f"there is no {path}; wanted is {layout}, or a folder with that")
    if path.is_file():
        return _find_file(path, layout)
    source = find_parquet(path, layout)
    if source is not None:
        return source
    for name in layout.archives:
        if (path / name).is_file():
            return Source((path / name,), layout.original)
    if layout.original and any(_matching(path, layout.original)):
        return Source((path,), layout.original)
    raise MissingDataError(f"the folder {path} does not hold {layout}")


def find_parquet(folder: Path, layout: Layout) -> Source | None:
    """The Parquet files of a layout, if all of them lie in the folder."""
    paths = tuple(folder / name for name in layout.parquet)
    return Source(paths) if paths and all(path.is_file() for path in paths) else None


def checksum(path: Path, algorithm: str) -> str:
    """The checksum of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _find_file(path: Path, layout: Layout) -> Source:
    if path.name in layout.parquet:
        source = find_parquet(path.parent, layout)
        if source is None:
            raise MissingDataError(f"beside {path} the others of {', '.join(layout.parquet)} are missing")
        return source
    if path.suffix == ".parquet" or layout.original is None:
        raise DataError(f"{path} is not one of the files that are read here: {layout}")
    if layout.original.search(path.name):
        return Source((path.parent,), layout.original)
    return Source((path,), layout.original)


def _matching(folder: Path, original: re.Pattern[str]) -> Iterable[tuple[re.Match[str], Path]]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            match = original.search(path.relative_to(folder).as_posix())
            if match:
                yield match, path


def _visit_folder(folder: Path, original: re.Pattern[str], visit: Visit) -> None:
    for match, path in _matching(folder, original):
        with path.open("rb") as file:
            visit(match, file)


def _visit_archive(path: Path, original: re.Pattern[str], visit: Visit) -> None:
    # Members are only read: nothing of an archive is ever written to the disk.
    with tarfile.open(path) as archive:
        for member in archive:
            match = original.search(member.name)
            file = archive.extractfile(member) if match and member.isfile() else None
            if match and file:
                visit(match, file)
