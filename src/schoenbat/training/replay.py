"""A fixed sequence of kernels by a CUDA graph: nothing is launched one by one."""

import warnings
from collections.abc import Callable

import torch

# Runs of one kernel at a time before a graph is captured: libraries set themselves up in them.
EAGER_RUNS = 3


class Replayed:
    """A function without arguments whose every run is the same sequence of kernels on the same memory.

    What differs from run to run stands in tensors.

    Args:
        function: runs on the current stream, and reads nothing back.
        captures: whether to capture it; else it is only called.

    Example:
        >>> count = torch.zeros(1)
        >>> add = Replayed(lambda: count.add_(1), captures=False)
        >>> add(), add(), count.item()
        (None, None, 2.0)
    """

    def __init__(self, function: Callable[[], object], *, captures: bool) -> None:
        self._function, self._captures = function, captures
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_runs = 0

    def __call__(self) -> None:
        """Run it once."""
        if self._graph is not None:
            self._graph.replay()
        elif not self._captures:
            self._function()
        elif self._eager_runs < EAGER_RUNS:
            self._run_aside()
        else:
            self._capture()
            self()

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph runs it."""
        return self._graph is not None

    def _run_aside(self) -> None:
        """On a stream of its own, as CUDA asks for before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function()
        torch.cuda.current_stream().wait_stream(stream)
        self._eager_runs += 1

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self._function()
        except RuntimeError as error:
            # Some attentions read a number back from the device; they run one kernel at a time.
            self._captures = False
            warnings.warn(f"steps run without a CUDA graph: {str(error).splitlines()[0]}", stacklevel=2)
            torch.cuda.synchronize()
            return
        self._graph = graph
