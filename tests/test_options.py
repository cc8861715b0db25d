"""Options that cannot be right are named, with their value."""

import math

import numpy as np
import pytest
import torch

from schoenbat.options import (
    MOST,
    check_count,
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_seed,
)


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "3", None, True, math.nan])
def test_a_count_is_an_integer_of_at_least(value):
    with pytest.raises(ValueError, match=r"size must be an integer of at least 1, got "):
        check_count("size", value)


def test_a_count_has_an_end():
    assert check_count("size", MOST, most=MOST) == MOST
    with pytest.raises(ValueError, match="size must be at most 65,536, got 65537"):
        check_count("size", MOST + 1, most=MOST)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "0.5", None, 1j])
def test_a_number_lies_between(value):
    assert check_number("rate", 1, 0, 1) == 1.0
    with pytest.raises(ValueError, match=r"rate must be a finite number from 0 to 1, got "):
        check_number("rate", value, 0, 1)


@pytest.mark.parametrize("value", [torch.int64, torch.complex64, "float32"])
def test_a_dtype_is_of_floats(value):
    check_dtype("dtype", None)
    check_dtype("dtype", torch.bfloat16)
    with pytest.raises(ValueError, match="dtype must be a floating-point"):
        check_dtype("dtype", value)


@pytest.mark.parametrize("value", [1.5, "0", None, 2**64, -(2**63) - 1])
def test_a_seed_fits_a_generator(value):
    torch.Generator().manual_seed(2**64 - 1)
    check_seed(2**64 - 1)
    with pytest.raises(ValueError, match="seed must be an integer of at most 64 bits"):
        check_seed(value)


@pytest.mark.parametrize("value", ["no", "false", None, 2])
def test_a_flag_is_true_or_false(value):
    assert check_flag("post", True) is True
    assert check_flag("post", False) is False
    with pytest.raises(ValueError, match="post must be True or False, got "):
        check_flag("post", value)


def test_a_device_is_there(monkeypatch):
    assert check_device("cpu") == torch.device("cpu")
    for name in ("foo", "meta", "cuda:x"):
        with pytest.raises(ValueError, match=f"there is no device '{name}'; use cpu"):
            check_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda' was asked for, but PyTorch sees no GPU"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1").index == 1
    with pytest.raises(ValueError, match="last GPU is cuda:1"):
        check_device("cuda:2")


def test_integers_of_numpy_are_integers():
    assert type(check_count("size", np.int64(3))) is int
    assert type(check_seed(np.int64(3))) is int
