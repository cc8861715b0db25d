"""Files from the web: what was interrupted goes on where it stopped, what is damaged is not kept."""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from schoenbat.data.errors import DataError
from schoenbat.data.progress import Step, silent
from schoenbat.data.source import checksum

# MD5 as published; the names are those of the files.
CHECKSUMS = {
    "aclImdb_v1.tar.gz": "7c2ac02c03563afcf9b574c7e56c153a",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
}
CHUNK = 1 << 20
TIMEOUT = 60.0


def is_url(source: object) -> bool:
    """Whether a source is to be downloaded.

    >>> is_url("https://example.org/a.tar.gz"), is_url("folder/a.tar.gz")
    (True, False)
    """
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def download(url: str, folder: Path, on_progress: Step = silent) -> Path:
    """Fetch a file into ``folder``, unless it lies there already; check its length and its checksum.

    The checksum is the published one, or the one that the address ends with, ``#sha256=...``; in any case
    what lies there must be what was once fetched. While a file is on its way it is called ``NAME.part``;
    ``NAME.json`` remembers where it comes from, its SHA-256, and which version of it (ETag, Last-Modified)
    was begun, without which an interrupted download starts over.
    """
    if not is_url(url):
        raise DataError(f"{url} is not fetched: an address begins with http:// or https://")
    url, _, wanted = url.partition("#sha256=")
    wanted = wanted.lower()
    name = _file_name(url)
    target, part, memory = folder / name, folder / f"{name}.part", folder / f"{name}.json"
    if target.is_file() and _recall(memory).get("url") == url:
        _verify(target, url, memory, wanted)
        return target
    if target.is_file() and _is_published(target, wanted):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, memory, on_progress)
    except urllib.error.HTTPError as error:
        raise DataError(f"{url} was refused: {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} could not be read ({error}); run it again to go on") from error
    _verify(part, url, memory, wanted)
    os.replace(part, target)
    return target


def _file_name(url: str) -> str:
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    if not name:
        raise DataError(f"{url} does not end with the name of a file")
    return name


def _is_published(path: Path, wanted: str) -> bool:
    """Whether a file that somebody put there is the one that was asked for, wherever it is from."""
    kind, expected = ("sha256", wanted) if wanted else ("md5", CHECKSUMS.get(path.name))
    return expected is not None and checksum(path, kind) == expected


def _fetch(url: str, part: Path, memory: Path, on_progress: Step) -> None:
    """Complete ``part``."""
    known = _recall(memory)
    done = part.stat().st_size if part.is_file() and known.get("url") == url else 0
    resumed = _resume(url, done, known) if done and _is_versioned(known) else None
    response = resumed or _open(url)
    with response:
        if resumed is None:
            done = 0
            # What NAME.json says from here on is not true of a file from elsewhere.
            part.with_suffix("").unlink(missing_ok=True)
            _remember(memory, url, response)
        total = _total(response, done)
        with part.open("ab" if resumed else "wb") as file:
            done = _copy(response, file, done, total, on_progress)
            os.fsync(file.fileno())
    if total is not None and done != total:
        raise DataError(
            f"{url} broke off after {done:,} of {total:,} bytes; run it again to go on from there"
        )


def _resume(url: str, done: int, known: Mapping[str, Any]) -> Any:
    """The rest of a file, or None if the server does not give it or has another version by now."""
    try:
        response = _open(url, {"Range": f"bytes={done}-"})
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None
        raise
    begins = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if (
        response.status == http.HTTPStatus.PARTIAL_CONTENT
        and begins
        and int(begins[1]) == done
        and _version(response) == {key: known.get(key) for key in ("etag", "modified")}
    ):
        return response
    response.close()
    return None


def _open(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """Over http and https alone, wherever a server redirects to: urlopen would follow to ftp as well."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=TIMEOUT)


def _total(response: Any, done: int) -> int | None:
    length = response.headers.get("Content-Length")
    return None if length is None else done + int(length)


def _copy(response: Any, file: IO[bytes], done: int, total: int | None, on_progress: Step) -> int:
    while chunk := response.read(CHUNK):
        file.write(chunk)
        done += len(chunk)
        on_progress(done, total)
    return done


def _version(response: Any) -> dict[str, str | None]:
    return {"etag": response.headers.get("ETag"), "modified": response.headers.get("Last-Modified")}


def _is_versioned(known: Mapping[str, Any]) -> bool:
    return bool(known.get("etag") or known.get("modified"))


def _remember(memory: Path, url: str, response: Any) -> None:
    memory.write_text(json.dumps({"url": url} | _version(response)) + "\n", encoding="utf-8")


def _recall(memory: Path) -> dict[str, Any]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _verify(path: Path, url: str, memory: Path, wanted: str) -> None:
    """Delete a file that is not what it should be; remember the SHA-256 of one that is."""
    known, found = _recall(memory), checksum(path, "sha256")
    published = CHECKSUMS.get(_file_name(url))
    for kind, expected, got, shown in (
        ("MD5", published, published and checksum(path, "md5"), "the published {}"),
        ("SHA-256", wanted, found, "the {} asked for"),
        ("SHA-256", known.get("sha256"), found, "the {} it was fetched with"),
    ):
        if expected and got != expected:
            path.unlink()
            memory.unlink(missing_ok=True)
            raise DataError(
                f"{url} has the {kind} checksum {got}, not {shown.format(expected)}; it was deleted. "
                "Run it again, or take another source with --from"
            )
    if not known.get("sha256"):
        memory.write_text(json.dumps({**known, "sha256": found}) + "\n", encoding="utf-8")
