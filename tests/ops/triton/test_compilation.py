"""Every tile configuration compiles for sm_90 and fits its registers and its shared memory.

What takes most of it also for sm_89, of which a multiprocessor has less.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024}
# What kernels spill now, in bytes a thread. It may only shrink.
SPILLED_BY_WIDE_HEADS = 760
# Causal kernels and those of windows hold scores beside their accumulators.
SPILLED_BY_SCORES = 128
SPILLED_BY_MANY_DEGREES = 520
# Where a map stays at hand for all tiles, gradients and causal outputs spill and are faster: docs/kernels.md.
SPILLED_BY_WHOLE_MAPS = 270
# One group of all pairs of narrow heads; with Triton 3.6 less.
SPILLED_BY_SUMS_OF_A_WIDE_GROUP = 400
# Two warps for any map that is trained, and twice as much for wide heads.
SPILLED_BY_TRAINED_MAPS = 750
# A decoding step of two warps was still the fastest.
SPILLED_BY_DECODING = 160
# Sums stay in registers from tile to tile: what is left for places in memory is spilled.
SPILLED_BESIDE_SUMS = 440
# Where shared memory leaves no cache, what counts is how often a tile loads what was spilled.
RELOADED_BESIDE_SUMS = 120
SPILLED_ON_SMALLER_GPUS = 280
# Three programs at a time on a multiprocessor instead of two were worth it.
SPILLED_WITH_FEWER_REGISTERS = 450


@pytest.fixture(scope="module")
def every_usage():
    program = Path(__file__).with_name("resource_usage.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(program.parents[2])
    run = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def usages(every_usage):
    return [usage for usage in every_usage if usage["arch"] == 90]


def allowed(usage):
    if usage["kernel"].startswith("kernels.odd_power."):
        return 0
    if usage["limit"] is not None:
        return SPILLED_WITH_FEWER_REGISTERS
    if usage["kernel"].endswith("map_backward"):
        return SPILLED_BY_TRAINED_MAPS * (usage["width"] // 64)
    if usage["kernel"].startswith("hopper."):
        return SPILLED_BESIDE_SUMS
    if usage["width"] > 64:
        return SPILLED_BY_WIDE_HEADS
    if usage["kernel"] == "kernels.decode.step":
        return SPILLED_BY_DECODING
    if usage["dtype"] == "torch.bfloat16" and not usage["quadratic"]:
        return SPILLED_BY_MANY_DEGREES
    if usage["kernel"] == "kernels.bidirectional_sums.summarize" and usage["width"] == 32:
        return SPILLED_BY_SUMS_OF_A_WIDE_GROUP
    if usage["kernel"].startswith("kernels.bidirectional.") and usage["kernel"].endswith("_backward"):
        return SPILLED_BY_WHOLE_MAPS
    if usage.get("SINGLE"):
        return SPILLED_BY_WHOLE_MAPS
    return SPILLED_BY_SCORES if usage["kernel"].startswith(("kernels.causal", "kernels.window")) else 64


def test_nothing_spills_more_than_is_known(usages):
    assert len(usages) == 171
    for usage in usages:
        assert usage["stack"] <= allowed(usage), usage


def test_wide_heads_spill_little_on_smaller_gpus(every_usage):
    """Without warp groups operands lie in registers beside the accumulators: 64 rows spilled kilobytes."""
    widest = [max(usage["width"], usage["value_dim"]) for usage in every_usage]
    usages = [u for u, width in zip(every_usage, widest, strict=True) if u["arch"] == 89 and width > 64]
    assert len(usages) == 32
    assert max(usage["stack"] for usage in usages) <= SPILLED_ON_SMALLER_GPUS


def test_tiles_of_hopper_kernels_seldom_load_what_was_spilled(usages):
    found = [usage["reloaded"] for usage in usages if usage["kernel"].startswith("hopper.")]
    assert 0 < max(found) <= RELOADED_BESIDE_SUMS


def test_shared_memory_suffices(every_usage):
    assert {usage["arch"] for usage in every_usage} == set(SHARED_MEMORY)
    for usage in every_usage:
        assert usage["shared"] <= SHARED_MEMORY[usage["arch"]], usage


def test_products_that_read_registers_are_waited_for_at_once(usages):
    """Assemblers before CUDA 13.3 may write to such registers while a product is still running."""
    for usage in usages:
        assert usage["running"] == 0, usage


def test_registers_of_products_are_not_written_to_before_these_are_waited_for(usages):
    """What is computed meanwhile goes elsewhere."""
    for usage in usages:
        assert usage["rewritten"] == [], usage


def test_products_of_hopper_kernels_follow_one_another(usages):
    """An assembler that runs out of registers waits for each of them."""
    for usage in usages:
        if usage["kernel"].startswith("hopper."):
            assert not usage["serialized"], usage


def test_products_that_read_registers_find_the_same_in_them_again(usages):
    """The same assemblers may give such registers to others where a loop needs them again."""
    for usage in usages:
        assert usage["overwritten"] == [], usage
