"""Fixtures of the tests of `fuse`: poisoned memory everywhere, one thread, and a record of the chains that ran."""

import pytest
import torch

from nasfast.fusion import run as deferred


@pytest.fixture(autouse=True)
def poison(poisoned_memory):
    """Every test runs with uninitialised memory full of NaN."""


@pytest.fixture(autouse=True)
def one_thread():
    """Layers are so small here that threads waiting for each other take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def executed(monkeypatch):
    """The stages of every chain that really ran."""
    calls = []
    run = deferred.conv_bn_act_chain

    def record(x, stages, *, residual=None):
        calls.append((len(stages), residual is not None))
        return run(x, stages, residual=residual)

    monkeypatch.setattr(deferred, "conv_bn_act_chain", record)
    return calls
