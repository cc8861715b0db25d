"""The fused kernels against the float64 specification: what the tests of both directions share."""

import torch
from oracle import gradients, poisoned_memory

from schoenbat.functional import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products in the interpreter are wrong for bfloat16; a GPU must show all three.
DTYPES = [torch.float32, torch.float16]
# One rounding of the features and one of the sums go into every output and gradient.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def relative_error(got, exact):
    """A gradient that cancels to nothing is the rounding of terms of size one."""
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=0.3))


def assert_close_to_specification(features, tensors, scale, exact="reference", **options):
    """Outputs and the gradients of query, key, value and scale."""
    inputs = [x.to(DEVICE).requires_grad_() for x in (*tensors, scale)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]

    def run(xs, implementation):
        *qkv, s = xs
        return gradients(
            lambda: attend(*qkv, features, scale=s, implementation=implementation, **options), xs
        )

    with poisoned_memory():
        got, got_grads = run(inputs, "triton")
    right, right_grads = run(exact_inputs, exact)
    assert got.dtype == tensors[0].dtype
    errors = [relative_error(a, b) for a, b in zip([got, *got_grads], [right, *right_grads], strict=True)]
    assert max(errors) < TOLERANCE[got.dtype], errors
