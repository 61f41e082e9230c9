"""Q by part of the network: the parts sum to Q, and without norms nothing is normalised."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import write_folder

from benchmarks import bench_trace
from nasfast.cells import nas_bench_201_space
from nasfast.nasi.score import score, untrained

SPACE = nas_bench_201_space(cells=3, channels=2, resolution=8)
ARCH = (4, 3, 1, 1, 2, 4)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(6, 3, 8, 8), torch.arange(6)


def test_parts_sum_to_q(batch):
    network = untrained(SPACE, ARCH, seed=1)
    parts = bench_trace.squares(network, *batch)
    assert set(parts) == {
        "stem",
        "cells.0",
        "cells.1",
        "cells.2",
        "transitions.1",
        "transitions.2",
        "head",
        "classifier",
    }
    assert sum(parts.values()) == pytest.approx(score(network, *batch), rel=1e-4)


def test_without_norms_the_network_is_positively_homogeneous(batch):
    x, _ = batch
    network = untrained(SPACE, ARCH, seed=1)
    assert torch.allclose(network(2 * x), network(x), rtol=1e-2, atol=1e-2)
    network = bench_trace.without_norms(network, 1)
    torch.testing.assert_close(network(2 * x), 2 * network(x))


def test_rows_are_written_once_and_shown(tmp_path, capsys):
    images = write_folder(tmp_path / "images", dict.fromkeys("abcdefghij", 2), side=32)
    cells = [f"|{op}~0|+|none~0|none~1|+|{other}~0|none~1|none~2|" for op in NAMES for other in NAMES]
    columns = {cell: {"cifar10-val": 10.0 + i} for i, cell in enumerate(cells)}
    (tmp_path / "table.json").write_text(json.dumps(columns))
    argv = [f"--images={images}", f"--table={tmp_path / 'table.json'}", f"--out={tmp_path / 'out.jsonl'}", "--exact"]
    argv += ["--cells=1", "--channels=2", "--batch=8", "--architectures=12"]
    bench_trace.main(argv)
    before = (tmp_path / "out.jsonl").read_bytes()
    found = bench_trace.rows(tmp_path / "out.jsonl")
    assert len({r["arch"] for r in found}) == 12 and all(r["trace_label"] > 0 for r in found)
    bench_trace.main(argv)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    bench_trace.main(["--summary", f"--out={tmp_path / 'out.jsonl'}"])
    shown = capsys.readouterr().out
    assert "1 cells of 2 channels, 8 images, 12 networks" in shown and "accuracy, edge 0 to 3" in shown


NAMES = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3")
