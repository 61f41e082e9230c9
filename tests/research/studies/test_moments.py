"""The moments study: marks, comparison with published arrays, files and resuming."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tiny import tiny_space, write_folder
from torch import nn

from nasfast.config import ConfigError
from nasfast.research.analysis.moments.detect import detect, summarise
from nasfast.research.analysis.moments.networks import NetConfig, gaussian, run
from nasfast.research.studies.moments import marks, study
from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig, QuickConfig
from nasfast.research.studies.moments.measure import input_source
from nasfast.research.studies.report import Check
from nasfast.research.studies.run import run_study

TINY = {
    "FC": NetConfig(width=24, batch=16, depth=24, every=2),
    "conv": NetConfig(kernel=3, width=8, batch=4, depth=20, every=4),
}


@pytest.fixture
def small(monkeypatch):
    """The quick experiment's structure in a second; its marks belong to its own sizes."""
    monkeypatch.setattr(study, "_QUICK", TINY)
    monkeypatch.setattr(study, "_QUICK_SEEDS", {"FC": 2, "conv": 2})
    monkeypatch.setattr(study, "_VANILLA_CONV_SEEDS", 3)
    monkeypatch.setattr(study, "_HISTOGRAM_SEEDS", 12)
    monkeypatch.setattr(marks, "_AVERAGED", 4)


def test_quick_measures_every_family_and_continues_from_its_results(small, tmp_path, monkeypatch):
    report = run_study("moments quick", QuickConfig(seed=1), out=tmp_path)
    families = [f"{kind}, {f}" for kind in ("FC", "conv") for f in ("vanilla", "BN feed-forward", "BN resnet")]
    assert list(report.verdicts) == families
    assert [len(f.axes) for f in report.figures] == [2, *[2, 4, 4] * 2]
    text = str(report)
    for words in ("pass marks", "FC, BN resnet: exponent minus tau", "layer norm", "conv, BN feed-forward"):
        assert words in text
    assert all(math.isfinite(check.measured) for check in report.checks)
    json.dumps(report.to_dict(), allow_nan=False)
    monkeypatch.setattr("nasfast.research.analysis.moments.networks.run_chunk", None)
    assert run_study("moments quick", QuickConfig(seed=1), out=tmp_path).checks == report.checks
    with pytest.raises(TypeError):
        run_study("moments quick", QuickConfig(seed=5), out=tmp_path)


def test_the_marks_tell_the_families_apart():
    """Each family's marks, applied to the others' runs, are missed."""
    base = NetConfig(width=64, batch=32, depth=80, every=4)
    runs = {
        "vanilla": run(base, gaussian(96), realisations=4),
        "exploding": run(base.replace(norm="batch"), gaussian(96), realisations=4),
        "resnet": run(base.replace(norm="batch", residual=2), gaussian(96), realisations=4),
    }
    verdicts = {name: detect(networks.depth, networks.curves()) for name, networks in runs.items()}

    def missed(checks: list[Check]) -> set[str]:
        return {check.name.split(": ", 1)[1] for check in checks if not check.passed}

    names = missed(marks.vanilla_checks("FC", runs["exploding"], verdicts["exploding"]))
    assert names == {"increment, last half", "r_eff(L)", "detected one-dimensional"}
    names = missed(marks.exploding_checks("FC", runs["resnet"], verdicts["resnet"]))
    assert {"slope of log chi", "R^2 of exponential", "detected exploding"} <= names
    assert not missed(marks.exploding_checks("FC", runs["exploding"], verdicts["exploding"])) & {
        "slope of log chi",
        "largest ReLU part (theorem 3: sqrt 2)",
        "detected exploding",
    }
    assert not missed(marks.resnet_checks("FC", runs["resnet"], verdicts["resnet"])) & {
        "R^2 of power law",
        "R^2 of power law minus exponential",
        "increment over lower bound of theorem 4, smallest",
        "increment over upper bound of theorem 4, largest",
    }


FC = {"width": 16, "batch": 8, "histogram_width": 8, "histogram_batch": 8, "depth": 20, "realisations": 2}
FIGURES = FiguresConfig(**FC, histogram_realisations=6)


