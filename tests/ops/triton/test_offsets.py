"""Tensors of more than 2³¹ elements: in the interpreter parts of them lie far apart, a GPU has whole ones."""

import pytest
import torch
from ops.triton.specification import DEVICE, TOLERANCE, relative_error
from oracle import make_map, rows

from schoenbat import RMFAState, RMFAWindowState, rmfa, rmfa_step, rmfa_window, rmfa_window_step

pytest.importorskip("triton")
# Two steps do not fit 32 bits, one does, so that Triton takes it for a number of 32.
STEP = 2**30
# Of several tiles, as causal sums are of what lies before a tile.
LENGTH, DIM = 100, 16


def far_apart(x):
    """The same numbers, with steps so large between sequences; what lies between is never touched."""
    memory = torch.empty(STEP * (x.shape[0] - 1) + x[0].numel(), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (STEP, *x[0].contiguous().stride())).copy_(x)


def draw(length=LENGTH, first_seed=0):
    seeds = range(first_seed, first_seed + 3)
    return [rows(3, 1, length, DIM, seed=seed, dtype=torch.float16).to(DEVICE) for seed in seeds]


def whole(form, features, tensors):
    options = {"is_causal": "causal" in form, "implementation": "triton"}
    if "window" in form:
        return rmfa_window(*tensors, features, 5, **options)
    return rmfa(*tensors, features, **options)


@pytest.mark.parametrize(
    ("form", "construction"),
    [
        *(("bidirectional", "exact-low"), ("bidirectional", "unbiased")),
        *(("causal", "exact-low"), ("causal", "unbiased")),
        *(("window", "exact-low"), ("trained", "exact-low"), ("causal trained", "exact-low")),
    ],
)
def test_sequences_may_lie_far_apart(few_programs, form, construction):
    options = {"dtype": torch.float32, "device": DEVICE, "trainable": "trained" in form}
    features = make_map(construction, DIM, 40, **options)
    outcomes = []
    for place in (torch.clone, far_apart):
        *inputs, grad = (place(x) for x in (*draw(), draw(first_seed=3)[0]))
        inputs = [x.requires_grad_() for x in inputs]
        out = whole(form, features, inputs)
        outcomes.append([out, *torch.autograd.grad(out, [*inputs, *features.parameters()], grad)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("length", [1, LENGTH])
def test_what_goes_onto_a_state_may_lie_far_apart(length):
    features = make_map("exact-low", DIM, 40, dtype=torch.float32, device=DEVICE)
    earlier, tensors = draw(length, first_seed=3), draw(length)
    outcomes = []
    for place in (torch.clone, far_apart):
        _, key, value = map(place, earlier)
        inputs = [place(x) for x in tensors]
        state = RMFAState.zeros(features, 3, 1, DIM, device=DEVICE)
        state.update(key, value, features, implementation="triton")
        out, state = rmfa_step(*inputs, features, state, implementation="triton")
        outcomes.append(
            [out, state.read(inputs[0], features, implementation="triton"), *vars(state).values()]
        )
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_tokens_of_a_window_may_lie_far_apart():
    """The second token sees the first one near, the third sees it far."""
    features = make_map("exact-low", DIM, 40, dtype=torch.float32, device=DEVICE)
    outcomes = []
    for place in (torch.clone, far_apart):
        state = RMFAWindowState.zeros(features, 1, 3, 1, DIM, device=DEVICE, dtype=torch.float16)
        found = []
        for seed in (0, 3, 6):
            token = map(place, draw(1, first_seed=seed))
            out, state = rmfa_window_step(*token, features, state, implementation="triton")
            found.append(out)
        outcomes.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_the_last_head_of_a_large_call_is_as_it_is_alone(construction, is_causal):
    """So large that it lies beyond 2³¹ elements of every tensor, outputs and gradients among them."""
    heads, length, dim = 9, 2**22, 64
    assert (heads - 1) * length * dim >= 2**31
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of free memory")
    features = make_map(construction, dim, 128, dtype=torch.float32, device=DEVICE)
    draw_one = lambda: torch.nn.functional.normalize(  # noqa: E731
        torch.randn(1, heads, length, dim, device=DEVICE, dtype=torch.bfloat16), dim=-1
    )
    torch.manual_seed(0)
    inputs = [draw_one().requires_grad_() for _ in range(3)]
    last = [x.detach()[:, -1:].clone().requires_grad_() for x in inputs]
    out, alone = (rmfa(*xs, features, is_causal=is_causal, implementation="triton") for xs in (inputs, last))
    assert relative_error(out[:, -1:].detach(), alone.detach()) < TOLERANCE[torch.bfloat16]
    grads = torch.autograd.grad(out, inputs, out.detach())
    right = torch.autograd.grad(alone, last, alone.detach())
    for a, b in zip(grads, right, strict=True):
        assert relative_error(a[:, -1:], b) < TOLERANCE[torch.bfloat16]
