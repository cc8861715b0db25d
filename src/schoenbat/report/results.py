"""The one format of results: a JSON file that says what was measured, on which machine, by which command."""

import contextlib
import importlib
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import schoenbat
from schoenbat.files import write_atomically


def write_results(
    path: Path, experiment: str, options: Any, rows: Sequence[Any], *, device: torch.device | str = "cpu"
) -> None:
    """Write ``rows`` (dataclasses) and all that is needed to measure them again; never half a file."""
    results = {
        "experiment": experiment,
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": {
            "system": platform.platform(),
            "device": device_name(torch.device(device)),
            "threads": torch.get_num_threads(),
        },
        "options": _plain(options),
        "rows": [_plain(row) for row in rows],
    }
    write_atomically(path, json.dumps(results, indent=1, default=str) + "\n")


def versions() -> dict[str, str]:
    """Of what figures depend on; of Triton, by which fused kernels are compiled, where there is one."""
    known = {
        "schoenbat": schoenbat.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    # Packages of several names hold it; a mere folder of that name can be imported, too, and has no version.
    with contextlib.suppress(ImportError, AttributeError):
        known["triton"] = importlib.import_module("triton").__version__
    return known


def _program() -> str:
    """What was called; ``python -m schoenbat`` is the command itself."""
    name = Path(sys.argv[0]).name
    return "schoenbat" if name == "__main__.py" else name


def device_name(device: torch.device) -> str:
    """The processor's own name where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _plain(row: Any) -> Mapping[str, Any]:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
