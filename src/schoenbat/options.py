"""Every check of an option: what a constructor is given besides tensors."""

import math
import numbers
from typing import Any

import torch

from schoenbat.kernels import DotProductKernel

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


def check_heads(num_heads: Any, num_key_heads: Any) -> tuple[int, int]:
    """As many query heads, and key heads (None: as many) that they share evenly."""
    num_heads = check_count("num_heads", num_heads)
    num_key_heads = check_count("num_key_heads", num_heads if num_key_heads is None else num_key_heads)
    if num_heads % num_key_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_key_heads} key heads evenly; pass num_key_heads that "
            "divides num_heads"
        )
    return num_heads, num_key_heads


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


def check_centring(center_keys: Any, kernel: DotProductKernel) -> None:
    """False, or what keys are centred by with a kernel for which that cancels."""
    if center_keys not in (False, True, "learned"):
        raise ValueError(f"center_keys must be False, True or 'learned', got {center_keys!r}")
    if center_keys and not kernel.is_exponential:
        raise ValueError(
            f"center_keys needs the kernel 'exp', for which a common shift of all keys cancels; with "
            f"{kernel.name!r} it would be another attention"
        )


def check_sharded(window: int | None, center_keys: bool | str, normalization: str | None) -> None:
    """No option that needs the whole sequence, where a rank of a process group holds a shard of it."""
    if window is not None or center_keys is True:
        raise ValueError(
            "window and center_keys=True need the whole sequence, of which a rank of the process_group "
            "holds a shard; leave them out, or use center_keys='learned'"
        )
    if normalization == "batch":
        raise ValueError(
            "normalization='batch' takes its statistics from the whole sequence, of which a rank of the "
            "process_group holds a shard; use normalization='token', 'l2' or None"
        )
