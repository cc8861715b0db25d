"""The power of post-SBN: chunk by chunk as all at once."""

import pytest
import torch
from torch.autograd import gradgradcheck

from schoenbat.ops import spans
from schoenbat.ops.odd_power import odd_power, specification


def inputs(dtype, n=300):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64).to(dtype)
    gamma, beta = (torch.rand(3, 5, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    return [x.requires_grad_() for x in (x, gamma.to(dtype), beta.to(dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_give_what_the_specification_does(dtype, monkeypatch):
    monkeypatch.setattr(spans, "rows_at_once", lambda x, factors=0: 1)
    chunked, plain = inputs(dtype), inputs(dtype)
    assert len(list(spans.spans(chunked[0]))) == 5
    outs = odd_power(*chunked, 1e-3), specification(*plain, 1e-3)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(*outs, rtol=8 * rounding, atol=rounding)
    for out in outs:
        out.backward(torch.ones_like(out))
    for ours, theirs in zip(chunked, plain, strict=True):
        assert ours.grad.dtype == dtype
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=16 * rounding, atol=16 * rounding * scale)


def test_second_derivatives():
    assert gradgradcheck(lambda *args: odd_power(*args, 1e-3), inputs(torch.float64, n=3))
