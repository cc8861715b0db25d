"""Rows of norm 1: chunk by chunk as all at once, forwards and backwards."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from schoenbat.ops import spans
from schoenbat.ops.unit_rows import UnitRows

CENTRED = pytest.mark.parametrize("centred", [True, False])


@pytest.fixture
def small_chunks(monkeypatch):
    """Of 64 rows: a fifth of what the tests below have."""
    monkeypatch.setattr(spans, "rows_at_once", lambda x, factors=0: 1)


def rows(dtype=torch.float64, n=300):
    """Among others a row of zeros, one shorter than the least norm, and a constant one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64)
    x[0, 0, 0], x[0, 0, 1], x[1, 2, n - 1] = 0.0, x[0, 0, 1] * 1e-3, 0.7
    return x.to(dtype)


@CENTRED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_give_what_plain_operators_do(centred, dtype, small_chunks):
    unit_rows, grad = UnitRows(centred, 1e-4), rows(dtype).flip(-2)
    x, y = (rows(dtype).requires_grad_() for _ in range(2))
    assert len(list(spans.spans(x))) == 5
    chunked, plain = unit_rows(x), unit_rows.of_all(y)[0].to(dtype)
    assert torch.equal(chunked, plain)
    for z, out in ((x, chunked), (y, plain)):
        out.backward(grad)
        assert z.grad.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        x.grad, y.grad, rtol=8 * rounding, atol=64 * rounding * float(y.grad.abs().max())
    )


@CENTRED
def test_first_and_second_derivatives(centred):
    x = rows(n=4).requires_grad_()
    assert gradcheck(UnitRows(centred, 1e-4), x)
    assert gradgradcheck(UnitRows(centred, 1e-4), x.detach()[:, :, 2:3].clone().requires_grad_())


def test_gradients_may_be_batched():
    x, grads = rows(n=4).requires_grad_(), torch.randn(3, 2, 3, 4, 5, dtype=torch.float64)
    unit = UnitRows(True, 1e-4)(x)
    (together,) = torch.autograd.grad(unit, x, grads, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(unit, x, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(together, torch.stack(alone))


def test_long_and_short_chunks_do_not_write_into_their_input(small_chunks):
    x = rows(torch.float32)
    before = x.clone()
    UnitRows(False, 1e-4)(x)
    assert torch.equal(x, before)
    assert UnitRows(True, 1e-4)(x[..., :0, :]).shape == (2, 3, 0, 5)


@CENTRED
def test_gradients_of_rows_whose_squares_overflow_are_finite(centred):
    x = torch.tensor([[3e30, -1e30, 2e30], [1.0, 2.0, 4.0]], requires_grad=True)
    UnitRows(centred, 1e-13)(x)[:, 0].sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[1].abs().max() > 1e-3
