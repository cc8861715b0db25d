"""Tiny tasks in every form they are published in, and a web server that can break off."""

import io
import re
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from schoenbat.data import image, listops, pathfinder, text


@pytest.fixture
def tiny(monkeypatch):
    """Splits of a few examples each."""
    monkeypatch.setattr(text, "HALF_SIZE", 8)
    monkeypatch.setattr(text, "VALIDATION_SIZE", 3)
    monkeypatch.setattr(image, "BATCH_SIZE", 4)
    monkeypatch.setattr(image, "VALIDATION_SIZE", 6)
    monkeypatch.setattr(pathfinder, "SPLIT_SIZES", {"train": 5, "validation": 3, "test": 2})
    monkeypatch.setattr(pathfinder, "IMAGES_PER_BLOCK", 10)
    monkeypatch.setattr(listops, "TRAIN_SIZE", 6)
    monkeypatch.setattr(listops, "VALIDATION_SIZE", 2)


class Make:
    """Files as they are published, and damaged ones."""

    @staticmethod
    def parquet(path: Path, **columns) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), path)
        return path

    @staticmethod
    def tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
        with tarfile.open(path, mode) as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path

    @staticmethod
    def folder(path: Path, files: dict[str, bytes]) -> Path:
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        return path

    @staticmethod
    def cut_off(path: Path, share: float = 0.6) -> Path:
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        return path


@pytest.fixture
def make():
    return Make


@pytest.fixture
def reviews():
    """Rows (split, label, id, text) in no order: long ones, an umlaut at the cut, NUL bytes, equal texts."""
    rng = np.random.default_rng(0)
    rows = []
    for half in ("train", "test"):
        for label in (0, 1):
            for number in (10, 2, 0, 7):
                letters = bytes(rng.integers(97, 123, int(rng.integers(1, 60))).astype(np.uint8))
                rows.append((half, label, number, f"{half} {number} {letters.decode()}"))
    for row, letter in zip((0, 4, 5, 6), "abcd", strict=True):
        rows[row] = (*rows[row][:3], 4095 * letter + "ü and more")
    rows[1] = (*rows[1][:3], "a\0b")
    rows[2] = (*rows[2][:3], rows[3][3])
    return [rows[index] for index in rng.permutation(len(rows))]


@pytest.fixture
def review_files(reviews):
    """The same reviews as the files of the original archive, among others that are not read."""
    files = {
        f"aclImdb/{half}/{('neg', 'pos')[label]}/{number}_{3 + 5 * label}.txt": words.encode()
        for half, label, number, words in reviews
    }
    return {
        "aclImdb/README": b"read me",
        "aclImdb/train/unsup/0_0.txt": b"no label",
        "aclImdb/train/urls_pos.txt": b"http://",
        **files,
    }


@pytest.fixture
def review_parquet(reviews, tmp_path):
    """The same reviews as a Parquet file, where they are cut already."""
    halves, labels, numbers, texts = zip(*reviews, strict=True)
    texts = [words if len(words) < 4096 else words[:4095] for words in texts]
    path = tmp_path / "parquet" / "imdb_reviews.parquet"
    return Make.parquet(path, split=halves, label=labels, id=numbers, text=texts)


class Server(ThreadingHTTPServer):
    """Serves ``files`` by name and remembers the requests.

    ``cut`` is after how many bytes of an answer the connection breaks off; ``version`` is the ETag, None for
    no ETag; with ``ranges`` False requests for a part are answered with the whole, and such a request is
    answered with a part that begins ``shift`` bytes too late. ``redirect`` is where every request is sent.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.version: str | None = '"1"'
        self.ranges = True
        self.shift = 0
        self.redirect: str | None = None
        self.requests: list[str | None] = []
        self.sent = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.requests.append(asked)
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        content = self.server.files.get(self.path.rpartition("/")[2])
        if content is None:
            self.send_error(404)
            return
        start = None
        if asked and self.server.ranges:
            start = int(re.match(r"bytes=(\d+)-$", asked)[1]) + self.server.shift
        if start is not None and start >= len(content):
            self.send_error(416)
            return
        self.send_response(200 if start is None else 206)
        if start is not None:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        content = content[start or 0 :]
        self.send_header("Content-Length", str(len(content)))
        if self.server.version:
            self.send_header("ETag", self.server.version)
        self.end_headers()
        content = content[: self.server.cut]
        self.server.sent += len(content)
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