@pytest.mark.slow
def test_figures_and_their_page(tmp_path):
    report = run_study("moments figures", FIGURES, out=tmp_path)
    assert [f.title for f in report.figures] == [
        "figure 2: vanilla, histograms",
        "figure 3: vanilla",
        "figure 4: BN feed-forward",
        "figure 5: BN resnet",
    ]
    assert report.checks == () and set(report.verdicts) == {"vanilla", "BN feed-forward", "BN resnet"}
    # figure 5 has the power law that the increments predict
    assert float(report.figures[3].axes[1].lines[-1].get_label().split("^")[1]) > 0
    # only networks with BatchNorm have parts of an increment, and a normalised signal
    rows = {row[0]: row for row in report.tables[0].rows if row[0]}
    assert {name: row[5:7].count("-") + (row[9] == "-") for name, row in rows.items()} == {
        "vanilla": 3,
        "BN feed-forward": 0,
        "BN resnet": 0,
    }
    page = report.save(tmp_path)
    record = json.loads((tmp_path / "moments.json").read_text())
    assert record == json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert page.read_text().count("<figure>") == 4
    assert len(list((tmp_path / "moments").glob("*.svg"))) == 4
    assert "http" not in page.read_text().replace("http-equiv", "")


NAMES = {2: "vanilla_histo", 3: "vanilla", 4: "bn_ff", 5: "bn_res"}


def write_published(folder, cfg: FiguresConfig, shift: float = 0.0) -> None:
    """Arrays of our own networks, as if they were the published ones."""
    source = input_source(cfg)
    for figure, name in NAMES.items():
        network = run(cfg.network(figure), source, realisations=8, seed=7)
        curves = network.curves()
        arrays = {**summarise(curves), "depth": network.depth.astype(int), "n_real": np.array(8)}
        arrays["chi_mean"] = np.exp(curves["logchi"]).mean(0)
        if figure == 2:
            arrays |= {f"{k}_kurt": np.zeros(4) for k in ("lognu2", "logmu2_noise")}
        if figure == 5:
            first = np.exp(network.log_chi("unit")).mean(0) / np.exp(network.log_chi("input")).mean(0)
            arrays |= {"inc_ratio_of_means": first, "units_per_residual": np.array(2)}
        arrays = {k: v + shift if k.endswith("_mean") else v for k, v in arrays.items()}
        np.savez(folder / f"{name}.npz", **arrays)


@pytest.fixture
def names(monkeypatch):
    monkeypatch.setattr(FiguresConfig, "published", lambda self, figure: NAMES[figure])


def test_agreement_with_arrays(tmp_path, names):
    photos = write_folder(tmp_path / "photos", {"a": 12, "b": 12})
    sizes = {"histogram_width": 32, "depth": 160, "every": 40, "realisations": 6, "histogram_realisations": 10}
    cfg = FIGURES.replace(images=str(photos), figures=(2, 4), **sizes)
    write_published(tmp_path, cfg)
    report = run_study("moments figures", cfg.replace(reference=str(tmp_path)))
    names = [check.name for check in report.checks]
    assert "bn_ff: logchi, largest deviation over the allowed" in names and "bn_ff: slope of log chi, l > 100" in names
    assert "vanilla_histo: mean lognu2, largest deviation over the allowed" in names
    assert all(c.passed for c in report.checks if "deviation" in c.name), report.missed
    assert "agreement" in str(report)
    # half the depth is compared as far as it goes, and has no slope
    report = run_study("moments figures", cfg.replace(reference=str(tmp_path), depth=80, figures=(4,)))
    assert report.checks and not any("slope" in check.name for check in report.checks)
    write_published(tmp_path, cfg, shift=30.0)
    report = run_study("moments figures", cfg.replace(reference=str(tmp_path)))
    failed = {check.name.split(",")[0] for check in report.missed}
    assert {"bn_ff: inc", "bn_ff: logchi", "bn_ff: nu1abs_z", "vanilla_histo: mean lognu2"} <= failed


def test_a_histogram_has_the_published_mean_of_its_own_depth(tmp_path, names):
    write_published(tmp_path, FIGURES)
    cfg = FIGURES.replace(reference=str(tmp_path), figures=(2,), every=4)
    reference = marks.published(cfg, 2)
    report = run_study("moments figures", cfg)
    # published at layers 5, 10, 15 and 20, measured at 4, 8, 12, 16 and 20
    (line,) = (line for line in report.figures[0].axes[0].lines if line.get_linestyle() == "--")
    assert reference["depth"].tolist() == [20] and line.get_xdata()[0] == reference["lognu2_mean"][0]


