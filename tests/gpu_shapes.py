"""Fused kernels at shapes that no test names: ``python tests/gpu_shapes.py out/shapes.xml``.

Every shape is compiled anew, and compilers have gone wrong at single ones: with illegal accesses, or with
numbers far from the right ones. So a random choice of shapes is compared with the eager path in float32, each
in a process of its own, which a bad access ends without hiding others. The report has the form of pytest's,
so that gpu_summary.py counts it with the other tests.
"""

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_summary import write_report
from torch import Tensor
from torch.nn import functional as F

from schoenbat import MaclaurinFeatures, rmfa, rmfa_window
from schoenbat.ops.triton import programs

WIDTHS = (16, 24, 32, 48, 64, 96, 128)
FORMS = ("bidirectional", "causal", "window", "causal window", "trained", "causal trained")
LENGTH = 300
# Rounding leaves a few units in the last place of bfloat16, 0.4 % each. Gradients of queries that see few
# keys nearly cancel, and have more: 3.4 % were measured where rounding features, scores and output alone, the
# rest in float64, makes 2.9 %. Wrong kernels had errors from 7 % on.
TOLERANCE = 0.05
SECONDS = 300


@dataclass(frozen=True)
class Case:
    head_dim: int
    value_dim: int
    num_features: int
    construction: str
    form: str

    def __str__(self) -> str:
        return ",".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> "Case":
        head_dim, value_dim, num_features, construction, form = text.split(",")
        return cls(int(head_dim), int(value_dim), int(num_features), construction, form)


def every_case() -> list[Case]:
    """Values narrower, as wide and wider; features for few directions, one pair, one group and several."""
    return [
        Case(width, value_dim, count, construction, form)
        for width in WIDTHS
        for value_dim in sorted({max(8, width * 3 // 4), width, min(128, width * 2)})
        for count in (width // 2, width + 2, 2 * width, 4 * width)
        for construction in ("exact-low", "unbiased")
        for form in FORMS
    ]


def attention(case: Case, features: MaclaurinFeatures) -> Callable[..., Tensor]:
    is_causal = case.form.startswith("causal")
    options = {"features": features, "is_causal": is_causal, "enable_gqa": True}
    return partial(rmfa_window, width=20, **options) if "window" in case.form else partial(rmfa, **options)


def run(case: Case) -> dict[str, float]:
    """The relative errors of the output and of all gradients; two runs must be bit-equal."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # where Triton's interpreter runs kernels
    torch.manual_seed(0)
    features = MaclaurinFeatures(
        case.head_dim,
        case.num_features,
        construction=case.construction,
        scale=1.0,
        trainable="trained" in case.form,
        seed=0,
        device=device,
    )
    widths = (4, case.head_dim), (2, case.head_dim), (2, case.value_dim)
    rows = [torch.randn(2, heads, LENGTH, width, device=device) for heads, width in widths]
    rows = [(F.normalize(x, dim=-1) if i < 2 else x).to(dtype) for i, x in enumerate(rows)]
    attend = attention(case, features)
    # A gradient along the output: with a random one the few gains would be sums over rows that cancel.
    with torch.no_grad():
        grad = attend(*(x.float() for x in rows), implementation="eager")

    def outcome(implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in zip("qkv", rows, strict=True)}
        out = attend(*leaves.values(), implementation=implementation)
        leaves |= {name: p for name, p in features.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad((out.float() * grad).sum(), list(leaves.values()))
        return {"output": out, **dict(zip(leaves, grads, strict=True))}

    got, again, right = outcome("triton", dtype), outcome("triton", dtype), outcome("eager", torch.float32)
    if not all(torch.equal(x, again[name]) for name, x in got.items()):
        raise ArithmeticError("two runs are not bit-equal")
    return {name: ((got[name].float() - x).norm() / x.norm()).item() for name, x in right.items()}


def too_large(errors: dict[str, float]) -> str | None:
    """What is above the tolerance, or not a number."""
    found = [f"{error:.1e} of {name}" for name, error in errors.items() if not error < TOLERANCE]
    return f"error {', '.join(found)}, above {TOLERANCE}" if found else None


def problem_of(case: Case) -> str | None:
    """What goes wrong in a process of its own."""
    command = [sys.executable, __file__, "--case", str(case)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"not at its end after {SECONDS} s"
    if ended.returncode == 0:
        return None
    lines = ended.stderr.strip().splitlines() or ["no message"]
    errors = [line for line in lines if "error" in line.lower()]  # CUDA's end in advice
    return f"exit code {ended.returncode}: {(errors or lines)[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fused kernels at shapes that no test names.")
    parser.add_argument("report", nargs="?", type=Path, default=Path("out/shapes.xml"))
    parser.add_argument("--cases", type=int, default=100, help="how many, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="the same seed chooses the same cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--case", type=Case.parse, help="one case in this process, as a report names it")
    arguments = parser.parse_args()
    if arguments.case is not None:
        # So few have several tiles, as in long sequences; of more, causal sequences have several segments.
        for programs._PROGRAMS in (2,) if arguments.case.form == "bidirectional" else (2, 16):
            if problem := too_large(run(arguments.case)):
                sys.exit(problem)
        return
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU, so no shapes were run")
        return
    cases = random.Random(arguments.seed).sample(every_case(), arguments.cases)
    problems: dict[str, str | None] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for case, problem in zip(cases, pool.map(problem_of, cases), strict=True):
            problems[str(case)] = problem
            # At once: of a run that is ended early, what it reached is not lost.
            write_report(arguments.report, "gpu_shapes", problems, len(cases))
            if problem is not None:
                print(f"{case}: {problem}", flush=True)
    failed = sum(problem is not None for problem in problems.values())
    print(f"{len(cases)} shapes, seed {arguments.seed}, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
