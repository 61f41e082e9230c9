"""The wiring studies with tiny settings: what they read from searches, judge and write, and their commands."""

from __future__ import annotations

import json
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

from nasfast.cli.main import main
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchEngine, CellSearchResult
from nasfast.research.cells.space import Cell, CellSpace, Edge, darts_cell, minimal_cell
from nasfast.research.studies import wiring, wiring_collapse, wiring_cost, wiring_width
from nasfast.research.studies.commands import PatternConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.research.studies.wiring import Setup, measures

TINY = Setup(channels=4, samples=16, noise=1.0, lr=0.1, steps=6, records=3, batch=4)
STEPS = {"p1": 2 * 6, "p2": 2 * 3 * 6, "p3": 2 * 2 * 6, "cost": 2 * 6}
"""Steps of a study in a directory in which those before it have been: P2 and P3 find the search of P1."""


@pytest.fixture
def tiny(monkeypatch):
    for module, name in ((wiring_width, "CONTROL"), (wiring_collapse, "GATES"), (wiring_cost, "SETUP")):
        monkeypatch.setattr(module, name, TINY)
    for module in (wiring, wiring_collapse):
        monkeypatch.setattr(module, "PATTERN", TINY)
        monkeypatch.setattr(module, "SPACE", wiring.one_cell(minimal_cell(), TINY))
    monkeypatch.setattr(wiring_cost, "NETS", 2)
    monkeypatch.setattr(wiring_cost, "BATCHES", 3)


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Gets an entry for each step of a search."""
    taken, original = [], CellSearchEngine.forward_backward

    def counting(self, x, y, paths=None):
        taken.append(1)
        return original(self, x, y, paths)

    monkeypatch.setattr(CellSearchEngine, "forward_backward", counting)
    return taken


@pytest.mark.slow
def test_studies_share_their_searches_and_repeat_none(tiny, steps, tmp_path, capsys):
    before: dict[str, dict] = {}
    for again in (False, True):
        for kind, count in STEPS.items():
            steps.clear()
            # tiny searches may miss their marks
            assert main(["wiring", kind, "--seeds", "2", "--threads", "1", "--out", str(tmp_path)]) in (0, 1)
            assert len(steps) == (0 if again else count)
            form = json.loads((tmp_path / f"wiring-{kind}.json").read_text())
            assert form["settings"]["seeds"] == 2
            page = (tmp_path / f"wiring-{kind}.html").read_text()
            assert page.count("<figure>") == len(list((tmp_path / f"wiring-{kind}").glob("*.svg"))) > 1
            names = [mark["name"] for mark in form["marks"]]
            assert len(names) == len(set(names)) == {"p1": 10, "p2": 14, "p3": 20, "cost": 2}[kind]
            told = {"marks": form["marks"], "tables": form["tables"]}
            assert before.setdefault(kind, told) == told
    sums = {row[0]: float(row[1]) for title, rows in form["tables"].items() if "figure 19" in title for row in rows[1:]}
    # corollary 1.2: what is not the last cell costs nothing
    assert abs(sums["second last cell"]) < 0.02 * abs(sums["last cell"])
    variants = {row[0]: float(row[3]) for row in form["tables"]["at initialisation, figures 29 to 31"][1:]}
    # theorem 5: without scale and shift an instance norm leaves nothing
    assert variants["norm instance"] == pytest.approx(0, abs=1e-5) and abs(variants["norm layer"]) > 1e-4


@pytest.mark.parametrize("method", ["darts", "proxyless"])
def test_of_other_methods_signs_are_judged_alone(tiny, tmp_path, monkeypatch, method, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cfg = PatternConfig(method=method, seeds=1)
    notes = Notebook("p1", cfg)
    wiring.growing(cfg, notes)
    # torch has a folder of its own there
    assert notes.marks == [] and not list(tmp_path.rglob("*search.npz"))
    said = capsys.readouterr().out
    assert "Seed 0: " in said and "signs are judged" in said


def fabricate_run(space: CellSpace, *, records: int, bilevel: bool = False) -> CellSearchResult:
    """A search whose arrays are random but possible: no candidate, no cost; parts of the samples are correct."""
    rng = np.random.default_rng(0)
    edges, ops = len(space.cell.edges), len(space.ops)
    allowed = uniform_logits(space)[0].exp().numpy() > 0
    logits = np.where(allowed, rng.normal(size=(records + 1, 1, edges, ops)), -np.inf)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shape = (records, 2, space.cells, edges, ops)
    count = rng.integers(0, 4, shape) * allowed
    cost = count * rng.normal(0.1, 1, shape)
    outputs = rng.normal(size=(records, 2, 3, 4))
    outputs[:, :, 1:, 3] = rng.integers(1, 9, (records, 2, 2))
    outputs[:, :, 0] = outputs[:, :, 1] + outputs[:, :, 2]
    return CellSearchResult(
        SimpleNamespace(space=space),
        CellSearchConfig(bilevel=bilevel),
        10 * np.arange(1, records + 1),
        logits[-1],
        p,
        np.stack([cost, cost**2, count], 2),
        rng.normal(size=shape[:-1]),
        outputs,
    )


def mean_cost(run: CellSearchResult, edge: int, records: range) -> float:
    """Mean over all batches in which an operation other than None ran on an edge of some cell."""
    live = [k for k, op in enumerate(run.space.ops) if op != "none"]
    sums = [run.costs[r, TRAIN, i, :, edge][:, live].sum() for r in records for i in (0, 2)]
    return sum(sums[::2]) / sum(sums[1::2])


SPACES = {
    "minimal": CellSpace("minimal", minimal_cell(), cells=2, channels=2),
    "darts": CellSpace("darts", darts_cell(), cells=1, channels=2),
    # into node 3 there is no edge from an input
    "chain": CellSpace("c", Cell(1, 3, (Edge(0, 1), Edge(0, 2), Edge(1, 2), Edge(2, 3)), (3,)), cells=1, channels=2),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("bilevel", [False, True])
def test_measures(name, bilevel):
    """Against sums by hand; fifteen parts of 32 records have three, three, and two each."""
    space, cell = SPACES[name], SPACES[name].cell
    run = fabricate_run(space, records=32, bilevel=bilevel)
    none, first, last = space.ops.index("none"), slice(0, 3), slice(30, 32)
    values = measures(run)

    def output_cost(which, part):
        return run.outputs[part, which, 0, 0].sum() / run.outputs[part, which, 0, 3].sum()

    assert (values["C_first"], values["C_last"]) == pytest.approx((output_cost(TRAIN, first), output_cost(TRAIN, last)))
    signs = [
        run.costs[last, TRAIN, 0, i, e, k].sum() > 0
        for i, e, k in np.ndindex(run.costs.shape[3:])
        if space.ops[k] != "none" and run.costs[last, TRAIN, 2, i, e, k].sum()
    ]
    assert values["positive_last"] == pytest.approx(np.mean(signs))
    for kind, inner in (("in", False), ("int", True)):
        edges = [e for e, edge in enumerate(cell.edges) if (edge.source >= cell.inputs) == inner]
        q = run.probabilities[:, 0][:, edges, none].mean(1)
        assert (values[f"q_{kind}_start"], values[f"q_{kind}_peak"], values[f"q_{kind}_end"]) == pytest.approx(
            (q[0], q.max(), q[-1])
        )
        kept = sum(int(run.probabilities[-1, 0, e].argmax()) != none for e in edges)
        assert (values[f"kept_{kind}"], values[f"n_{kind}"]) == (kept, len(edges))
    differences = []
    for node in cell.inner:
        costs = {True: [], False: []}
        for e in cell.into(node):
            costs[cell.edges[e].source >= cell.inputs].append(mean_cost(run, e, range(32)))
        if costs[True] and costs[False]:
            differences.append(np.mean(costs[True]) - np.mean(costs[False]))
    assert values["intermediate_minus_input_cost"] == pytest.approx(np.mean(differences))
    assert ("search_C_first" in values) == bilevel
    if bilevel:
        assert values["search_C_first"] == pytest.approx(output_cost(SEARCH, first))
        assert values["search_C_smallest"] <= values["search_C_first"]


def test_signs_of_the_patterns():
    seen = {"C_first": 0.1, "C_last": -0.1, "q_in_start": 0.1, "q_in_peak": 0.2, "q_in_end": 0.05}
    seen |= {"positive_first": 0.8, "positive_last": 0.4, "kept_in": 8.0, "n_in": 8.0, "kept_int": 1.0, "n_int": 6.0}
    seen |= {"q_int_end": 0.8, "intermediate_minus_input_cost": 0.01}
    assert all(wiring._growing_signs(seen).values()) and all(wiring_width._width_signs(seen).values())
    for change in ({"C_first": -0.2}, {"C_last": float("nan")}, {"q_in_peak": 0.1019}, {"positive_last": 0.9}):
        assert list(wiring._growing_signs({**seen, **change}).values()).count(False) == 1
    # as many in number, but a larger share of the six is left
    for change in ({"kept_int": 6.0}, {"q_in_end": 0.9}, {"intermediate_minus_input_cost": float("nan")}):
        assert list(wiring_width._width_signs({**seen, **change}).values()).count(False) == 1
    collapsed = {"kept_in": 0.0, "kept_int": 0.0, "search_C_smallest": 0.1, "search_minus_train_C": 0.1}
    assert all(wiring_collapse._collapse_signs(collapsed).values())
    for change in ({"kept_int": 1.0}, {"search_C_smallest": -0.1}, {"search_minus_train_C": -0.1}):
        assert list(wiring_collapse._collapse_signs({**collapsed, **change}).values()).count(False) == 1


def test_the_settings_are_those_of_the_description():
    """Rows W2 to W5: noisy starts, and cells of one input for the controls."""
    assert wiring.PATTERN == Setup(channels=6, samples=400, noise=4.0, lr=0.4, steps=1500, records=75)
    assert wiring_width.CONTROL == Setup(channels=8, samples=1000, noise=3.0, lr=0.1, steps=600, records=12)
    assert wiring_collapse.GATES == Setup(channels=8, samples=300, noise=3.0, lr=0.1, steps=300, records=12)
    cells = [cell for _, cell, _ in wiring_width.CONTROLS.values()]
    assert [(cell.inputs, cell.outputs) for cell in cells] == [(1, (1, 2)), (1, (2,)), (1, (2,))]
    assert cells[2].edges[0].ops == ("sep_conv_5x5",) and cells[1].edges[0].ops == cells[2].edges[1].ops
