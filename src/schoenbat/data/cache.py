"""A prepared task on disk: a folder of .npy files that can be memory-mapped, and a manifest.

The folder appears as a whole: it is built beside its place under a hidden name and then renamed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schoenbat.data.arrays import NAMES, Arrays, fingerprint
from schoenbat.data.errors import DataError
from schoenbat.data.progress import Step, silent

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a cache holds, and what it was made of.

    Args:
        options: what was asked for, such as ``test_size``.
        source: the SHA-256 of each file that was read; empty where the data were generated.
        fingerprint: the SHA-256 of all arrays.
        bytes: the size of each file.
    """

    options: Mapping[str, object]
    source: Mapping[str, str]
    fingerprint: str
    bytes: Mapping[str, int]
    format: int = FORMAT


def claim(folder: Path) -> None:
    """Make sure that a cache can be written, and delete what writers left that were killed.

    One that stepped aside for another that never came steps back. Two writers of one cache at a time are not
    provided for.
    """
    if _aside(folder).exists() and not folder.exists():
        _aside(folder).rename(folder)
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise DataError(f"{folder} is in the way and no prepared task; move it, or choose another place")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be made ({error}); choose another place") from error
    if not os.access(folder.parent, os.W_OK):
        raise DataError(f"{folder.parent} may not be written to; choose another place")
    for leftover in folder.parent.glob(f".{folder.name}-*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def write(
    folder: Path,
    arrays: Arrays,
    options: Mapping[str, object],
    source: Mapping[str, str],
    on_progress: Step = silent,
) -> Manifest:
    """Put the arrays into ``folder`` in place of what it held, as a whole, whenever the program ends.

    >>> from schoenbat.data.arrays import consecutive
    >>> sizes = {"train": 2, "validation": 1, "test": 1}
    >>> arrays = consecutive(np.zeros((4, 2), np.uint8), np.ones(4, int), np.arange(4), sizes)
    >>> with tempfile.TemporaryDirectory() as root:
    ...     written = write(Path(root) / "task", arrays, {"test_size": 1}, {})
    ...     read(Path(root) / "task")[1] == written
    True
    """
    claim(folder)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-", suffix=".part"))
    try:
        for done, name in enumerate(NAMES, start=1):
            np.save(temporary / f"{name}.npy", arrays[name])
            on_progress(done, len(NAMES))
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        manifest = Manifest(dict(options), dict(source), fingerprint(arrays), sizes)
        text = json.dumps(asdict(manifest), indent=1) + "\n"
        (temporary / MANIFEST).write_text(text, encoding="utf-8")
        # mkdtemp makes folders that only their owner may read.
        temporary.chmod(0o755)
        for file in (*temporary.iterdir(), temporary):
            _to_disk(file)
        _put_in_place(temporary, folder)
    except OSError as error:
        raise DataError(
            f"{folder} could not be written ({error}); what was there before is kept: make room and run it "
            "again, or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def read(folder: Path) -> tuple[Arrays, Manifest]:
    """The arrays of a cache, memory-mapped, and its manifest.

    Sizes are checked, and where a file was written after the manifest, which comes last, its values too.
    """
    manifest = read_manifest(folder)
    arrays = {name: _read_array(folder / f"{name}.npy", manifest) for name in NAMES}
    if _was_touched(folder) and fingerprint(arrays) != manifest.fingerprint:
        raise DataError(
            f"the files in {folder} were changed since they were prepared: they have another checksum than "
            f"{MANIFEST} says; delete {folder} and prepare it again"
        )
    return arrays, manifest


def _was_touched(folder: Path) -> bool:
    prepared = (folder / MANIFEST).stat().st_mtime_ns
    return any((folder / f"{name}.npy").stat().st_mtime_ns > prepared for name in NAMES)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise DataError(
                f"{path} has the format {content['format']}, this version reads {FORMAT}; prepare it again"
            )
        return Manifest(**content)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no manifest of a prepared task ({error}); prepare it again") from error


def _read_array(path: Path, manifest: Manifest) -> NDArray:
    expected = manifest.bytes.get(path.name)
    size = path.stat().st_size if path.is_file() else None
    if size is None or size != expected:
        found = "is missing" if size is None else f"has {size:,} bytes, not {expected or 0:,}"
        raise DataError(f"{path} {found}; delete {path.parent} and prepare it again")
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is no array ({error}); delete {path.parent} and prepare it again") from error


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename; a folder that is not empty cannot be replaced, so an old cache steps aside first."""
    if folder.exists():
        old = folder.rename(_aside(folder))
        try:
            temporary.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
    _to_disk(folder.parent)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-old.part")


def _to_disk(path: Path) -> None:
    """Wait until a file or folder would survive a power failure."""
    if path.is_dir() and os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
