"""Tables of latencies: what is timed, how parts become values of the table, and what the file says."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from tiny import tiny_excited_space, tiny_macro_space, tiny_space
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.measure import latency as module
from nasfast.measure import onnx_parts
from nasfast.measure.config import LatencyConfig
from nasfast.measure.deployed import deployed, fold
from nasfast.measure.latency import Fit, LatencyReport, latency, space_parts
from nasfast.runtime.onnx import check_provider, write_onnx
from nasfast.spaces import SKIP, format_arch, parse_arch, read_cost_table
from nasfast.spaces.arch import Arch
from nasfast.supernet import build

SPACES = [tiny_space(), tiny_excited_space(), tiny_macro_space()]


@pytest.fixture
def cfg(tmp_path) -> LatencyConfig:
    tiny_space().save(tmp_path / "tiny.yaml")
    return LatencyConfig(space=str(tmp_path / "tiny.yaml"), rounds=2, calibrate=4, threads=1)


@pytest.fixture
def clockwork(monkeypatch):
    """Makes the times of parts and networks known: a part takes its MACs, a network 1.5 times that and 0.2 per part."""
    space = tiny_space()
    parts = space_parts(space)
    alone = {name: 1.0 + i / 10 for i, name in enumerate(parts.modules)}

    def whole(arch: Arch) -> float:
        return 1.5 * sum(alone[n] for n in parts.names(arch)) + 0.2 * len(parts.names(arch))

    def timed(work, **options):
        times = {name: alone[name] if name in alone else whole(parse_arch(name)) for name in work}
        return {name: {"run": {"median_ms": t, "q20_ms": t, "q80_ms": t}} for name, t in times.items()}

    monkeypatch.setattr(module, "measure", timed)
    return whole


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_the_parts_of_a_network_compute_the_network(space):
    """Each part has the input shape that it is timed at, and what a network runs is exactly its parts."""
    parts = space_parts(space)
    for number in range(3):
        arch = tuple(options[number % len(options)] for options in space.options)
        x = torch.randn(2, space.in_channels, space.resolution, space.resolution)
        modules = [parts.modules["stem"]]
        modules += [parts.modules[n] for row, v in zip(parts.layers, arch, strict=True) if (n := row[v]) is not None]
        modules.append(parts.modules["head and classifier"])
        assert len(modules) == len(parts.names(arch))
        macs = 0
        for part, shape in modules:
            assert tuple(x.shape[1:]) == shape
            part.eval()
            macs += macs_of(part, x)
            x = part(x)
        assert x.shape == (2, space.num_classes)
        network = build(space, arch).eval()
        assert macs == macs_of(network, torch.randn(2, space.in_channels, space.resolution, space.resolution))


def macs_of(network: nn.Module, x) -> int:
    with FlopCounterMode(display=False) as counter:
        network(x)
    return counter.get_total_flops()


def test_equal_shapes_and_candidates_are_timed_once():
    space = tiny_space(stages=(tiny_space().stages[0].replace(layers=4), tiny_space().stages[1]))
    parts = space_parts(space)
    # layer 0 reduces; layers 1, 2, 3 are equal, layer 4 widens, layer 5 is alone
    assert parts.layers[1] == parts.layers[2] == parts.layers[3]
    assert len(parts.modules) == 2 + 3 * 4
    assert len(set(parts.names((0, 1, 1, 1, 0, 0)))) == 2 + 4


def test_an_identity_takes_no_time_and_a_strided_one_does():
    parts = space_parts(tiny_macro_space())
    assert [row[0] is None for row in parts.layers] == [False, True, False, True]
    pinned = tiny_space(stages=(tiny_space().stages[0].replace(pinned=(1,)), tiny_space().stages[1]))
    assert space_parts(pinned).layers[1] == {SKIP: None}


def test_folding_changes_nothing_but_the_batch_norms():
    space = tiny_excited_space()
    network = build(space, (1, 2, 1, 2))
    for bn in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (bn.weight.data, bn.bias.data, bn.running_mean, bn.running_var):
            tensor.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 16, 16)
    network.eval()
    with torch.no_grad():
        expected = network(x)
        got = fold(network)(x)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in network.modules())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_table_predicts_whole_networks(cfg, clockwork):
    """The times obey the model exactly, so every prediction must be exact, whichever networks were fitted."""
    report = latency(cfg.replace(validate=5))
    space, form = tiny_space(), report.content
    assert (form["fit"]["scale"], form["fit"]["per_part_ms"]) == (pytest.approx(1.5), pytest.approx(0.2))
    for arch in ((0, 0, 0, 0), (2, 1, 0, 1), (1, 2, 2, 2)):
        assert report.table.cost(arch) == pytest.approx(clockwork(arch), rel=1e-7)
    error = form["validation"]["error"]
    assert error["max"] < 1e-6 < error["median_by_macs"]
    fitted = [row["arch"] for row in form["fit"]["networks"]]
    validated = [row["arch"] for row in form["validation"]["networks"]]
    assert (len(fitted), len(validated), len({*fitted, *validated})) == (4, 5, 9)
    costs = {format_arch(a): space.cost(a).macs for a in [(1, 1, 1, 1), (2, 2, 2, 2)]}
    assert set(costs) <= set(fitted)  # fewest and most MACs
    assert "; error 0.0% median, 0.0% for 80 % of 5 random networks" in form["about"]


def test_a_report_names_unsteady_parts_and_advises_no_limit_that_nothing_meets(cfg, clockwork):
    report = latency(cfg.replace(validate=5))
    assert "different rounds" not in str(report) and "serves no limit" not in str(report)
    assert "hides differences" not in str(report)
    at_most, limit = map(
        float, re.search(r"at most ([\d.]+) ms, set --search.max_latency_ms ([\d.]+)", str(report)).groups()
    )
    assert limit == pytest.approx(at_most, rel=1e-2)
    part = report.content["parts"]["layer 0, k3 e2"]
    part["q20_ms"], part["q80_ms"] = 0.1, 36.0
    report.content["validation"]["error"] |= {"median": 0.03, "q80": 0.6}
    text = str(report)
    assert "1 of 14 parts took very different times in different rounds (e.g. layer 0, k3 e2: 0.1 to 36 ms" in text
    assert "with an error of that size this table serves no limit" in text and "max_latency_ms" not in text
    assert "an error above 7% for 80 % of the networks hides differences" in text


def test_the_file_is_a_table_of_the_space(cfg, tmp_path):
    """Timed in earnest: a table that a search reads, with the machine, and an interval for every part."""
    # a fit to two runs of tiny networks could fail on a busy machine
    report = latency(cfg.replace(calibrate=0, validate=1, clock="cpu"))
    assert isinstance(report, LatencyReport)
    report.save(tmp_path / "deep" / "latency.json")
    table = read_cost_table(tmp_path / "deep" / "latency.json", tiny_space())
    assert table == report.table
    assert (table.quantity, table.unit, table.device, table.batch) == ("latency", "ms", "cpu", 1)
    assert all(value > 0 for row in table.rows for choice, value in row if choice != SKIP)
    form = json.loads((tmp_path / "deep" / "latency.json").read_text())
    assert form["parts"].keys() == space_parts(tiny_space()).modules.keys()
    assert all(0 < t["q20_ms"] <= t["median_ms"] <= t["q80_ms"] for t in form["parts"].values())
    assert form["machine"]["torch"] == torch.__version__ and form["machine"]["threads"] == 1
    text = str(report)
    assert re.search(r"layer  0: k3 e2 \d+\.\d{3}, k5 e1", text) and "whole networks: " in text


def test_a_compiled_network_is_compiled(cfg, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda network: compiled.append(network) or network)
    images = torch.randn(1, 3, 16, 16)
    assert deployed(build(tiny_space(), (0, 0, 0, 0)), images, cfg.replace(compiled=True))()["run"] > 0
    assert len(compiled) == 1


@pytest.mark.slow
def test_onnxruntime_runs_the_exported_network(cfg, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    results = []

    class Noted(runtime.InferenceSession):
        def run(self, names, feeds):
            results.append((feeds["images"], super().run(names, feeds)[0]))
            return results[-1][1]

    monkeypatch.setattr(runtime, "InferenceSession", Noted)
    space = tiny_space()
    network, images = build(space, (0, 1, 2, 0)).eval(), torch.randn(3, 3, 16, 16)
    assert deployed(network, images, cfg.replace(device="onnx", batch=3))()["run"] > 0
    ((given, got),) = results
    assert np.array_equal(given, images.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(got, network(images).numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES[:2], ids=lambda space: space.name)
def test_onnxruntime_runs_the_same_nodes_in_a_joined_network_as_in_an_exported_one(space, tmp_path):
    """A table of onnxruntime times what it would run of the exported file, with the same results and own weights."""
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")

    def optimised(content: bytes):
        options = runtime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimised.onnx"), 3
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return session, [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]

    arch = tuple(options[(7 * i + 1) % len(options)] for i, options in enumerate(space.options))
    parts = space_parts(space)
    network = nn.Sequential(*(parts.modules[name][0] for name in parts.names(arch))).eval()
    images = torch.randn(3, space.in_channels, space.resolution, space.resolution)
    with torch.no_grad():
        expected = network(images).numpy()
    write_onnx(build(space, arch).eval(), images, tmp_path / "exported.onnx")
    exported = onnx_parts.export_parts(
        {name: (fold(part.eval()), shape) for name, (part, shape) in parts.modules.items()}
    )
    content = onnx_parts.join_parts([exported[name] for name in parts.names(arch)])
    session, nodes = optimised(content)
    assert nodes == optimised((tmp_path / "exported.onnx").read_bytes())[1]
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, rtol=1e-3, atol=1e-6)
    # equal layers share a part, and no weights: a network whose weights fit into a cache would be faster
    weights = sum(math.prod(tensor.dims) for tensor in onnx.load_from_string(content).graph.initializer)
    assert weights > 0.9 * sum(p.numel() for p in build(space, arch).parameters() if p.ndim > 1)


def test_rounds_that_were_measured_are_kept_when_it_is_stopped(cfg, monkeypatch, tmp_path, caplog):
    """The second call measures the rounds that are missing, and the table is of all of them."""
    made, stop = [], [30]

    def fake(module, images, cfg):
        def run():
            made.append(1)
            if len(made) == stop[0]:
                raise KeyboardInterrupt
            return {"run": 0.001 * len(made)}

        return run

    monkeypatch.setattr(module, "deployed", fake)
    cfg, path = cfg.replace(calibrate=0, validate=1, rounds=4), tmp_path / "out.json.rounds"
    each = len(space_parts(tiny_space()).modules) + 1
    stop[0] = 4 * each + 3  # two rounds are not timed, two are whole
    with pytest.raises(KeyboardInterrupt):
        latency(cfg, rounds_file=path)
    kept = json.loads(path.read_text())["rounds"]
    assert len(kept) == 2 and len(kept[0]) == each
    stop[0], before = 0, len(made)
    with caplog.at_level("INFO"):
        report = latency(cfg, rounds_file=path)
    assert len(made) - before == 4 * each and "goes on after 2 rounds" in caplog.text
    rounds = json.loads(path.read_text())["rounds"]
    assert rounds[:2] == kept and len(rounds) == 4
    for name, times in report.content["parts"].items():
        assert times["median_ms"] == pytest.approx(np.median([r[name]["run"] for r in rounds]))
    # complete: nothing is run again
    before = len(made)
    latency(cfg, rounds_file=path)
    assert len(made) == before
    # other settings, and a file that is damaged, begin anew
    latency(cfg.replace(batch=2), rounds_file=path)
    assert len(made) - before == 6 * each and len(json.loads(path.read_text())["rounds"]) == 4
    path.write_text(path.read_text()[:-40])
    before = len(made)
    latency(cfg.replace(batch=2), rounds_file=path)
    assert len(made) - before == 6 * each


# what goes wrong


def test_a_table_of_another_kind_is_not_replaced(cfg, clockwork, tmp_path, capsys):
    out = tmp_path / "latency.json"
    flags = ["latency", "--space", cfg.space, "--calibrate", "4", "--rounds", "1", "--out", str(out)]
    assert main(flags) == 0
    assert f"written: {out}" in capsys.readouterr().out
    assert [file.name for file in tmp_path.glob("latency.json*")] == ["latency.json"], "no rounds are left"
    before = out.read_bytes()
    assert main([*flags, "--batch", "8"]) == 1
    assert "is a table of 'tiny' with batch 1, not 8: choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == before
    out.write_text("{}")
    assert main(flags) == 1
    assert "is no table of latencies" in capsys.readouterr().err


def test_a_runtime_that_is_not_installed_says_what_to_install(cfg, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ConfigError, match="no provider 'CUDAExecutionProvider'.* pip install onnxruntime-gpu in place"):
        latency(cfg.replace(device="onnx", provider="CUDAExecutionProvider"))
    with pytest.raises(ConfigError, match="no provider 'Cuda', but CPUExecutionProvider: choose one of these"):
        check_provider("Cuda")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(RuntimeError, match=r"needs onnxruntime: pip install 'nasfast\[onnx\]'"):
        latency(cfg.replace(device="onnx"))


def test_networks_that_do_not_grow_with_their_parts_have_no_table():
    with pytest.raises(RuntimeError, match="do not grow with those of their layers"):
        Fit.least_squares([1, 2, 3], [4, 4, 4], [3, 2, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "auto"}, "a table is of one device; got 'auto'"),
        ({"device": "gpu"}, "device must be"),
        ({"device": "onnx", "dtype": "bf16"}, "device='onnx' runs fp32 or int8 files"),
        ({"device": "cpu", "dtype": "int8"}, "dtype='int8' is onnxruntime's: give device='onnx', got 'cpu'"),
        ({"calibrate": 3}, "calibrate must be 0 or at least 4"),
        ({"validate": -1}, "validate must not be negative"),
        ({"clock": "cpu", "threads": 2}, "clock='cpu' needs threads=1 and a CPU, got threads=2"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"space": "darts"}, "is a space of cells"),
        ({"validate": 100}, "has 81 architectures, and 104 different ones"),
    ],
)
def test_wrong_settings_are_named(cfg, changes, message):
    with pytest.raises(ValueError, match=message):
        latency(LatencyConfig.from_dict({**cfg.to_dict(), **changes}))


def test_on_a_gpu(cfg, gpu):
    report = latency(cfg.replace(device=gpu, calibrate=0, validate=1, threads=0))
    assert report.content["device"] == "cuda" and report.table.cost((0, 0, 0, 0)) > 0


def test_networks_that_have_more_than_their_parts_are_fitted_with_the_rest():
    rng = np.random.default_rng(0)
    sums, counts = rng.uniform(1, 9, 12), rng.integers(5, 15, 12)
    fit, outside = Fit.with_outside(list(sums), list(counts), list(0.8 * sums - 0.02 * counts + 1.5), shortest=0.1)
    assert (fit.scale, fit.per_part, outside) == pytest.approx((0.8, -0.02, 1.5))
    # a rest below 0 is none, and no part is free
    fit, outside = Fit.with_outside(list(sums), [7] * 12, list(0.8 * sums), shortest=0.1)
    assert (fit.scale, fit.per_part, outside) == pytest.approx((0.8, 0, 0), abs=1e-9)
    with pytest.raises(RuntimeError, match="do not grow"):
        Fit.with_outside([1, 2, 3], [4, 4, 4], [3, 2, -1], shortest=0.1)
