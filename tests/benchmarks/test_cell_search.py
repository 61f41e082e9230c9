"""The judge of cells: what a table says of a cell that it has, of another name of it, and of one that it lacks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from tiny import write_folder

from benchmarks import bench_cell_search
from benchmarks.cell_judge import COLUMNS, Judge, network_of, text_of
from benchmarks.cell_searches import norm_supernet
from nasfast.cells import CellStandalone, nas_bench_201_space

SPACE = nas_bench_201_space(cells=1, channels=2, resolution=8)
OPS = ("none", "skip_connect", "avg_pool_3x3", "conv_1x1", "conv_3x3")
TABLE = [(a, b, 0, 0, c, 4) for a, b, c in itertools.product(range(5), range(5), (0, 1, 3))]
"""75 cells: all end in a convolution from node 2 to the output."""


def cell(*ops):
    return tuple(SPACE.ops.index(op) for op in ops)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge") / "table.json"
    form = {text_of(SPACE, arch): dict.fromkeys(COLUMNS, 20.0 + i) for i, arch in enumerate(TABLE)}
    path.write_text(json.dumps(form))
    return path


def test_the_text_of_a_cell_is_read_back():
    for arch in TABLE:
        assert SPACE.parse(text_of(SPACE, arch)) == arch
    assert text_of(SPACE, (4, 1, 0, 3, 2, 0)) == (
        "|nor_conv_3x3~0|+|skip_connect~0|none~1|+|nor_conv_1x1~0|avg_pool_3x3~1|none~2|"
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # nothing enters node 1, so what leaves it does not matter; node 2 leads nowhere
        ((0, 4, 0, 3, 0, 0), (0, 2, 4, 3, 2, 0), True),
        # an identity from node 0 to node 1 makes both the same source
        ((1, 4, 0, 0, 0, 1), (1, 0, 4, 0, 0, 1), True),
        # order of the terms
        ((4, 3, 0, 0, 1, 1), (3, 4, 0, 0, 1, 1), True),
        # one convolution that is used twice is not two convolutions
        ((4, 0, 1, 0, 1, 1), (4, 4, 0, 0, 1, 1), False),
        ((4, 0, 1, 0, 3, 3), (4, 4, 0, 0, 3, 3), False),
        ((4, 0, 0, 0, 1, 0), (3, 0, 0, 0, 1, 0), False),
        ((1, 0, 0, 1, 1, 0), (0, 0, 0, 1, 0, 0), False),  # twice the input
    ],
)
def test_names_of_one_network(one, other, same):
    assert (network_of(SPACE, one) == network_of(SPACE, other)) == same


def test_cells_of_one_network_compute_the_same():
    """All convolutions have the same weights here, so only the wiring decides what a cell computes."""
    torch.manual_seed(0)
    weights = {name: torch.randn(2, 2, k, k) for name, k in (("conv_1x1", 1), ("conv_3x3", 3))}
    x = torch.randn(3, 3, 8, 8)

    def output(arch):
        torch.manual_seed(1)
        network = CellStandalone(SPACE, arch).train()
        for edge in network.cells[0].edges:
            for name, module in edge.items():
                if name in weights:
                    module.body[0].weight.data = weights[name]
        torch.manual_seed(1)
        network.stem[0].weight.data = torch.randn(network.stem[0].weight.shape)
        return network.features(x)

    groups = {}
    for arch in itertools.product((0, 1, 4), repeat=6):
        groups.setdefault(network_of(SPACE, arch), []).append(arch)
    several = [group for group in groups.values() if len(group) > 1]
    assert len(several) == 45
    for group in several[::9]:
        first = output(group[0])
        for arch in group[1:4]:
            torch.testing.assert_close(output(arch), first, rtol=1e-3, atol=1e-4)


def test_what_the_table_says(table):
    judge = Judge(str(table), SPACE)
    arch = TABLE[40]
    row = judge.row(arch)
    assert (row["looked_up"], row["accuracy"]["imagenet-test"], row["percentile"]) == ("itself", 60.0, 54.67)
    assert (row["skips"], row["removed"]) == (arch.count(1), arch.count(0))
    near = [20.0 + i for i, other in enumerate(TABLE) if sum(a != b for a, b in zip(arch, other, strict=True)) == 1]
    assert row["one_edge_away"]["cells"] == len(near) == 10
    assert row["one_edge_away"]["accuracy"][::2] == [min(near), max(near)]
    # nothing leaves node 1, so the operation into it does not matter; the first name in the table counts
    twin = judge.row((3, 2, 0, 0, 0, 4))
    assert twin["looked_up"] == "itself"
    other = judge.row((0, 2, 3, 0, 0, 4))
    assert other["looked_up"] == text_of(SPACE, (0, 2, 0, 0, 0, 4))
    assert other["accuracy"]["cifar10-val"] == 20.0 + TABLE.index((0, 2, 0, 0, 0, 4))
    absent = judge.row((4, 4, 4, 4, 4, 4))
    assert (absent["looked_up"], absent["accuracy"], absent["percentile"]) == ("no", None, None)
    assert "one_edge_away" not in absent


def test_scores_of_candidates_are_compared_with_accuracies(table):
    """The accuracies of the table rise with the first edge, and within it with the second."""
    judge = Judge(str(table), SPACE)
    rising = [[0.0] * 5 for _ in range(6)]
    rising[0], rising[1], rising[4] = [[w * k for k in range(5)] for w in (100.0, 10.0, 1.0)]
    found = judge.table(rising)
    assert found["cells"] == 1.0 and found["candidates"] == 1.0
    # only the first edge is known: of the 2775 pairs of cells, 5 * 105 have the same first edge and tie
    first = [rising[0], *[[0.0] * 5] * 5]
    assert judge.table(first)["cells"] == pytest.approx(2250 / (2250 * 2775) ** 0.5, abs=1e-4)
    assert judge.table([[-v for v in row] for row in rising])["cells"] == -1.0


def test_every_operation_of_the_indicator_supernet_has_its_own_norm():
    net = norm_supernet(SPACE, seed=0)
    train = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {"classifier.weight", "classifier.bias"} <= train
    assert not any("conv" in name and name.endswith("body.0.weight") for name in train)
    for edge in net.cells[0].edges:
        assert set(edge) == set(OPS) - {"none"}
        assert all(edge[op].norm.weight.requires_grad for op in edge)
    # a gamma of 0 removes its operation, that of a skip too
    x, gates = torch.randn(4, 3, 8, 8), torch.zeros(1, 6, 5)
    gates[0, 3, SPACE.ops.index("skip_connect")] = 1
    before = net(x, gates)
    norm = net.cells[0].edges[3]["skip_connect"].norm
    torch.nn.init.zeros_(norm.weight)
    after = net(x, gates)
    assert not torch.allclose(before, after) and torch.allclose(after, after[:1].expand(4, -1))


@pytest.mark.slow
def test_rows_are_written_once_and_shown(table, tmp_path, monkeypatch, capsys):
    images = write_folder(tmp_path / "images", dict.fromkeys("abcdefghij", 16), side=32)
    names = ("nasi", "darts, second order", "BN indicators", "random", "log_volume+synflow-ntk_q of 100 random cells")
    queue = [entry for entry in bench_cell_search.QUEUE if entry.name in names]
    chosen = [replace(e, cells=1, channels=2, epochs=min(e.epochs, 1), batch=16) for e in queue]
    chosen = [replace(e, changes=(*e.changes, ("steps", 2))) if e.kind == "nasi" else e for e in chosen]
    monkeypatch.setattr(bench_cell_search, "QUEUE", chosen)
    argv = [f"--images={images}", f"--table={table}", f"--work={tmp_path / 'w'}", f"--out={tmp_path / 'out.jsonl'}"]
    argv += ["--seeds", "3", "--seconds=1", "--candidates=3", "--threads=1"]
    bench_cell_search.main(argv)
    rows = bench_cell_search.rows(tmp_path / "out.jsonl")
    assert [(r["name"], r["seed"], r["cells"]) for r in rows] == [(entry.name, 3, 1) for entry in chosen]
    assert all(r["cpu_s"] > 0 and nas_bench_201_space().parse(r["arch"]) for r in rows)
    before = (tmp_path / "out.jsonl").read_bytes()
    bench_cell_search.main(argv)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    capsys.readouterr()
    bench_cell_search.main([f"--out={tmp_path / 'out.jsonl'}", "--summary"])
    shown = capsys.readouterr().out
    assert shown.count("| 1 x 2 | 3 |") == len(names) and "nasi: median percentile " in shown
    assert "| lowest cost chosen |" in shown and shown.count(" of 6 |") == 1


def test_costs_of_a_row_by_hand():
    """Four records of two sets of images; the logits learn from the second. On the last edge `none` is cheapest."""
    edges = [[[0.0] * 6, [c] * 6] for c in (0.4, 0.3, 0.1, -0.2)]
    of_edge = [0.0, 0.1, -0.3, 0.2, 0.3]
    costs = [[of_edge] * 5 + [[0.0, 0.1, 0.2, 0.3, 0.4]]]
    row = {"edge_costs": edges, "op_costs": [None, *costs], "settings": {"bilevel": True}}
    row["arch"] = text_of(SPACE, (2, 2, 2, 1, 2, 0))
    assert bench_cell_search._costs(row) == "+0.4000, -0.2000 | 5 of 6"
