"""What the steps of a run cost: seconds and memory."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch


class Costs:
    """Those of a run's steps on this device, over all of its parts where it was stopped in between.

    >>> costs = Costs(torch.device("cpu"))
    >>> for steps in (0, 20):  # the first ones are not timed
    ...     costs.start()
    ...     costs.stop(timed_steps=steps)
    >>> costs.timed_steps, costs.memory
    (20, None)
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.timed_steps, self.peak_memory = 0.0, 0, 0
        self._blocks: list[float] = []  # seconds a step, of each block that was timed
        self._on_cuda = device.type == "cuda"
        self._data_memory, self._started = 0, 0.0

    @contextmanager
    def of_data(self) -> Iterator[None]:
        """What is put on the device inside is not counted as memory of a step."""
        before = torch.cuda.memory_allocated() if self._on_cuda else 0
        yield
        self._data_memory = torch.cuda.memory_allocated() - before if self._on_cuda else 0

    def start(self) -> None:
        """A block of steps begins."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def stop(self, timed_steps: int) -> None:
        """It has ended, with so many steps whose time counts."""
        if self._on_cuda:
            torch.cuda.synchronize()
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated())
        if timed_steps:
            seconds = time.perf_counter() - self._started
            self.seconds += seconds
            self.timed_steps += timed_steps
            self._blocks.append(seconds / timed_steps)

    def count_median(self) -> None:
        """Every step counts as one of the median block: what disturbs a few steps does not."""
        self.seconds = median(self._blocks) * self.timed_steps if self._blocks else 0.0

    @property
    def rate(self) -> float | None:
        """Steps a second; None where none was timed."""
        return self.timed_steps / self.seconds if self.seconds else None

    @property
    def memory(self) -> int | None:
        """Bytes at the peak of a step beyond the data; None where the device does not tell."""
        return self.peak_memory - self._data_memory if self._on_cuda else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"seconds": self.seconds, "timed_steps": self.timed_steps, "peak_memory": self.peak_memory}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` was."""
        self.seconds, self.timed_steps = state["seconds"], state["timed_steps"]
        self.peak_memory = state["peak_memory"]
