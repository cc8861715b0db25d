"""How different are the five kernels, as attention sees them?"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from schoenbat.experiments.theorems.estimates import Inputs, rms
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import kernelized_attention, rmfa
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel

AVERAGING = "averaging"
# The series of sqrt begins like that of exp at half the scale, 1 + x/2.
HALF_SCALE = DotProductKernel.from_expression("exp(x/2)")
KERNELS = (*map(get_kernel, ("exp", "inv", "logi", "trigh", "sqrt")), HALF_SCALE)
COMPARED = (*(kernel.name for kernel in KERNELS), AVERAGING)


@dataclass(frozen=True)
class KernelRow:
    """How far exact attention with one kernel is from that with another, or from plain averaging."""

    check: str
    head_dim: int
    scale: float
    kernel: str
    other: str
    of_signal: float
    """Root mean square of the difference, as a share of exp's distance to plain averaging."""
    of_output: float
    """The same as a share of exp's output."""
    equal: bool
    """Whether coefficients, attention, and RMFA from the same seed are equal to the last bit."""


def compare_kernels(inputs: Inputs, scale: float) -> Iterator[KernelRow]:
    """One row for each pair of `COMPARED`."""
    outputs = {kernel.name: kernelized_attention(*inputs, kernel=kernel, scale=scale) for kernel in KERNELS}
    outputs[AVERAGING] = inputs.value.mean(0).expand_as(inputs.query)
    signal, output = rms(outputs["exp"] - outputs[AVERAGING]), rms(outputs["exp"])
    by_name = {kernel.name: kernel for kernel in KERNELS}
    for kernel, other in itertools.combinations(COMPARED, 2):
        difference = rms(outputs[kernel] - outputs[other])
        yield KernelRow(
            check="kernels",
            head_dim=inputs.query.shape[-1],
            scale=scale,
            kernel=kernel,
            other=other,
            of_signal=difference / signal,
            of_output=difference / output,
            equal=difference == 0 and same_map(by_name[kernel], by_name[other], inputs, scale),
        )


def same_map(kernel: DotProductKernel, other: DotProductKernel, inputs: Inputs, scale: float) -> bool:
    """Whether two kernels have the same series, and one seed gives the same RMFA with both.

    >>> from schoenbat.experiments.theorems.estimates import draw_inputs, normalised
    >>> inputs = normalised(draw_inputs(seed=0, num_tokens=8, head_dim=4))
    >>> same_map(get_kernel("exp"), get_kernel("trigh"), inputs, 0.5)
    True
    """
    one, two = (
        MaclaurinFeatures(
            inputs.query.shape[-1], 64, each, construction="paper", scale=scale, seed=0, dtype=torch.float64
        )
        for each in (kernel, other)
    )
    same_series = torch.equal(kernel.coefficients(50), other.coefficients(50))
    return same_series and torch.equal(rmfa(*inputs, features=one), rmfa(*inputs, features=two))
