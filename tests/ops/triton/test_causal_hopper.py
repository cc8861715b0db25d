"""Causal attention in one pass: on Hopper if there is one, else the kernels as plain Python."""

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
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton.experimental.gluon")
# What a GPU runs of it are other programs than what a CPU does: there they are among the tests of GPUs.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
draw = partial(specification.draw, dtype=torch.bfloat16)
# Of narrow heads with two groups of pairs, and with one. Wide heads have two warp groups to a program.
MAPS = pytest.mark.parametrize(("dim", "num_features"), [(64, 128), (32, 128), (32, 90), (128, 256)])
WIDTHS = pytest.mark.parametrize("dim", [32, 64, 128])


def draw_map(dim, num_features, **options):
    return make_map("exact-low", dim, num_features, dtype=torch.float32, device=DEVICE, **options)


@pytest.fixture(params=["one segment", "several segments"], autouse=True)
def passes(request, monkeypatch):
    """The passes that were run by these kernels."""
    from schoenbat.ops.triton import hopper_calls, launch_causal_hopper
    from schoenbat.ops.triton.hopper import (
        causal,
        causal_keys,
        causal_narrow,
        causal_narrow_keys,
        causal_narrow_queries,
        causal_queries,
        causal_wide,
        causal_wide_keys,
        causal_wide_queries,
        warp_groups,
    )

    if DEVICE == "cpu":
        from ops.triton.gluon_emulation import emulate

        common = causal, causal_queries, causal_keys
        narrow = causal_narrow, causal_narrow_queries, causal_narrow_keys
        wide = causal_wide, causal_wide_queries, causal_wide_keys
        emulate(monkeypatch, [warp_groups, *common, *narrow, *wide])
        monkeypatch.setattr(hopper_calls, "has_kernels", lambda device: True)
    monkeypatch.setattr(launch_causal_hopper, "_PROGRAMS", 2 if request.param == "one segment" else 10_000)
    run = recorded(monkeypatch, launch_causal_hopper, ("attend", "attend_backward"))
    yield
    assert run == ["attend", "attend_backward"]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 64), (150, 150), (110, 200), (200, 110)])
@MAPS
def test_matches_the_specification(queries, keys, dim, num_features):
    """The last query is beside the last key."""
    features = draw_map(dim, num_features)
    tensors = draw(queries, keys, dim=dim)
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), is_causal=True)


@pytest.mark.parametrize(
    ("dim", "value_dim", "num_features"), [(48, 64, 100), (32, 32, 128), (32, 32, 80), (96, 112, 190)]
)
def test_masks_groups_and_maps_per_head(dim, value_dim, num_features):
    """A sequence that begins with masked keys, and one that has no others; padded widths."""
    features = draw_map(dim, num_features, num_heads=2)
    tensors = draw(130, 130, heads=4, key_heads=2, dim=dim, value_dim=value_dim, batch=2)
    mask = (torch.rand(2, 130, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[0, :3], mask[1] = False, False
    options = {"key_mask": mask, "enable_gqa": True, "is_causal": True}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 3.0, 4), **options)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 112])
def test_rows_are_normalised_on_the_way(centred, dim):
    features = draw_map(dim, max(128, 2 * dim))
    mask = (torch.rand(1, 150, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "is_causal": True, "unit_rows": UnitRows(centred, 1e-3)}
    assert_close_to_specification(features, draw(150, 150, dim=dim), torch.tensor([2.0]), **options)


@WIDTHS
def test_linear_features_may_differ_in_weight(dim):
    features = draw_map(dim, max(128, 2 * dim))
    features.feature_weights[1 : 1 + dim] *= torch.linspace(0, 2, dim, device=DEVICE)
    assert_close_to_specification(features, draw(150, 150, dim=dim), torch.tensor([1.3]), is_causal=True)


@WIDTHS
def test_pairs_may_differ_in_weight(dim):
    features = draw_map(dim, max(128, 2 * dim))
    pairs = features.feature_weights[1 + dim :]
    pairs *= torch.linspace(2, 0, len(pairs), device=DEVICE)
    assert_close_to_specification(features, draw(150, 150, dim=dim), torch.tensor([1.3]), is_causal=True)


@WIDTHS
def test_floors_that_act(dim):
    """Queries and keys of opposed means, at a scale at which denominators fall below their floors."""
    query, key, value = draw(150, 150, dim=dim)
    tensors = [query / dim**0.5 + 0.1, key / dim**0.5 - 0.1, value]
    options = {"is_causal": True, "roundings": 2.0}
    features = draw_map(dim, max(128, 2 * dim))
    assert_close_to_specification(features, tensors, torch.tensor([6.0]), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 4096, 16384 + 7])
@MAPS
def test_long_sequences_on_a_gpu(length, dim, num_features):
    features = draw_map(dim, num_features)
    tensors = draw(length, length, heads=4, key_heads=2, batch=2, dim=dim)
    options = {"is_causal": True, "enable_gqa": True}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 2.5, 4), "eager", **options)


@WIDTHS
def test_a_gradient_may_begin_anywhere(dim):
    """As that of a part of a flat tensor does: it is contiguous, and not aligned."""
    features = draw_map(dim, max(128, 2 * dim))
    inputs = [x.to(DEVICE).requires_grad_() for x in draw(70, 70, dim=dim)]
    others = torch.zeros(3, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = rmfa(*inputs, features, is_causal=True, implementation="triton")
    torch.cat([others, out.flatten()]).square().sum().backward()
    assert_gradients_of_squares(inputs, features)


@WIDTHS
def test_rows_may_begin_anywhere(dim):
    """And lie anywhere: columns of a wider tensor, by steps that are no multiples of 16."""
    features = draw_map(dim, max(128, 2 * dim))
    inputs = []
    for x in draw(70, 70, dim=dim):
        wider = torch.cat([torch.zeros_like(x[..., :5]), x], dim=-1).to(DEVICE)
        inputs.append(wider[..., 5:].requires_grad_())
    rmfa(*inputs, features, is_causal=True, implementation="triton").square().sum().backward()
    assert_gradients_of_squares(inputs, features)


@WIDTHS
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_take_these_kernels(dim, dynamic):
    """In one graph, whether lengths are numbers or symbols."""
    features = draw_map(dim, max(128, 2 * dim))
    inputs = [x.to(DEVICE).requires_grad_() for x in draw(150, 150, dim=dim)]
    attention = partial(rmfa, features=features, is_causal=True, implementation="triton")
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compiled(*inputs).square().sum().backward()
    assert_gradients_of_squares(inputs, features)


@WIDTHS
def test_sums_over_keys_are_formed_once(dim, monkeypatch):
    """Gradients find those of the forward pass."""
    from schoenbat.ops.triton import launch_causal_hopper

    formed = recorded(monkeypatch, launch_causal_hopper, ["_sum_keys"])
    inputs = [x.to(DEVICE).requires_grad_() for x in draw(150, 150, dim=dim)]
    rmfa(*inputs, draw_map(dim, max(128, 2 * dim)), is_causal=True, implementation="triton").sum().backward()
    assert formed == ["_sum_keys"]


@WIDTHS
def test_compilers_know_what_is_kept(dim, monkeypatch):
    from schoenbat.ops.triton import library

    features = draw_map(dim, max(128, 2 * dim))
    inputs = [x.to(DEVICE).requires_grad_() for x in draw(300, 300, dim=dim)]

    def call():
        rmfa(*inputs, features, is_causal=True, implementation="triton").square().sum().backward()

    assert_fakes_agree(monkeypatch, library, "attend_causal", call)
