"""Attention in linear time for PyTorch, by polynomial (Maclaurin) feature maps of dot-product kernels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from schoenbat.features import MaclaurinFeatures, reseed
from schoenbat.functional import kernelized_attention, rmfa, rmfa_step
from schoenbat.kernels import DotProductKernel, kernel, polynomial
from schoenbat.modules import SchoenbAt
from schoenbat.multihead import MultiheadSchoenbAt
from schoenbat.normalization import PostSBN, PreSBN
from schoenbat.state import RMFAState, RMFAWindowState
from schoenbat.varlen import rmfa_varlen
from schoenbat.windowed import rmfa_window, rmfa_window_step

if TYPE_CHECKING:
    from schoenbat import data as data
    from schoenbat.registry import attention_names, build_attention

__version__ = "0.1.0"

__all__ = [
    "DotProductKernel",
    "MaclaurinFeatures",
    "MultiheadSchoenbAt",
    "PostSBN",
    "PreSBN",
    "RMFAState",
    "RMFAWindowState",
    "SchoenbAt",
    "attention_names",
    "build_attention",
    "data",
    "kernel",
    "kernelized_attention",
    "polynomial",
    "reseed",
    "rmfa",
    "rmfa_step",
    "rmfa_varlen",
    "rmfa_window",
    "rmfa_window_step",
]


def __getattr__(name: str) -> Any:
    """What loads when it is asked for: the core needs torch and nothing else."""
    if name in ("data", "integrations"):
        return import_module(f"schoenbat.{name}")
    if name in ("attention_names", "build_attention"):
        return getattr(import_module("schoenbat.registry"), name)
    raise AttributeError(f"module 'schoenbat' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is there for users, also what is not loaded yet."""
    return sorted([*__all__, "__version__", "integrations", "parallel"])
