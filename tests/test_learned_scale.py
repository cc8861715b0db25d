"""What a parameter of a head stands for, and back."""

import math

import pytest
import torch
from torch.testing import assert_close

from schoenbat.kernels import kernel
from schoenbat.learned_scale import first_scale, rho_of, rho_of_weight, scale_of, weight_of


@pytest.mark.parametrize("name", ["exp", "inv"])
def test_scale_and_parameter_are_each_others_inverse(name):
    scale = first_scale(kernel(name)) * torch.tensor([0.01, 0.5, 1.0, 1.1], dtype=torch.float64)
    assert_close(scale_of(rho_of(scale, kernel(name)), kernel(name)), scale)
    start = scale_of(torch.zeros(1, dtype=torch.float64), kernel(name))
    assert start.item() == pytest.approx(first_scale(kernel(name)))


def test_a_scale_stays_below_the_radius():
    far = scale_of(torch.tensor([100.0]), kernel("inv"))
    assert 0.99 < far.item() < 1


def test_a_scale_close_to_the_radius_can_leave_it():
    rho = torch.tensor([0.6], requires_grad=True)
    assert scale_of(rho, kernel("inv")).item() == pytest.approx(1 - 1e-6, abs=1e-7)
    optimizer = torch.optim.Adam([rho], lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        (scale_of(rho, kernel("inv")) - 0.5).square().sum().backward()
        optimizer.step()
    assert scale_of(rho, kernel("inv")).item() < 0.9


def test_a_weight_and_its_parameter_are_each_others_inverse():
    weight = torch.tensor([1e-3, 1.0, 20.0], dtype=torch.float64)
    assert_close(weight_of(rho_of_weight(weight)), weight)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_no_parameter_stands_for_is_named(bad):
    with pytest.raises(ValueError, match="above 0 and below the radius inf of the kernel 'exp'"):
        rho_of(torch.tensor([1.0, bad]), kernel("exp"))
    with pytest.raises(ValueError, match="positive and finite"):
        rho_of_weight(torch.tensor([bad]))


def test_half_precision_is_computed_in_float32():
    assert scale_of(torch.zeros(2, dtype=torch.bfloat16), kernel("exp")).dtype == torch.float32
