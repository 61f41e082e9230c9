"""Fixtures of the tests of `fuse`: one thread, and a record of the chains that ran."""

import pytest

from nasfast.fusion import rule, stages
from nasfast.ops import _native


@pytest.fixture(autouse=True, scope="module")
def threads(one_thread):
    """Layers are so small here that threads waiting for each other take longer than the work."""


@pytest.fixture(autouse=True)
def recording_is_free(monkeypatch):
    """Small chains run fused inside the forwards of their modules, too."""
    monkeypatch.setattr(rule, "LEAST_RECORDED", 0)


@pytest.fixture(autouse=True)
def rule_holds(monkeypatch):
    """The rule decides here on every processor, not only on those that it was measured on."""
    if _native.extension is not None:
        monkeypatch.setattr(rule, "_KNOWN", {*rule._KNOWN, _native.extension.isa()})


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


@pytest.fixture
def folds(monkeypatch):
    """The chains that were folded, by their number of stages."""
    calls = []

    class Recorded(stages.Folded):
        def __init__(self, stages, *args):
            calls.append(len(stages))
            super().__init__(stages, *args)

    for user in ("chain", "dynamo"):
        monkeypatch.setattr(f"nasfast.fusion.{user}.Folded", Recorded)
    return calls
