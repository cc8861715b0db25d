"""Custom operators and the way around them."""

import pytest
import torch
from torch.profiler import profile

from schoenbat.ops.operators import direct_operator


@direct_operator("test_product")
def product(x: torch.Tensor, y: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x * y * others[0], x + y]


@product.register_fake
def _(x, y, others):
    return [torch.empty_like(x), torch.empty_like(x)]


@direct_operator("test_product_backward")
def product_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, others: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [grad * y * others[0], grad * x * others[0], grad * x * y]


@product_backward.register_fake
def _(grad, x, y, others):
    return [torch.empty_like(x) for _ in range(3)]


@direct_operator("test_square")
def square(x: torch.Tensor) -> list[torch.Tensor]:
    return [x @ x]


def _context(ctx, inputs, output):
    x, y, others = inputs
    ctx.save_for_backward(x, y, *others)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grads):
    x, y, *others = ctx.saved_tensors
    to_x, to_y, to_other = product_backward(grads[0], x, y, others)
    return to_x, to_y, [to_other]


product.register_autograd(_gradient, setup_context=_context)


def draw():
    return [torch.randn(3, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]


def names_in_a_profile_of(call):
    with profile() as profiled:
        call()
    return {event.name for event in profiled.events() if event.name.startswith("schoenbat::")}


def test_both_ways_give_the_same():
    x, y, other = draw()
    other = other.detach()
    calls = product, product.operator
    outputs = [call(x, y, [other]) for call in calls]
    assert [type(out) for out in outputs] == [list, list]
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(out[0], (x, y), torch.ones(3)) for out in outputs]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert not product(x, y, [other])[0].requires_grad


def test_the_operator_serves_members_of_lists_that_want_gradients():
    x, y, other = draw()
    (grad,) = torch.autograd.grad(product(x, y, [other])[0], other, torch.ones(3))
    assert torch.equal(grad, (x * y).detach())


def test_a_second_derivative_raises():
    x, y, other = draw()
    out = product(x, y, [other.detach()])[0]
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="test_product_backward has no derivative: "):
        grad.sum().backward()


def test_what_has_no_derivative_says_so():
    x, y, other = draw()
    out = product_backward(torch.ones(3), x, y, [other])[0]
    with pytest.raises(RuntimeError, match="test_product_backward has no derivative: "):
        out.sum().backward()


def test_compilers_see_the_operator():
    x, y, other = draw()
    seen = []

    def look(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(lambda a, b: product(a, b, [other.detach()])[0], backend=look, fullgraph=True)
    assert torch.equal(compiled(x, y), product(x, y, [other.detach()])[0])
    assert torch.ops.schoenbat.test_product.default in seen


def test_a_profiler_shows_its_name():
    x, y, other = draw()
    call = lambda: product(x, y, [other.detach()])[0].sum().backward()  # noqa: E731
    assert names_in_a_profile_of(call) == {"schoenbat::test_product", "schoenbat::test_product_backward"}


def test_nothing_is_cast_inside():
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = square(torch.eye(3))
        assert torch.mm(torch.eye(3), torch.eye(3)).dtype == torch.bfloat16
    assert out.dtype == torch.float32


def test_plain_tensors_go_around_the_operator(monkeypatch):
    x, y, other = draw()

    def refuse(*args):
        raise AssertionError("called the operator")

    monkeypatch.setattr(product, "operator", refuse)
    out = product(x, y, [other.detach()])[0]
    assert out.grad_fn.name() == "test_productBackward"
    with torch.no_grad():
        product(x, y, [other])
    for others in ([other], (other,)):  # a member that wants a gradient
        with pytest.raises(AssertionError, match="called the operator"):
            product(x, y, others)
    with pytest.raises(AssertionError, match="called the operator"):
        product(torch.nn.Parameter(x.detach()), y, [other.detach()])


def test_outputs_can_be_changed_in_place():
    x, y, other = draw()
    out = product(x, y, [other.detach()])[0]
    out.mul_(2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, 2 * (y * other).detach())
