"""Downloads: resumed where they broke off, never half a file, never a wrong one."""

import hashlib
import json

import numpy as np
import pytest

from schoenbat.data import DataError, download

NAME = "thing.tar.gz"
CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def web(server, monkeypatch):
    server.files[NAME] = CONTENT
    monkeypatch.setattr(download, "CHUNK", 1 << 14)
    return server


@pytest.fixture
def fetch(web, tmp_path):
    return lambda *more: download.download(web.url(NAME), tmp_path / "downloads", *more)


def break_off(web, fetch, after):
    """Let a download break off after some bytes."""
    web.cut = after
    with pytest.raises(DataError, match=f"broke off after {after:,} of [0-9,]+ bytes; run it again"):
        fetch()
    web.cut, web.sent = None, 0
    web.requests.clear()


def test_a_file_is_fetched_once(web, fetch, tmp_path):
    told = []
    path = fetch(lambda done, total: told.append((done, total)))
    assert path == tmp_path / "downloads" / NAME
    assert path.read_bytes() == CONTENT
    assert told[-1] == (300_000, 300_000)
    assert told == sorted(told)
    assert fetch() == path
    assert web.requests == [None]
    assert not list(path.parent.glob("*.part"))


def test_it_goes_on_where_it_broke_off(web, fetch):
    break_off(web, fetch, 100_000)
    assert fetch().read_bytes() == CONTENT
    assert web.requests == ["bytes=100000-"]
    assert web.sent == 200_000


def test_it_goes_on_after_a_second_break(web, fetch):
    break_off(web, fetch, 100_000)
    web.cut = 50_000
    with pytest.raises(DataError, match="broke off after 150,000 of 300,000 bytes"):
        fetch()
    web.cut = None
    assert fetch().read_bytes() == CONTENT
    assert web.requests == ["bytes=100000-", "bytes=150000-"]


def test_an_interruption_by_the_user_is_one_too(web, fetch):
    def interrupt(done, total):
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(interrupt)
    assert fetch().read_bytes() == CONTENT
    assert web.requests[0] is None
    assert int(web.requests[1].removeprefix("bytes=").rstrip("-")) > 100_000


@pytest.mark.parametrize("version", ['"2"', None])
def test_a_file_that_changed_starts_over(web, fetch, version):
    break_off(web, fetch, 100_000)
    web.files[NAME] = CONTENT[::-1]
    web.version = version
    assert fetch().read_bytes() == CONTENT[::-1]
    assert web.requests == ["bytes=100000-", None]


def test_without_a_version_it_starts_over(web, fetch):
    web.version = None
    break_off(web, fetch, 100_000)
    assert fetch().read_bytes() == CONTENT
    assert web.requests == [None]


def test_a_server_without_ranges_starts_over(web, fetch):
    web.ranges = False
    break_off(web, fetch, 100_000)
    assert fetch().read_bytes() == CONTENT
    assert web.requests == ["bytes=100000-", None]


def test_another_part_than_the_one_asked_for_is_not_taken(web, fetch):
    break_off(web, fetch, 100_000)
    web.shift = 7
    assert fetch().read_bytes() == CONTENT
    assert web.requests == ["bytes=100000-", None]


def test_a_part_that_is_longer_than_the_file_starts_over(web, fetch):
    break_off(web, fetch, 100_000)
    web.files[NAME] = CONTENT[:50_000]
    assert fetch().read_bytes() == CONTENT[:50_000]
    assert web.requests == ["bytes=100000-", None]


def test_a_part_from_elsewhere_is_not_continued(web, fetch, tmp_path):
    break_off(web, fetch, 100_000)
    memory = tmp_path / "downloads" / f"{NAME}.json"
    memory.write_text(json.dumps(json.loads(memory.read_text()) | {"url": "http://elsewhere/" + NAME}))
    assert fetch().read_bytes() == CONTENT
    assert web.requests == [None]


def test_a_file_of_the_same_name_from_elsewhere_is_fetched_again(web, fetch, tmp_path):
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / NAME).write_bytes(b"something else")
    break_off(web, fetch, 100_000)
    assert fetch().read_bytes() == CONTENT


def test_a_file_from_elsewhere_is_kept_until_another_is_on_its_way(web, tmp_path):
    path = tmp_path / NAME
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="could not be read"):
        download.download(f"http://127.0.0.1:9/{NAME}", tmp_path)
    assert path.read_bytes() == b"something else"


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_the_published_file_from_elsewhere_is_taken_as_it_is(web, monkeypatch, tmp_path, kind):
    (tmp_path / NAME).write_bytes(CONTENT)
    found, url = hashlib.new(kind, CONTENT).hexdigest(), web.url(NAME)
    if kind == "md5":
        monkeypatch.setitem(download.CHECKSUMS, NAME, found)
    else:
        url += f"#sha256={found}"
    assert download.download(url, tmp_path).read_bytes() == CONTENT
    assert not web.requests


def test_the_published_checksum_is_checked(web, fetch, monkeypatch, tmp_path):
    good = hashlib.md5(CONTENT).hexdigest()
    monkeypatch.setitem(download.CHECKSUMS, NAME, good)
    path = fetch()
    path.write_bytes(b"damaged on the disk")
    with pytest.raises(DataError, match=f"not the published {good}; it was deleted"):
        fetch()
    assert fetch().read_bytes() == CONTENT


def test_a_wrong_checksum_deletes_the_file_and_tells_both(fetch, monkeypatch, tmp_path):
    monkeypatch.setitem(download.CHECKSUMS, NAME, "0123")
    found = hashlib.md5(CONTENT).hexdigest()
    with pytest.raises(DataError, match=f"thing.tar.gz has the MD5 checksum {found}, not the published 0123"):
        fetch()
    assert not list((tmp_path / "downloads").iterdir())


def test_addresses_that_give_nothing(web, tmp_path):
    with pytest.raises(DataError, match=r"nothing\.gz was refused: 404"):
        download.download(web.url("nothing.gz"), tmp_path)
    with pytest.raises(DataError, match="could not be read"):
        download.download("http://127.0.0.1:1/file.gz", tmp_path)
    with pytest.raises(DataError, match="does not end with the name of a file"):
        download.download("http://127.0.0.1:1/", tmp_path)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/a.gz", "data:,a", "/etc/passwd", "a.gz"]
)
def test_only_http_is_fetched(url, tmp_path):
    with pytest.raises(DataError, match="is not fetched: an address begins with http:// or https://"):
        download.download(url, tmp_path)


def test_a_redirection_leads_to_http_only(web, tmp_path):
    web.redirect = "ftp://127.0.0.1:1/thing.tar.gz"
    with pytest.raises(DataError, match="unknown url type: ftp"):
        download.download(web.url(NAME), tmp_path)


def test_an_address_may_name_its_checksum(web, tmp_path):
    good = hashlib.sha256(CONTENT).hexdigest()
    assert download.download(f"{web.url(NAME)}#sha256={good}", tmp_path).read_bytes() == CONTENT
    with pytest.raises(DataError, match=f"has the SHA-256 checksum {good}, not the 0123 asked for"):
        download.download(f"{web.url(NAME)}#sha256=0123", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_that_changed_on_the_disk_is_not_taken(fetch):
    path = fetch()
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(DataError, match=r"it was fetched with; it was deleted\. Run it again"):
        fetch()
    assert fetch().read_bytes() == CONTENT
