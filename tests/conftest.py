"""What holds for every test: a known global generator, and one thread."""

import pytest
import torch

# Small tensors in several worker processes: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
