"""Causal attention by many degrees in one pass: on Hopper if there is one, else kernels as plain Python."""

from functools import partial

import pytest
import torch
from ops.triton import specification
from ops.triton.specification import (
    DEVICE,
    assert_close_to_specification,
    recorded,
)
from oracle import make_map

pytest.importorskip("triton.experimental.gluon")
# What a GPU runs of it are other programs than what a CPU does: there they are among the tests of GPUs.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
draw = partial(specification.draw, dim=64, dtype=torch.bfloat16)


@pytest.fixture(params=["one segment", "several segments"], autouse=True)
def passes(request, monkeypatch):
    """The passes that were run by these kernels."""
    from schoenbat.ops.triton import (
        causal_hopper,
        causal_hopper_degrees,
        causal_hopper_degrees_keys,
        causal_hopper_degrees_queries,
        causal_hopper_keys,
        causal_hopper_narrow,
        degrees_hopper,
        degrees_hopper_backward,
        hopper,
        hopper_calls,
        launch_causal,
        launch_hopper,
    )

    if DEVICE == "cpu":
        from ops.triton.gluon_emulation import emulate

        own = causal_hopper_degrees, causal_hopper_degrees_queries, causal_hopper_degrees_keys
        others = causal_hopper, causal_hopper_keys, causal_hopper_narrow
        emulate(monkeypatch, [hopper, degrees_hopper, degrees_hopper_backward, *others, *own])
        for module in (hopper_calls, launch_causal):
            monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(launch_hopper, "_PROGRAMS", 2 if request.param == "one segment" else 10_000)
    run = recorded(monkeypatch, launch_hopper, ("attend", "attend_backward"))
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
