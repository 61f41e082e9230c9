"""Scores of single untrained networks, of layers and of cells, and their sums."""

from __future__ import annotations

import itertools
import json
from math import log

import pytest
from scipy.stats import kendalltau
from tiny import batches, write_folder

from nasfast.cli.main import main
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.registry import ScoreError
from nasfast.indicators.scores import (
    NetworkEvidence,
    combine_scores,
    default_score,
    parse_sum,
    rank_sum,
    score_networks,
)
from nasfast.research.cells.space import nas_bench_201_space
from nasfast.research.nasi.config import NasiConfig
from nasfast.research.nasi.score import untrained
from nasfast.research.nasi.search import search
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.zero_cost import ZERO_COST
from nasfast.spaces import nas_bench_macro

CELLS = nas_bench_201_space(cells=2, channels=4, resolution=8)
ARCHS = [(4, 1, 3, 2, 0, 4), (1, 4, 0, 0, 1, 3), (2, 2, 3, 1, 0, 4)]


@pytest.mark.parametrize("name", [*ZERO_COST])
def test_every_score_of_cells_is_that_of_the_untrained_network(name):
    images = batches(2, resolution=8)
    scores, failed = score_networks(name, NetworkEvidence(CELLS, images, seed=5), ARCHS[:2])
    by_hand = {arch: ZERO_COST[name](untrained(CELLS, arch, seed=5), *images[0]) for arch in ARCHS[:2]}
    assert (scores, failed) == (by_hand, {})


def test_networks_of_layers_have_the_same_scores():
    space, images = nas_bench_macro(resolution=16), batches(1, resolution=16)
    arch = (1, 0, 2, 1, 0, 1, 2, 0)
    scores, _ = score_networks("jacov", NetworkEvidence(space, images), [arch])
    assert scores == {arch: ZERO_COST["jacov"](untrained(space, arch), *images[0])}


def test_a_cell_through_which_nothing_passes_is_the_lowest():
    dead = [(0,) * 6, (4, 0, 0, 0, 0, 0)]
    scores, failed = score_networks("jacov", NetworkEvidence(CELLS, batches(1, resolution=8)), [*dead, *ARCHS])
    assert set(failed) == set(dead)
    assert max(scores[arch] for arch in dead) < min(scores[arch] for arch in ARCHS)
    with pytest.raises(ScoreError, match="path 0 0 0 0 0 0 of nas_bench_201 has no jacov: the logits of"):
        score_networks("jacov", NetworkEvidence(CELLS, batches(1, resolution=8)), dead)


def test_counts_are_parts_of_sums_of_cells():
    evidence = NetworkEvidence(CELLS, ())
    assert score_networks("depth", evidence, ARCHS) == (dict(zip(ARCHS, (3, 2, 2), strict=True)), {})
    assert default_score(CELLS).endswith("+depth") and default_score(nas_bench_macro()) == "sqrt_size"


@pytest.mark.slow
def test_nasi_scores_by_the_logits_of_its_search():
    images, space = batches(3, resolution=4), nas_bench_201_space(cells=1, channels=2, resolution=4)
    scores, _ = score_networks("nasi", NetworkEvidence(space, images, seed=2), ARCHS)
    logits = search(CellMixture(space, seed=2), images, NasiConfig(mu=1.0, seed=2)).logits[0]
    for arch in ARCHS:
        assert scores[arch] == pytest.approx(float(sum(logits[e, k] for e, k in enumerate(arch))))


def test_a_sum_of_ranks_by_hand():
    """Logarithms of the shares that are lower, with half of the ties: (0.5, 1.5, 2.5) / 3 and (1, 2.5, 1) / 3."""
    a, b, c = ARCHS
    found = rank_sum([{a: -5.0, b: 0.0, c: 1e9}, {a: 1.0, b: 2.0, c: 1.0}])
    assert found == pytest.approx({a: log(0.5 / 9), b: log(1.5 * 2.5 / 9), c: log(2.5 / 9)})


