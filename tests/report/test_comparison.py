"""The page that compares runs: its figures against other computations, and runs that lack files."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from nasfast.cli.main import main
from nasfast.indicators.table import IndicatorTable
from nasfast.report.comparison import write_comparison
from nasfast.search import SearchConfig, load_candidates, save_candidates
from nasfast.settings import RetrainConfig
from nasfast.spaces import digits_mini


def rows_of(page, section: str) -> list[list[str]]:
    """The cells of the table of a section, row by row."""
    text = re.search(f'<section id="{section}">.*?</section>', page.read_text(), re.DOTALL)[0]
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", text)]


def settings(folder, **changes):
    data = {"val": "images/val", "batch_size": 32}
    form = {"out": str(folder), "seed": 0, "method": "dinas", "data": data, **changes}
    (folder / "config.yaml").write_text(json.dumps(form))


@pytest.fixture(scope="session")
def made(tmp_path_factory, make_run):
    """The files of two runs in one space; the table of the second is the first one's with noise."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("a", "b"):
        (folder / name).mkdir()
        make_run(folder / name, digits_mini(), max_macs=2.5e6)
    table, rng = IndicatorTable.load(folder / "a" / "indicators.json"), random.Random(3)
    block = tuple({c: score + rng.gauss(0, 0.1) for c, score in row.items()} for row in table.block)
    IndicatorTable(table.space, block, table.layer, {"method": "dinas"}).save(folder / "b" / "indicators.json")
    return folder


