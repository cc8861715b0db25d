"""How much shared memory a GPU has."""

from functools import cache

import torch

HOPPER_MEMORY = 227 * 1024


@torch.compiler.assume_constant_result
def is_roomy(device: torch.device) -> bool:
    """Whether a GPU has the shared memory of Hopper's, which some tiles need; the interpreter has any."""
    return device.type != "cuda" or _shared_memory(device) >= HOPPER_MEMORY


@cache
def _shared_memory(device: torch.device) -> int:
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
