"""The numbers of the wiring study, against loops over fabricated searches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchConfig, CellSearchResult
from nasfast.research.cells.space import DARTS_OPS, Cell, CellSpace, Edge, minimal_cell
from nasfast.research.studies.report import checks_of
from nasfast.research.studies.wiring import study
from nasfast.research.studies.wiring.config import CollapseConfig, LearntConfig, WidthConfig
from nasfast.research.studies.wiring.study import measures

INF = float("inf")
CONTROLS = ("control-simplified", "control-modified__sampled", "control-modified___0_1__fixed")


def fabricated(
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
    "darts": study.space_of(LearntConfig(cells=4)),
    "simplified": study.space_of(LearntConfig(cell="simplified")),
    "nas_bench_201": study.space_of(LearntConfig(cell="nas_bench_201")),
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


class Fabricating:
    """Replaces the runner: every search ends at once, and its arguments are recorded."""

    device = "cpu"

    def __init__(self) -> None:
        self.found, self.asked = {}, {}

    def all(self, *groups) -> list[dict[int, CellSearchResult]]:
        return [{key: self._made(search) for key, search in group.items()} for group in groups]

    def _made(self, search) -> CellSearchResult:
        cfg, how, seed = search.cfg, search.how, 100 * search.cfg.seed + len(search.name)
        settings = {"records": how.records, "bilevel": how.bilevel, "method": how.method}
        made = fabricated(search.space, seed=seed, **settings)
        self.found[search.name, cfg.seed], self.asked[search.name] = made, (cfg, how)
        return made


@pytest.fixture
def runner(monkeypatch) -> Fabricating:
    made = Fabricating()
    monkeypatch.setattr(study, "Runner", lambda *args: made)
    return made


def marks_of(checks) -> dict[str, tuple[float, float, float]]:
    return {check.name: (check.low, check.high, check.measured) for check in checks}


def test_studies_ask_for_the_searches_of_section_9_and_judge_every_seed(runner):
    found = study.growth(LearntConfig(seeds=2), None)
    expected = checks_of("seed 1", study.PATTERNS["P1"].marks(measures(runner.found["dsnas", 1])))
    assert len(found.checks) == 2 * len(expected) and found.checks[len(expected) :] == tuple(expected)
    missing = [sign for sign, seen in found.verdicts["P1, seed 0"].evidence.items() if not seen]
    assert found.verdicts["P1, seed 0"].names == (f"not seen: {', '.join(missing)}",)
    # marks are of the default settings, and the controls have their own
    assert study.growth(LearntConfig(steps=1499), None).checks == ()
    assert study.width(WidthConfig(control_steps=599), None).checks == ()
    assert len(study.width(WidthConfig(seeds=2, cell="minimal", lr=0.3), None).checks) == 8
    for name, outputs, first in zip(
        CONTROLS, ((1, 2), (2,), (2,)), (DARTS_OPS, DARTS_OPS, ("sep_conv_5x5",)), strict=True
    ):
        cfg, search = runner.asked[name]
        cell = runner.found[name, 0].space.cell
        assert (cell.outputs, cell.edges[0].ops, cell.edges[1].ops) == (outputs, first, DARTS_OPS)
        assert (search.method, search.redraw, search.records) == ("uniform", name != CONTROLS[0], 12)
        # row W5, whatever the search
        assert (cfg.samples, cfg.noise, cfg.lr, cfg.steps, cfg.channels, cfg.cells) == (1000, 3.0, 0.1, 600, 8, 1)
    found = study.collapse(CollapseConfig(seeds=2), None)
    assert len(found.checks) == 2 * (3 + 1 + 6)
    dropped = int((runner.found["dsnas", 1].probabilities[-1, 0].argmax(-1) == 0).sum())
    assert marks_of(found.checks)["seed 1: edges that are None on one level"] == (0, 6, dropped)
    cfg, search = runner.asked["table"]
    # row W4: probabilities stay, held-out batches are measured
    assert (search.method, search.bilevel, search.alpha_lr) == ("darts", True, 0.0)
    assert (cfg.cell, cfg.channels, cfg.samples, cfg.noise, cfg.lr, cfg.steps) == ("minimal", 8, 300, 3.0, 0.1, 300)
    searches = {name: asked for name, (_, asked) in runner.asked.items()}
    assert searches["dsnas-bilevel"].bilevel and not searches["dsnas"].bilevel
    assert searches["dsnas"] == LearntConfig(seed=1).search()


def test_marks_of_the_control_for_width():
    labels = ("simplified", "modified, sampled", "modified, (0,1) fixed")
    runs = {label: {0: fabricated(SPACES["simplified"], records=12, seed=i)} for i, label in enumerate(labels)}
    expected, rows = {}, []
    for label, found in runs.items():
        late, early = ([mean_cost(found[0], e, records) for e in range(3)] for records in (range(9, 12), range(6)))
        between = (-INF, 0) if label.endswith("fixed") else (0, INF)
        expected[f"{label}, seed 0: cost of (1,2) minus (0,2), last quarter"] = (*between, late[2] - late[1])
        if label == labels[1]:
            expected[f"{label}, seed 0: cost of (1,2) minus (0,1), first half"] = (0, INF, early[2] - early[0])
        rows.append((label, "seed 0", *(f"{v:+.3f}" for v in (*early, *late))))
    marks = marks_of(study.control_checks(runs))
    assert marks == {name: pytest.approx(mark, abs=1e-12) for name, mark in expected.items()}
    assert study.control_table(runs).rows == tuple(rows)
    one = [[mean_cost(runs[labels[0]][0], e, range(r, r + 1)) for r in range(12)] for e in range(3)]
    # of each edge a run and the mean, which has the label
    lines = study.control("", runs).axes[0].lines
    assert [line.get_label() for line in lines[1::2]] == ["(0,1)", "(0,2)", "(1,2)"]
    np.testing.assert_allclose([line.get_ydata() for line in lines[:-1:2]], one)


def test_signs_of_the_gates():
    gates = fabricated(SPACES["minimal"], records=12, bilevel=True, method="darts")
    # the third quarter of twelve records, by hand
    sums = gates.outputs[6] + gates.outputs[7] + gates.outputs[8]
    c, ell, h = (sums[..., q] / sums[..., 3] for q in range(3))
    held_out = gates.outputs[:, SEARCH, 0, 0] / gates.outputs[:, SEARCH, 0, 3]
    expected = {
        "table, seed 3: correct C, training": (-INF, 0, c[TRAIN, 1]),
        "table, seed 3: correct C, held out": (-INF, 0, c[SEARCH, 1]),
        "table, seed 3: wrong L, held out minus training": (0, INF, ell[SEARCH, 2] - ell[TRAIN, 2]),
        "table, seed 3: wrong H, held out minus training": (-INF, 0, h[SEARCH, 2] - h[TRAIN, 2]),
        "table, seed 3: wrong C, held out minus training": (0.5, INF, c[SEARCH, 2] - c[TRAIN, 2]),
        "table, seed 3: held-out C, second half minus first": (0, INF, held_out[6:].mean() - held_out[:6].mean()),
    }
    window = study.sign_window(gates)
    marks = marks_of(study.sign_checks(3, gates, window))
    assert marks == {name: pytest.approx(mark, abs=1e-12) for name, mark in expected.items()}
    shown = [q[which, 2] for q in (c, ell, h) for which in (TRAIN, SEARCH)]
    assert study.signs_table({3: window}).rows[1] == ("wrong, seed 3", *(f"{v:+.2f}" for v in shown))


SEEN = {
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
    found, m = study.PATTERNS[pattern], {**SEEN[pattern], **change}
    assert [what for what, is_so in found.signs.items() if not is_so(m)] == ([sign] if sign else [])
    missed = [check.name for check in checks_of("m", found.marks(m)) if not check.passed]
    assert missed == ([f"m: {mark}"] if mark else [])
