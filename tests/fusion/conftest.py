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
    run = stages.conv_bn_act_chain

    def record(x, given, *, residual=None):
        calls.append((len(given), residual is not None))
        return run(x, given, residual=residual)

    monkeypatch.setattr(stages, "conv_bn_act_chain", record)
    return calls
