"""Fixtures of the tests of `fuse`: one thread, and a record of the chains that ran."""

import pytest

from nasfast.fusion import execute


@pytest.fixture(autouse=True, scope="module")
def threads(one_thread):
    """Layers are so small here that threads waiting for each other take longer than the work."""


@pytest.fixture
def executed(monkeypatch):
    """The stages of every chain that really ran."""
    calls = []
    run = execute.conv_bn_act_chain

    def record(x, stages, *, residual=None):
        calls.append((len(stages), residual is not None))
        return run(x, stages, residual=residual)

    monkeypatch.setattr(execute, "conv_bn_act_chain", record)
    return calls
