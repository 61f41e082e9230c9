"""The lookups: rows are appended, kept, and equal what the report of the same scores says."""

from __future__ import annotations

import itertools
import json

import pytest
from tiny import write_folder

from benchmarks import bench_lookups
from nasfast.indicators.structure import BASELINES
from nasfast.indicators.zero_cost import ZERO_COST

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
    bench_lookups.main([*argv, "--architectures", "20"])
    before = (tmp_path / "out.jsonl").read_bytes()
    found = bench_lookups.rows(tmp_path / "out.jsonl")
    assert [(r["table"], r["score"]) for r in found] == [
        (f"nas_bench_201 {column}", score) for column in "ab" for score in (*BASELINES, *ZERO_COST)
    ]
    # the accuracies of one data set are the other's in reverse order, and both share the scores
    for one, other in zip(found[:10], found[10:], strict=True):
        assert one["kendall"]["value"] == pytest.approx(-other["kendall"]["value"])
        assert one.get("failed") == other.get("failed")

    def fail(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(bench_lookups, "ZERO_COST", dict.fromkeys(ZERO_COST, fail))
    bench_lookups.main([*argv, "--architectures", "20"])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    # a missing row is added
    lines = before.splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:5] + lines[6:]))
    with pytest.raises(AssertionError, match="computed again"):
        bench_lookups.main([*argv, "--architectures", "20"])
    capsys.readouterr()
    bench_lookups.main([*argv, "--summary"])
    shown = capsys.readouterr().out
    assert shown.count("| naswot |") == 2 and "nas_bench_201 a, 20 architectures per seed" in shown
    assert shown.count("| depth |") == 4 and "nas_bench_201 b, all 64 architectures" in shown


def test_an_architecture_without_a_score_is_the_lowest(argv, tmp_path, monkeypatch):
    """NASWOT's kernel is singular where no ReLU sees the images: no convolution on the edge (0, 1), which would have
    a ReLU though nothing comes of it, and none on (0, 2) and (0, 3), by which alone something reaches the output."""
    monkeypatch.setattr(bench_lookups, "ZERO_COST", {"naswot": ZERO_COST["naswot"]})
    seen, rank = {}, bench_lookups.rank

    def recorded(truth, scores, *args, **kwargs):
        seen.update(scores)
        return rank(truth, scores, *args, **kwargs)

    monkeypatch.setattr(bench_lookups, "rank", recorded)
    bench_lookups.main([*argv, "--columns", "a"])
    row = next(r for r in bench_lookups.rows(tmp_path / "out.jsonl") if r["score"] == "naswot")
    sees = {arch: arch[0] >= 3 or arch[1] != 0 or arch[3] != 0 for arch in seen}
    assert row["failed"] == 2 == sum(not s for s in sees.values())
    assert max(v for a, v in seen.items() if not sees[a]) < min(v for a, v in seen.items() if sees[a])
