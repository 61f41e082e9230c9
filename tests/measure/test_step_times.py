"""The rows of Table 2: what each runs, the published figures beside them, and the file."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from tiny import tiny_space

from benchmarks.captures import EagerCapture
from nasfast.measure import step_times as module
from nasfast.measure.config import StepTimesConfig
from nasfast.measure.step_times import PUBLISHED_MS, StepTimesReport, step_times


@pytest.fixture
def cfg(tmp_path) -> StepTimesConfig:
    tiny_space().save(tmp_path / "tiny.yaml")
    return StepTimesConfig(space=str(tmp_path / "tiny.yaml"), batch=4, rounds=2, device="cpu")


def test_every_row_is_what_its_method_publishes(cfg, monkeypatch):
    networks, step_of = [], module._make_step
    monkeypatch.setattr(
        module, "_make_step", lambda net, *args, **more: networks.append(net) or step_of(net, *args, **more)
    )
    report = step_times(cfg)
    assert [(row.name, row.trainable, row.published_ms) for row in report.rows] == [
        ("SPOS", "all", 137.4),
        ("BNNAS", "indicators", 96.3),
        ("DI-NAS, reference ops", "indicators", 93.1),
        ("DI-NAS, nasfast ops", "indicators", None),
    ]
    settings = [(net.layer_indicators, net._fused) for net in networks]
    assert settings == [(False, False), (False, False), (True, False), (True, True)]
    trained = [{name for name, p in net.named_parameters() if p.grad is not None} for net in networks]
    path = report.path
    assert f"layers.0.candidates.{path[0]}.depthwise.conv.weight" in trained[0]
    assert all(name.endswith((".bn.weight", ".bn.bias")) for name in trained[1])
    assert trained[1] == trained[2] == trained[3]
    # one draw serves all rows, and each has its own memory, because their formats differ
    weights = [net.state_dict() for net in networks]
    for name, weight in weights[0].items():
        others = [found[name] for found in weights]
        assert all(torch.equal(weight, other) for other in others)
        assert len({other.data_ptr() for other in others}) == len(others)


def test_a_row_is_seen_as_soon_as_it_has_run_twice(cfg, monkeypatch, tmp_path, caplog):
    """What comes later may take long or fail, and then these rows are there."""
    step_of = module._make_step
    rows = []

    def fails_at_the_last(net, *args, **more):
        if net._fused:
            raise RuntimeError("no such kernel")
        return step_of(net, *args, **more)

    monkeypatch.setattr(module, "_make_step", fails_at_the_last)
    with caplog.at_level(logging.INFO, logger=module.__name__), pytest.raises(RuntimeError, match="no such kernel"):
        step_times(cfg, callback=rows.append)
    assert [row["name"] for row in rows] == ["SPOS", "BNNAS", "DI-NAS, reference ops"]
    assert all(row["first_s"] > 0 and row["second_ms"] > 0 for row in rows)
    assert [record.message.partition(":")[0] for record in caplog.records] == [row["name"] for row in rows]
    pytest.importorskip("jsonargparse")
    from nasfast.cli.main import main

    out = tmp_path / "step.json"
    flags = ["--space", cfg.space, "--batch", "4", "--rounds", "2", "--device", "cpu", "--out", str(out)]
    assert main(["step", *flags]) == 1
    assert [row["name"] for row in json.loads(out.read_text())["first_steps"]] == [row["name"] for row in rows]


def test_the_file_holds_rows_machine_and_versions(cfg, tmp_path):
    report = step_times(cfg)
    report.save(tmp_path / "deep" / "latency.json")
    form = json.loads((tmp_path / "deep" / "latency.json").read_text())
    assert form == json.loads(json.dumps(report.to_dict()))
    assert form["rows"][0]["times"].keys() == {"forward", "backward", "step"}
    assert form["macs_per_image"] == tiny_space().cost(report.path).macs
    assert all(f" {figure}" in str(report) for figure in PUBLISHED_MS.values())


def test_a_graph_and_the_engine_run_the_step(cfg):
    """The functions that are captured give the gradients and the loss of the eager step."""
    space, path = cfg.resolve()
    images, labels = module.random_batch(space, cfg.batch)
    gradients = []
    for make in (
        lambda net: module.TrainingStep(net, images, labels, path=path),
        lambda net: module.graphed_step(module.TrainingStep(net, images, labels, path=path), EagerCapture()),
        lambda net: module.engine_step(
            module.GraphEngine(net, tuple(images.shape), capture=EagerCapture()), images, labels, path
        ),
    ):
        net = module.Supernet(space).train()
        net.freeze("indicators")
        run = make(net)
        for _ in range(2):  # the second adds to nothing
            assert run()["step"] > 0
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    eager, *others = gradients
    for found in others:
        assert found.keys() == eager.keys()
        assert all(torch.equal(grad, eager[name]) for name, grad in found.items())


def test_on_a_gpu(cfg, gpu):
    report = step_times(cfg.replace(device=gpu))
    assert isinstance(report, StepTimesReport)
    assert report.machine["device"].startswith("cuda")
    assert [row.name for row in report.rows[4:]] == ["DI-NAS, torch graph", "DI-NAS, nasfast engine"]
    assert all(row.step_ms > 0 and row.published_ms is None for row in report.rows[4:])
