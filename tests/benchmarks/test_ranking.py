"""The queue of supernets: it continues where it stopped, computes rows once, and the summary shows them."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from tiny import tiny_macro_space, write_folder

import nasfast.train.loop as loop
from benchmarks import bench_ranking
from benchmarks.bench_ranking import Entry
from nasfast.indicators.table import IndicatorTable

SCORES = (("path_loss", 0.0), ("path_loss", 1.0), ("path_accuracy", 0.0))
QUEUE = (
    (Entry("initial", epochs=0, scores=(("ntk_q", 0.0),), paths=30), (0, 1)),
    (Entry("short", epochs=2, scores=SCORES, paths=60, batch_size=16), (0, 1)),
)


@pytest.fixture
def argv(tmp_path, monkeypatch):
    space = tiny_macro_space()
    monkeypatch.setattr(bench_ranking, "nas_bench_macro", tiny_macro_space)
    monkeypatch.setattr(bench_ranking, "QUEUE", QUEUE)
    folders = [write_folder(tmp_path / name, dict.fromkeys("abcd", count)) for name, count in (("t", 20), ("v", 2))]
    params = {"".join(map(str, a)): space.cost(a).params for a in itertools.product(range(3), repeat=4)}
    truth = {arch: 100 * count / max(params.values()) for arch, count in params.items()}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    return [
        f"--train={folders[0]}",
        f"--val={folders[1]}",
        f"--accuracies={tmp_path / 'truth.json'}",
        "--images=16",
        f"--work={tmp_path / 'work'}",
        f"--out={tmp_path / 'out.jsonl'}",
        "--resamples=10",
        "--threads=1",
    ]


def test_a_queue_goes_on_where_it_stopped(argv, tmp_path, monkeypatch, capsys):
    step, steps = loop.update, []

    def counted(*args, **kwargs):
        steps.append(1)
        if len(steps) == 6:  # of 8 steps: 72 images in batches of 16, for two epochs
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "update", counted)
    with pytest.raises(KeyboardInterrupt):
        bench_ranking.main(argv)
    rows = bench_ranking.read_lines(tmp_path / "out.jsonl")
    assert [(r["name"], r["seed"]) for r in rows] == [("initial", 0), ("initial", 1)]
    bench_ranking.main(argv)
    assert len(steps) == 6 + 4 + 8  # from the checkpoint of the first epoch; then the other seed
    rows = bench_ranking.read_lines(tmp_path / "out.jsonl")
    assert [(r["name"], r["seed"], r["score"], r["structure"]) for r in rows[2:]] == [
        ("short", seed, *score) for seed in (0, 1) for score in SCORES
    ]
    before = (tmp_path / "out.jsonl").read_bytes()
    bench_ranking.main(argv)
    assert len(steps) == 18
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert ["train_cpu_s" in row for row in rows[2:]] == [False] * 3 + [True] * 3
    table = IndicatorTable.load(tmp_path / "work" / "short-s1-path_loss-1.json")
    for row, kept in zip(table.scores, rows[6]["table"], strict=True):
        assert {int(choice): score for choice, score in kept.items()} == pytest.approx(row, abs=1e-6)
    capsys.readouterr()
    bench_ranking.main([*argv, "--summary"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:4] for line in shown[2:]] == [
        [" initial ", " ntk_q ", " 0 1 "],
        [" short ", " path_loss ", " 0 1 "],
        [" short ", " path_loss + 1 structure ", " 0 1 "],
        [" short ", " path_accuracy ", " 0 1 "],
    ]
    mean = sum(row["kendall"]["value"] for row in rows if (row["score"], row["structure"]) == SCORES[1]) / 2
    assert f" {mean:.3f} (" in shown[4]
    rho = sum(row["spearman"]["value"] for row in rows if (row["score"], row["structure"]) == SCORES[1]) / 2
    column = shown[0].split("|").index(" Spearman ")
    assert shown[4].split("|")[column].startswith(f" {rho:.3f} (")
    assert len({line.count("|") for line in shown}) == 1


def test_agreement_is_tau_of_the_scores():
    one = [{str(c): float(c * (i + 1)) for c in range(3)} for i in range(4)]
    turned = [{c: -score for c, score in row.items()} for row in one]
    assert bench_ranking._agreement(one, one) == pytest.approx(1)
    assert bench_ranking._agreement(one, turned) == pytest.approx(-1)
    noise = [{c: random.Random(f"{i} {c}").random() for c in row} for i, row in enumerate(one)]
    assert abs(bench_ranking._agreement(one, noise)) < 0.6


def test_the_default_entry_is_the_package_default():
    entry = next(entry for entry, _ in bench_ranking.QUEUE if entry.name == "default")
    assert entry.supernet == bench_ranking.SupernetConfig().resolved("dinas")
    assert (entry.train.lr, entry.train.label_smoothing, entry.train.epochs) == (0.4, 0.0, 30)
    deep = next(entry for entry, _ in bench_ranking.QUEUE if entry.name == "mobilenet_v2, deep")
    assert (deep.supernet, deep.train.lr) == (entry.supernet, 0.05)


def test_without_trained_accuracies_the_summary_says_how_far_seeds_agree(argv, tmp_path, monkeypatch, capsys):
    entry = Entry("other", epochs=0, scores=(("ntk_q", 0.0),), paths=30, space="mobilenet_v2")
    monkeypatch.setattr(bench_ranking, "QUEUE", ((entry, (0, 1)),))
    monkeypatch.setattr(bench_ranking, "mobilenet_v2", lambda **kwargs: tiny_macro_space())
    bench_ranking.main(argv)
    rows = bench_ranking.read_lines(tmp_path / "out.jsonl")
    assert [(row["space"], "kendall" in row) for row in rows] == [("mobilenet_v2", False)] * 2
    capsys.readouterr()
    bench_ranking.main([*argv, "--summary"])
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")[1:-1]]
    agreement = bench_ranking._agreement(rows[0]["table"], rows[1]["table"])
    assert cells[:8] == ["other", "ntk_q", "0 1", "-", "-", "-", "-", "-"]
    assert cells[10] == f"{agreement:.3f}"
