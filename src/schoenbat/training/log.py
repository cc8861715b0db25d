"""What a run says while it trains: one JSON object a line, and TensorBoard's files where it is installed."""

import json
from pathlib import Path
from typing import Any

from schoenbat.files import write_atomically


class RunLog:
    """Appends to ``path``; a run that continues from ``step`` first drops what was written after it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> RunLog(path).write(step=50, loss=0.7)
    >>> RunLog(path, step=50).write(step=100, loss=0.6)
    >>> [line["step"] for line in read_log(path)]
    [50, 100]
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line["step"] <= step] if step else []
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board = _board(path.parent / "tensorboard", step)

    def write(self, *, step: int, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that was cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _board(directory: Path, step: int) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # What an interrupted run wrote after its checkpoint is hidden from here on.
    return SummaryWriter(str(directory), purge_step=step + 1)
