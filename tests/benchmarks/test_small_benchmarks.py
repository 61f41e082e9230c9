"""bench_fuse_models at a small size: what it measures, refuses and keeps."""

from __future__ import annotations

import json

import pytest
import torch
from fused_models import make

import nasfast
from benchmarks import bench_fuse_models

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
    monkeypatch.setattr(bench_fuse_models, "bench", lambda *_: None)  # what is there is measured once
    run(bench_fuse_models, *SMALL, "--types", "fp32", "--trains", "nothing", "--out", out)
    assert json.loads(out.read_text())["rows"] == [row]
    assert "trains nothing     fp32            1 models: median" in capsys.readouterr().out


def test_fuse_models_refuses_other_work(monkeypatch):
    """A variant that computes something else is not timed."""
    monkeypatch.setattr(nasfast, "fuse", lambda model, **_: torch.nn.init.uniform_(model.classifier[1].bias, 0, 100))
    with pytest.raises(RuntimeError, match="nasfast has loss"):
        bench_fuse_models.bench(MODEL, "nothing", "fp32", 2, 32, 1)
