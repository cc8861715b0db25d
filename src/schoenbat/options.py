"""Every check of an option: what a constructor is given besides tensors."""

import math
import numbers
from typing import Any

import torch

# More features, landmarks or samples than this are a slip of the pen, and would fill any memory.
MOST = 2**16


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> Any:
    """An integer of at least `least` and at most `most`, as it is."""
    is_integer = isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value!r}")
    return value if isinstance(value, torch.SymInt) else int(value)


def check_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number from `least` to `most`, as a float."""
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if not (math.isfinite(number) and least <= number <= most):
        limits = f" of at least {least:g}" if math.isinf(most) else f" from {least:g} to {most:g}"
        limits = "" if math.isinf(least) else limits
        raise ValueError(f"{name} must be a finite number{limits}, got {value!r}")
    return number


def check_dtype(name: str, dtype: Any) -> None:
    """None, or a floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name} must be a floating-point torch.dtype or None, got {dtype!r}")


def check_device(name: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"there is no device {name!r}; use cpu, cuda or cuda:1")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {name!r} was asked for, but PyTorch sees no GPU; use cpu")
        if device.index is not None and device.index >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise ValueError(f"device {name!r} was asked for, but PyTorch's last GPU is cuda:{last}")
    return device


def check_seed(seed: Any) -> int:
    """An integer that torch's generators take."""
    is_integer = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not is_integer or not -(2**63) <= int(seed) < 2**64:
        raise ValueError(f"seed must be an integer of at most 64 bits, got {seed!r}")
    return int(seed)


def check_flag(name: str, value: Any) -> bool:
    """True or False; a word such as "no" would otherwise count as True."""
    if value not in (True, False):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)
