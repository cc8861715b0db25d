"""How often a model is right: every example counts once, whatever the batch."""

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from schoenbat.data.task import Split
from schoenbat.training.batches import DeviceSplit
from schoenbat.training.evaluation import Evaluation
from schoenbat.training.interruption import Interrupted


class FirstToken(nn.Module):
    """Answers with the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, tokens, mask):
        assert not self.training
        return nn.functional.one_hot((tokens[:, 0] + self.shift.long()) % 4, 4).float()


def make(examples, batch_size, accelerator="cpu"):
    """A split of which all but the last third have the label that the model gives."""
    tokens = np.arange(3 * examples, dtype=np.uint8).reshape(examples, 3) % 4
    labels = tokens[:, 0].astype(np.int64)
    labels[2 * examples // 3 :] = (labels[2 * examples // 3 :] + 1) % 4
    split = Split(tokens, np.full(examples, 3), np.arange(examples), labels)
    fabric = Fabric(accelerator=accelerator, devices=1)
    model = fabric.setup_module(FirstToken()).train()
    return Evaluation(fabric, model, DeviceSplit(split, fabric.device), batch_size), model


@pytest.mark.parametrize(("examples", "batch_size"), [(9, 9), (9, 4), (9, 1), (3, 8), (30, 4)])
def test_every_example_counts_once(examples, batch_size):
    evaluation, model = make(examples, batch_size)
    for _ in range(2):
        assert evaluation.accuracy() == pytest.approx(2 / 3)
    assert model.training


def test_it_sees_weights_as_they_are():
    evaluation, model = make(9, 4)
    assert evaluation.accuracy() == pytest.approx(2 / 3)
    with torch.no_grad():
        model.module.shift += 1
    assert evaluation.accuracy() == pytest.approx(1 / 3)


def test_it_can_be_stopped():
    class Stop:
        number = 2

        def __bool__(self):
            return True

    evaluation, _ = make(9, 4)
    with pytest.raises(Interrupted, match="while testing"):
        evaluation.accuracy(Stop())


@pytest.mark.gpu
def test_a_graph_counts_the_same():
    evaluation, model = make(30, 4, "cuda")
    assert evaluation.accuracy() == pytest.approx(2 / 3)
    assert evaluation._count.captured
    with torch.no_grad():
        model.module.shift += 1
    assert evaluation.accuracy() == pytest.approx(1 / 3)