def test_signs_of_a_sum_and_architectures_without_a_part():
    assert parse_sum("x") == [(1, "x")] and parse_sum("-x") == [(-1, "x")]
    assert parse_sum("x+y-z") == [(1, "x"), (1, "y"), (-1, "z")]
    a, b, c = ARCHS
    parts = [{a: -5.0, b: 0.0, c: 1e9}, {a: 1.0, b: 2.0, c: 1.0}]
    expected = {a: log(0.5 * 2 / 9), b: log(1.5 * 0.5 / 9), c: log(2.5 * 2 / 9)}
    assert combine_scores("x-y", parts) == pytest.approx(expected)
    assert combine_scores("x", parts[:1]) == parts[0]
    assert combine_scores("-x", parts[:1]) == pytest.approx({a: log(2.5 / 3), b: log(1.5 / 3), c: log(0.5 / 3)})
    # what lacks a part is the lowest, although a minus would make it the highest
    found = combine_scores("x-y", parts, {c})
    assert found[c] < min(found[a], found[b]) and found[a] == pytest.approx(log(0.5 * 2 / 9))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of three classes, and a table of cells in NAS-Bench-201's form."""
    folder = tmp_path_factory.mktemp("rank")
    images = write_folder(folder / "images", dict.fromkeys("abc", 6), side=32)
    ops = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3")
    cells = [f"|{a}~0|+|{b}~0|none~1|+|avg_pool_3x3~0|none~1|skip_connect~2|" for a, b in itertools.product(ops, ops)]
    (folder / "table.json").write_text(json.dumps({cell: {"val": 90.0 - i} for i, cell in enumerate(cells)}))
    return images, folder / "table.json", cells


def rank_argv(files, *more):
    argv = ["rank", f"--table={files[1]}", "--column=val", f"--images={files[0]}", "--resamples=10", "--seed=3"]
    return [*argv, "--batch=6", "--score", *more]


def test_one_command_ranks_cells(files, tmp_path, capsys):
    sizes = ["--space=nas_bench_201", "--cells=3", "--channels=2"]
    assert main([*rank_argv(files, "jacov+synflow"), *sizes, f"--save={tmp_path / 'rank.json'}"]) == 0
    assert "more conv_3x3" in capsys.readouterr().out
    space = nas_bench_201_space(cells=3, channels=2, num_classes=3)
    data = DataConfig(train=str(files[0]), batch_size=6)
    batch = next(iter(make_loader(data, FolderSource(files[0]), resolution=32, seed=3).epoch(0)))
    archs = [space.parse(cell) for cell in files[2]]
    parts = [{a: ZERO_COST[n](untrained(space, a, seed=3), *batch) for a in archs} for n in ("jacov", "synflow")]
    total = rank_sum(parts)
    tau = kendalltau([total[a] for a in archs], [-i for i in range(len(archs))]).statistic
    report = json.loads((tmp_path / "rank.json").read_text())
    assert report["predictor"]["kendall"]["value"] == pytest.approx(tau)
    assert [row["name"] for row in report["baselines"]][:4] == ["depth", "macs", "params", "sqrt_size"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["gamma", "--space=nas_bench_201"], "'gamma' needs a supernet"),
        (["naswott", "--space=nas_bench_201"], "unknown score 'naswott'; did you mean 'naswot'"),
        (["naswot", "--space=nas_bench_macro"], "16 of 16 architectures are not of space 'nas_bench_macro'"),
        (["naswot", "--space=nas_bench_macro", "--cells=3"], "cells belong to spaces of cells, and nas_bench_macro"),
        (["naswot", "--space=nas_bench_201", "--batch=19"], "a batch must have at most 18 images"),
    ],
)
def test_what_cannot_be_ranked_is_said(files, capsys, more, message):
    assert main(rank_argv(files, *more)) == 1
    assert message in capsys.readouterr().err
