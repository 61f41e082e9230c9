"""Searches of a run: its score and others, tables of costs, trained accuracies, scores that need no training."""

from __future__ import annotations

import itertools
import json
import random
import sys

import pytest
from digits_runs import EVOLUTION, interrupt
from scipy.stats import kendalltau
from tiny import tiny_space

from nasfast.cli.main import main
from nasfast.data import make_loader, make_loaders, random_subset
from nasfast.indicators import bn_gamma
from nasfast.indicators.registry import get_score
from nasfast.indicators.scores import score_paths, score_table, untrained_table
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline.evidence import build_evidence, load_evidence, load_supernet
from nasfast.pipeline.run import load_settings, resolved
from nasfast.report.html import write_report
from nasfast.research.zero_cost import ntk_q
from nasfast.search import load_candidates
from nasfast.settings import METHODS, RunConfig
from nasfast.spaces import SKIP, SearchSpace, read_cost_table
from nasfast.supernet import inherit
from nasfast.train.supernet import make_supernet

SPACE = tiny_space(num_classes=10)
ARCHS = list(itertools.product(range(3), repeat=4))


def accuracy(arch):
    """The last candidates of the first two layers are best, against the table of `scored`."""
    return 50.0 + 3 * arch[0] + 2 * arch[1] - arch[2] - arch[3] / 2


def write_accuracies(path, archs):
    path.write_text(json.dumps({"".join(map(str, arch)): accuracy(arch) for arch in archs}))
    return path


def test_the_default_score_is_distilled_from_held_out_images_beside_structure(run_dir):
    table = IndicatorTable.load(run_dir / "indicators.json")
    assert (table.rule, table.meta["score"], table.meta["step"]) == ("sum", "path_loss", 20)
    assert table.meta["structure"] == METHODS["dinas"].structure
    assert 0 < table.meta["r2"] <= 1
    evidence, _ = load_evidence(load_settings(str(run_dir)), SPACE)
    train, held = evidence.loaders
    assert len(train.source) + len(held.source) == 1442  # the digits of the training part
    assert sum(len(y) for _, y in evidence.batches) == len(held.source)
    # batches mix the classes, as those of training did
    assert all(len(y.unique()) > 5 for _, y in evidence.batches)
    again = score_table("path_loss", evidence, structure=METHODS["dinas"].structure)
    assert [again.score(a) for a in evidence.sample(5)] == [table.score(a) for a in evidence.sample(5)]


@pytest.mark.slow
def test_another_score_of_the_same_supernet(out):
    assert main(["score", "--out", str(out), "--score.name", "gamma", "--score.structure", "0"]) == 0
    net, _ = load_supernet(load_settings(str(out)), SPACE)
    table = IndicatorTable.load(out / "indicators.json")
    assert table.scores == bn_gamma.score(net).scores
    assert main(["search", "--out", str(out)]) == 0
    best = load_candidates(out / "archs.json").candidates[0]
    assert best.score == pytest.approx(table.score(best.arch))
    # the scores need no training: they use the weights with which the supernet began
    assert main(["score", "--out", str(out), "--score.name", "ntk_q", "--score.images", "64"]) == 0
    assert IndicatorTable.load(out / "indicators.json").meta["score"] == "ntk_q"


def test_a_score_can_be_ranked_path_by_path(out, tmp_path, capsys):
    table = write_accuracies(tmp_path / "accuracies.json", ARCHS)
    ranked = ["rank", "--out", str(out), "--table", str(table), "--resamples", "10"]
    assert main([*ranked, "--score", "path_accuracy", "--sample", "12"]) == 0
    assert "12 architectures" in capsys.readouterr().out
    report = json.loads((out / "rank-path_accuracy.json").read_text())
    cfg = load_settings(str(out))
    evidence = build_evidence(cfg, load_supernet(cfg, SPACE)[0], get_score("path_accuracy"))
    chosen = random.Random(0).sample(ARCHS, 12)
    scores = score_paths("path_accuracy", evidence, chosen)
    tau = kendalltau([scores[a] for a in chosen], [accuracy(a) for a in chosen]).statistic
    assert report["predictor"]["kendall"]["value"] == pytest.approx(tau)
    assert not (out / "rank.json").exists()