@pytest.fixture
def runs(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for seed, name in enumerate("ab"):
        settings(tmp_path / name, seed=seed)
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.usefixtures("blank_figures")
def test_a_network_of_several_seeds_counts_as_their_mean(runs, tmp_path):
    first, _ = runs
    shutil.copytree(first / "retrain" / "best", first / "retrain" / "best-seed-1")
    path = first / "retrain" / "best-seed-1" / "result.json"
    form = json.loads(path.read_text())
    path.write_text(json.dumps({**form, "top1": form["top1"] - 0.02, "correct": "00" * (len(form["correct"]) // 2)}))
    page = write_comparison(runs, tmp_path / "page.html")
    overview = {row[0]: row[1:] for row in rows_of(page, "runs")}
    assert overview["top-1 of the best"][0] == "74.12 % [73.12, 75.12] (2 seeds)"
    (row,) = rows_of(page, "accuracies")[1:]
    assert row[2].startswith("-37.56 ["), "half of the trainings are right nowhere"


@pytest.mark.usefixtures("blank_figures")
def test_two_runs(runs, tmp_path):
    first, second = runs
    form = json.loads((second / "retrain" / "best" / "result.json").read_text())
    right = np.unpackbits(np.frombuffer(bytes.fromhex(form["correct"]), np.uint8), count=form["images"])
    right[np.flatnonzero(right)[:300]] = 0
    worse = {**form, "correct": np.packbits(right).tobytes().hex(), "top1": float(right.mean())}
    (second / "retrain" / "best" / "result.json").write_text(json.dumps(worse))
    page = write_comparison(runs, tmp_path / "page.html")
    assert "cannot be read" not in page.read_text() and "Not run yet" not in page.read_text()
    # the page alone is written
    assert "<figure><svg" in page.read_text() and {path.name for path in tmp_path.iterdir()} == {"a", "b", "page.html"}

    overview = {row[0]: row[1:] for row in rows_of(page, "runs")}
    assert overview[""] == ["a", "b"] and overview["seed"] == ["0", "1"]
    low, high = stats.binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
    expected = f"{100 * right.mean():.2f} % [{100 * low:.2f}, {100 * high:.2f}]"
    assert overview["top-1 of the best"][1] == expected
    assert overview["time of retraining, all networks"] == ["55 min", "55 min"]  # 4 networks of 812.3 s

    # every image that differs is right in the first run only
    (_, (one, other, said)) = rows_of(page, "accuracies")
    half = 100 * 1.959963985 * np.std(np.r_[np.ones(300), np.zeros(len(right) - 300)], ddof=1) / len(right) ** 0.5
    assert (one, other, said) == ("a", "b", f"+3.00 [{3 - half:+.2f}, {3 + half:+.2f}]")

    assert rows_of(page, "settings") == [["setting", "a", "b"], ["seed", "0", "1"]]


@pytest.mark.usefixtures("blank_figures")
def test_tau_between_tables_is_that_of_scipy(runs, tmp_path):
    (_, (*_, said)) = rows_of(write_comparison(runs, tmp_path / "page.html"), "tables")
    tables, rng = [IndicatorTable.load(run / "indicators.json") for run in runs], random.Random(9)
    archs = [tuple(rng.choice(layer.options) for layer in tables[0].space.layers) for _ in range(3000)]
    tau = stats.kendalltau(*([table.score(arch) for arch in archs] for table in tables))[0]
    value, low, high = map(float, re.findall(r"[+-][\d.]+", said))
    assert low < value < high < 1 and value == pytest.approx(tau, abs=0.06)


@pytest.mark.usefixtures("blank_figures")
def test_what_cannot_be_compared_is_said(runs, tmp_path, make_run):
    first, second = runs
    settings(second, data={"source": "digits", "val": "images/val", "batch_size": 32})
    other = digits_mini().replace(num_classes=11)
    (tmp_path / "c").mkdir()
    make_run(tmp_path / "c", other, max_macs=2.5e6)
    settings(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "retrain")
    (tmp_path / "d").mkdir()
    settings(tmp_path / "d")
    page = write_comparison([*runs, tmp_path / "c", tmp_path / "d"], tmp_path / "page.html")
    said = {tuple(row[:2]): row[2] for row in rows_of(page, "accuracies")}
    assert said["a", "b"] == "evaluated on other images" and said["a", "c"] == "not both are retrained"
    said = {tuple(row[:2]): row[2] for row in rows_of(page, "tables")}
    assert said["a", "c"] == "tables of different spaces" and said["c", "d"] == "not both have a table"
    assert {row[0]: row[4] for row in rows_of(page, "runs")}["MACs"] == "-"


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"val_fraction": 0.2}, False),
        ({"split_seed": 4}, False),
        ({"train": "others"}, False),
        ({"train": "others", "val": "images/val"}, False),
        ({"source": "digits"}, False),
        ({"workers": 7, "augment": "none"}, True),
        (None, None),
    ],
)
def test_held_out_images_are_the_same_only_where_their_choice_is(runs, tmp_path, changes, same):
    """Without validation images of their own, runs hold out a part of the training images."""
    data = {"source": "folder", "train": "images", "val": None, "batch_size": 32, "split_seed": 1}
    settings(runs[0], data=data)
    settings(runs[1], data=None if changes is None else {**data, **changes})
    (_, (*_, said)) = rows_of(write_comparison(runs, tmp_path / "page.html"), "accuracies")
    other = "the images of one are not known" if same is None else "evaluated on other images"
    assert (said != other) == bool(same)


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("supernet", [{"sampler": "uniform"}, {"sampler": "strict_fair", "layer_indicators": False}])
def test_the_time_of_a_supernet_counts_every_path_of_a_step(runs, tmp_path, supernet):
    """The logged speed is that of images times paths: 900 steps of 32 images at 10 a second are 48 minutes a path."""
    paths = max(len(layer.options) for layer in digits_mini().layers) if supernet["sampler"] == "strict_fair" else 1
    for run in runs:
        settings(run, supernet=supernet)
        lines = [json.dumps({"stage": "supernet", "step": step, "images_per_s": 10.0}) for step in (450, 900)]
        (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    overview = {row[0]: row[1:] for row in rows_of(write_comparison(runs, tmp_path / "page.html"), "runs")}
    assert overview["time of supernet training"] == ["4 h 48 min" if paths == 6 else "48 min"] * 2


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("name", ["archs.json", "indicators.json", "space.yaml", "retrain/best/result.json"])
def test_a_damaged_file_costs_only_what_it_says(runs, tmp_path, name):
    (runs[1] / name).write_text("{")
    page = write_comparison(runs, tmp_path / "page.html")
    assert rows_of(page, "settings") == [["setting", "a", "b"], ["seed", "0", "1"]]
    assert "cannot be read" not in page.read_text()


@pytest.mark.usefixtures("blank_figures")
def test_settings_are_those_of_the_results(runs, tmp_path):
    """Later stages may have been given others, which are in config.yaml then."""
    page, searched = tmp_path / "page.html", SearchConfig(max_macs=2.5e6)
    retrain = {"init": "orthogonal", "top_k": 1, "train": {"epochs": 6, "lr": 0.1}}
    settings(runs[0], search={"max_macs": 2.5e6}, retrain={**retrain, "train": {"epochs": 1}})
    settings(runs[1], search={"max_macs": 9e6}, retrain={**retrain, "top_k": 7})
    for run, paths, ema in zip(runs, (300, 40), (None, 0.9), strict=True):
        table, result = IndicatorTable.load(run / "indicators.json"), load_candidates(run / "archs.json")
        meta = {**table.meta, "settings": {"score": {"name": "path_loss", "paths": paths}, "recalibration_batches": 20}}
        replace(table, meta=meta).save(run / "indicators.json")
        save_candidates(run / "archs.json", table.space, result.candidates, settings=searched)
        path = run / "retrain" / "best" / "result.json"
        trained = RetrainConfig.from_dict(retrain).replace(ema=ema)
        path.write_text(json.dumps({**json.loads(path.read_text()), "settings": trained.to_dict()}))
    write_comparison(runs, page)
    expected = [["retrain.ema", "None", "0.9"], ["retrain.top_k", "1", "7"], ["score.paths", "300", "40"]]
    assert rows_of(page, "settings")[1:] == expected

    # a search that scores whole paths uses no table, but one of an earlier score may be there still
    for run, name in zip(runs, ("path_loss", "path_accuracy"), strict=True):
        scored = {"score": {"name": name, "paths": 300}, "recalibration_batches": 20}
        candidates = load_candidates(run / "archs.json").candidates
        save_candidates(run / "archs.json", digits_mini(), candidates, settings=searched, scored_with=scored)
    write_comparison(runs, page)
    assert rows_of(page, "settings")[3:] == [["score.name", "path_loss", "path_accuracy"]]
    assert rows_of(page, "tables")[1:] == [["a", "b", "not both have a table"]]


@pytest.mark.usefixtures("blank_figures")
def test_the_command(runs, tmp_path, capsys, monkeypatch):
    first, second = map(str, runs)
    assert main(["report", first, second, "--page", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'page.html'}\n"
    monkeypatch.chdir(tmp_path)
    assert main(["report", first, second]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'comparison.html'}\n"
    assert main(["report", first]) == 0 and main(["report", "--out", second]) == 0
    assert (runs[0] / "report.html").exists() and (runs[1] / "report.html").exists()
    assert main(["report", first, first]) == 1
    assert "at least two run directories, each once" in capsys.readouterr().err
    assert main(["report", first, str(tmp_path)]) == 1
    assert "is no run directory: it has no config.yaml" in capsys.readouterr().err
    # what `nasfast run --seeds` leaves
    for folder in (tmp_path / "many", tmp_path / "many" / "seed-0", tmp_path / "many" / "seed-1"):
        folder.mkdir()
        settings(folder)
    assert main(["report", first, str(tmp_path / "many")]) == 1
    assert f"such as {tmp_path}/many/seed-0 {tmp_path}/many/seed-1\n" in capsys.readouterr().err
    for flags in ([], [first, "--out", second], [first, "--page", "x.html"]):
        assert main(["report", *flags]) == 2
