"""The one results format."""

import json
import os
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import schoenbat
from schoenbat.files import write_atomically
from schoenbat.report.results import device_name, versions, write_results


@dataclass(frozen=True)
class Options:
    seed: int = 3
    kernels: tuple[str, ...] = ("exp",)


@dataclass(frozen=True)
class Row:
    length: int
    seconds: float | None


def test_results_say_how_to_measure_them_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/schoenbat", "speed", "--out", "a b"])
    path = tmp_path / "new" / "speed.json"
    write_results(path, "speed", Options(), [Row(256, 0.1), Row(512, None)])
    results = json.loads(path.read_text())
    assert results["experiment"] == "speed"
    assert results["command"] == "schoenbat speed --out 'a b'"
    assert results["versions"]["schoenbat"] == schoenbat.__version__
    assert results["versions"]["torch"] == torch.__version__
    assert results["machine"]["device"] == device_name(torch.device("cpu")) != ""
    assert results["options"] == {"seed": 3, "kernels": ["exp"]}
    assert results["rows"] == [{"length": 256, "seconds": 0.1}, {"length": 512, "seconds": None}]
    assert results["finished"].endswith("+00:00")
    assert os.listdir(path.parent) == ["speed.json"]


def test_results_say_which_triton_compiles_kernels(tmp_path):
    triton = pytest.importorskip("triton")
    write_results(tmp_path / "speed.json", "speed", Options(), [])
    assert json.loads((tmp_path / "speed.json").read_text())["versions"]["triton"] == triton.__version__


def test_a_folder_called_triton_does_not_keep_results_from_being_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert versions().keys() == {"schoenbat", "torch", "python"}


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, interruption):
    path = tmp_path / "a.svg"
    write_atomically(path, "old")

    def interrupt(*_):
        raise interruption

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(interruption):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.svg"]


def test_others_may_read_the_file(tmp_path):
    write_atomically(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644
