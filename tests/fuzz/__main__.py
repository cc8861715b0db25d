"""Run the properties on many random cases: ``PYTHONPATH=tests python -m fuzz --cases 10000 --seed 0``.

A failure prints the smallest case that was found and the command that finds it again.
"""

import argparse
import faulthandler
import sys
import time
import traceback
import warnings

import torch

from fuzz.harness import allot, run
from fuzz.properties import PROPERTIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m fuzz")
    parser.add_argument("--cases", type=int, default=10_000, help="over all properties")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same cases")
    parser.add_argument(
        "--only", choices=sorted(PROPERTIES), help="one property, with its share of the cases"
    )
    arguments = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = allot(arguments.cases)
    if arguments.only:
        counts = {arguments.only: counts[arguments.only]}
    ran, failed = 0, []
    for name, count in counts.items():
        # Printed before it runs: after a crash of the interpreter this line says which property it was.
        print(f"{name} ... ", end="", flush=True)
        start = time.monotonic()
        try:
            done = run(name, count, arguments.seed)
        except Exception:
            traceback.print_exc(limit=-6)
            again = f"python -m fuzz --cases {arguments.cases} --seed {arguments.seed} --only {name}"
            print(f"FAILED; to see it again: PYTHONPATH=tests {again}", flush=True)
            failed.append(name)
            continue
        ran += done
        print(f"{done} cases, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{ran} cases of {len(counts)} properties, seed {arguments.seed}, {len(failed)} failed")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
