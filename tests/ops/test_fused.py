"""How the fused kernels' calls are laid out."""

import pytest
import torch
from oracle import make_map

from schoenbat.ops import fused

pytest.importorskip("triton")


def is_wide(queries=256, keys=256, dim=64, value_dim=64, dtype=torch.bfloat16, trained=False, scale=4.0):
    from schoenbat.ops.triton.plan import Plan

    mapped = make_map("unbiased", dim, 128, dtype=torch.float32, scale=scale).map(dtype)
    if trained:
        mapped = mapped._replace(weight=mapped.weight.clone().requires_grad_())
    query, key = torch.zeros(1, 1, 1, queries, dim, dtype=dtype), torch.zeros(1, 1, 1, keys, dim, dtype=dtype)
    value = torch.zeros(1, 1, 1, keys, value_dim, dtype=dtype)
    tensors, _, flags = fused.lay_out_causal(query, key, value, mapped, None)
    return Plan.of(tensors, flags).is_wide


@pytest.fixture
def on_hopper(monkeypatch):
    from schoenbat.ops.triton import hopper_calls

    monkeypatch.setattr(hopper_calls, "has_kernels", lambda device: True)


@pytest.mark.parametrize("options", [{}, {"dim": 48}, {"queries": 200, "keys": 110}, {"scale": 2.0}])
def test_causal_calls_of_many_degrees_have_wide_groups_on_hopper(on_hopper, options):
    assert is_wide(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 100, "keys": 201},
        {"dim": 32},
        {"dim": 56},
        {"value_dim": 128},
        {"dtype": torch.float16},
        {"trained": True},
        {"scale": 8.0},
    ],
)
def test_other_causal_calls_have_narrow_ones(on_hopper, options):
    assert not is_wide(**options)


def test_other_devices_have_narrow_ones():
    assert not is_wide()
