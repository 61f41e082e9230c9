"""Searches of cells: what a table says of a cell that it has or lacks, and what rows say of costs and differences."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import write_folder
from torch import nn

from benchmarks import bench_cell_search, cell_tables
from benchmarks.cell_judge import COLUMNS, Judge, network_of, text_of
from benchmarks.cell_searches import norm_supernet, short_accuracy, wiring
from nasfast.cells import CellStandalone, nas_bench_201_space, search_cells
from nasfast.settings.cells import CellSearchConfig
from nasfast.train import TrainConfig

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


def test_the_best_cell_with_an_accuracy(table):
    judge = Judge(str(table), SPACE)
    scores = np.zeros((6, 5))
    scores[[0, 1, 4, 5], [2, 3, 1, 4]] = 1  # a cell of the table
    itself = judge.best(scores)
    assert itself["arch"] == text_of(SPACE, (2, 3, 0, 0, 1, 4)) and itself["accuracy"] == 20.0 + 2 * 15 + 3 * 3 + 1
    scores[2, 0], scores[2, 3] = 0, 0.5  # this cell is not in the table, which has `none` there
    assert judge.best(scores)["arch"] == itself["arch"]
    scores[2] = 0
    scores[1, 3] = -math.inf  # the next candidates of this edge tie, and the first cell counts
    assert judge.best(scores)["arch"] == text_of(SPACE, (2, 0, 0, 0, 1, 4))
    # another name of a network of the table counts more than the sum: through both of these cells nothing passes
    scores[:] = 0
    scores[0, 4], scores[5, 0] = 1, 0.5
    assert judge.best(scores)["arch"] == text_of(SPACE, (0, 0, 0, 0, 0, 4))


def test_cells_that_were_scored_one_by_one(table):
    judge = Judge(str(table), SPACE)
    scored = {TABLE[3]: 0.1, TABLE[9]: 0.3, TABLE[40]: 0.2, (4, 4, 4, 4, 4, 4): 9.0}
    found = judge.known(scored)
    assert found["cells"] == 3 and found["in_table"]["accuracy"] == 29.0
    assert found["tau"] == pytest.approx(1 / 3, abs=1e-4)  # two of three pairs agree
    assert judge.known({(4, 4, 4, 4, 4, 4): 9.0}) == {"cells": 0, "tau": None, "in_table": None}


@pytest.mark.parametrize("head", [True, False])
def test_what_reaches_the_output_node_costs_nothing_behind_a_norm(head, tmp_path):
    """With BatchNorm behind the last cell the edges into its output cancel; without it they cost L - H."""
    space = SPACE.replace(head=head, classifier_bias=False)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 3, 8, 8, generator=generator), torch.arange(16) % 10) for _ in range(3)]
    cfg = CellSearchConfig(method="darts", alpha_lr=0.01, records=3)
    found = search_cells(
        space, batches, cfg, TrainConfig(epochs=1, lr=0.01, label_smoothing=0.0, checkpoint_every=0), run_dir=tmp_path
    )
    row = wiring(found)
    cost, of_edge = np.array(row["output_cost"])[:, 0], np.array(row["edge_costs"])[:, 0]
    if head:
        assert np.abs(cost).max() < 1e-3 * np.abs(of_edge).max()
    else:
        np.testing.assert_allclose(cost, np.array(row["C"])[:, 0], atol=2e-4)
    assert len(row["none"]) == 4 and len(row["probabilities"]) == 4 and len(row["top1"]) == 3
    assert set(row["patterns"]) == {"growing", "width"}


@pytest.mark.slow
def test_rows_are_written_once_and_shown(table, tmp_path, monkeypatch, capsys):
    images = write_folder(tmp_path / "images", dict.fromkeys("abcdefghij", 16), side=32)
    names = ("nasi", "darts, second order", "BN indicators", "random", "log_volume+synflow-ntk_q of 100 random cells")
    queue = [entry for entry in bench_cell_search.QUEUE if entry.name in names]
    chosen = [replace(e, cells=1, channels=2, epochs=min(e.epochs, 1), batch=16) for e in queue]
    chosen = [replace(e, changes=(*e.changes, ("steps", 2))) if e.kind in ("nasi", "random") else e for e in chosen]
    monkeypatch.setattr(bench_cell_search, "QUEUE", chosen)
    argv = [f"--images={images}", f"--table={table}", f"--work={tmp_path / 'w'}", f"--out={tmp_path / 'out.jsonl'}"]
    argv += ["--seeds", "3", "--seconds=1", "--candidates=3", "--threads=1"]
    bench_cell_search.main(argv)
    rows = bench_cell_search.rows(tmp_path / "out.jsonl")
    assert [(r["name"], r["seed"], r["cells"]) for r in rows] == [(entry.name, 3, 1) for entry in chosen]
    assert {r["training_images"] for r in rows} == {160}
    assert all(r["cpu_s"] > 0 and nas_bench_201_space().parse(r["arch"]) for r in rows)
    before = (tmp_path / "out.jsonl").read_bytes()
    bench_cell_search.main(argv)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    capsys.readouterr()
    bench_cell_search.main([f"--out={tmp_path / 'out.jsonl'}", "--summary"])
    shown = capsys.readouterr().out
    assert shown.count("| 1 x 2 | 3 |") == len(names) and "| BN indicators | 1 | 1 |" not in shown
    assert "| patterns |" in shown and shown.count(" of 6, ") == 1


def test_a_short_training_takes_the_batches_that_it_is_given():
    """The first batches say that the images are of class 1, the others that they are not."""
    taken = {"train": 0, "held": 0}

    class Batches:
        def __init__(self, name):
            self.name = name

        def __len__(self):
            return 5

        def epoch(self, _):
            for i in range(5):
                taken[self.name] += 1
                yield torch.ones(2, 3), torch.tensor([int(i < 3), int(i < 3)])

    network = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(network.weight)
    right = short_accuracy(network, Batches("train"), Batches("held"), steps=3, held_out=4)
    assert taken == {"train": 3, "held": 4}
    assert right == 0.75


def test_how_far_costs_predict_a_choice_by_hand():
    """The scores follow the costs, except that on the last edge a costly pooling is chosen; one cost is unknown."""
    costs = [[0.0, 0.1, -0.3, 0.2, 0.3]] * 5 + [[0.0, 0.1, 0.2, 0.3, 0.0]]
    row = {
        "arch": text_of(SPACE, (2, 2, 2, 2, 2, 2)),
        "logits": [[0.0, -1.0, 3.0, -2.0, -3.0]] * 5 + [[0.0, -1.0, 3.0, -2.0, -3.0]],
    }
    assert cell_tables.agreement(row, costs) == {"signs": 22, "operations": 23, "lowest": 5, "edges": 6}


def test_differences_that_labels_make_are_paired_by_seed():
    def row(name, seed, accuracy, arch="a"):
        return {"name": name, "seed": seed, "candidates": {"in_table": {"accuracy": accuracy, "arch": arch}}}

    found = [row("q", 0, 70.0), row("q", 1, 80.0), row("q", 2, 60.0)]
    found += [row("q, random labels", 0, 71.0, "b"), row("q, random labels", 1, 77.0), row("q, random images", 5, 1.0)]
    (shown,) = cell_tables.agnosticism(found).splitlines()[2:]
    # mean -1, standard deviation 2 sqrt 2; t is 12.706; the seeds are 10, 10 and 20 apart
    assert shown == "| q | random labels | 2 | +1.0 -3.0 | -1.0 ± 25.4 | 13.3 | 1 of 2 |"


def test_a_method_has_the_median_of_its_seeds():
    def row(seed, value, cpu):
        form = {"in_table": {"accuracy": value, "percentile": value - 1}}
        return {"name": "m", "seed": seed, "cpu_s": cpu, "steps": 8, "steps_here": 4, "choices": {"logits": form}}

    (shown,) = cell_tables.comparison([row(0, 60.0, 1.0), row(1, 70.0, 2.0), row(2, 90.0, 9.0)]).splitlines()[2:]
    assert shown == "| m | 3 | 8 | 70.0 (60.0 to 90.0) | 69.0 (59.0 to 89.0) | - | - | - | 4 |"
