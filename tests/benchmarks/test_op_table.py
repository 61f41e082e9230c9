"""The benchmarks of operators: every family of the table runs, and a result file has what it must have."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks.ops.cases import BOTH, CHANNELS_LAST, CONTIGUOUS, FORWARD, PEERS, Call, Case, Setting, prepare
from benchmarks.ops.table import table
from nasfast.ops.backends import explain

FOLDER = Path(benchmarks.__file__).parent / "ops"


class Outcomes:
    """A plugin of pytest that counts the outcomes by operator."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.others: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.others.append((report.nodeid, str(report.longrepr)))
        elif report.when == "call":
            self.passed[report.nodeid.partition("[")[2].partition("-")[0]] += 1


def run(monkeypatch, *options: str) -> Outcomes:
    """Run the smallest table in this process."""
    # pytest-benchmark measures nothing in a worker of xdist, which the run inside it is not
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    found = Outcomes()
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([str(FOLDER), "-q", "--size", "tiny", *plugins, *options], plugins=[found])
    return found


def check_all_families(monkeypatch, device: str) -> None:
    # torch.compile takes seconds for each case, and what it compiles is the function of the other peers
    found = run(monkeypatch, "--benchmark-disable", "--device", device, "-k", "fp32 and not compile")
    others = [(test, why) for test, why in found.others if device == "cpu" or "cannot serve" not in why]
    assert not others, others[0]
    assert found.passed.keys() == {row.op for row in explain()}


@pytest.mark.slow
def test_every_family_runs(monkeypatch):
    check_all_families(monkeypatch, "cpu")


def test_every_peer_and_both_dtypes_are_in_the_table(native):
    settings = {case.op: case.settings("cpu") for case in table("tiny")}
    for op in ("bn_act", "conv_bn_act", "conv_bn_act_chain", "mixed_bn", "pool_3x3"):
        wanted = [Setting(provider, dtype, "cpu") for dtype in ("fp32", "bf16") for provider in ("cpu", *PEERS)]
        assert settings[op] == wanted
    of = {c.family: [s.provider for s in c.settings("cpu")] for c in table("tiny") if c.op == "orthogonalize"}
    assert of["all"] == ["cpu", "qr loop", "geqrf loop", "qr grouped"] and of["fill"] == ["cpu", "torch.nn.init loop"]


@pytest.mark.slow
def test_a_result_file(native, monkeypatch, tmp_path):
    path = tmp_path / "ops.json"
    timing = ["--benchmark-max-time=0", "--benchmark-min-rounds=2", "--benchmark-json", str(path)]
    found = run(monkeypatch, *timing, "-k", "([bn_act- or conv_bn_act_chain-inverted_residual_s1) and not compile")
    assert not found.others
    results = json.loads(path.read_text())
    assert results["nasfast"]["torch"] == torch.__version__
    groups: dict[str, dict[str, dict]] = {}
    for row in results["benchmarks"]:
        assert row["stats"]["median"] > 0 and "data" not in row["stats"]
        groups.setdefault(row["group"], {})[row["name"]] = row["extra_info"]
    assert len(groups) == 8 and all(g.keys() == {"cpu", CONTIGUOUS, CHANNELS_LAST} for g in groups.values())
    of = groups["bn_act relu6 2x144x8x8 fp32 forward+backward"]
    x_bytes = 2 * 144 * 8 * 8 * 4
    assert all(x_bytes < info["input_bytes"] < 1.1 * x_bytes for info in of.values())
    # PyTorch saves x and its normalised form, nasfast x alone, and both a few numbers per channel
    assert x_bytes <= of["cpu"]["saved_bytes"] < 1.1 * x_bytes
    assert 2 * x_bytes <= of[CHANNELS_LAST]["saved_bytes"] < 2.1 * x_bytes
    floors = {name: group["cpu"].get("floor_ms") for name, group in groups.items()}
    for name, both in floors.items():
        if name.endswith("+backward"):
            forward = floors[name.removesuffix("+backward")]
            assert forward is both is None if name.startswith("bn_act") else 0 < forward < both


def test_a_provider_that_computes_something_else_is_not_timed():
    def make(setting: Setting) -> Call:
        function = torch.relu if setting.provider == CONTIGUOUS else torch.sigmoid
        return Call(function, [setting.images((2, 3, 4, 4))])

    case = Case("relu", "plain", "2x3x4x4", make)
    prepare(case, Setting(CONTIGUOUS, "fp32", "cpu"))
    with pytest.raises(RuntimeError, match="relu plain 2x3x4x4, fp32: eager channels_last .* not the same work"):
        prepare(case, Setting(CHANNELS_LAST, "fp32", "cpu"))


def test_weights_that_are_not_orthonormal_are_not_timed(native, monkeypatch):
    (fill,) = (case for case in table("tiny") if case.family == "fill")
    ours = Setting("cpu", "fp32", "cpu")
    prepare(fill, ours)
    monkeypatch.setattr(torch.nn.init, "orthogonal_", torch.nn.init.normal_)
    with pytest.raises(RuntimeError, match="not the same work"):
        prepare(fill, ours)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("passes", [FORWARD, BOTH])
def test_on_a_gpu_the_timed_function_waits_for_the_kernels(passes, monkeypatch):
    events = []

    def function(x):
        events.append("launch")
        return 2 * x

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    work = Call(function, [torch.ones(3).as_subclass(OnGpu).requires_grad_()]).timed(passes)
    events.clear()
    work()
    assert events == ["launch", "wait"]
