"""Causal attention by many degrees in one pass: on Hopper if there is one, else as plain Python."""

from functools import partial

import pytest
import torch
from ops.triton import specification
from ops.triton.specification import (
    DEVICE,
    assert_close_to_specification,
    assert_fakes_agree,
    assert_gradients_of_squares,
    recorded,
)
from oracle import make_map

from schoenbat import rmfa
from schoenbat.kernels import polynomial
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton.experimental.gluon")
# What a GPU runs of it are other programs than what a CPU does: there they are among the tests of GPUs.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
draw = partial(specification.draw, dim=64, dtype=torch.bfloat16)


@pytest.fixture(params=["one segment", "several segments"], autouse=True)
def passes(request, monkeypatch):
    """The passes that were run by these kernels."""
    from schoenbat.ops.triton import hopper_calls, launch_causal_hopper
    from schoenbat.ops.triton.hopper import (
        causal,
        causal_degrees,
        causal_degrees_keys,
        causal_degrees_queries,
        causal_keys,
        causal_narrow,
        degrees,
        degrees_backward,
        warp_groups,
    )

    if DEVICE == "cpu":
        from ops.triton.gluon_emulation import emulate

        own = causal_degrees, causal_degrees_queries, causal_degrees_keys
        others = causal, causal_keys, causal_narrow
        emulate(monkeypatch, [warp_groups, degrees, degrees_backward, *others, *own])
        monkeypatch.setattr(hopper_calls, "has_kernels", lambda device: True)
    monkeypatch.setattr(launch_causal_hopper, "_PROGRAMS", 2 if request.param == "one segment" else 10_000)
    run = recorded(monkeypatch, launch_causal_hopper, ("attend", "attend_backward"))
    yield
    assert run == ["attend", "attend_backward"]


def draw_map(dim=64, num_features=128, scale=4.0, **options):
    return make_map("unbiased", dim, num_features, dtype=torch.float32, device=DEVICE, scale=scale, **options)


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (64, 64), (150, 150), (300, 300), (150, 290), (290, 150)]
)
def test_matches_the_specification(queries, keys):
    """The last query is beside the last key."""
    features, tensors, scale = draw_map(), draw(queries, keys), torch.tensor([2.0])
    assert_close_to_specification(features, tensors, scale, is_causal=True)


@pytest.mark.parametrize(
    ("num_features", "options"),
    [
        (66, {"scale": 1.0}),
        (110, {}),
        (129, {}),
        (72, {"scale": 6.0}),
        (128, {"kernel": polynomial(4, 0.25)}),
    ],
    ids=["one level each", "a wide highest level", "no padding", "all room is taken", "nothing is packed"],
)
def test_levels_that_share_tiles(num_features, options):
    features, tensors = draw_map(64, num_features, **options), draw(150, 150)
    # Where a polynomial is approximated, denominators come near their floors, and gradients jump there.
    scale, roundings = (4.0, 2.0) if "kernel" in options else (2.0, 1.0)
    scale = torch.tensor([scale])
    assert_close_to_specification(features, tensors, scale, roundings=roundings, is_causal=True)


def test_masks_groups_and_maps_per_head():
    """A sequence that begins with masked keys, and one that has no others; padded widths."""
    features = draw_map(48, 100, num_heads=2)
    tensors = draw(150, 150, heads=4, key_heads=2, dim=48, value_dim=64, batch=2)
    mask = (torch.rand(2, 150, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[0, :3], mask[1] = False, False
    options = {"key_mask": mask, "enable_gqa": True, "is_causal": True}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 3.0, 4), **options)


@pytest.mark.parametrize("centred", [False, True])
def test_rows_are_normalised_on_the_way(centred):
    mask = (torch.rand(1, 150, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "is_causal": True, "unit_rows": UnitRows(centred, 1e-3)}
    assert_close_to_specification(draw_map(), draw(150, 150), torch.tensor([3.0]), **options)


def test_floors_that_act():
    """Queries and keys of opposed means, at a scale at which denominators fall below their floors."""
    query, key, value = draw(150, 150)
    tensors = [query / 8 + 0.1, key / 8 - 0.1, value]
    options = {"is_causal": True, "roundings": 2.0}
    assert_close_to_specification(draw_map(), tensors, torch.tensor([6.0]), **options)


def test_rows_of_zeros_have_gradients():
    """Products are divided by their factors, which are zero here."""
    tensors = draw(140, 140)
    for x in tensors[:2]:
        x[..., 3:7, :] = 0.0
    assert_close_to_specification(draw_map(), tensors, torch.tensor([2.0]), is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 4096, 16384 + 7])
def test_long_sequences_on_a_gpu(length):
    """Of so many rows, some have projections that are zero.

    At larger scales some have denominators so close to their floors that rounding decides on their gradients.
    """
    tensors = draw(length, length, heads=4, key_heads=2, batch=2)
    options = {"enable_gqa": True, "is_causal": True, "unit_rows": UnitRows(True, 1e-3)}
    assert_close_to_specification(draw_map(), tensors, torch.linspace(0.5, 2.0, 4), "eager", **options)


def test_rows_and_gradients_may_begin_anywhere():
    """As parts of a flat tensor do: contiguous, and not aligned."""
    features, given = draw_map(), draw(140, 140)
    inputs = []
    for x in given:
        flat = torch.cat([torch.zeros(3, dtype=x.dtype), x.flatten()]).to(DEVICE)
        inputs.append(flat[3:].view(x.shape).requires_grad_())
    others = torch.zeros(3, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = rmfa(*inputs, features, is_causal=True, implementation="triton")
    torch.cat([others, out.flatten()]).square().sum().backward()
    assert_gradients_of_squares(inputs, features)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_take_these_kernels(dynamic):
    """In one graph, whether lengths are numbers or symbols; the map is laid out while it is traced."""
    features, given = draw_map(), draw(140, 140)
    inputs = [x.to(DEVICE).requires_grad_() for x in given]
    attention = partial(rmfa, features=features, is_causal=True, implementation="triton")
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compiled(*inputs).square().sum().backward()
    assert_gradients_of_squares(inputs, features)


def test_compilers_know_what_is_kept(monkeypatch):
    from schoenbat.ops.triton import library

    features = draw_map()
    inputs = [x.to(DEVICE).requires_grad_() for x in draw(300, 300)]

    def call():
        rmfa(*inputs, features, is_causal=True, implementation="triton").square().sum().backward()

    assert_fakes_agree(monkeypatch, library, "attend_causal", call)
