"""Benchmarks at a small size: what they measure, refuse and keep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fused_models import make

import nasfast
from benchmarks import bench_fuse_models, bench_shrink, fit_rule

MODEL = "torchvision/mobilenet_v3_small"
SMALL = ["--models", MODEL, "--batch", "2", "--resolution", "32", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A smaller model in place of MODEL, the same at every call."""

    def made(name: str) -> torch.nn.Module:
        torch.manual_seed(0)
        return make("small efficientnet")

    monkeypatch.setattr(bench_fuse_models, "make", made)


@pytest.fixture
def run(monkeypatch, one_thread):
    """Runs the program in this process."""

    def run(module, *arguments: object) -> None:
        monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
        module.main()

    return run


def test_fuse_models_measures_and_continues(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.json"
    run(bench_fuse_models, *SMALL, "--types", "fp32", "--trains", "nothing", "--out", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["times"].keys() == {"eager", "nasfast", "always", "folded"}
    assert row["peer"] in ("eager", "folded")
    assert row["ratio"] == pytest.approx(
        row["times"]["nasfast"]["step"]["median_ms"] / row["times"][row["peer"]]["step"]["median_ms"]
    )
    ms = {name: phases["step"]["median_ms"] for name, phases in row["times"].items()}
    assert row["of_better"] == pytest.approx(ms["nasfast"] / min(ms["eager"], ms["always"]))
    assert (row["in_chains"], row["convolutions"]) == (13, 21)
    assert row["ran_fused"] == 0  # too small
    monkeypatch.setattr(bench_fuse_models, "bench", lambda *_: None)  # what is there is measured once
    run(bench_fuse_models, *SMALL, "--types", "fp32", "--trains", "nothing", "--out", out)
    assert json.loads(out.read_text())["rows"] == [row]
    assert "trains nothing     fp32            1 models: median" in capsys.readouterr().out


def test_fuse_models_refuses_other_work(monkeypatch):
    """A variant that computes something else is not timed."""
    monkeypatch.setattr(nasfast, "fuse", lambda model, **_: torch.nn.init.uniform_(model.classifier[1].bias, 0, 100))
    with pytest.raises(RuntimeError, match="nasfast has loss"):
        bench_fuse_models.bench(MODEL, "nothing", "fp32", 2, 32, 1)


def test_shrink_trains_peers_as_long_as_the_program(run, tmp_path, monkeypatch):
    """By --first, the network of the program has trained before it is cut; a peer's has not."""
    (tmp_path / "network.py").write_text(
        "import torch\nimport shrinkable\n\n\ndef small():\n    return shrinkable.small(2).float()\n"
    )
    images, labels = torch.randint(256, (75, 3, 16, 16), dtype=torch.uint8), torch.arange(75) % 2
    torch.save(images, tmp_path / "fit.pt")
    torch.save((images, labels), tmp_path / "test.pt")
    torch.save(labels, tmp_path / "labels.pt")
    epochs, files = [], set()

    def train(bench, model, size, count, kept=None):
        epochs.append((size, count, bench.views.shape[0]))
        return []

    def fastnas(model, share, batches, *, multiple, checkpoint):
        files.add(checkpoint)
        return model

    monkeypatch.setattr(bench_shrink.Bench, "train", train)
    monkeypatch.setattr(bench_shrink, "fastnas", fastnas)
    data = ("--fit", tmp_path / "fit.pt", "--test", tmp_path / "test.pt", "--pruning", tmp_path / "labels.pt")
    sizes = ("--sizes", 16, 8, "--resolutions", "--shares", 0.9, 0.2, "--images", 50, "--score-images", 25)
    more = ("--first", 2, "--epochs", 3, "--views", 3, "--peers", "modelopt", "--multiple", 4)
    run(bench_shrink, f"{tmp_path}/network.py:small", *data, *sizes, *more)
    # the network at 8 pixels; then for each share the peer, the program and, where it fits, the network
    # at 8 pixels the program has had its first epochs
    assert epochs == [(8, 2, 3), (16, 5, 3), (16, 5, 3), (8, 5, 3), (16, 5, 3), (8, 3, 3)]
    (file,) = files
    assert not file.exists() and file.parent != Path.cwd()


def test_fit_rule_finds_the_constants_of_its_rows(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fit_rule, "make", lambda _: make("small efficientnet"))
    monkeypatch.setattr(fit_rule, "SIZES", ((2, 32), (1, 32)))
    out = tmp_path / "rows.json"
    run(fit_rule, "--models", MODEL, "--rounds", 1, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert {row["trains"] for row in rows} == set(fit_rule.TRAINS)
    costs = fit_rule.rule.Costs(0.2, -0.3, -2.0, -7_000)
    for row in rows:
        eager = row["times"]["eager"]
        row["times"]["nasfast"] = eager - float(np.dot(fit_rule.work(row), costs)) / 1e6
    assert fit_rule.fit(rows) == pytest.approx(costs)
    eager, ours = (sum(row["times"][name] for row in rows) for name in ("eager", "nasfast"))
    best = sum(min(row["times"].values()) for row in rows)
    assert best < min(eager, ours)  # some chains pay, others do not
    assert fit_rule.judge(rows, costs).startswith(f"{best / eager:.3f} of eager, at most 1.00; ")
