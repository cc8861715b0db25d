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


@pytest.fixture(scope="module")
def usages():
    program = Path(__file__).with_name("resource_usage.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nothing_spills(usages):
    assert len(usages) == 24
    for usage in usages:
        allowed = SPILLED_BY_WIDE_HEADS if usage["width"] > 64 else 64
        assert usage["stack"] <= allowed, usage


def test_shared_memory_suffices(usages):
    assert all(usage["shared"] <= SHARED_MEMORY for usage in usages), usages
