"""Batches on the device are those of the arrays."""

import numpy as np
import pytest
import torch

from schoenbat.data.task import Split
from schoenbat.training.batches import DeviceSplit, batch_order


@pytest.mark.parametrize("hide_zeros", [True, False])
@pytest.mark.parametrize("members", [np.array([2, 0, 1]), np.array([[2, 0], [1, 1], [0, 2]])])
def test_a_batch_is_what_the_split_says(hide_zeros, members):
    store = np.array([[3, 0, 2, 0], [4, 0, 0, 0], [1, 1, 1, 1]], dtype=np.uint8)
    split = Split(store, np.array([3, 1, 4]), members, np.array([5, 6, 7]), hide_zeros)
    batch = DeviceSplit(split, "cpu").batch(torch.tensor([2, 0]))
    index = np.array([2, 0])
    assert batch.tokens.tolist() == split.tokens[index].tolist()
    assert batch.mask.tolist() == split.mask(index).tolist()
    assert batch.labels.tolist() == [7, 5]


def test_each_pass_sees_every_example_once_in_an_order_of_its_own():
    order = batch_order(10, batch_size=4, steps=5, seed=0)
    assert order.shape == (5, 4)
    passes = order.flatten().view(2, 10)
    assert all(sorted(one.tolist()) == list(range(10)) for one in passes)
    assert passes[0].tolist() != passes[1].tolist()
    assert order.equal(batch_order(10, batch_size=4, steps=5, seed=0))
    assert not order.equal(batch_order(10, batch_size=4, steps=5, seed=1))


def test_no_examples_is_an_error():
    with pytest.raises(ValueError, match="training split is empty"):
        batch_order(0, 4, 5, 0)
