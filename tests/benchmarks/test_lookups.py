"""The lookups: rows are appended, kept, and equal what the report of the same scores says."""

from __future__ import annotations

import itertools
import json
import random
from argparse import Namespace

import pytest
from tiny import write_folder

from benchmarks import bench_lookups
from nasfast.cells import nas_bench_201_space
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.structure import baselines

OPS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3")


@pytest.fixture
def argv(tmp_path):
    images = write_folder(tmp_path / "images", {str(c): 2 for c in range(10)}, side=32)
    texts = [f"|{a}~0|+|{b}~0|none~1|+|{c}~0|none~1|skip_connect~2|" for a, b, c in itertools.product(OPS, repeat=3)]
    table = {text: {"a": 10.0 + i, "b": 90.0 - i} for i, text in enumerate(texts)}
    (tmp_path / "cells.json").write_text(json.dumps(table))
    return [
        f"--images={images}",
        f"--cells={tmp_path / 'cells.json'}",
        "--columns",
        "a",
        "b",
        "--cell-count=1",
        "--channels=2",
        "--architectures=64",
        "--batch=8",
        "--seeds",
        "4",
        "--resamples=10",
        f"--out={tmp_path / 'out.jsonl'}",
    ]


def test_rows_are_computed_once(argv, tmp_path, monkeypatch, capsys):
    argv = [*argv, "--architectures", "20", "--scores", "synflow", "naswot", "naswot+synflow"]
    bench_lookups.main(argv)
    before = (tmp_path / "out.jsonl").read_bytes()
    found = {(r["table"][-1], r["score"]): r for r in bench_lookups.rows(tmp_path / "out.jsonl")}
    names = ("synflow", "naswot", "naswot+synflow", *baselines(nas_bench_201_space()))
    assert set(found) == set(itertools.product("ab", names))
    # the accuracies of one data set are the other's in reverse order, and both share the scores
    for name in names:
        one, other = found["a", name], found["b", name]
        if name == "fewer avg_pool_3x3":  # no cell of the table has one
            assert one["kendall"]["value"] is None
            continue
        assert one["kendall"]["value"] == pytest.approx(-other["kendall"]["value"])
        assert one.get("failed") == other.get("failed")
    assert found["a", "naswot+synflow"]["failed"] == found["a", "naswot"]["failed"]

    def fail(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(bench_lookups, "score_networks", fail)
    bench_lookups.main(argv)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    # a missing row is added
    lines = before.splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:5] + lines[6:]))
    with pytest.raises(AssertionError, match="computed again"):
        bench_lookups.main(argv)
    capsys.readouterr()
    bench_lookups.main([*argv, "--summary"])
    shown = capsys.readouterr().out
    assert shown.count("| naswot |") == 2 and "nas_bench_201 a, 20 architectures per seed" in shown
    assert shown.count("| depth |") == 2 and shown.count("all 64 architectures: tau depth ") == 2


def test_no_sample_has_the_cells_that_scores_were_chosen_on(argv, monkeypatch):
    monkeypatch.setattr(bench_lookups, "CHOSEN_ON", (100, 30))
    args = Namespace(macro=None, cells=argv[1].partition("=")[2], columns=["a"], cell_count=1, channels=2)
    (task,) = bench_lookups.tasks(args)
    truth = read_accuracies(args.cells, task.space, column="a")
    seen = random.Random(100).sample(sorted(truth), 30)
    assert set(task.truth) == set(truth) - set(seen) and len(task.truth) == 34
    # but the whole table is ranked
    assert bench_lookups.whole(task, "depth")["architectures"] == 64


def test_an_architecture_without_a_score_is_the_lowest(argv, tmp_path, monkeypatch):
    """NASWOT's kernel is singular where no ReLU sees the images: no convolution on the edge (0, 1), which would have
    a ReLU though nothing comes of it, and none on (0, 2) and (0, 3), by which alone something reaches the output."""
    seen, rank = {}, bench_lookups.rank

    def recorded(truth, scores, *args, **kwargs):
        seen.update(scores)
        return rank(truth, scores, *args, **kwargs)

    monkeypatch.setattr(bench_lookups, "rank", recorded)
    bench_lookups.main([*argv, "--columns", "a", "--scores", "naswot"])
    row = next(r for r in bench_lookups.rows(tmp_path / "out.jsonl") if r["score"] == "naswot")
    sees = {arch: arch[0] >= 3 or arch[1] != 0 or arch[3] != 0 for arch in seen}
    assert row["failed"] == 2 == sum(not s for s in sees.values())
    assert max(v for a, v in seen.items() if not sees[a]) < min(v for a, v in seen.items() if sees[a])
