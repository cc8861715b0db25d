"""Sums of wide heads on Hopper: on one if there is one, else the kernel as plain Python.

All other kernels are interpreted there.
"""

from functools import partial

import pytest
import torch
from ops.triton import specification
from ops.triton.specification import DEVICE, assert_close_to_specification, recorded
from oracle import make_map, rows

from schoenbat import RMFAState, rmfa
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton.experimental.gluon")
# What a GPU runs of it are other programs than what a CPU does: there they are among the tests of GPUs.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# The interpreter's products are wrong in bfloat16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
draw = partial(specification.draw, dtype=DTYPE)
# As many directions as there is room for, and fewer; widths that are padded.
MAPS = pytest.mark.parametrize(
    ("dim", "num_features", "directions"), [(128, 256, 16), (128, 200, 12), (112, 240, 16), (80, 155, 12)]
)


def draw_map(dim=128, num_features=256, **options):
    return make_map("exact-low", dim, num_features, dtype=torch.float32, device=DEVICE, **options)


@pytest.fixture(params=["one program to a head", "several"], autouse=True)
def passes(request, monkeypatch):
    """The passes that were run by this kernel."""
    from schoenbat.ops.triton import (
        hopper_calls,
        launch,
        launch_bidirectional_hopper,
    )
    from schoenbat.ops.triton.hopper import bidirectional_wide, degrees, warp_groups

    if DEVICE == "cpu":
        from ops.triton.gluon_emulation import emulate

        takes = hopper_calls.takes_sums_of_pairs

        def takes_float16(shape, plan, x):
            return takes(shape._replace(dtype=torch.bfloat16), plan, x)

        emulate(monkeypatch, [warp_groups, degrees, bidirectional_wide])
        monkeypatch.setattr(hopper_calls, "has_kernels", lambda device: True)
        monkeypatch.setattr(launch, "takes_sums_of_pairs", takes_float16)
    monkeypatch.setattr(
        launch_bidirectional_hopper, "_PROGRAMS", 1 if request.param == "one program to a head" else 10_000
    )
    run = recorded(monkeypatch, launch_bidirectional_hopper, ("summarize_pairs",))
    yield
    assert run in (["summarize_pairs"] * 2, ["summarize_pairs"] * 4)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 300), (300, 63)])
def test_matches_the_specification(queries, keys):
    assert_close_to_specification(draw_map(), draw(queries, keys, dim=128), torch.tensor([1.3]))


@MAPS
def test_fewer_pairs_and_narrower_heads(dim, num_features, directions):
    features = draw_map(dim, num_features)
    assert features.map(DTYPE).blocks.quadratic.shape[-1] == directions
    assert_close_to_specification(features, draw(150, 150, dim=dim), torch.tensor([1.3]))


@pytest.mark.parametrize(("dim", "value_dim", "num_features"), [(96, 112, 190), (128, 80, 256)])
def test_masks_groups_and_maps_per_head(dim, value_dim, num_features):
    """A sequence that has masked keys, and one that has no others; padded widths."""
    features = draw_map(dim, num_features, num_heads=2)
    tensors = draw(40, 140, heads=4, key_heads=2, dim=dim, value_dim=value_dim, batch=2)
    mask = (torch.rand(2, 140, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[1] = False
    options = {"key_mask": mask, "enable_gqa": True}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 3.0, 4), **options)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dim", [80, 128])
def test_rows_are_normalised_on_the_way(centred, dim):
    mask = (torch.rand(1, 150, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "unit_rows": UnitRows(centred, 1e-3)}
    features = draw_map(dim, 2 * dim if dim == 128 else 200)
    assert_close_to_specification(features, draw(150, 150, dim=dim), torch.tensor([2.0]), **options)


def test_features_may_differ_in_weight():
    """Each linear one and each pair."""
    features = draw_map()
    features.feature_weights[1:129] *= torch.linspace(0, 2, 128, device=DEVICE)
    features.feature_weights[129:] *= torch.linspace(2, 0, 127, device=DEVICE)
    assert_close_to_specification(features, draw(150, 150, dim=128), torch.tensor([1.3]))


def test_floors_that_act():
    """Queries and keys of opposed means: mean logits get gradients."""
    query, key, value = draw(150, 150, dim=128)
    tensors = [query / 128**0.5 + 0.1, key / 128**0.5 - 0.1, value]
    assert_close_to_specification(draw_map(), tensors, torch.tensor([6.0]), roundings=2.0)


def test_a_state_in_two_pieces():
    """Sums that are added up, from which nobody has gradients."""
    features = draw_map()
    key, value, query = (rows(2, 3, 150, 128, seed=i, dtype=DTYPE).to(DEVICE) for i in range(3))
    state = RMFAState.zeros(features, 2, 3, 128, device=DEVICE, dtype=DTYPE)
    for start, end in ((0, 70), (70, 150)):
        state.update(key[..., start:end, :], value[..., start:end, :], features, implementation="triton")
    got = state.read(query, features, implementation="triton")
    right = rmfa(query.double(), key.double(), value.double(), features, implementation="reference")
    assert specification.relative_error(got, right) < specification.TOLERANCE[DTYPE]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 4096, 16384 + 7])
def test_long_sequences_on_a_gpu(length):
    tensors = draw(length, length, heads=4, key_heads=2, batch=2, dim=128)
    options = {"enable_gqa": True, "unit_rows": UnitRows(True, 1e-3)}
    scale = torch.linspace(0.5, 2.5, 4)
    assert_close_to_specification(draw_map(), tensors, scale, "eager", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 16384])
def test_every_run_gives_the_same_on_a_gpu(length):
    """Sums of what some threads store and others multiply: who comes first must make no difference."""
    tensors = [x.to(DEVICE) for x in draw(length, length, heads=16, dim=128)]
    features, grad = draw_map(), torch.ones_like(tensors[0])

    def run():
        inputs = [x.clone().requires_grad_() for x in tensors]
        out = rmfa(*inputs, features, implementation="triton")
        return [out, *torch.autograd.grad(out, inputs, grad)]

    first, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
