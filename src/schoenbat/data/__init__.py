"""The data that the experiments train on: one module for each task."""

from schoenbat.data import listops, pathfinder

__all__ = ["listops", "pathfinder"]
