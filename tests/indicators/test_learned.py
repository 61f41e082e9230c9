"""Features of architectures by hand, scores learned from few accuracies, and the table of benchmarks."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from scipy.stats import kendalltau
from tiny import batches, tiny_space, write_folder

from nasfast import extensions
from nasfast.cli.main import main
from nasfast.indicators.benchmark import Benchmark, run_benchmarks
from nasfast.indicators.evidence import NetworkEvidence
from nasfast.indicators.learned import features, learned_score
from nasfast.indicators.registry import ScoreError
from nasfast.indicators.structure import structure_scores
from nasfast.research.cells.space import nas_bench_201_space, transnas_micro_space

CELLS = nas_bench_201_space(cells=2, channels=4, resolution=8)
SETS = [s for size in range(1, 5) for s in itertools.combinations(range(5), size)]


def test_graph_features_of_a_cell_by_hand():
    """Edges 01 02 12 03 13 23: conv3x3, none, skip, none, none, conv3x3. The only path of work is 0-1-2-3."""
    (row,) = CELLS.encode([(4, 0, 1, 0, 0, 4)])
    assert len(row) == 65
    counts, least, most = row[:5], dict(zip(SETS, row[5:35], strict=True)), dict(zip(SETS, row[35:], strict=True))
    assert list(counts) == [3, 1, 0, 0, 2]
    assert (least[1, 4], most[1, 4]) == (3, 3)
    assert (least[4,], most[4,]) == (7, 0)  # the skip between interrupts the path
    assert (least[0,], most[0,]) == (1, 1)  # `none` on the edge from input to output
    assert (least[0, 4], most[0, 4]) == (1, 2)  # 0-1-3, and 0-2-3
    assert (least[0, 1, 4], most[0, 1, 4]) == (1, 3)


def test_features_of_layers_say_what_is_chosen():
    space = tiny_space()
    archs = [layer.options for layer in space.layers]
    archs = list(itertools.product(*archs))[:5]
    rows = space.encode(archs)
    pairs = [(i, v) for i, layer in enumerate(space.layers) for v in layer.legal]
    for row, arch in zip(rows, archs, strict=True):
        assert {pairs[i] for i in np.flatnonzero(row[: len(pairs)])} == set(enumerate(arch))
        assert sum(row[len(pairs) :]) == len(space)
    assert list(features(space, archs)[:, 3]) == structure_scores(space, "sqrt_size", archs)


def test_transnas_micro_is_nas_bench_201_without_pooling():
    space = transnas_micro_space()
    assert (space.ops, space.cardinality) == (("none", "skip_connect", "conv_1x1", "conv_3x3"), 4**6)
    whole = nas_bench_201_space()
    assert space.cost(space.parse("(3, 1, 2, 0, 3, 1)")) == whole.cost((4, 1, 3, 0, 4, 1))


def cells(count: int) -> list:
    return random.Random(0).sample(list(itertools.product(range(5), repeat=6)), count)


def test_few_accuracies_improve_a_prior_and_noise_leaves_it():
    archs = cells(300)
    truth = {a: float(a.count(4) + 2 * (a[3] == 1) - a.count(2)) for a in archs}
    prior = dict(zip(archs, structure_scores(CELLS, "macs", archs), strict=True))
    known = archs[:60]
    learned = learned_score(CELLS, {a: truth[a] for a in known}, prior)
    assert learned.keys() == set(archs)

    def tau(scores):
        return kendalltau([scores[a] for a in archs[60:]], [truth[a] for a in archs[60:]]).statistic

    assert tau(learned) > tau(prior) + 0.1
    # only the order of accuracies counts
    assert learned_score(CELLS, {a: 10 + 3 * truth[a] for a in known}, prior) == learned
    noise = random.Random(1)
    shuffled = learned_score(CELLS, {a: noise.random() for a in known}, prior)
    assert tau(shuffled) > tau(prior) - 0.1


def test_no_architecture_is_looked_for_in_a_list(small_forests):
    """One of 400 places in 15,625 architectures took the comparison of 3 million pairs."""
    compared = []

    class Counted(tuple):
        __hash__ = tuple.__hash__

        def __eq__(self, other):
            compared.append(self)
            return tuple.__eq__(self, other)

    archs = [Counted(arch) for arch in cells(300)]
    scores = {arch: float(i % 7) for i, arch in enumerate(archs)}
    learned_score(CELLS, {arch: scores[arch] for arch in archs[:60]}, scores)
    assert len(compared) < 300


def test_a_missing_package_names_its_extra(monkeypatch):
    def load(name):
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr(extensions.importlib, "import_module", load)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nasfast\[learn\]'"):
        learned_score(CELLS, {a: 1.0 for a in cells(2)}, {a: 0.0 for a in cells(2)})


def test_benchmarks_stand_beside_the_best_count(small_forests):
    archs = cells(40)
    accuracies = {a: float(a.count(4)) + 0.01 * i for i, a in enumerate(archs)}
    evidence = NetworkEvidence(CELLS, batches(1, resolution=8))
    report = run_benchmarks(
        [Benchmark("one", evidence, accuracies)], ["depth", "gamma+depth"], trainings=(12, 30), resamples=20
    )
    assert report.counts == {"one": 40}
    assert report.rows["best count"]["one"].note == "more conv_3x3"
    depth = report.rows["depth"]["one"]
    wanted = kendalltau([a.count(3) + a.count(4) for a in archs], list(accuracies.values())).statistic
    assert depth.kendall.value == pytest.approx(wanted) and depth.above.high < 0
    assert "gamma+depth" not in report.rows  # it needs a supernet
    assert report.rows["learned, 12 trainings"]["one"].kendall.value > 0.3
    assert "learned, 30 trainings" not in report.rows  # ten architectures are too few to judge
    with pytest.raises(ScoreError, match="unknown score 'jacob'"):
        run_benchmarks([Benchmark("one", evidence, accuracies)], ["jacob"])
    assert f"{depth.kendall}-" in str(report)


def test_the_command_reads_several_tables(small_forests, tmp_path, capsys):
    images = tmp_path / "images"
    write_folder(images, {"a": 9, "b": 9})
    archs = cells(30)
    table = {" ".join(map(str, a)): {"x": a.count(4) + 1.0, "y": 90.0 - a.count(0)} for a in archs}
    (tmp_path / "table.json").write_text(json.dumps(table))
    argv = ["rank", f"--images={images}", "--batch=8", "--cells=1", "--channels=2", "--resamples=20", "--sample=14"]
    files = [f"nas_bench_201={tmp_path}/table.json:{column}" for column in "xy"]
    assert main([*argv, "--score=jacov,depth", f"--save={tmp_path / 'out.json'}", "--benchmark", *files]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["counts"] == {"nas_bench_201 x": 14, "nas_bench_201 y": 14}
    assert set(saved["rows"]) == {"best count", "jacov", "depth"}
    assert "best count" in capsys.readouterr().out
    one = ["--space=nas_bench_201", f"--table={tmp_path}/table.json", "--column=x", f"--save={tmp_path / 'one.json'}"]
    assert main([*argv[:-1], *one]) == 0  # by the default score, which no flag names
    assert json.loads((tmp_path / "one.json").read_text())["architectures"] == 30
    for wrong, message in (
        (["--benchmark", "x.json"], "expected SPACE=FILE or SPACE=FILE:COLUMN"),
        (["--table=a", "--benchmark", *files], "--benchmark takes no --table"),
    ):
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["rank", "--benchmark", *files]) == 2
    assert "--benchmark needs --images" in capsys.readouterr().err
