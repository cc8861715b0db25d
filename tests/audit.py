"""Bandit on the source and pip-audit on what is installed: ``make audit``.

pip-audit asks PyPI for the known vulnerabilities of each pinned version. Where it cannot be asked, pip-audit
itself calls every package "not found" and ends well; here that is not a pass.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *words], cwd=HERE, capture_output=True, text=True)


def check_source() -> str | None:
    """What bandit found, if anything."""
    found = run("bandit", "--quiet", "--recursive", "src")
    return None if found.returncode == 0 else found.stdout or found.stderr


def known_vulnerabilities() -> tuple[list[str], int, int]:
    """The vulnerable packages, and how many packages were looked up and how many could not be."""
    words = ["--requirement", "constraints.txt", "--no-deps", "--disable-pip", "--format", "json"]
    words += ["--progress-spinner", "off"]
    report = run("pip_audit", *words)
    try:
        packages: list[dict[str, Any]] = json.loads(report.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = report.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
        print(f"pip-audit gave no report: {reason[0]}")
        return [], 0, 0
    vulnerable = [
        f"{package['name']} {package['version']}: {', '.join(item['id'] for item in package['vulns'])}"
        for package in packages
        if package.get("vulns")
    ]
    skipped = sum("skip_reason" in package for package in packages)
    return vulnerable, len(packages) - skipped, skipped


def main() -> None:
    problems = check_source()
    print(problems or "bandit: nothing found in src")
    vulnerable, looked_up, skipped = known_vulnerabilities()
    print("\n".join(vulnerable) or f"pip-audit: no known vulnerability in {looked_up} packages looked up")
    if problems or vulnerable:
        sys.exit(1)
    if skipped or not looked_up:
        print(
            f"{skipped or 'All'} packages could NOT be looked up: PyPI's JSON service (https://pypi.org) "
            "was not reachable or does not know them. This is no pass: run it where it is."
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
