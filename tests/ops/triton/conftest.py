import pytest

from schoenbat.ops import dispatch


@pytest.fixture
def few_programs(monkeypatch):
    """Programs of several tiles, and segments of several chunks, as long sequences have."""
    from schoenbat.ops.triton import programs

    monkeypatch.setattr(programs, "_PROGRAMS", 2)


@pytest.fixture
def smaller_gpu(monkeypatch):
    """One with less shared memory than Hopper's."""
    for module in ("plan", "tiles", "shared_memory"):
        monkeypatch.setattr(f"schoenbat.ops.triton.{module}.is_roomy", lambda device: False)


@pytest.fixture
def one_segment(monkeypatch):
    """Causal sums of several tiles that nothing far is added to, as many heads have them."""
    from schoenbat.ops.triton import axis

    monkeypatch.setattr(axis, "_MANY_HEADS", 1)


@pytest.fixture
def auto_takes_the_kernels(monkeypatch):
    """Without a GPU, too."""
    choose = dispatch.choose

    def by_name(implementation, obstacle, query):
        return choose("triton" if implementation == "auto" else implementation, obstacle, query)

    monkeypatch.setattr(dispatch, "choose", by_name)
