"""The numbers of the wiring study, against loops over fabricated searches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest

from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchConfig, CellSearchResult
from nasfast.research.cells.space import DARTS_OPS, Cell, CellSpace, Edge, minimal_cell
from nasfast.research.studies.report import StudyReport, name_checks
from nasfast.research.studies.run import no_task
from nasfast.research.studies.wiring import study
from nasfast.research.studies.wiring.config import CollapseConfig, GrowthConfig, WidthConfig
from nasfast.research.studies.wiring.marks import PATTERNS
from nasfast.research.studies.wiring.measure import MEASURES, measures

INF = float("inf")
CONTROLS = ("control-simplified", "control-modified__sampled", "control-modified___0_1__fixed")


def fabricate_run(
    space: CellSpace, *, records: int, seed: int = 0, bilevel: bool = False, method: str = "dsnas"
) -> CellSearchResult:
    """A search whose arrays are random but possible: no candidate, no cost; parts of the samples are correct."""
    rng = np.random.default_rng(seed)
    types, edges, ops = len(space.types), len(space.cell.edges), len(space.ops)
    allowed = uniform_logits(space)[0].exp().numpy() > 0
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


def mean_cost(run: CellSearchResult, edge: int, records: range) -> float:
    """Mean over all batches in which an operation other than None ran on an edge of some cell."""
    total = count = 0.0
    for r in records:
        for cell in range(run.space.cells):
            for k, op in enumerate(run.space.ops):
                if op != "none":
                    total += run.costs[r, TRAIN, 0, cell, edge, k]
                    count += run.costs[r, TRAIN, 2, cell, edge, k]
    return total / count


def share_positive(run: CellSearchResult, records: range) -> float:
    signs = []
    for cell, edge, k in np.ndindex(run.costs.shape[3:]):
        total = sum(run.costs[r, TRAIN, 0, cell, edge, k] for r in records)
        count = sum(run.costs[r, TRAIN, 2, cell, edge, k] for r in records)
        if count and run.space.ops[k] != "none":
            signs.append(total > 0)
    return sum(signs) / len(signs)


def output_cost(run: CellSearchResult, which: int, records: range) -> float:
    return sum(run.outputs[r, which, 0, 0] for r in records) / sum(run.outputs[r, which, 0, 3] for r in records)


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
    run = fabricate_run(space, records=records, bilevel=bilevel)
    cell, none = space.cell, space.ops.index("none")
    # q has its peak at the start in half of the cases
    run.probabilities[0, ..., none] += bilevel
    values, parts = measures(run), windows(records)
    assert [len(part) for part in parts] == [3, 3] + [2] * 13
    expected = {
        "C_first": output_cost(run, TRAIN, parts[0]),
        "C_last": output_cost(run, TRAIN, parts[-1]),
        "positive_first": share_positive(run, parts[0]),
        "positive_last": share_positive(run, parts[-1]),
    }
    kinds = {
        "in": [e for e, edge in enumerate(cell.edges) if edge.source < cell.inputs],
        "int": [e for e, edge in enumerate(cell.edges) if edge.source >= cell.inputs],
    }
    for kind, edges in kinds.items():
        q = [
            np.mean([run.probabilities[r, t, e, none] for t in range(len(space.types)) for e in edges])
            for r in range(records + 1)
        ]
        kept_share = [run.probabilities[-1, t, e].argmax() != none for t in range(len(space.types)) for e in edges]
        expected |= {
            f"q_{kind}_start": q[0],
            f"q_{kind}_peak": max(q),
            f"q_{kind}_end": q[-1],
            f"kept_{kind}": sum(kept_share) / len(space.types),
            f"n_{kind}": len(edges),
        }
    differences = []
    for node in range(cell.inputs, cell.inputs + cell.nodes):
        kind_costs = {
            kind: [mean_cost(run, e, range(records)) for e in edges if cell.edges[e].target == node]
            for kind, edges in kinds.items()
        }
        if kind_costs["int"] and kind_costs["in"]:
            differences.append(np.mean(kind_costs["int"]) - np.mean(kind_costs["in"]))
    expected["intermediate_minus_input_cost"] = np.mean(differences)
    if bilevel:
        held_out = [output_cost(run, SEARCH, part) for part in parts]
        expected |= {
            "search_C_first": held_out[0],
            "search_C_last": held_out[-1],
            "search_C_smallest": min(held_out),
            "search_minus_train_C": min(s - output_cost(run, TRAIN, p) for s, p in zip(held_out, parts, strict=True)),
        }
    assert values == pytest.approx(expected, abs=1e-12)
    # every measure has words in the table
    assert set(values) <= set(MEASURES)


class Fabricating:
    """Replaces the runner: every search ends at once, and its arguments are recorded."""

    device = "cpu"

    def __init__(self) -> None:
        self.runs, self.settings = {}, {}

    def all(self, *groups) -> list[dict[int, CellSearchResult]]:
        return [{key: self._fabricate(search) for key, search in group.items()} for group in groups]

    def _fabricate(self, search) -> CellSearchResult:
        cfg, how, seed = search.cfg, search.how, 100 * search.cfg.seed + len(search.name)
        settings = {"records": how.records, "bilevel": how.bilevel, "method": how.method}
        run = fabricate_run(search.space, seed=seed, **settings)
        self.runs[search.name, cfg.seed], self.settings[search.name] = run, (cfg, how)
        return run


@pytest.fixture
def runner(monkeypatch) -> Fabricating:
    fabricating = Fabricating()
    monkeypatch.setattr(study, "Runner", lambda *args: fabricating)
    return fabricating


def assert_marks(report: StudyReport, expected: Mapping[str, tuple[float, float, float]]) -> None:
    """Name -> from, to, measured; the marks of the patterns have a test of their own."""
    marks = {c.name: (c.low, c.high, c.measured) for c in report.checks if c.name in expected}
    assert marks == {name: pytest.approx(mark, abs=1e-12) for name, mark in expected.items()}


def test_a_pattern_is_judged_for_every_seed(runner):
    report = study.growth(GrowthConfig(seeds=2), None, no_task)
    m = measures(runner.runs["dsnas", 1])
    expected = name_checks("seed 1", PATTERNS["P1"].marks(m))
    assert len(report.checks) == 2 * len(expected) and report.checks[len(expected) :] == tuple(expected)
    assert report.notes == ()
    verdict = report.verdicts["P1, seed 0"]
    missing = [sign for sign, seen in verdict.evidence.items() if not seen]
    assert verdict.names == (f"not seen: {', '.join(missing)}",)
    assert study.growth(GrowthConfig(steps=1499), None, no_task).checks == ()


def test_marks_of_the_control_for_width(runner):
    report = study.width(WidthConfig(seeds=2), None, no_task)
    expected = {}
    labels = dict(zip(CONTROLS, ("simplified", "modified, sampled", "modified, (0,1) fixed"), strict=True))
    for name, label in labels.items():
        for seed in (0, 1):
            run = runner.runs[name, seed]
            late = [mean_cost(run, e, range(9, 12)) for e in range(3)]
            early = [mean_cost(run, e, range(6)) for e in range(3)]
            between = (-INF, 0) if name == CONTROLS[2] else (0, INF)
            expected[f"{label}, seed {seed}: cost of (1,2) minus (0,2), last quarter"] = (*between, late[2] - late[1])
            if name == CONTROLS[1]:
                expected[f"{label}, seed {seed}: cost of (1,2) minus (0,1), first half"] = (0, INF, early[2] - early[0])
            row = next(r for r in report.tables[2].rows if r[:2] == (label, f"seed {seed}"))
            assert list(row[2:]) == [f"{v:+.3f}" for v in (*early, *late)]
    assert_marks(report, expected)
    # the control has its own marks, which do not depend on the search
    assert len(study.width(WidthConfig(seeds=2, cell="minimal"), None, no_task).checks) == len(expected)
    assert study.width(WidthConfig(seeds=2, control_steps=599), None, no_task).checks == ()
    lines = report.figures[-1].axes[0].lines
    # of each edge two runs and their mean, which has the label
    assert [line.get_label() for line in lines[2::3]] == ["(0,1)", "(0,2)", "(1,2)"]
    one = [[mean_cost(runner.runs[CONTROLS[0], 1], e, range(r, r + 1)) for r in range(12)] for e in range(3)]
    np.testing.assert_allclose([line.get_ydata() for line in lines[1:-1:3]], one)


def test_the_control_is_that_of_section_6(runner):
    study.width(WidthConfig(seeds=1, lr=0.3, noise=1.0), None, no_task)
    for name, outputs, first in (
        (CONTROLS[0], (1, 2), DARTS_OPS),
        (CONTROLS[1], (2,), DARTS_OPS),
        (CONTROLS[2], (2,), ("sep_conv_5x5",)),
    ):
        cfg, search = runner.settings[name]
        cell = runner.runs[name, 0].space.cell
        assert (cell.outputs, cell.edges[0].ops, cell.edges[1].ops) == (outputs, first, DARTS_OPS)
        assert (search.method, search.redraw, search.records) == ("uniform", name != CONTROLS[0], 12)
        # row W5 of section 9, whatever the search
        assert (cfg.samples, cfg.noise, cfg.lr, cfg.steps, cfg.channels, cfg.cells) == (1000, 3.0, 0.1, 600, 8, 1)


def test_marks_of_collapse_and_signs_of_the_gates(runner):
    report = study.collapse(CollapseConfig(seeds=2), None, no_task)
    expected = {}
    for seed in (0, 1):
        single, gates = (runner.runs[name, seed] for name in ("dsnas", "table"))
        dropped = int((single.probabilities[-1, 0].argmax(-1) == 0).sum())
        # the third quarter of twelve records, by hand
        sums = gates.outputs[6] + gates.outputs[7] + gates.outputs[8]
        c, ell, h = (sums[..., q] / sums[..., 3] for q in range(3))
        held_out = gates.outputs[:, SEARCH, 0, 0] / gates.outputs[:, SEARCH, 0, 3]
        table = f"table, seed {seed}:"
        expected |= {
            f"seed {seed}: edges that are None on one level": (0, 6, dropped),
            f"{table} correct C, training": (-INF, 0, c[TRAIN, 1]),
            f"{table} correct C, held out": (-INF, 0, c[SEARCH, 1]),
            f"{table} wrong L, held out minus training": (0, INF, ell[SEARCH, 2] - ell[TRAIN, 2]),
            f"{table} wrong H, held out minus training": (-INF, 0, h[SEARCH, 2] - h[TRAIN, 2]),
            f"{table} wrong C, held out minus training": (0.5, INF, c[SEARCH, 2] - c[TRAIN, 2]),
            f"{table} held-out C, second half minus first": (0, INF, held_out[6:].mean() - held_out[:6].mean()),
        }
        row = next(r for r in report.tables[3].rows if r[0] == f"wrong, seed {seed}")
        shown = [q[which, 2] for q in (c, ell, h) for which in (TRAIN, SEARCH)]
        assert list(row[1:]) == [f"{v:+.2f}" for v in shown]
    assert_marks(report, expected)
    assert len(report.checks) == len(expected) + 2 * 3
    cfg, search = runner.settings["table"]
    # row W4 of section 9: probabilities stay, held-out batches are measured
    assert (search.method, search.bilevel, search.alpha_lr) == ("darts", True, 0.0)
    assert (cfg.cell, cfg.channels, cfg.samples, cfg.noise, cfg.lr, cfg.steps) == ("minimal", 8, 300, 3.0, 0.1, 300)
    searches = {name: how for name, (_, how) in runner.settings.items()}
    assert searches["dsnas-bilevel"].bilevel and not searches["dsnas"].bilevel
    assert searches["dsnas"] == GrowthConfig(seed=1).search()


SEEN_MEASURES = {
    "P1": {"C_first": 0.1, "C_last": -0.1, "q_in_start": 0.1, "q_in_peak": 0.2, "q_in_end": 0.05}
    | {"positive_first": 0.8, "positive_last": 0.4, "kept_in": 8.0, "n_in": 8.0},
    "P2": {"q_int_end": 0.8, "q_in_end": 0.1, "kept_int": 1.0, "n_int": 6.0, "kept_in": 8.0, "n_in": 8.0}
    | {"intermediate_minus_input_cost": 0.01},
    "P3": {"kept_in": 0.0, "kept_int": 0.0, "n_in": 8.0, "n_int": 6.0}
    | {"search_C_smallest": 0.1, "search_minus_train_C": 0.1},
}


@pytest.mark.parametrize(
    ("pattern", "change", "sign", "mark"),
    [
        ("P1", {}, None, None),
        ("P1", {"C_first": -0.2}, "C turns from positive to negative", "C of the first part"),
        ("P1", {"C_last": math.nan}, "C turns from positive to negative", "C of the last part"),
        ("P1", {"q_in_start": 0.1289, "q_in_peak": 0.1299}, "None gains at first", "peak of q of input edges"),
        ("P1", {"q_in_start": 0.04}, "and loses in the end", None),
        ("P1", {"q_in_end": 0.061}, None, "q of input edges at the end"),
        ("P1", {"positive_last": 0.9}, "fewer costs are positive", None),
        ("P1", {"kept_in": 7.0}, None, "input edges kept"),
        ("P2", {}, None, None),
        ("P2", {"q_in_end": 0.9}, "intermediate edges are less probable", None),
        ("P2", {"kept_int": 3.0}, None, "intermediate edges kept"),
        # as many in number, but fewer of the six are left
        ("P2", {"kept_int": 2.0, "kept_in": 2.0}, "fewer of them are kept", "input edges kept"),
        (
            "P2",
            {"intermediate_minus_input_cost": math.nan},
            "they cost more than input edges of their nodes",
            "cost of intermediate minus input edges of a node",
        ),
        ("P3", {}, None, None),
        ("P3", {"kept_int": 1.0}, "all edges are None", None),
        ("P3", {"kept_in": 1.0, "kept_int": 1.0}, "all edges are None", "edges that are None"),
        ("P3", {"search_C_smallest": -0.1}, "held-out C stays positive", "held-out C, smallest part"),
        (
            "P3",
            {"search_minus_train_C": -0.1},
            "training C is below it",
            "held-out minus training C, smallest part",
        ),
    ],
)
def test_signs_and_marks_of_a_pattern(pattern, change, sign, mark):
    expected_pattern, values = PATTERNS[pattern], {**SEEN_MEASURES[pattern], **change}
    assert [what for what, is_seen in expected_pattern.signs.items() if not is_seen(values)] == ([sign] if sign else [])
    missed = [check.name for check in name_checks("m", expected_pattern.marks(values)) if not check.passed]
    assert missed == ([f"m: {mark}"] if mark else [])
