import pytest


@pytest.fixture
def few_programs(monkeypatch):
    """Programs of several tiles, and segments of several chunks, as long sequences have."""
    from schoenbat.ops.triton import launch

    monkeypatch.setattr(launch, "_PROGRAMS", 2)
