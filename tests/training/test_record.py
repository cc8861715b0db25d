"""What a run leaves behind: the revision of the code that trained it."""

import subprocess

import pytest

from schoenbat.training import record


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A repository with a package in it, which is taken for this one; none of its files are added yet."""

    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    folder = tmp_path / "src" / "schoenbat"
    (folder / "training").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (tmp_path / "README").touch()
    git("init")
    git("add", "README")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    git(*author, "commit", "-m", "no package yet")
    monkeypatch.setattr(record, "__file__", str(folder / "training" / "record.py"))
    monkeypatch.delenv("SCHOENBAT_REVISION", raising=False)
    return lambda *words: git(*author, *words)


def test_the_revision_is_that_of_the_repository_the_package_is_in(package, tmp_path):
    package("add", "src")
    package("commit", "-m", "a package")
    assert len(record.revision()) == 40
    (tmp_path / "src" / "schoenbat" / "__init__.py").write_text("changed = True")
    assert record.revision().endswith("+")


def test_a_package_that_is_installed_inside_of_another_repository_has_no_revision(package):
    assert record.revision() is None
