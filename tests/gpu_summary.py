"""What GPU tests gave: ``python tests/gpu_summary.py REPORT.xml ...`` after ``pytest --junitxml=REPORT.xml``.

Writes benchmarks/results/tests-<gpu>.json: for each file what passed, what failed, the revision that ran, and
how many tests it has now: a run that was ended early reports fewer. Files that are in no report stay as they
are in it.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schoenbat.report.results import write_results
from schoenbat.training.record import revision

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def write_report(path: Path, program: str, problems: Mapping[str, str | None], planned: int) -> None:
    """A report of that form by a program that is no test of pytest's: what it ran, and what went wrong."""
    suite = ET.Element("testsuite", name=program, tests=str(planned))
    for name, problem in problems.items():
        case = ET.SubElement(suite, "testcase", classname=f"tests.{program}", name=name)
        if problem is not None:
            ET.SubElement(case, "failure").text = problem
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(path)


def summarize(paths: list[Path], ran: str | None) -> tuple[dict[str, str], dict[str, Row]]:
    """Properties of the machine, and a row for each file."""
    machine: dict[str, str] = {}
    rows: dict[str, Row] = {}
    for path in paths:
        suite = ET.parse(path).getroot()
        machine |= {x.attrib["name"]: x.attrib["value"] for x in suite.iter("property")}
        for case in (x for x in suite.iter("testcase") if "classname" in x.attrib):
            file, result = case.attrib["classname"].replace(".", "/") + ".py", outcome(case)
            planned = int(suite.attrib["tests"]) if suite.tag == "testsuite" else None
            row = rows.setdefault(
                file, {"file": file, "revision": ran, "passed": 0, "failed": [], "tests": planned}
            )
            if result == "passed":
                row["passed"] += 1
            elif result != "skipped":
                row["failed"].append(case.attrib["name"])
    return machine, rows


def collected() -> dict[str, int]:
    """How many GPU tests each file of this checkout has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "gpu", "tests"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pairs = (line.split(": ") for line in printed.splitlines() if ".py: " in line)
    return {file: int(count) for file, count in pairs}


def is_of_pytest(file: str) -> bool:
    return Path(file).name.startswith("test_")


def main() -> None:
    machine, rows = summarize([Path(name) for name in sys.argv[1:]], revision())
    if "device" not in machine:
        sys.exit("no report of GPU tests: make test-gpu needs a CUDA device")
    path = RESULTS / f"tests-{machine['device'].lower().replace(' ', '-')}.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    merged, now = {row["file"]: row for row in known} | rows, collected()
    # Programs that are no tests of pytest's say themselves how many cases they have.
    merged = {file: row for file, row in merged.items() if file in now or not is_of_pytest(file)}
    for file, row in merged.items():
        row["tests"] = now.get(file, row["tests"])
    write_results(path, "tests", {"gpu": machine}, [merged[file] for file in sorted(merged)])
    failed = [f"{row['file']}::{name}" for row in rows.values() for name in row["failed"]]
    print(f"{sum(row['passed'] for row in rows.values())} passed, {len(failed)} failed", *failed, sep="\n")
    for file, row in rows.items():
        if row["tests"] and row["passed"] + len(row["failed"]) < row["tests"]:
            print(f"{file}: {row['tests']} tests, of which not all are in the reports")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
