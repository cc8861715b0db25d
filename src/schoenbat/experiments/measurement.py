"""How long a call takes, and how much memory beyond what it is given."""

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

FORWARD = "forward"
BACKWARD = "forward+backward"
PASSES = (FORWARD, BACKWARD)
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
LEAST_REPETITIONS = 3

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median and the 20 % and 80 % quantiles of ``repetitions`` calls."""

    median: float
    low: float
    high: float
    repetitions: int


def make_call(direction: str, attention: Attention, inputs: list[Tensor]) -> Callable[[], None]:
    """One of `PASSES` of an attention; gradients are those of the inputs and of a module's parameters."""
    return partial(_forward if direction == FORWARD else _backward, attention, inputs)


def time_call(
    call: Callable[[], object], device: torch.device, *, seconds: float = 1.0, max_repetitions: int = 100
) -> Timing:
    """Time ``call`` after one warm-up, repeatedly for about ``seconds``.

    >>> time_call(lambda: None, torch.device("cpu"), max_repetitions=5).repetitions
    5
    """
    measure = _cuda_seconds if device.type == "cuda" else _wall_seconds
    call()
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < max_repetitions:
        samples.append(measure(call))
        if len(samples) >= LEAST_REPETITIONS and time.perf_counter() - started > seconds:
            break
    low, median, high = torch.tensor(samples, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return Timing(median.item(), low.item(), high.item(), len(samples))


def time_replay(call: Callable[[], object], *, seconds: float = 0.2) -> Timing:
    """Time what ``call`` does on the current GPU, without the time that Python takes to ask for it.

    The call is captured as a CUDA graph, and its replay is timed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    device = torch.device("cuda", torch.cuda.current_device())
    return time_call(graph.replay, device, seconds=seconds, max_repetitions=50)


def peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that one ``call`` holds at its peak beyond what is held before it; None where nothing tells.

    On CUDA this is PyTorch's own count. On a Linux CPU it is the resident memory of the process, to a few
    hundred KiB.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if not _reset_resident_peak():
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def available_memory(device: torch.device) -> int | None:
    """Bytes that are free to use; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@torch.no_grad()
def _forward(attention: Attention, inputs: list[Tensor]) -> None:
    attention(*inputs)


def _backward(attention: Attention, inputs: list[Tensor]) -> None:
    output = attention(*inputs)
    parameters = attention.parameters() if isinstance(attention, nn.Module) else ()
    # Some attentions never look at the key, or at neither query nor key.
    torch.autograd.grad(output, [*inputs, *parameters], inputs[2], allow_unused=True)


def _wall_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _reset_resident_peak() -> bool:
    """Make the kernel's high-water mark of resident memory start again from here."""
    try:
        # Memory that the C library has kept from earlier calls would hide what this call asks for.
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text(RESET_PEAK)
    except (AttributeError, OSError):
        return False
    return True


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
