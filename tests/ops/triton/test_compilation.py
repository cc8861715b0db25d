"""Every tile configuration compiles for sm_90 and fits its registers and its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SHARED_MEMORY = 227 * 1024
# Wide heads hold an accumulator of 128 × 128: what they spill now, in bytes a thread. It may only shrink.
SPILLED_BY_WIDE_HEADS = 1000
# Causal kernels and those of windows hold scores beside their accumulators.
SPILLED_BY_SCORES = 128
# Two warps hold what four could, for maps of several degrees: see `launch.tiles_for`.
SPILLED_BY_TWO_WARPS = 1000
# Where a map stays at hand for all tiles, gradients and causal outputs spill and are faster: docs/kernels.md.
SPILLED_BY_WHOLE_MAPS = 450
# Two warps again, for any map that is trained, and twice as much for wide heads.
SPILLED_BY_TRAINED_MAPS = 900
# A decoding step of two warps was still the fastest.
SPILLED_BY_DECODING = 160
# Three programs at a time on a multiprocessor instead of two were worth it.
SPILLED_WITH_FEWER_REGISTERS = 450


@pytest.fixture(scope="module")
def usages():
    program = Path(__file__).with_name("resource_usage.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(program.parents[2])
    run = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nothing_spills_more_than_is_known(usages):
    assert len(usages) == 93
    for usage in usages:
        allowed = SPILLED_BY_SCORES if usage["kernel"].startswith(("causal", "window")) else 64
        whole = ("bidirectional.read_backward", "bidirectional.key_backward", "causal.read")
        if usage["kernel"] in whole and usage.get("single"):
            allowed = SPILLED_BY_WHOLE_MAPS
        if usage["dtype"] == "torch.bfloat16" and not usage["quadratic"]:
            allowed = SPILLED_BY_TWO_WARPS
        if usage["kernel"] == "decode.step":
            allowed = SPILLED_BY_DECODING
        if usage["width"] > 64:
            allowed = SPILLED_BY_WIDE_HEADS
        if usage["kernel"].endswith("map_backward"):
            allowed = SPILLED_BY_TRAINED_MAPS * (usage["width"] // 64)
        if usage["limit"] is not None:
            allowed = SPILLED_WITH_FEWER_REGISTERS
        assert usage["stack"] <= allowed, usage


def test_shared_memory_suffices(usages):
    assert all(usage["shared"] <= SHARED_MEMORY for usage in usages), usages


def test_products_that_read_registers_are_waited_for_at_once(usages):
    """Assemblers before CUDA 13.3 may write to such registers while a product is still running."""
    for usage in usages:
        assert usage["running"] == 0, usage


def test_products_that_read_registers_find_the_same_in_them_again(usages):
    """The same assemblers may give such registers to others where a loop needs them again."""
    for usage in usages:
        assert usage["overwritten"] == [], usage
