"""The rows of Table 2: what each runs, the published figures beside them, and the file."""

from __future__ import annotations

import json

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


@pytest.fixture
def made(monkeypatch) -> list[tuple[dict, set[str]]]:
    """Settings and trainable parameters of the supernets that `step_times` times."""
    networks = []

    class Noted(module.Supernet):
        def __init__(self, space, **settings):
            super().__init__(space, **settings)
            networks.append((settings, self))

    monkeypatch.setattr(module, "Supernet", Noted)
    return networks


def test_every_row_is_what_its_method_publishes(cfg, made):
    report = step_times(cfg)
    assert [(row.name, row.trainable, row.published_ms) for row in report.rows] == [
        ("SPOS", "all", 137.4),
        ("BNNAS", "indicators", 96.3),
        ("DI-NAS, reference ops", "indicators", 93.1),
        ("DI-NAS, nasfast ops", "indicators", None),
    ]
    settings = [(s["init"], s["layer_indicators"], s["fused"]) for s, _ in made]
    assert settings == [
        ("he", False, False),
        ("he", False, False),
        ("orthogonal", True, False),
        ("orthogonal", True, True),
    ]
    trained = [{name for name, p in net.named_parameters() if p.grad is not None} for _, net in made]
    path = report.path
    assert f"layers.0.candidates.{path[0]}.depthwise.conv.weight" in trained[0]
    assert all(name.endswith((".bn.weight", ".bn.bias")) for name in trained[1])
    assert trained[1] == trained[2] == trained[3]


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
