"""What holds for every test: a known global generator, and one thread."""

import os
import signal

import pytest
import torch
from _pytest.junitxml import xml_key

# Without a GPU the fused kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell that starts us in the background has us ignore Ctrl-C, and with us whatever a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Small tensors in several worker processes: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Reports of runs on a GPU say which; pytest's own fixture for that does nothing with several workers."""
    report = config.stash.get(xml_key, None)
    if report is not None and torch.cuda.is_available():
        from schoenbat.report.results import versions

        report.add_global_property("device", torch.cuda.get_device_name())
        for name, version in versions().items():
            report.add_global_property(name, version)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_turns(tmp_path_factory):
    """Runs that these tests time wait for no others."""
    folder = tmp_path_factory.mktemp("turns")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schoenbat.training.turns._folder", lambda: folder)
        yield
