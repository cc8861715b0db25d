"""The fused kernels against the float64 specification: what their tests share."""

import torch
from oracle import gradients, poisoned_memory, rows
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from schoenbat import rmfa
from schoenbat.functional import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products in the interpreter are wrong for bfloat16; a GPU must show all three.
DTYPES = [torch.float32, torch.float16]
# One rounding of the features and one of the sums go into every output and gradient.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(queries, keys, heads=1, key_heads=None, dim=16, value_dim=None, dtype=torch.float32, batch=1):
    """Query, key and value, on the CPU."""
    key_heads = key_heads or heads
    shapes = (heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, value_dim or dim)
    return [rows(batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def recorded(monkeypatch, module, names):
    """A list to which the names of these functions are added as they are called."""
    called = []

    def recording(name, function):
        def call(*args):
            called.append(name)
            return function(*args)

        return call

    for name in names:
        monkeypatch.setattr(module, name, recording(name, getattr(module, name)))
    return called


def relative_error(got, exact, terms=0.3):
    """Gradients may cancel to nothing: then the error is the rounding of terms that are not nothing."""
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=terms))


def assert_close_to_specification(
    features,
    tensors,
    scale,
    exact="reference",
    few_keys=None,
    attention=attend,
    trained=None,
    roundings=1.0,
    **options,
):
    """Outputs and the gradients of query, key, value, scale, the map's parameters and what is `trained`.

    `few_keys`: see below. `roundings`: how many more of them than `TOLERANCE` is for.
    """
    trained = trained or {}
    inputs = [x.to(DEVICE).requires_grad_() for x in (*tensors, scale, *trained.values())]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    clear, terms = (1.0, (0.3, 0.3)) if few_keys is None else few_keys
    parameters = list(features.parameters())

    def run(xs, implementation):
        query, key, value, s, *others = xs
        given = options | dict(zip(trained, others, strict=True))

        def call():
            out = attention(query, key, value, features, scale=s, implementation=implementation, **given)
            return clear * out

        return gradients(call, [*xs, *parameters])

    with poisoned_memory():
        got, got_grads = run(inputs, "triton")
    right, right_grads = run(exact_inputs, exact)
    assert got.dtype == tensors[0].dtype
    # Scales and what is trained get sums over the rows of all heads, of about 0.1 each and of either sign.
    over_rows = max(0.3, 0.1 * tensors[0].shape[:-1].numel() ** 0.5)
    sizes = 0.3, *terms, 0.3, *[over_rows] * (1 + len(trained) + len(parameters))
    pairs = zip([got, *got_grads], [right, *right_grads], sizes, strict=True)
    errors = [relative_error(a, b, size) for a, b, size in pairs]
    # One that is not a number is not the largest of them.
    assert all(error < roundings * TOLERANCE[got.dtype] for error in errors), errors


def where_few_keys_are_in_sight(features, tensors, scale, visible):
    """Which rows to compare, and how large the terms are that cancel in the gradients of query and key.

    Features are rounded before they are multiplied, as on any tensor core. The gradients through numerator
    and denominator cancel (for one key altogether), their rounding does not: it is measured by the gradients
    that there would be if denominators were constants. A row's gradient jumps where its denominator meets the
    floor: rows closer to it than the rounding are left out.
    """
    query, key, value = (x.detach().double().to(DEVICE).requires_grad_() for x in tensors)
    scale = scale.double().to(DEVICE)[:, None, None]
    planned = features.scale
    scores = features(query * scale / planned**0.5) @ features(key * planned**0.5).mT
    scores = torch.where(visible, scores, 0.0)
    count = visible.sum(-1, keepdim=True)
    mean_logit = scale * (query * (visible.double() / count.clamp(min=1)).matmul(key)).sum(-1, keepdim=True)
    total, floor = scores.sum(-1, keepdim=True), count * mean_logit.clamp(max=0.0).exp()
    rounding = torch.finfo(tensors[0].dtype).eps * scores.abs().sum(-1, keepdim=True)
    clear = (total - floor).abs() >= rounding
    assert clear.double().mean() > 0.4
    floored = (torch.maximum(total, floor) + (count == 0)).detach()
    _, sizes = gradients(lambda: clear * (scores @ value) / floored, [query, key])
    return clear, [max(0.3, float(x.norm())) for x in sizes]


def assert_a_graph_replays(call, inputs):
    """Nothing waits for the device: a CUDA graph of a call and its gradients gives what the call gives."""

    def run():
        out = call()
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    with torch.no_grad():
        for x in inputs:  # what the graph was captured with must not be what it replays
            x.copy_(x.roll(1, -1))
    wanted = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def assert_gradients_of_squares(inputs, features):
    """Those of causal attention in bfloat16, which inputs have got, are those of the specification."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rmfa(*exact, features, is_causal=True, implementation="reference").square().sum().backward()
    for got, right in zip(inputs, exact, strict=True):
        assert (got.grad.double() - right.grad).norm() < 3e-2 * right.grad.norm()


def assert_fakes_agree(monkeypatch, module, name, call):
    """Compilers plan memory by what an operator says that it will return."""
    operator, seen = getattr(module, name), []

    def watched(*args):
        returned = operator(*args)
        seen.append((args, returned))
        return returned

    monkeypatch.setattr(module, name, watched)
    call()
    ((args, returned),) = seen
    with FakeTensorMode() as mode:
        fakes = operator.operator(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    kinds = [[(x.shape, x.dtype, x.stride()) for x in tensors] for tensors in (fakes, returned)]
    assert kinds[0] == kinds[1]
