"""Archives are read, never unpacked: what a hostile one holds stays in it."""

import io
import re
import tarfile

from schoenbat.data.source import Source

ORIGINAL = re.compile(r"(?:^|/)(secret|review)\.txt$")


def archive(path, members):
    with tarfile.open(path, "w:gz") as file:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content
                file.addfile(member)
    return path


def test_names_that_lead_outside_write_nothing(tmp_path):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    members = [
        (name, b"text", tarfile.REGTYPE)
        for name in ("../../review.txt", f"{tmp_path}/review.txt", "x/../../review.txt", "review.txt")
    ]
    seen = []
    Source((archive(inside / "some.tar.gz", members),), ORIGINAL).visit(
        lambda _, file: seen.append(file.read())
    )
    assert seen == [b"text"] * 4
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inside / "some.tar.gz"]


def test_links_and_devices_are_not_followed(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    members = [
        ("secret.txt", str(tmp_path / "secret.txt"), tarfile.SYMTYPE),
        ("b/secret.txt", "../secret.txt", tarfile.LNKTYPE),
        ("c/secret.txt", "", tarfile.FIFOTYPE),
        ("d/secret.txt", "", tarfile.CHRTYPE),
    ]
    seen = []
    Source((archive(tmp_path / "some.tar.gz", members),), ORIGINAL).visit(
        lambda _, file: seen.append(file.read())
    )
    assert seen == []
