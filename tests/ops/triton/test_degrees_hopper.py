"""Maps of many degrees on Hopper: on one if there is one, else the kernels as plain Python."""

from functools import partial

import pytest
import torch
from ops.triton import specification
from ops.triton.specification import DEVICE, assert_close_to_specification, recorded
from oracle import make_map

from schoenbat.kernels import polynomial
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton.experimental.gluon")
# What a GPU runs of it are other programs than what a CPU does: there they are among the tests of GPUs.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
draw = partial(specification.draw, dim=64, dtype=torch.bfloat16)


@pytest.fixture(params=["one program to a head", "several"], autouse=True)
def passes(request, monkeypatch):
    """The passes that were run by these kernels."""
    from schoenbat.ops.triton import hopper_calls, launch_bidirectional_hopper
    from schoenbat.ops.triton.hopper import degrees, degrees_backward, warp_groups

    if DEVICE == "cpu":
        from ops.triton.gluon_emulation import emulate

        emulate(monkeypatch, [warp_groups, degrees, degrees_backward])
        monkeypatch.setattr(hopper_calls, "has_kernels", lambda device: True)
    monkeypatch.setattr(
        launch_bidirectional_hopper, "_PROGRAMS", 1 if request.param == "one program to a head" else 10_000
    )
    run = recorded(
        monkeypatch,
        launch_bidirectional_hopper,
        ("summarize_degrees", "read", "read_backward", "key_backward"),
    )
    yield
    assert run == ["summarize_degrees", "read", "read_backward", "summarize_degrees", "key_backward"]


def draw_map(dim=64, num_features=128, scale=4.0, **options):
    return make_map("unbiased", dim, num_features, dtype=torch.float32, device=DEVICE, scale=scale, **options)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (300, 300), (70, 200)])
def test_matches_the_specification(queries, keys):
    assert_close_to_specification(draw_map(), draw(queries, keys), torch.tensor([2.0]))


@pytest.mark.parametrize(
    ("num_features", "options", "packing"),
    [
        (66, {"scale": 1.0}, (1, 2, 1, 1, 2)),
        (72, {}, (2, 6, 1, 1, 4)),
        (110, {}, (3, 8, 3, 1, 6)),
        (129, {}, (4, 9, 3, 1, 8)),
        (80, {"scale": 8.0}, (5, 14, 4, 1, 11)),
        (128, {"kernel": polynomial(4, 0.25)}, (4, 8, 4, 1, 8)),
        (128, {"kernel": polynomial(6, 0.25)}, (6, 12, 6, 3, 12)),
    ],
    ids=[
        "one level of each group alone",
        "an even number of levels alone",
        "a first group with a wide highest level",
        "no padding",
        "almost as many tiles as there is room for",
        "no level that serves few features",
        "more than one level on which all features have factors",
    ],
)
def test_levels_that_share_tiles(num_features, options, packing):
    from schoenbat.ops.triton.plan import make_plan

    features = draw_map(64, num_features, **options)
    mapped = features.map(torch.bfloat16)
    laid_out = make_plan(mapped.blocks, mapped.weight, torch.bfloat16, 64, True, True)
    middle, _, *rest = laid_out.first.tolist()[1:]
    assert (middle, *rest) == packing
    # Where a polynomial is approximated, denominators come near their floors, and gradients jump there.
    scale = torch.tensor([4.0 if "kernel" in options else 2.0])
    assert_close_to_specification(features, draw(90, 140), scale)


def test_masks_groups_and_maps_per_head():
    """A sequence that has masked keys, and one that has no others; padded widths."""
    tensors = draw(150, 140, heads=4, key_heads=2, dim=48, value_dim=64, batch=2)
    mask = (torch.rand(2, 140, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[1] = False
    options = {"key_mask": mask, "enable_gqa": True}
    features = draw_map(48, 100, num_heads=2)
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 3.0, 4), **options)


@pytest.mark.parametrize("centred", [False, True])
def test_rows_are_normalised_on_the_way(centred):
    mask = (torch.rand(1, 150, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "unit_rows": UnitRows(centred, 1e-3)}
    assert_close_to_specification(draw_map(), draw(150, 150), torch.tensor([3.0]), **options)


def test_rows_of_zeros_have_gradients():
    """Products are divided by their factors, which are zero here."""
    tensors = draw(40, 40)
    for x in tensors[:2]:
        x[..., 3:7, :] = 0.0
    assert_close_to_specification(draw_map(), tensors, torch.tensor([2.0]))


def test_projections_that_cancel_have_gradients():
    """Of each kind of level some factors are zero: the terms of a projection are each other's opposite."""
    features = draw_map()
    factors = torch.cat(features.map(torch.float32).blocks.maps, -1)[0, :, ::4].to("cpu", torch.bfloat16)
    tensors, count = draw(200, 200), factors.shape[-1]
    for x in tensors[:2]:
        x[..., :count, :] = 0.0
        x[..., :count, 0], x[..., :count, 1] = factors[1], -factors[0]
    assert_close_to_specification(features, tensors, torch.tensor([2.0]))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 4096, 16384 + 7])
def test_long_sequences_on_a_gpu(length):
    """Of so many rows, some have projections that are zero."""
    tensors = draw(length, length, heads=4, key_heads=2, batch=2)
    options = {"enable_gqa": True, "unit_rows": UnitRows(True, 1e-3)}
    scale = torch.linspace(0.5, 4.0, 4)
    assert_close_to_specification(draw_map(), tensors, scale, "eager", **options)