def test_a_score_of_untrained_weights_is_ranked_from_the_settings_alone(config, tmp_path, capsys):
    cfg = RunConfig.load(config).replace(seed=3)
    out, space, archs = tmp_path / "run", SPACE, ARCHS[::5]
    table = write_accuracies(tmp_path / "accuracies.json", archs)
    ranked = ["rank", "--out", str(out), "--table", str(table), "--resamples", "10", "--score"]
    out.mkdir()
    assert main([*ranked, "ntk_q"]) == 1
    error = capsys.readouterr().err
    assert f"{out / 'config.yaml'} is missing: run `nasfast supernet --out {out}` first" in error
    cfg.save(out / "config.yaml")
    assert main([*ranked, "ntk_q"]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["config.yaml", "rank-ntk_q.json"]
    # the same by hand: the weights of the method `dinas` with the seed, and the first batch of held-out images
    net, _ = make_supernet(space, "dinas", seed=3)
    _, held = make_loaders(cfg.data, resolution=space.resolution, seed=3, hold_out=True)
    images = make_loader(
        cfg.data, random_subset(held.source, 1000, 3), train=False, resolution=space.resolution, in_channels=3
    )
    batch = next(iter(images.epoch(0)))
    scores = [ntk_q(inherit(net, arch), *batch) for arch in archs]
    tau = kendalltau(scores, [accuracy(a) for a in archs]).statistic
    report = json.loads((out / "rank-ntk_q.json").read_text())
    assert report["predictor"]["kendall"]["value"] == pytest.approx(tau)
    assert main([*ranked, "gamma"]) == 1
    assert f"{out / 'space.yaml'} is missing: run `nasfast supernet --out {out}` first" in capsys.readouterr().err


@pytest.mark.slow
def test_a_score_of_paths_can_be_searched_without_a_table(out, capsys):
    (out / "indicators.json").rename(out / "refined.json")
    flags = ["--score.distill", "false", *(f"--search.{key}={value}" for key, value in EVOLUTION.items())]
    assert main(["score", "--out", str(out), *flags]) == 0
    assert not (out / "indicators.json").exists()
    assert main(["search", "--out", str(out), *flags]) == 0
    assert not (out / "refined.json").exists()
    (best, *_) = load_candidates(out / "archs.json").candidates
    evidence, checkpoint = load_evidence(load_settings(str(out)), SPACE)
    assert best.score == score_paths("path_loss", evidence, [best.arch])[best.arch]
    header = json.loads((out / "history.jsonl").read_text().splitlines()[0])
    assert header["scorer"] == f"path_loss of {checkpoint.digest}, 1000 images"


@pytest.fixture
def run(tmp_path):
    """A run directory that the search can begin with, and a file of latencies."""
    space, rng = tiny_space(), random.Random(0)
    folder = tmp_path / "run"
    folder.mkdir()
    space.save(folder / "space.yaml")
    rows = [{v: rng.uniform(0.1, 1) for v in layer.options} for layer in space.layers]
    IndicatorTable.from_rows(space, rows, {}).save(folder / "indicators.json")
    entries = [
        {"layer": i, "choice": v, "value": round(rng.uniform(1, 3), 2)}
        for i, layer in enumerate(space.layers)
        for v in layer.options
        if v != SKIP
    ]
    form = {"quantity": "latency", "unit": "ms", "about": "measured <here>", "fingerprint": space.fingerprint}
    (tmp_path / "latency.json").write_text(json.dumps({**form, "entries": entries}))
    return folder, tmp_path / "latency.json", space


def test_a_latency_limit_reaches_result_and_report(run, capsys):
    folder, file, space = run
    flags = ["search", "--out", str(folder), "--search.latency_table", str(file), "--search.top_k", "2"]
    assert main([*flags, "--search.max_latency_ms", "7.5"]) == 0
    shown = capsys.readouterr().out
    table, result = read_cost_table(file, space), load_candidates(folder / "archs.json", space)
    (limit,) = result.tables
    assert (limit.maximum, limit.about) == (7.5, "measured <here>")
    assert len(limit.pareto) > 1 and len(result.pareto) > 1
    for candidate in result.candidates:
        assert candidate.values == (table.cost(candidate.arch),) and candidate.values[0] <= 7.5
        assert f"{candidate.values[0]:.4g} ms latency" in shown
    assert "latency: measured <here>" in shown
    assert main(["report", "--out", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "7.5 ms of latency" in page and "Latency: measured &lt;here&gt;." in page and "latency, ms" in page
    assert (folder / "report" / "pareto_0.svg").exists()
    assert main([*flags, "--search.max_latency_ms", "1"]) == 1
    assert "max_latency_ms=1 cannot be met: the architectures of space 'tiny' at" in capsys.readouterr().err
    assert load_candidates(folder / "archs.json", space) == result


def test_a_limit_of_a_table_names_where_it_is_set(run, tmp_path, capsys):
    folder, file, _ = run
    energy = tmp_path / "energy.json"
    energy.write_text(json.dumps({**json.loads(file.read_text()), "quantity": "energy", "unit": "mJ"}))
    assert main(["search", "--out", str(folder), "--search.tables", json.dumps([f"{energy} <= 1"])]) == 1
    assert " mJ; raise its limit in search.tables to at least " in capsys.readouterr().err


def test_a_table_is_the_score(run, capsys):
    folder, file, space = run
    assert main(["search", "--out", str(folder), "--score.table", str(file)]) == 0  # a table of no known origin
    assert main(["score", "--out", str(folder), "--score.table", str(file)]) == 0
    assert main(["search", "--out", str(folder), "--search.top_k", "1"]) == 0
    result = load_candidates(folder / "archs.json", space)
    (best,) = result.candidates
    # what the results keep of their settings, for pages that compare runs
    assert (result.settings.top_k, result.settings.method, result.scored_with) == (1, "auto", None)
    assert IndicatorTable.load(folder / "indicators.json").meta["settings"]["score"]["table"] == str(file)
    costs = read_cost_table(file, space)
    fastest = tuple(min(layer.options, key=lambda v, i=i: costs.integers[i][v]) for i, layer in enumerate(space.layers))
    assert best.arch == fastest
    assert best.score == pytest.approx(-costs.cost(fastest))
    capsys.readouterr()
    other = file.with_name("other.json")
    other.write_bytes(file.read_bytes())
    assert main(["search", "--out", str(folder), "--score.table", str(other)]) == 1
    assert f"the settings say 'table {other}'" in capsys.readouterr().err


@pytest.fixture
def scored(tmp_path, config):
    """A run directory as the score stage leaves it, with a table in which the first candidates are best."""
    out = tmp_path / "run"
    out.mkdir()
    resolved(RunConfig.load(config).replace(out=str(out))).save(out / "config.yaml")
    SPACE.save(out / "space.yaml")
    rows = [{v: -float(v) for v in layer.options} for layer in SPACE.layers]
    IndicatorTable.from_rows(SPACE, rows, {"score": "path_loss", "step": 1}).save(out / "indicators.json")
    return out


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("sklearn.ensemble", "learning from trained accuracies needs scikit-learn: pip install 'nasfast[learn]'"),
        ("scipy.optimize", "search needs scipy.optimize, which comes with the search: pip install 'nasfast[search]'"),
    ],
)
def test_a_missing_package_is_a_line_and_no_traceback(module, said, scored, tmp_path, capsys, monkeypatch):
    table = write_accuracies(tmp_path / "accuracies.json", random.Random(0).sample(ARCHS, 60))
    refine = ["--search.refine", str(table)] if module == "sklearn.ensemble" else []
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["search", "--out", str(scored), *refine]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"nasfast search: {said}"


@pytest.mark.slow
def test_the_exact_search_runs_on_the_refined_table(scored, small_forests, tmp_path, capsys):
    table = write_accuracies(tmp_path / "accuracies.json", random.Random(0).sample(ARCHS, 60))
    assert main(["search", "--out", str(scored), "--search.max_macs", "null"]) == 0
    before = load_candidates(scored / "archs.json").candidates[0].arch
    assert before == (0, 0, 0, 0)
    free = ["search", "--out", str(scored), "--search.max_macs", "null", "--search.refine"]
    assert main([*free, str(table)]) == 0
    refined = IndicatorTable.load(scored / "refined.json")
    best = load_candidates(scored / "archs.json").candidates[0]
    assert best.optimal and best.arch == max(ARCHS, key=refined.score)
    assert best.arch == (2, 2, 0, 0)
    said = "The proof is about the score only. The accuracies of 60 architectures are added to the score: "
    assert said in capsys.readouterr().out
    write_report(scored)
    assert said in (scored / "report.html").read_text()
    assert IndicatorTable.load(scored / "indicators.json").scores[0] == {0: 0.0, 1: -1.0, 2: -2.0}
    # a search without the accuracies is what it was
    assert main([*free, "null"]) == 0
    assert load_candidates(scored / "archs.json").candidates[0].arch == before
    assert not (scored / "refined.json").exists()


@pytest.fixture
def space_file(tmp_path):
    tiny_space().save(tmp_path / "tiny.yaml")
    return tmp_path / "tiny.yaml"


def test_one_command_finds_the_best_within_the_limit(space_file, tmp_path, capsys):
    out = tmp_path / "run"
    space = tiny_space(num_classes=7)
    costs = {arch: space.cost(arch).macs for arch in ARCHS}
    limit = sorted(costs.values())[40]
    command = ["search", "--out", str(out), "--space.name", str(space_file), "--score.name=isometry"]
    command += ["--search.max_macs"]
    assert main([*command, str(limit), "--num_classes", "7"]) == 0
    assert SearchSpace.load(out / "space.yaml") == space
    table = untrained_table("isometry", space, structure=5.0)
    assert IndicatorTable.load(out / "indicators.json").scores == table.scores
    best = load_candidates(out / "archs.json").candidates[0]
    within = [arch for arch, macs in costs.items() if macs <= limit]
    assert best.optimal and best.score == pytest.approx(max(map(table.score, within)))
    assert "The proof is about the score only" in capsys.readouterr().out
    assert {"config.yaml", "space.yaml", "indicators.json", "archs.json"} <= {file.name for file in out.iterdir()}
    # again with another limit: the table is kept, and so are the classes
    before = (out / "indicators.json").stat().st_mtime_ns
    assert main([*command, str(2 * limit)]) == 0
    assert (out / "indicators.json").stat().st_mtime_ns == before
    assert SearchSpace.load(out / "space.yaml") == space
    # a damaged one is computed again
    (out / "indicators.json").write_text("{")
    assert main([*command, str(limit)]) == 0
    assert IndicatorTable.load(out / "indicators.json").scores == table.scores
    assert main([*command, str(limit), "--num_classes", "6"]) == 1
    assert "is another space: num_classes" in capsys.readouterr().err
    # another seed is another table
    assert main([*command, str(limit), "--seed", "1"]) == 1
    assert "has other settings: seed" in capsys.readouterr().err


def test_structure_alone_is_a_score(space_file, tmp_path):
    out = tmp_path / "run"
    assert main(["search", "--out", str(out), "--space.name", str(space_file), "--score.name", "sqrt_size"]) == 0
    assert json.loads((out / "indicators.json").read_text())["meta"]["score"] == "sqrt_size"


def test_the_first_training_decides_the_images(space_file, tmp_path, capsys, monkeypatch):
    """Also where it is stopped; before it, they may change, because nothing depends on them."""
    out = tmp_path / "run"
    flags = ["--out", str(out), "--space", str(space_file), "--score", "isometry", "--num_classes", "10"]
    assert main(["search", *flags]) == 0
    command = ["retrain", "--out", str(out), "--data.source", "digits", "--data.workers", "0", "--threads", "1"]
    command += ["--retrain.train.epochs", "1", "--retrain.random_architectures", "0"]
    with monkeypatch.context() as patched:
        interrupt(patched, 4)
        assert main([*command, "--retrain.train.checkpoint_every", "2"]) == 130
    before = (out / "config.yaml").read_bytes()
    assert main([*command, "--resume", "--data.augment", "none"]) == 1
    assert "has other settings: data.augment was 'auto', now 'none'" in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main(["retrain", "--out", str(out), "--resume"]) == 0
    assert (out / "retrain/best/result.json").exists()
