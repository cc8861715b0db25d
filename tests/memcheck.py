"""Fused kernels under compute-sanitizer's memcheck: ``python tests/memcheck.py out/memcheck.xml``.

Small calls of odd lengths with post-SBN, forward and backward, and decoding steps. Memory comes straight from
the driver, as torch's own cache would hide what lies beyond a tensor. The report has the form of pytest's, so
that gpu_summary.py counts it with the other tests.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from gpu_summary import write_report
from torch.nn import functional as F

from schoenbat import (
    MaclaurinFeatures,
    PostSBN,
    RMFAState,
    RMFAWindowState,
    rmfa,
    rmfa_step,
    rmfa_window,
    rmfa_window_step,
)
from schoenbat.ops.triton import launch_bidirectional_hopper, launch_causal_hopper, launch_odd_power, programs

TOOL = "compute-sanitizer"
CONSTRUCTIONS = ("exact-low", "unbiased", "paper")
# Channels of queries and keys, of values, and features; all but the second have their own kernels on Hopper.
SIZES = ((64, 64, 128), (32, 24, 64), (32, 32, 128), (128, 128, 256))
MAPS = {
    ",".join(map(str, (construction, *size))): (construction, *size)
    for construction, size in itertools.product(CONSTRUCTIONS, SIZES)
}
FINISHED = "all calls ran"
MOST_LINES = 40


def calls(construction: str, head_dim: int, value_dim: int, num_features: int) -> Iterator[str]:
    """Name every call, then run it."""
    options = {"construction": construction, "scale": 2.0, "seed": 0, "device": "cuda"}
    features = MaclaurinFeatures(head_dim, num_features, **options)
    name = f"{construction}, d = {head_dim}, {value_dim}"
    for is_causal, width in itertools.product((False, True), (None, 20)):
        window = "" if width is None else f", window of ±{width}"
        yield f"{name}, {'causal' if is_causal else 'bidirectional'}{window}"
        attend(features, value_dim, is_causal, width)
    yield f"{name}, decoding"
    decode(features, value_dim)
    yield f"{name}, a prompt onto a state"
    go_on(features, value_dim)
    trained = MaclaurinFeatures(head_dim, num_features, trainable=True, **options)
    for is_causal in (False, True):
        yield f"{name}, {'causal' if is_causal else 'bidirectional'}, trained"
        attend(trained, value_dim, is_causal, None)


def draw(length: int, *widths: int) -> list[torch.Tensor]:
    return [
        F.normalize(torch.randn(1, 2, length, width, device="cuda"), dim=-1).bfloat16() for width in widths
    ]


def attend(features: MaclaurinFeatures, value_dim: int, is_causal: bool, width: int | None) -> None:
    attention = rmfa if width is None else partial(rmfa_window, width=width)
    inputs = [x.requires_grad_() for x in draw(131, features.head_dim, features.head_dim, value_dim)]
    mask = torch.rand(1, 131, device="cuda") > 0.3
    options = {"features": features, "key_mask": mask, "is_causal": is_causal, "implementation": "triton"}
    post = PostSBN(2, value_dim, device="cuda")
    post(attention(*inputs, **options)).float().sum().backward()
    torch.cuda.synchronize()


def go_on(features: MaclaurinFeatures, value_dim: int) -> None:
    """Two prompts, one onto the sums of the other, and the gradients of both."""
    widths, state = (features.head_dim, features.head_dim, value_dim), None
    total = torch.zeros((), device="cuda")
    for length in (67, 131):
        prompt = [x.requires_grad_() for x in draw(length, *widths)]
        state = RMFAState.zeros(features, 1, 2, value_dim) if state is None else state
        out, state = rmfa_step(*prompt, features, state, implementation="triton")
        total = total + out.float().sum()
    total.backward()
    torch.cuda.synchronize()


@torch.no_grad()
def decode(features: MaclaurinFeatures, value_dim: int) -> None:
    state = RMFAState.zeros(features, 1, 2, value_dim)
    token = draw(1, features.head_dim, features.head_dim, value_dim)
    rmfa_step(*token, features, state, implementation="triton")
    for width in (0, 3, 40):
        near = RMFAWindowState.zeros(features, width, 1, 2, value_dim)
        rmfa_window_step(*token, features, near, implementation="triton")
    torch.cuda.synchronize()


def check(jobs: int) -> str | None:
    """What the tool found, if anything; a process for each map, as compiling is what takes the time."""
    with ThreadPoolExecutor(jobs) as pool:
        problems = [problem for problem in pool.map(check_map, MAPS) if problem]
    print(*(problems or ["no bad access"]), sep="\n\n")
    return "\n\n".join(problems) or None


def check_map(name: str) -> str | None:
    command = [TOOL, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--map", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "Host Frame" not in line]
    # The program must have come to its end: a tool that could not start it found nothing, either.
    if ended.returncode == 0 and FINISHED in lines:
        return None
    reported = [line for line in lines if line.startswith("=====")] + lines[-5:]
    names = [line for line in lines if line.startswith(name.split(",")[0])]
    last_call = "after all calls" if FINISHED in lines else (names or ["no call began"])[-1]
    return "\n".join([f"{name}: {last_call}", *reported[:MOST_LINES]])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fused kernels under compute-sanitizer's memcheck.")
    parser.add_argument("report", nargs="?", type=Path, default=Path("out/memcheck.xml"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--map", choices=MAPS, metavar="MAP", help="the calls of one map, in this process")
    arguments = parser.parse_args()
    if arguments.map is not None:
        # So few that each has several tiles, as in long sequences.
        programs._PROGRAMS = launch_bidirectional_hopper._PROGRAMS = 2
        launch_causal_hopper._PROGRAMS = 4
        launch_odd_power._PROGRAMS = 2
        for name in calls(*MAPS[arguments.map]):
            print(name, flush=True)
        print(FINISHED)
        return
    if shutil.which(TOOL) is None:
        print(
            f"{TOOL} is not installed, so accesses of memory were not checked; it comes with the CUDA toolkit"
        )
        return
    problem = check(arguments.jobs)
    write_report(arguments.report, "memcheck", {"no_bad_access": problem}, 1)
    sys.exit(problem is not None)


if __name__ == "__main__":
    main()
