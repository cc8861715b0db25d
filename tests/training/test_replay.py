"""A sequence of kernels by a CUDA graph sees tensors as they are when it runs."""

import pytest
import torch

from schoenbat.training.classifier import Classifier
from schoenbat.training.replay import EAGER_RUNS, Replayed


def test_without_a_graph_it_is_a_call():
    count = torch.zeros(())
    add = Replayed(lambda: count.add_(1), captures=False)
    for _ in range(EAGER_RUNS + 2):
        add()
    assert count == EAGER_RUNS + 2
    assert not add.captured


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@torch.no_grad()
def test_a_graph_of_a_compiled_model_sees_what_is_loaded(construction):
    """Each layer has a map of its own, and none may end up where the graph looks for another's."""

    def classifier():
        text = f"schoenbat:construction={construction}"
        return Classifier(text, vocab_size=16, num_classes=4, max_length=64).cuda().eval()

    torch.manual_seed(0)
    first, second = classifier(), classifier()
    while [b.shape for b in first.buffers()] != [b.shape for b in second.buffers()]:
        second = classifier()
    tokens = torch.randint(1, 16, (32, 64), device="cuda")
    expected = [model(tokens) for model in (first, second)]
    compiled, logits = torch.compile(first), torch.empty_like(expected[0])
    run = Replayed(lambda: logits.copy_(compiled(tokens)), captures=True)
    for _ in range(EAGER_RUNS + 1):
        run()
    assert run.captured
    torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-4)
    first.load_state_dict(second.state_dict())
    run()
    torch.testing.assert_close(logits, expected[1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(expected[0], expected[1], rtol=1e-2, atol=1e-2)
