"""The tasks of the Long Range Arena as arrays: one module for each, and ``prepare`` and ``load`` for all."""

try:
    from schoenbat.data import image, listops, pathfinder, retrieval, text
    from schoenbat.data.catalogue import load, prepare, task_names
    from schoenbat.data.errors import DataError, MissingDataError
    from schoenbat.data.task import Split, Task
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("schoenbat"):
        raise
    raise ModuleNotFoundError(
        f"the tasks' data needs {missing.name}; install it with: pip install '.[cli]' in a checkout",
        name=missing.name,
    ) from None

__all__ = [
    "DataError",
    "MissingDataError",
    "Split",
    "Task",
    "image",
    "listops",
    "load",
    "pathfinder",
    "prepare",
    "retrieval",
    "task_names",
    "text",
]
