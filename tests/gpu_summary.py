"""What GPU tests gave: ``python tests/gpu_summary.py REPORT.xml ...`` after ``pytest --junitxml=REPORT.xml``.

Writes benchmarks/results/tests-<gpu>.json: what ran where, how many passed in each file, and what failed.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from schoenbat.report.results import write_results
from schoenbat.training.record import revision

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def summarize(paths: list[Path]) -> tuple[dict[str, str], list[dict[str, object]], list[str]]:
    """Properties of the machine, a row for each file, and the tests that failed."""
    machine: dict[str, str] = {}
    counts: dict[str, Counter[str]] = {}
    failed = []
    for path in paths:
        suite = ET.parse(path).getroot()
        machine |= {x.attrib["name"]: x.attrib["value"] for x in suite.iter("property")}
        for case in suite.iter("testcase"):
            file, result = case.attrib["classname"].replace(".", "/") + ".py", outcome(case)
            counts.setdefault(file, Counter())[result] += 1
            if result in ("failure", "error"):
                failed.append(f"{file}::{case.attrib['name']}")
    rows = [{"file": file} | dict(count) for file, count in sorted(counts.items())]
    return machine, rows, failed


def main() -> None:
    machine, rows, failed = summarize([Path(name) for name in sys.argv[1:]])
    if "device" not in machine:
        sys.exit("no report of GPU tests: make test-gpu needs a CUDA device")
    options = {"gpu": machine, "revision": revision(), "failed": failed}
    name = machine["device"].lower().replace(" ", "-")
    write_results(RESULTS / f"tests-{name}.json", "tests", options, rows)
    print(f"{sum(row.get('passed', 0) for row in rows)} passed, {len(failed)} failed", *failed, sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
