"""How much shared memory a GPU has for a program."""

from functools import cache

import torch

HOPPER_MEMORY = 227 * 1024
LEAST_MEMORY = 99 * 1024
"""That of compute capability 8.6, 8.9 and 12.0; those before 8.0 have less."""


@torch.compiler.assume_constant_result
def is_roomy(device: torch.device) -> bool:
    """Whether a GPU has the shared memory of Hopper's, which some tiles need; the interpreter has any."""
    return device.type != "cuda" or _shared_memory(device) >= HOPPER_MEMORY


@torch.compiler.assume_constant_result
def is_enough(device: torch.device) -> bool:
    """Whether a GPU has what the smallest tiles need; the interpreter has any."""
    return device.type != "cuda" or _shared_memory(device) >= LEAST_MEMORY


@cache
def _shared_memory(device: torch.device) -> int:
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
