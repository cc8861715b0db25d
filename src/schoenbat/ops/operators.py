"""How functions become custom operators of torch.library, one node each in a compiled graph."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.keeping import is_concrete, is_transformed
from schoenbat.precision import without_autocast


def as_operators() -> bool:
    """Whether a call may be made of operators.

    Not under transforms: an operator has no forward-mode derivative and would give silent zeros. Nor for
    ONNX, which knows PyTorch's own operators only.
    """
    return not (is_transformed() or torch.onnx.is_in_onnx_export())


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """A custom operator: nothing is recorded inside, and nothing cast: accumulation stays in float32."""
    return lambda function: _custom_op(name, _alone(function))


def direct_operator(name: str) -> Callable[[Callable[..., list[Tensor]]], "DirectOperator"]:
    """The same, but plain tensors reach its function directly: see `DirectOperator`."""
    return lambda function: DirectOperator(name, _alone(function))


class DirectOperator:
    """A custom operator, and a way around it for calls that nothing but Python sees.

    The dispatcher and what torch.library does for lists of tensors take longer than several launches of
    kernels. So the operator itself is left to compilers and to whatever else wraps tensors, and to calls in
    which a member of a list wants a gradient.
    """

    def __init__(self, name: str, function: Callable[..., list[Tensor]]) -> None:
        self.operator, self._function = _custom_op(name, function), _named(name, function)
        self._name = name
        self._recorded: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., list[Tensor]]) -> None:
        self.operator.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        self.operator.register_autograd(backward, setup_context=setup_context)
        self._recorded = _recorded(self._name, self._function, backward, setup_context)

    def __call__(self, *args: Any) -> list[Tensor]:
        tensors = [x for x in args if isinstance(x, Tensor)]
        lists = [x for x in args if isinstance(x, list | tuple)]
        members = [x for given in lists for x in given if isinstance(x, Tensor)]
        if not is_concrete(*tensors, *members):
            return self.operator(*args)
        if not (torch.is_grad_enabled() and _any_requires_grad([*tensors, *members])):
            return self._function(*args)
        if self._recorded is None or _any_requires_grad(members):
            return self.operator(*args)  # which says so if it has no derivative
        return list(self._recorded.apply(*args))


def _any_requires_grad(tensors: Iterable[Tensor]) -> bool:
    return any(x.requires_grad for x in tensors)


def _custom_op(name: str, function: Callable[..., Any]) -> Any:
    """Without a derivative until one is registered: then PyTorch's own error would speak to its author."""
    operator = torch.library.custom_op(f"schoenbat::{name}", function, mutates_args=())

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"schoenbat::{name} has no derivative: fused and eager attention are differentiable once. Second "
            "derivatives are taken under torch.func, or with rmfa(..., implementation='reference')"
        )

    operator.register_autograd(refuse)
    return operator


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A profiler shows the function as it shows the operator."""

    def named(*args: Any) -> Any:
        if not torch.autograd._profiler_enabled():
            return function(*args)
        with torch.profiler.record_function(f"schoenbat::{name}"):
            return function(*args)

    return named


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current GPU: that is made the one where the first tensor lies."""

    @wraps(function)
    def alone(first: Tensor, *rest: Any) -> Any:
        with torch.cuda.device_of(first), without_autocast(first), torch.no_grad():
            return function(first, *rest)

    return alone


def _recorded(
    name: str,
    function: Callable[..., list[Tensor]],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> type[torch.autograd.Function]:
    """The function as autograd records it, with the gradients that its operator has."""

    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = function(*args)
        setup_context(ctx, args, output)
        return tuple(output)

    def gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Members of lists get no gradient here. Under create_graph it is operators without a derivative that
        # are called: a second one raises.
        return tuple(None if isinstance(x, list | tuple) else x for x in backward(ctx, list(grads)))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    return type(name, (torch.autograd.Function,), methods)  # autograd's nodes are called by its name
