"""Checkpoints are whole, and say why they cannot be used."""

import pytest
import torch

from schoenbat.training import checkpoint


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "checkpoint.pt"
    checkpoint.save(path, {"step": 3, "model": {"w": torch.arange(3.0)}, "best": None})
    state = checkpoint.load(path)
    assert state["step"] == 3
    assert state["model"]["w"].tolist() == [0.0, 1.0, 2.0]


def test_a_failed_write_keeps_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"step": 3})

    def fail(state, file):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(checkpoint.CheckpointError, match=r"no space.*continue with --resume"):
        checkpoint.save(path, {"step": 4})
    assert checkpoint.load(path)["step"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("kept", [0, 3, 2000])
def test_a_damaged_file_is_named(tmp_path, kept):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"model": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(checkpoint.CheckpointError, match=r"checkpoint\.pt.*delete it"):
        checkpoint.load(path)


def test_other_options_are_listed(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.refuse_other_options(path, {"seed": 1}, {"seed": 1})
    with pytest.raises(checkpoint.CheckpointError, match="seed: 1 there, 2 here"):
        checkpoint.refuse_other_options(path, {"seed": 1, "task": "text"}, {"seed": 2, "task": "text"})
