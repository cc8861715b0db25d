"""Directories as checkpoints are whole, and say why they cannot be used."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric

from schoenbat.training import checkpoint, shards
from schoenbat.training.record import CHECKPOINT, find_checkpoint


def save(directory, step):
    tensors = {"model": {"a.b": torch.full((100,), float(step))}, "optimizer": {3: {"step": torch.ones(())}}}
    shards.save(Fabric(accelerator="cpu", devices=1), directory, tensors, {"step": step, "best": None})


def load(path):
    empty = {"model": {"a.b": torch.zeros(100)}, "optimizer": {3: {"step": torch.zeros(())}, 4: {}}}
    return shards.load_rest(path)["step"], shards.load(path, empty)


def test_round_trip(tmp_path):
    save(tmp_path / "deep", 7)
    step, tensors = load(find_checkpoint(tmp_path / "deep"))
    assert step == 7
    assert tensors["model"]["a.b"].tolist() == [7.0] * 100
    assert tensors["optimizer"] == {3: {"step": torch.ones(())}}


def test_a_new_one_takes_the_place_of_those_before(tmp_path):
    checkpoint.save(tmp_path / CHECKPOINT, {"step": 1})
    for step in (2, 3):
        save(tmp_path, step)
        (path,) = tmp_path.iterdir()
        assert load(path)[0] == step


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_write_keeps_the_one_before(tmp_path, monkeypatch, late):
    save(tmp_path, 2)
    before = find_checkpoint(tmp_path)

    def fail(*arguments, **options):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*(checkpoint, "save") if late else (dcp, "save"), fail)
        with pytest.raises(OSError, match="no space"):
            save(tmp_path, 3)
    assert len(list(tmp_path.iterdir())) == 2
    assert find_checkpoint(tmp_path) == before
    assert load(before)[0] == 2
    save(tmp_path, 4)
    (path,) = tmp_path.iterdir()
    assert load(path)[0] == 4


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "run.pt"])
@pytest.mark.parametrize("kept", [0, 100])
def test_a_damaged_file_is_named(tmp_path, name, kept):
    save(tmp_path, 2)
    path = find_checkpoint(tmp_path)
    (path / name).write_bytes((path / name).read_bytes()[:kept])
    with pytest.raises(checkpoint.CheckpointError, match=r"checkpoint-1.*delete it"):
        load(path)


def test_a_missing_file_is_named(tmp_path):
    save(tmp_path, 2)
    path = find_checkpoint(tmp_path)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"checkpoint-1.*delete it"):
        load(path)
