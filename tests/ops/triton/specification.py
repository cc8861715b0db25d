"""The fused kernels against the float64 specification: what the tests of both directions share."""

import torch
from oracle import gradients, poisoned_memory

from schoenbat.functional import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products in the interpreter are wrong for bfloat16; a GPU must show all three.
DTYPES = [torch.float32, torch.float16]
# One rounding of the features and one of the sums go into every output and gradient.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def relative_error(got, exact, terms=0.3):
    """Gradients may cancel to nothing: then the error is the rounding of terms that are not nothing."""
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=terms))


def assert_close_to_specification(features, tensors, scale, exact="reference", terms=(0.3, 0.3), **options):
    """Outputs and the gradients of query, key, value and scale; `terms`: what `size_of_terms` gives."""
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
    pairs = zip([got, *got_grads], [right, *right_grads], (0.3, *terms, 0.3, 0.3), strict=True)
    errors = [relative_error(a, b, size) for a, b, size in pairs]
    assert max(errors) < TOLERANCE[got.dtype], errors


def size_of_terms(features, tensors, scale, visible):
    """Norms of the gradients of query and key if the denominators were constants, in float64.

    Scores are rounded before they are multiplied by values, as on any tensor core. Where few keys are in
    sight, the gradients through numerator and denominator cancel (for one key altogether); the rounding
    does not.
    """
    query, key, value = (x.detach().double().to(DEVICE).requires_grad_() for x in tensors)
    scale = scale.double().to(DEVICE)[:, None, None]
    planned = features.scale
    scores = features(query * scale / planned**0.5) @ features(key * planned**0.5).mT
    scores = torch.where(visible, scores, 0.0)
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean_logit = scale * (query * (visible / count).double().matmul(key)).sum(-1, keepdim=True)
    floor = count * mean_logit.clamp(max=0.0).exp()
    floored = torch.maximum(scores.sum(-1, keepdim=True), floor).detach()
    _, sizes = gradients(lambda: scores @ value / floored, [query, key])
    return [max(0.3, float(x.norm())) for x in sizes]