def test_without_images_only_slope_and_exponent_are_compared(tmp_path, names):
    cfg = FIGURES.replace(depth=160, every=40)
    write_published(tmp_path, cfg)
    report = run_study("moments figures", cfg.replace(reference=str(tmp_path)))
    assert [check.name for check in report.checks] == ["bn_ff: slope of log chi, l > 100"]


def test_data_checks(tmp_path):
    z = np.full(5, 0.7)
    np.savez(tmp_path / "bn_ff_x.npz", nu1abs_z_mean=z, inc_phi_mean=(1 - z**2 / 2) ** -0.5 + 0.004)
    np.savez(tmp_path / "bn_ff_y.npz", nu1abs_z_mean=z, inc_phi_mean=(1 - z**2 / 2) ** -0.5 + 0.008)
    assert [check.passed for check in marks.data_checks(tmp_path)] == [True, False]


@pytest.fixture(scope="module")
def space(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("space") / "tiny.yaml"
    tiny_space(resolution=16).save(path)
    return str(path)


def test_a_space(space, tmp_path):
    report = run_study("moments module", ModuleConfig(space=space, batch=8, paths=3, candidate_paths=2))
    settings = ("orthogonal, tanh", "gaussian, tanh", "orthogonal, relu6", "gaussian, relu6")
    assert tuple(report.verdicts) == settings
    paths, layers, stages, candidates, comparable = report.tables
    assert [row[0] for row in stages.rows] == ["reduction", "1 later", "whole stage"]
    assert [row[0] for row in paths.rows] == list(settings)
    assert [row[0] for row in layers.rows] == ["0 reduction", "1", "2 reduction", "3"]
    assert [row[0] for row in candidates.rows] == [f"{i} {n}" for i in range(4) for n in ("k3 e2", "k5 e1", "k3 e3")]
    assert all(0.8 < float(cell) < 3 for row in candidates.rows for cell in row[1:])
    assert len(comparable.rows) == 4
    assert all((curves["candidates_std"] > 0).all() for curves in report.data["curves"].values())
    assert report.figures[0].axes[0].get_legend_handles_labels()[1] == list(settings)
    assert report.save(tmp_path).read_text().count("<figure>") == 1


def test_a_space_on_images(space, tmp_path):
    photos = write_folder(tmp_path / "photos", {"a": 6, "b": 6})
    report = run_study(
        "moments module", ModuleConfig(space=space, batch=8, paths=2, candidate_paths=1, images=str(photos))
    )
    assert "images of photos" in report.subject


def two_layers() -> nn.Module:
    """A user's factory."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3))


def test_a_module():
    cfg = ModuleConfig(module=f"{__name__}:two_layers", input="3,8,8", batch=8)
    report = run_study("moments module", cfg)
    assert [table.title for table in report.tables] == ["as it is", "orthogonal", "gaussian"]
    assert [row[0] for row in report.tables[0].rows] == ["0", "1", "2", "3"]
    report = run_study("moments module", cfg.replace(probes="3, 1"))
    assert [row[0] for row in report.tables[0].rows] == ["1", "3"]
    assert len(report.figures[0].axes) == 2
    report = run_study("moments module", ModuleConfig(module=f"{__name__}:vectors", input="6", batch=8))
    assert report.tables[0].rows


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FiguresConfig(figures=(1,)), r"figures must be some of 2, 3, 4 and 5, got \[1\]"),
        (lambda: FiguresConfig(reference="/no/such"), "reference must be a folder of .npz files, got '/no/such'"),
        (lambda: ModuleConfig(batch=1), "batch and paths must be at least 2, got 1 and 16"),
        (lambda: ModuleConfig(paths=3), "candidate_paths must be at most paths, got 4 and 3"),
        (
            lambda: run_study("moments module", ModuleConfig(module=f"{__name__}:two_layers", input="4,8,8")),
            "two_layers', input 4,8,8, as it is: .*cannot take x of shape",
        ),
        (
            lambda: run_study("moments module", ModuleConfig(module=f"{__name__}:vectors", input="6", images="x")),
            "images need an input",
        ),
    ],
)
def test_wrong_settings_are_named(call, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        call()
