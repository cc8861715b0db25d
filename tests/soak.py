"""Kill and continue a sweep at random moments, then compare its table with that of an undisturbed one.

``make soak`` runs it for ten minutes; ``python tests/soak.py --seconds 60 --seed 3`` for one, from another
seed.
What is killed, and how, is drawn anew each time: the sweep or one of its runs, by SIGKILL, SIGTERM or SIGINT.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from schoenbat.data import cache
from schoenbat.data.arrays import consecutive

ATTENTIONS = ("none", "mean")
# How long a run takes is not part of what must be equal, nor what it measured of the machine.
UNEQUAL = {"step_seconds", "time_over_naive", "time_over_sdpa", "peak_memory"}


def write_data(root: Path) -> None:
    """The Image task with 48 images of noise: small, so that killing is most of what happens."""
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (48, 1024)).astype(np.uint8), rng.integers(0, 10, 48)
    sizes = {"train": 32, "validation": 8, "test": 8}
    cache.write(root / "image", consecutive(pixels, np.full(48, 1024), labels, sizes), {}, {})


def command(data: Path, out: Path, steps: int, seeds: int) -> list[str]:
    words = [sys.executable, "-m", "schoenbat.cli", "lra", "sweep", "--tasks", "image"]
    words += ["--attentions", ",".join(ATTENTIONS), "--seeds", str(seeds), "--jobs", "2"]
    words += ["--data", str(data), "--out", str(out)]
    for option in (f"steps={steps}", "batch-size=4", "evaluate-every=50"):
        words += ["--train-option", option]
    return words


def table(runs: Path, out: Path) -> list[dict]:
    """The rows of ``lra table`` without what differs from run to run."""
    words = [sys.executable, "-m", "schoenbat.cli", "lra", "table", "--runs", str(runs), "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True)
    rows = json.loads((out / "lra-table.json").read_text())["rows"]
    return [{name: value for name, value in row.items() if name not in UNEQUAL} for row in rows]


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


def disturb(words: list[str], rng: random.Random) -> bool:
    """Run the sweep and kill it or one of its runs once, unless it ends first; whether it has ended well."""
    sweep = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return sweep.wait(timeout=rng.uniform(8.0, 25.0)) == 0
    except subprocess.TimeoutExpired:
        victims = [sweep.pid, *children(sweep.pid)]
        victim = rng.choice(victims)
        number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        kind = "the sweep" if victim == sweep.pid else "a run"
        print(f"{signal.Signals(number).name} to {kind}", flush=True)
        os.kill(victim, number)
    if victim != sweep.pid:
        time.sleep(2.0)
        os.kill(sweep.pid, signal.SIGTERM)
    sweep.wait()
    return False


def wait_for_orphans(runs: Path) -> None:
    """A run whose sweep was killed goes on to its end; nobody else may take it until then."""
    pattern = f"--out {runs}"
    while subprocess.run(["pgrep", "-f", "--", pattern], capture_output=True).returncode == 0:
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="go on disturbing for so long")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when")
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    arguments = parser.parse_args()
    # Two runs at once on few cores; and sums depend on how many threads share them.
    os.environ["OMP_NUM_THREADS"] = "1"
    rng, deadline = random.Random(arguments.seed), time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_data(root / "data")
        # More seeds than there is time for: there is always a run to kill. The last sweeps are left in peace.
        seeds = 1
        disturbances = 0
        while time.monotonic() < deadline:
            words = command(root / "data", root / "disturbed", arguments.steps, seeds)
            if disturb(words, rng):
                seeds += 1
            else:
                disturbances += 1
        wait_for_orphans(root / "disturbed")
        for name in ("disturbed", "undisturbed"):
            words = command(root / "data", root / name, arguments.steps, seeds)
            subprocess.run(words, check=True)
        disturbed = table(root / "disturbed", root / "disturbed-table")
        undisturbed = table(root / "undisturbed", root / "undisturbed-table")
    if disturbed != undisturbed:
        print("disturbed:  ", disturbed, "\nundisturbed:", undisturbed, sep="\n")
        raise SystemExit(f"{disturbances} disturbances changed the table")
    print(f"{disturbances} disturbances, {seeds} seeds of {len(ATTENTIONS)} attentions: the same table")


if __name__ == "__main__":
    main()
