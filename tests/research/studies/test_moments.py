"""The studies of moments: marks, comparison with published arrays, resuming, and paths through a space."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import tiny_space, write_folder

from nasfast.config import ConfigError
from nasfast.research.analysis.moments.detect import detect, summarise
from nasfast.research.analysis.moments.networks import NetConfig, gaussian, images, run
from nasfast.research.studies import moments, moments_paths
from nasfast.research.studies.commands import FiguresConfig, SpaceConfig, StudyConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.spaces import mobilenet_v2


def test_quick_marks_every_family_and_continues_from_its_results(tmp_path, monkeypatch):
    """The structure of the experiment in a second; its marks belong to its own sizes."""
    sizes = {"FC_NETWORKS": 2, "CONV_NETWORKS": 2, "VANILLA_CONV_NETWORKS": 3, "HISTOGRAM_NETWORKS": 12}
    nets = {"FC": NetConfig(width=24, batch=16, depth=24), "CONV": NetConfig(kernel=3, width=8, batch=4, depth=40)}
    for name, value in {**sizes, **nets}.items():
        monkeypatch.setattr(moments, name, value)
    monkeypatch.setitem(moments.VARIANTS["ReLU resnet without BN"], "depth", 24)
    marks = []
    for seed in (1, 1):
        notes = Notebook("moments-quick", StudyConfig(seed=seed), tmp_path)
        moments.quick(notes.settings, notes)
        marks.append(notes.marks)
        # what is there is not computed again
        monkeypatch.setattr("nasfast.research.analysis.moments.networks.run_chunk", None)
    assert marks[0] == marks[1] and len(marks[0]) == 38
    assert len({mark["name"] for mark in marks[0]}) == 38 and all(math.isfinite(m["measured"]) for m in marks[0])
    assert len(notes.tables["averages over networks"]) == 1 + 6 * 4
    with pytest.raises(TypeError):
        moments.quick(StudyConfig(seed=5), Notebook("moments-quick", StudyConfig(seed=5), tmp_path))


def test_the_marks_tell_the_families_apart():
    """Each family's marks, applied to the others' runs, are missed."""
    base = NetConfig(width=64, batch=32, depth=80, every=4)
    changes = {"vanilla": {}, "exploding": {"norm": "batch"}, "resnet": {"norm": "batch", "residual": 2}}
    runs = {name: run(base.replace(**change), gaussian(96), realisations=4) for name, change in changes.items()}

    def missed(judge, name: str) -> set[str]:
        notes = Notebook("n", StudyConfig())
        judge("n", runs[name], detect(runs[name].depth, runs[name].curves()), notes)
        return {mark.removeprefix("n: ") for mark in notes.missed}

    assert missed(moments.vanilla, "exploding") == {"increment, last half", "r_eff(L)", "detected one-dimensional"}
    exploding = {"slope of log chi", "R^2 of exponential", "detected exploding"}
    assert exploding <= missed(moments.exploding, "resnet")
    assert not missed(moments.exploding, "exploding") & {"slope of log chi", "detected exploding"}
    bounds = {f"increment over {end} of theorem 4, {most}" for end, most in
              (("lower bound", "smallest"), ("upper bound", "largest"))}  # fmt: skip
    assert not missed(moments.resnet, "resnet") & {"R^2 of power law", *bounds}


@pytest.mark.slow
def test_figures_beside_published_arrays(tmp_path, monkeypatch):
    """Our own networks as if they were the published ones; shifted ones miss their marks."""
    sizes = {"WIDTH": 16, "HISTOGRAM_WIDTH": 32, "HISTOGRAM_BATCH": 8, "DEPTH": 160, "RESIDUALS": 20}
    for name, value in {**sizes, "PUBLISHED_HISTOGRAM_NETWORKS": 10}.items():
        monkeypatch.setattr(moments, name, value)
    photos = write_folder(tmp_path / "photos", {"a": 12, "b": 12})
    cfg = FiguresConfig(images=str(photos), batch=8, networks=60, reference=str(tmp_path))
    source = images(moments.load_images(str(photos)), flat=True)
    names = {2: "vanilla_histo_fc_w32", 4: "bn_ff_fc_b8"}

    def study(shift: float) -> Notebook:
        for figure, name in names.items():
            network = run(moments.published_network(cfg, figure), source, realisations=64, seed=7)
            arrays = {**summarise(network.curves()), "depth": network.depth.astype(int), "n_real": np.array(64)}
            arrays |= {f"{key}_kurt": np.zeros(4) for key in ("lognu2", "logmu2_noise")}
            arrays = {key: v + shift if key.endswith("_mean") else v for key, v in arrays.items()}
            np.savez(tmp_path / f"{name}.npz", **arrays)
        notes = Notebook("moments-figures", cfg)
        moments.figures(cfg, notes)
        return notes

    notes = study(0.0)
    marks = {mark["name"]: mark["passed"] for mark in notes.marks}
    assert "bn_ff_fc_b8: slope of log chi, l > 100" in marks
    assert all(passed for name, passed in marks.items() if "deviation" in name) and "agreement" in notes.tables
    missed = {name.split(",")[0] for name in study(30.0).missed}
    assert {f"bn_ff_fc_b8: {key}" for key in ("inc", "logchi", "nu1abs_z")} <= missed
    assert "vanilla_histo_fc_w32: mean lognu2" in missed


def test_names_of_the_published_arrays(tmp_path):
    def name(figure: int, **flags: object) -> str | None:
        cfg = FiguresConfig(reference=str(tmp_path), **flags)
        return moments.published(cfg, figure, moments.published_network(cfg, figure)).get("name")

    names = ("bn_ff_fc_b256", "bn_res_conv", "vanilla_conv_zeropad", "vanilla_fc", "bn_res_fc", "vanilla_conv")
    for stem in names:
        np.savez(tmp_path / f"{stem}.npz", depth=np.arange(10, 201, 10))
    assert (name(4, batch=256), name(4), name(5, batch=256)) == ("bn_ff_fc_b256", None, None)
    assert (name(3), name(3, kernel=3, padding="zero")) == ("vanilla_fc", "vanilla_conv_zeropad")
    # the shift matters to skip connections alone
    assert (name(3, kernel=3, padding="periodic"), name(5, kernel=3, padding="periodic")) == ("vanilla_conv", None)
    assert (name(5, kernel=3), name(5)) == ("bn_res_conv", "bn_res_fc")


def test_marks_of_the_published_arrays(tmp_path):
    z = np.full(5, 0.7)
    for stem, distance in (("bn_ff_x", 0.004), ("bn_ff_y", 0.008)):
        np.savez(tmp_path / f"{stem}.npz", nu1abs_z_mean=z, inc_phi_mean=(1 - z**2 / 2) ** -0.5 + distance)
    notes = Notebook("n", StudyConfig())
    moments._published_marks(tmp_path, notes)
    assert [mark["passed"] for mark in notes.marks] == [True, False]


def test_paths_through_a_space(tmp_path, monkeypatch):
    tiny_space(resolution=16).save(tmp_path / "tiny.yaml")
    for name, value in (("BATCH", 8), ("PATHS", 3), ("CANDIDATE_PATHS", 2)):
        monkeypatch.setattr(moments_paths, name, value)
    cfg = SpaceConfig(space=str(tmp_path / "tiny.yaml"))
    notes = Notebook("moments-paths", cfg, tmp_path)
    moments_paths.paths(cfg, notes)
    end, stages, comparable, layers, candidates = notes.tables.values()
    assert [row[0] for row in end[1:]] == [
        f"{init}, {a}" for a in ("tanh", "relu6") for init in ("orthogonal", "gaussian")
    ]
    assert [row[0] for row in stages[1:]] == ["reduction", "1 later", "whole stage"]
    assert (len(comparable), len(layers)) == (5, 5)
    assert [row[0] for row in candidates[1:]] == [f"{i} {n}" for i in range(4) for n in ("k3 e2", "k5 e1", "k3 e3")]
    assert all(0.8 < float(cell) < 3 for row in candidates[1:] for cell in row[1:])
    notes.close()
    assert (tmp_path / "moments-paths.html").read_text().count("<figure>") == 1


def test_spaces_are_reduced_and_need_one_activation(tmp_path):
    spaces = ("mobilenet_v2", "nas_bench_macro")
    assert [moments_paths.reduced_space(name).resolution for name in spaces] == [64, 32]
    space = mobilenet_v2()
    stages = (space.stages[0].replace(activation="hswish"), *space.stages[1:])
    space.replace(stages=stages).save(tmp_path / "mixed.yaml")
    with pytest.raises(ConfigError, match=r"activations of their own \(hswish\), and this study gives all"):
        moments_paths.reduced_space(str(tmp_path / "mixed.yaml"))


def test_a_missing_reference_is_named():
    with pytest.raises(ConfigError, match="reference must be a folder of .npz files, got '/no/such'"):
        FiguresConfig.from_dict({"reference": "/no/such"})
