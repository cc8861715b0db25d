"""Which implementation is chosen, and who is told."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from schoenbat.ops import dispatch

ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch):
    monkeypatch.setattr(dispatch, "_TOLD", set())


def test_a_gpu_runs_the_kernels_and_a_cpu_does_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose("auto", None, ON_GPU) == "triton"
        assert dispatch.choose("auto", None, ON_CPU) == "eager"
        assert dispatch.choose("auto", "it needs a GPU", ON_CPU) == "eager"
        assert dispatch.choose("eager", "heads are too wide", ON_GPU) == "eager"


def test_who_gets_the_slow_path_on_a_gpu_is_told_once_for_each_reason():
    with pytest.warns(
        UserWarning, match="plain PyTorch on this GPU, not in the fused kernels: heads are too wide"
    ):
        assert dispatch.choose("auto", "heads are too wide", ON_GPU) == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.choose("auto", "heads are too wide", ON_GPU)
    with pytest.warns(UserWarning, match="float64"):
        dispatch.choose("auto", "it knows no float64", ON_GPU)


def test_transforms_are_known_to_run_plain_pytorch():
    def call(x):
        assert dispatch.choose("auto", "under transforms", ON_GPU) == "eager"
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(call)(torch.ones(2))
