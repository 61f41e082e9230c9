"""The numbers of the wiring study, against loops over fabricated searches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nasfast.research.cells.costs import NONE, OPERATIONS
from nasfast.research.cells.probe import LocalCosts
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchConfig, CellSearchResult
from nasfast.research.cells.space import DARTS_OPS, Cell, CellSpace, Edge, minimal_cell
from nasfast.research.studies.draw import figure_of
from nasfast.research.studies.report import StudyReport, plain
from nasfast.research.studies.wiring import measure, study
from nasfast.research.studies.wiring.config import CollapseConfig, CostConfig, GrowthConfig, WidthConfig
from nasfast.research.studies.wiring.measure import measures
from nasfast.research.studies.wiring.study import edge_costs, output_cost_figure, patterns

INF = float("inf")
CONTROLS = ("control-simplified", "control-modified__sampled", "control-modified___0_1__fixed")


def fabricated(
    space: CellSpace, *, records: int, seed: int = 0, bilevel: bool = False, method: str = "dsnas"
) -> CellSearchResult:
    """A search whose arrays are random but possible: no candidate, no cost; parts of the samples are correct."""
    rng = np.random.default_rng(seed)
    types, edges, ops = len(space.types), len(space.cell.edges), len(space.ops)
    allowed = np.zeros((edges, ops), dtype=bool)
    for e, columns in enumerate(space.candidates):
        allowed[e, list(columns)] = True
    logits = np.where(allowed, rng.normal(size=(records + 1, types, edges, ops)), -np.inf)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shape = (records, 2, space.cells, edges, ops)
    count = rng.integers(0, 4, shape) * allowed
    cost = count * rng.normal(0.1, 1, shape)
    outputs = rng.normal(size=(records, 2, 3, 4))
    outputs[:, :, 1:, 3] = rng.integers(1, 9, (records, 2, 2))
    outputs[:, :, 0] = outputs[:, :, 1] + outputs[:, :, 2]
    return CellSearchResult(
        SimpleNamespace(space=space),
        CellSearchConfig(method=method, bilevel=bilevel),
        10 * np.arange(1, records + 1),
        logits[-1],
        p,
        np.stack([cost, cost**2, count], 2),
        rng.normal(size=shape[:-1]),
        outputs,
    )


def windows(records: int) -> list[range]:
    """Fifteen parts of a run, the longer ones first."""
    short, rest = divmod(records, 15)
    sizes = [short + 1] * rest + [short] * (15 - rest)
    ends = np.cumsum(sizes)
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def mean_cost(found: CellSearchResult, edge: int, records: range) -> float:
    """Mean over all batches in which an operation other than None ran on an edge of some cell."""
    total = count = 0.0
    for r in records:
        for cell in range(found.space.cells):
            for k, op in enumerate(found.space.ops):
                if op != "none":
                    total += found.costs[r, TRAIN, 0, cell, edge, k]
                    count += found.costs[r, TRAIN, 2, cell, edge, k]
    return total / count


def share_positive(found: CellSearchResult, records: range) -> float:
    signs = []
    for cell, edge, k in np.ndindex(found.costs.shape[3:]):
        total = sum(found.costs[r, TRAIN, 0, cell, edge, k] for r in records)
        count = sum(found.costs[r, TRAIN, 2, cell, edge, k] for r in records)
        if count and found.space.ops[k] != "none":
            signs.append(total > 0)
    return sum(signs) / len(signs)


def output_cost(found: CellSearchResult, which: int, records: range) -> float:
    return sum(found.outputs[r, which, 0, 0] for r in records) / sum(found.outputs[r, which, 0, 3] for r in records)


SPACES = {
    "minimal": CellSpace("minimal", minimal_cell(), cells=2, channels=2),
    "darts, reductions": GrowthConfig(cells=4, reductions=True).space(),
    "simplified": GrowthConfig(cell="simplified").space(),
    "nas_bench_201": GrowthConfig(cell="nas_bench_201").space(),
    "restricted": CellSpace("r", minimal_cell().restricted(0, 2, ("none", "sep_conv_3x3")), cells=1, channels=2),
    # into node 3 there is no edge from an input
    "chain": CellSpace("c", Cell(1, 3, (Edge(0, 1), Edge(0, 2), Edge(1, 2), Edge(2, 3)), (3,)), cells=1, channels=2),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("bilevel", [False, True])
def test_measures(name, bilevel):
    space, records = SPACES[name], 32
    found = fabricated(space, records=records, bilevel=bilevel)
    cell, none = space.cell, space.ops.index("none")
    # q has its peak at the start in half of the cases
    found.probabilities[0, ..., none] += bilevel
    m, parts = measures(found), windows(records)
    assert [len(part) for part in parts] == [3, 3] + [2] * 13
    expected = {
        "C_first": output_cost(found, TRAIN, parts[0]),
        "C_last": output_cost(found, TRAIN, parts[-1]),
        "positive_first": share_positive(found, parts[0]),
        "positive_last": share_positive(found, parts[-1]),
    }
    kinds = {
        "in": [e for e, edge in enumerate(cell.edges) if edge.source < cell.inputs],
        "int": [e for e, edge in enumerate(cell.edges) if edge.source >= cell.inputs],
    }
    for kind, edges in kinds.items():
        q = [
            np.mean([found.probabilities[r, t, e, none] for t in range(len(space.types)) for e in edges])
            for r in range(records + 1)
        ]
        kept = [found.probabilities[-1, t, e].argmax() != none for t in range(len(space.types)) for e in edges]
        expected |= {
            f"q_{kind}_start": q[0],
            f"q_{kind}_peak": max(q),
            f"q_{kind}_end": q[-1],
            f"kept_{kind}": sum(kept) / len(space.types),
            f"n_{kind}": len(edges),
        }
    differences = []
    for node in range(cell.inputs, cell.inputs + cell.nodes):
        of = {
            kind: [mean_cost(found, e, range(records)) for e in edges if cell.edges[e].target == node]
            for kind, edges in kinds.items()
        }
        if of["int"] and of["in"]:
            differences.append(np.mean(of["int"]) - np.mean(of["in"]))
    expected["intermediate_minus_input_cost"] = np.mean(differences)
    if bilevel:
        held_out = [output_cost(found, SEARCH, part) for part in parts]
        expected |= {
            "search_C_first": held_out[0],
            "search_C_last": held_out[-1],
            "search_C_smallest": min(held_out),
            "search_minus_train_C": min(s - output_cost(found, TRAIN, p) for s, p in zip(held_out, parts, strict=True)),
        }
    assert m == pytest.approx(expected, abs=1e-12)
    # every measure has words in the table
    assert set(m) <= set(study.MEASURES)


def test_a_short_run_has_a_part_per_record():
    found = fabricated(SPACES["minimal"], records=4)
    assert measures(found)["C_first"] == output_cost(found, TRAIN, range(1))
    cost, none, _, positive = (panel["marks"][0] for panel in patterns("", {0: found}).panels)
    assert cost["x"] == [10, 20, 30, 40] and none["x"] == [0, 10, 20, 30, 40]
    assert list(positive["y"]) == pytest.approx([100 * share_positive(found, range(r, r + 1)) for r in range(4)])


def test_curves_of_a_search():
    found = fabricated(SPACES["minimal"], records=4, bilevel=True)
    costs, total, learning = edge_costs("", found).panels
    # of the last of two cells; the four input edges have a mean
    *edges, mean, _ = costs["marks"]
    assert [mark["label"] for mark in edges] == ["(0,2)", "(1,2)", "(0,3)", "(1,3)", "(2,3)"]
    np.testing.assert_array_equal([mark["y"] for mark in edges], found.edge_costs[:, TRAIN, 1].T)
    np.testing.assert_allclose(mean["y"], found.edge_costs[:, TRAIN, 1, :4].mean(1))
    np.testing.assert_allclose(total["marks"][0]["y"], found.edge_costs[:, TRAIN, 1].sum(1))
    count = found.outputs[:, TRAIN, 0, 3]
    np.testing.assert_array_equal(learning["marks"][0]["y"], found.outputs[:, TRAIN, 0, 1] / count)
    accuracy = learning["twin"]["marks"][0]["y"]
    np.testing.assert_allclose(accuracy, 100 * found.outputs[:, TRAIN, 1, 3] / count)
    for g, panel in enumerate(output_cost_figure("", found).panels):
        lines = [mark["y"] for mark in panel["marks"][:-1]]
        means = found.outputs[:, :, g, :3] / found.outputs[:, :, g, 3:]
        np.testing.assert_array_equal(lines, [means[:, which, q] for which in (TRAIN, SEARCH) for q in range(3)])
    one_level = output_cost_figure("", fabricated(SPACES["minimal"], records=4))
    assert all(len(panel["marks"]) == 4 for panel in one_level.panels)


def test_every_operation_has_its_own_colour_and_short_name():
    assert set(study._OPERATIONS) == set(OPERATIONS)
    short, colours = zip(*study._OPERATIONS.values(), strict=True)
    assert len(set(short)) == len(set(colours)) == len(OPERATIONS)


@pytest.mark.parametrize("name", ["minimal", "restricted", "darts, reductions"])
def test_figures_of_an_architecture(name):
    """Candidates that an edge lacks are not drawn, and an edge whose best operation is None has no label."""
    found = fabricated(SPACES[name], records=6)
    figures = study.architecture_figures("t", found)
    assert len(figures) == 2 * len(found.space.types)
    probabilities, graphs = figures[:2]
    assert [each["title"] for each in probabilities.panels] == [edge.name for edge in found.space.cell.edges]
    cell = found.space.cell
    for each, edge, inner in zip(probabilities.panels, cell.edges, cell.intermediate, strict=True):
        assert [mark["label"] for mark in each["marks"]] == [op for op in found.space.ops if op in edge.ops]
        assert bool(each["tint"]) == inner
    last = graphs.panels[-1]["marks"][0]["edges"]
    best = found.probabilities[-1, 0].argmax(-1)
    assert [not edge[2] for edge in last] == [found.space.ops[k] == NONE for k in best]
    np.testing.assert_allclose([edge[4] for edge in last], 1 - found.probabilities[-1, 0, :, 0])
    for each in figures:
        figure_of(plain(each))


def test_heatmaps_of_near_scales_share_one():
    space = SPACES["minimal"]
    mean = np.random.default_rng(0).normal(0, 0.05, (5, 8))
    near, far = (study.cost_heatmap(space, "", {"a": mean, "b": mean * scale}) for scale in (0.5, 1e-3))
    limits = [[each["marks"][0]["limit"] for each in figure.panels] for figure in (near, far)]
    assert limits[0][0] == limits[0][1] and limits[1][1] == pytest.approx(1e-3 * limits[1][0])
    assert [each["marks"][0]["unit"] for each in far.panels] == [1.0, pytest.approx(1e-4)]


def test_intervals_of_seeds():
    values = [1.0, 2.0, 4.0]
    half = 4.302653 * np.std(values, ddof=1) / math.sqrt(3)
    assert study._interval(values) == f"{7 / 3:.3f} ± {half:.3f}"
    assert study._interval([1.0]) == study._interval([1.0, math.nan]) == "-"


class Fabricating:
    """Replaces the runner: every search ends at once, and its arguments are recorded."""

    device, prepare = "cpu", staticmethod(list)

    def __init__(self, records: int | None = None) -> None:
        self.records, self.found, self.asked = records, {}, {}

    def all(self, searches) -> dict[int, CellSearchResult]:
        return {key: self._made(search) for key, search in searches.items()}

    def _made(self, search) -> CellSearchResult:
        cfg, how, seed = search.cfg, search.how, 100 * search.cfg.seed + len(search.name)
        settings = {"records": self.records or how.records, "bilevel": how.bilevel, "method": how.method}
        made = fabricated(cfg.space(search.cell), seed=seed, **settings)
        self.found[search.name, cfg.seed], self.asked[search.name] = made, (cfg, how)
        return made


def assert_marks(found: StudyReport, expected: Mapping[str, tuple[float, float, float]]) -> None:
    """Name -> from, to, measured."""
    assert sorted(check.name for check in found.checks) == sorted(expected)
    for check in found.checks:
        assert (check.low, check.high, check.measured) == pytest.approx(expected[check.name], abs=1e-12), check.name


def test_marks_of_growing():
    runner = Fabricating()
    found = study._growth(GrowthConfig(seeds=2), runner)
    expected = {}
    for seed in (0, 1):
        m = measures(runner.found["dsnas", seed])
        expected |= {
            f"seed {seed}: C of the first part": (0, INF, m["C_first"]),
            f"seed {seed}: C of the last part": (-INF, 0, m["C_last"]),
            f"seed {seed}: peak of q of input edges": (0.13, 1, m["q_in_peak"]),
            f"seed {seed}: q of input edges at the end": (0, 0.06, m["q_in_end"]),
            f"seed {seed}: input edges kept": (8, 8, m["kept_in"]),
        }
    assert_marks(found, expected)
    assert found.notes == ()
    assert study._growth(GrowthConfig(steps=1499), runner).checks == ()


def test_marks_of_width_and_of_its_control():
    runner = Fabricating()
    found = study._width(WidthConfig(seeds=2), runner)
    expected = {}
    for seed in (0, 1):
        m = measures(runner.found["dsnas", seed])
        cost = m["intermediate_minus_input_cost"]
        expected |= {
            f"seed {seed}: intermediate edges kept": (0, 2, m["kept_int"]),
            f"seed {seed}: input edges kept": (8, 8, m["kept_in"]),
            f"seed {seed}: cost of intermediate minus input edges of a node": (0, INF, cost),
        }
    control = {}
    labels = dict(zip(CONTROLS, ("simplified", "modified, sampled", "modified, (0,1) fixed"), strict=True))
    for name, label in labels.items():
        for seed in (0, 1):
            f = runner.found[name, seed]
            late = [mean_cost(f, e, range(9, 12)) for e in range(3)]
            early = [mean_cost(f, e, range(6)) for e in range(3)]
            between = (-INF, 0) if name == CONTROLS[2] else (0, INF)
            control[f"{label}, seed {seed}: cost of (1,2) minus (0,2), last quarter"] = (*between, late[2] - late[1])
            if name == CONTROLS[1]:
                control[f"{label}, seed {seed}: cost of (1,2) minus (0,1), first half"] = (0, INF, early[2] - early[0])
            row = next(r for r in found.tables[2].rows if r[:2] == (label, f"seed {seed}"))
            assert list(row[2:]) == [f"{v:+.3f}" for v in (*early, *late)]
    assert_marks(found, expected | control)
    # the control has its own marks, which do not depend on the search
    assert_marks(study._width(WidthConfig(seeds=2, cell="minimal"), runner), control)
    assert study._width(WidthConfig(seeds=2, control_steps=599), runner).checks == ()
    marks = found.figures[-1].panels[0]["marks"]
    # of each edge two runs and their mean, which has the label
    assert [mark["label"] for mark in marks[2::3]] == ["(0,1)", "(0,2)", "(1,2)"]
    one = [[mean_cost(runner.found[CONTROLS[0], 1], e, range(r, r + 1)) for r in range(12)] for e in range(3)]
    np.testing.assert_allclose([mark["y"] for mark in marks[1:-1:3]], one)


def test_the_control_is_that_of_section_6():
    runner = Fabricating()
    study._width(WidthConfig(seeds=1, lr=0.3, noise=1.0), runner)
    for name, outputs, first in (
        (CONTROLS[0], (1, 2), DARTS_OPS),
        (CONTROLS[1], (2,), DARTS_OPS),
        (CONTROLS[2], (2,), ("sep_conv_5x5",)),
    ):
        cfg, search = runner.asked[name]
        cell = runner.found[name, 0].space.cell
        assert (cell.outputs, cell.edges[0].ops, cell.edges[1].ops) == (outputs, first, DARTS_OPS)
        assert (search.method, search.redraw, search.records) == ("uniform", name != CONTROLS[0], 12)
        # row W5 of section 9, whatever the search
        assert (cfg.samples, cfg.noise, cfg.lr, cfg.steps, cfg.channels, cfg.cells) == (1000, 3.0, 0.1, 600, 8, 1)


def test_marks_of_collapse_and_signs_of_the_gates():
    runner = Fabricating()
    found = study._collapse(CollapseConfig(seeds=2), runner)
    expected = {}
    for seed in (0, 1):
        run, single, gates = (runner.found[name, seed] for name in ("dsnas-bilevel", "dsnas", "table"))
        m = measures(run)
        dropped = [int((r.probabilities[-1, 0].argmax(-1) == 0).sum()) for r in (run, single)]
        # the third quarter of twelve records, by hand
        sums = gates.outputs[6] + gates.outputs[7] + gates.outputs[8]
        c, ell, h = (sums[..., q] / sums[..., 3] for q in range(3))
        held_out = gates.outputs[:, SEARCH, 0, 0] / gates.outputs[:, SEARCH, 0, 3]
        table = f"table, seed {seed}:"
        expected |= {
            f"seed {seed}: edges that are None": (13, 14, dropped[0]),
            f"seed {seed}: held-out C, smallest part": (0, INF, m["search_C_smallest"]),
            f"seed {seed}: held-out minus training C, smallest part": (0, INF, m["search_minus_train_C"]),
            f"seed {seed}: edges that are None on one level": (0, 6, dropped[1]),
            f"{table} correct C, training": (-INF, 0, c[TRAIN, 1]),
            f"{table} correct C, held out": (-INF, 0, c[SEARCH, 1]),
            f"{table} wrong L, held out minus training": (0, INF, ell[SEARCH, 2] - ell[TRAIN, 2]),
            f"{table} wrong H, held out minus training": (-INF, 0, h[SEARCH, 2] - h[TRAIN, 2]),
            f"{table} wrong C, held out minus training": (0.5, INF, c[SEARCH, 2] - c[TRAIN, 2]),
            f"{table} held-out C, second half minus first": (0, INF, held_out[6:].mean() - held_out[:6].mean()),
        }
        row = next(r for r in found.tables[3].rows if r[0] == f"wrong, seed {seed}")
        shown = [q[which, 2] for q in (c, ell, h) for which in (TRAIN, SEARCH)]
        assert list(row[1:]) == [f"{v:+.2f}" for v in shown]
    assert_marks(found, expected)
    cfg, search = runner.asked["table"]
    # row W4 of section 9: probabilities stay, held-out batches are measured
    assert (search.method, search.bilevel, search.alpha_lr) == ("darts", True, 0.0)
    assert (cfg.cell, cfg.channels, cfg.samples, cfg.noise, cfg.lr, cfg.steps) == ("minimal", 8, 300, 3.0, 0.1, 300)
    searches = {name: asked for name, (_, asked) in runner.asked.items()}
    assert searches["dsnas-bilevel"].bilevel and not searches["dsnas"].bilevel
    assert searches["dsnas"] == GrowthConfig().of_seed(1).search()


def test_what_was_published_stands_below_the_signs():
    rows = study._collapse(CollapseConfig(seeds=1, method="snas"), Fabricating()).tables[3].rows
    # section 8: C, L and H, training and search
    assert rows[-2:] == (
        ("correct, published", "-0.11", "-0.11", "0.06", "0.08", "0.17", "0.19"),
        ("wrong, published", "0.80", "2.18", "1.70", "2.92", "0.90", "0.74"),
    )


GROWN = {
    "C_first": 0.1,
    "C_last": -0.1,
    "q_in_start": 0.1,
    "q_in_peak": 0.2,
    "q_in_end": 0.05,
    "positive_first": 0.8,
    "positive_last": 0.4,
}
WIDENED = {
    "q_int_end": 0.8,
    "q_in_end": 0.1,
    "kept_int": 1.0,
    "n_int": 6.0,
    "kept_in": 7.0,
    "n_in": 8.0,
    "intermediate_minus_input_cost": 0.01,
}
COLLAPSED = {"kept_in": 0.0, "kept_int": 0.0, "search_C_smallest": 0.1, "search_minus_train_C": 0.1}


@pytest.mark.parametrize(
    ("pattern", "seen", "name", "changes"),
    [
        (
            "P1",
            GROWN,
            "growing",
            {
                "C turns from positive to negative": [{"C_first": -0.2}, {"C_last": 0.05}, {"C_last": math.nan}],
                "None gains at first": [{"q_in_peak": 0.101}],
                "and loses in the end": [{"q_in_end": 0.15}],
                "fewer costs are positive": [{"positive_last": 0.9}],
            },
        ),
        (
            "P2",
            WIDENED,
            "width preferred",
            {
                "intermediate edges are less probable": [{"q_in_end": 0.9}],
                # as many in number, but fewer of the six are left
                "fewer of them are kept": [{"kept_int": 6.0}],
                "they cost more than input edges of their nodes": [
                    {"intermediate_minus_input_cost": -0.1},
                    {"intermediate_minus_input_cost": math.nan},
                ],
            },
        ),
        (
            "P3",
            COLLAPSED,
            "collapsed",
            {
                "all edges are None": [{"kept_in": 1.0}, {"kept_int": 1.0}],
                "held-out C stays positive": [{"search_C_smallest": -0.1}],
                "training C is below it": [{"search_minus_train_C": -0.1}],
            },
        ),
    ],
    ids=["P1", "P2", "P3"],
)
def test_verdicts(monkeypatch, pattern, seen, name, changes):
    def verdict(of: Mapping[str, float]) -> dict:
        monkeypatch.setattr(study, "measures", lambda found: of)
        return study.verdicts(pattern, {0: None})[f"{pattern}, seed 0"].to_dict()

    assert verdict(seen) == {"names": [name], "evidence": dict.fromkeys(changes, True)}
    for sign, others in changes.items():
        for other in others:
            assert verdict({**seen, **other}) == {
                "names": [f"not seen: {sign}"],
                "evidence": {s: s != sign for s in changes},
            }


def test_derived_cells_are_told_by_rule():
    ops = ("none", "skip_connect", "sep_conv_3x3")
    space = CellSpace("s", minimal_cell(ops), cells=3, channels=2, reductions=(1, 2))
    found = fabricated(space, records=2)
    logits = np.zeros((2, 5, 3))
    # edges (0,2) (1,2) (0,3) (1,3) (2,3); on the weakest of the last three DARTS's rule has None
    logits[0] = [[3, 1, 0], [0, 2, 1], [0, 0, 9], [5, 0, 1], [0, 3, 0]]
    logits[1] = [[9, 0, 1], [9, 1, 0], [9, 3, 0], [9, 0, 4], [9, 5, 0]]
    found = CellSearchResult(**{**vars(found), "logits": logits})
    rows = study.derivation_table({7: found}).rows
    assert rows == (
        ("seed 7", "argmax (its own)", "normal: (1,2)=skip_connect (0,3)=sep_conv_3x3 (2,3)=skip_connect; reduction: "),
        (
            "seed 7",
            "darts",
            "normal: (0,2)=skip_connect (1,2)=skip_connect (0,3)=sep_conv_3x3 (2,3)=skip_connect; "
            "reduction: (0,2)=sep_conv_3x3 (1,2)=skip_connect (1,3)=sep_conv_3x3 (2,3)=skip_connect",
        ),
    )


def test_costs_are_those_of_the_last_cell(monkeypatch):
    """Means, shares and marks of fabricated tables: two networks of two cells, of which the first is not told."""
    rng = np.random.default_rng(0)
    cfg = CostConfig(channels=4, samples=16, steps=6, records=3, seeds=2, batch_size=4, cells=2, nets=2, batches=3)
    given = []

    def fake(net, loader, *, batches, seed, device):
        shape = (2, 5, 8)
        count = rng.integers(2, 5, shape).astype(float)
        total = count * rng.normal(0.2, 1, shape)
        # the first cell's are all positive
        total[0] = abs(total[0]) + 1
        given.append((total, count))
        outputs = torch.zeros(3, 4, dtype=torch.float64)
        outputs[0] = torch.tensor([6.0 if len(given) == 1 else 1.0, 0, 0, 10])
        return LocalCosts(*map(torch.tensor, (total, total**2 / count + count, count))), outputs

    monkeypatch.setattr(study, "monte_carlo", fake)
    monkeypatch.setattr(measure, "monte_carlo", fake)
    monkeypatch.setattr(CostConfig, "published", True)
    monkeypatch.setattr(study, "sums_table", lambda cfg, runner: None)
    monkeypatch.setattr(study, "variants_table", lambda cfg, runner: None)

    made = {seed: fabricated(cfg.space(), records=3, seed=seed) for seed in (0, 1)}
    found = study._cost(cfg, SimpleNamespace(device="cpu", all=lambda searches: made))
    rows = found.tables[0].rows
    for row, pair, label in zip(rows, (given[:2], given[2:]), ("initialisation", "trained"), strict=True):
        total, count = (sum(g[i][1, :, 1:] for g in pair) for i in (0, 1))
        mean = total / count
        squares = sum((g[0][1, :, 1:] ** 2 / g[1][1, :, 1:] + g[1][1, :, 1:]) for g in pair)
        error = np.sqrt((squares - total**2 / count) / (count - 1) / count)
        single = np.mean([(g[0][1, :, 1:] > 0).mean() for g in pair])
        clear = [int((sign * mean > 2 * error).sum()) for sign in (1, -1)]
        assert row == (
            label,
            "2",
            f"{(mean > 0).mean():.2f}",
            f"{single:.2f}",
            f"{mean.mean():+.4f}",
            f"{error.mean():.4f}",
            f"{clear[0]} / {clear[1]}",
        )
        panel = next(p for p in found.figures[0].panels if p["title"].startswith(label))
        grid = panel["marks"][0]["grid"]
        np.testing.assert_allclose(grid[:, 1:], mean)
        assert np.isnan(grid[:, 0]).all()
        assert panel["title"] == f"{label}: {(mean > 0).mean():.0%} of the costs > 0"
        if label == "initialisation":
            share = (mean > 0).mean()
    expected = {"mean C": (0, INF, 7 / 20), "share of costs > 0": (0.6, 1, share)}
    assert_marks(found, {f"initialisation: {name}": mark for name, mark in expected.items()})


def test_sums_are_of_two_cells_without_skips(monkeypatch):
    asked = []

    def initial(cfg, runner, space, nets):
        asked.append(space)
        total = torch.arange(2.0 * 5 * 8).view(2, 5, 8)
        return [LocalCosts(total, total, total)], 0.0

    monkeypatch.setattr(study, "initial_costs", initial)
    table = study.sums_table(CostConfig(cells=3, reductions=True, batches=10), None)
    assert table.rows == (("second last cell", "+7.80e+01"), ("last cell", "+2.38e+02"))
    assert (asked[0].cells, asked[0].reductions) == (2, ())
    assert ["skip_connect" in edge.ops for edge in asked[0].cell.edges] == [True] * 4 + [False]
