"""Fixtures of the tests of `fuse`: one thread, and a record of the chains that ran."""

import pytest

from nasfast.fusion import stages


@pytest.fixture(autouse=True, scope="module")
def threads(one_thread):
    """Layers are so small here that threads waiting for each other take longer than the work."""


@pytest.fixture
def executed(monkeypatch):
    """The stages of every chain that really ran."""
    calls = []
    run = stages.run_checked_chain

    def record(x, given, residual):
        calls.append((len(given), residual is not None))
        return run(x, given, residual)

    monkeypatch.setattr(stages, "run_checked_chain", record)
    return calls
