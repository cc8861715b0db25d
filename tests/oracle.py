"""Inputs, the float64 oracle and tolerances that the tests of attention share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from schoenbat import MaclaurinFeatures, rmfa


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Unit rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


def make_map(construction: str, head_dim: int = 6, num_features: int = 40, **options) -> MaclaurinFeatures:
    """A small map with gains that are not 1 where it is trainable."""
    options = {"scale": 2.0, "seed": 3, "dtype": torch.float64, **options}
    features = MaclaurinFeatures(head_dim, num_features, construction=construction, **options)
    if features.gains is not None:
        with torch.no_grad():
            noise = torch.randn(features.gains.shape, generator=torch.Generator().manual_seed(1))
            features.gains += 0.1 * noise.to(features.gains)
    return features


def gradients(call: Callable[[], Tensor], tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output of a call and the gradient of a fixed random combination of it for every tensor."""
    out = call()
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((out * direction.to(out)).sum(), tensors, allow_unused=True)
    zero_for_none = [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)]
    return out.detach(), zero_for_none


def assert_as_good_as_reference(
    got: Tensor, same_precision: Tensor, exact: Tensor, slack: float = 2.0
) -> None:
    """Error against float64 at most `slack` × (the reference's in the same precision + one rounding)."""
    rounding = torch.finfo(got.dtype).eps * exact.double().norm()
    allowed = slack * ((same_precision.double() - exact.double()).norm() + rounding)
    error = (got.double() - exact.double()).norm()
    assert error <= allowed, f"error {error:.3g} > {allowed:.3g}"


def assert_matches_reference(
    query: Tensor, key: Tensor, value: Tensor, features: MaclaurinFeatures, rtol: float = 1e-9, **options
) -> None:
    """Output and every gradient of the eager path against the specification, in float64."""
    tensors = [query, key, value, *features.parameters()]
    if isinstance(options.get("scale"), Tensor):
        tensors.append(options["scale"])
    for tensor in tensors:
        tensor.requires_grad_()
    results = [
        gradients(lambda i=i: rmfa(query, key, value, features, implementation=i, **options), tensors)
        for i in ("reference", "eager")
    ]
    (expected, expected_grads), (got, got_grads) = results
    size = expected.abs().max() if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * float(size))
    for a, b in zip(expected_grads, got_grads, strict=True):
        # Gradients that are zero up to rounding are sums of terms of order one.
        size = max(float(a.abs().max()), 1e-3) if a.numel() else 0.0
        torch.testing.assert_close(b, a, rtol=100 * rtol, atol=100 * rtol * size)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN, so that an unwritten element cannot hide."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out
