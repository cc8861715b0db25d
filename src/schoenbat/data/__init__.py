"""The data that the experiments train on: one module for each task."""

from schoenbat.data import listops

__all__ = ["listops"]
