"""The figures of the wiring study, from plain data as it stands in a report's JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from nasfast.report.style import INK
from nasfast.research.cells.costs import OPERATIONS
from nasfast.research.cells.space import DARTS_OPS
from nasfast.research.studies.page import drawings, study_figure, write_study_page
from nasfast.research.studies.wiring.figures import _OPERATIONS, _TINT

KINDS = ("edge_prob", "wiring", "cost_heatmap", "edge_cost", "clh", "patterns", "control")
STEPS = [100, 200, 300, 400, 500, 600]
R = len(STEPS)
CELLS = {"simplified": (1, 2), "minimal": (2, 2), "darts": (2, 4)}
"""Inputs and intermediate nodes; 3, 5 and 14 edges."""


def edges_of(cell: str) -> list[list[int]]:
    inputs, nodes = CELLS[cell]
    return [[i, j] for j in range(inputs, inputs + nodes) for i in range(j)]


def example(kind: str, cell: str = "darts") -> dict:
    """Data of a figure: the first edge lacks skip_connect, the last None, and what is measured has gaps."""
    rng = np.random.default_rng(0)
    inputs, nodes = CELLS[cell]
    pairs, ops = edges_of(cell), list(DARTS_OPS)
    names, intermediate = [f"({i},{j})" for i, j in pairs], [i >= inputs for i, _ in pairs]
    count = len(pairs)
    p = rng.dirichlet(np.ones(len(ops)), (R + 1, count))
    p[:, 0, 1] = p[:, -1, 0] = np.nan
    curve = rng.normal(0, 0.1, R)
    curve[2] = np.nan
    mean = rng.normal(0, 0.05, (count, len(ops)))
    mean[:, 0], mean[0, 1] = 0, np.nan
    cost = rng.normal(0, 0.1, (R, count))
    cost[1, 0] = np.nan
    common = {"edges": names, "intermediate": intermediate, "ops": ops}
    split = {group: dict.fromkeys("CLH", curve) for group in ("all", "correct", "wrong")}
    run = {
        "steps": STEPS,
        "C": curve,
        "q_steps": [0, *STEPS],
        "positive": np.linspace(0.8, 0.4, R),
        "search_C": curve + 1,
        **{key: np.linspace(0.1, 0.9, R + 1) for key in ("q_in", "q_int")},
        **{key: np.arange(R + 1) // 2 for key in ("kept_in", "kept_int")},
    }
    figures = {
        "edge_prob": {**common, "steps": [0, *STEPS], "p": p},
        "wiring": {
            "inputs": inputs,
            "nodes": nodes,
            "outputs": list(range(inputs, inputs + nodes)),
            "edges": pairs,
            "ops": ops,
            "steps": [0, *STEPS],
            "p": p,
        },
        "cost_heatmap": {
            **common,
            "panels": [
                {"label": "at initialisation", "mean": mean, "positive": 0.83},
                {"label": "after training", "mean": mean - 0.1, "positive": 0.25},
            ],
        },
        "edge_cost": {
            "steps": STEPS,
            "edges": names,
            "intermediate": intermediate,
            "cost": cost,
            "total": cost.sum(1),
            "loss": np.linspace(2, 0.1, R),
            "accuracy": np.linspace(0.1, 0.9, R),
        },
        "clh": {"steps": STEPS, "train": split, "search": split},
        "patterns": {
            "runs": [{**run, "name": f"seed {i}", "C": curve + i} for i in range(3)],
            "n_in": intermediate.count(False),
            "n_int": intermediate.count(True),
        },
        "control": {
            "panels": [
                {"label": label, "steps": STEPS, "edges": names, "runs": [cost, cost + 0.2]}
                for label in ("simplified", "modified, sampled", "modified, fixed")
            ],
        },
    }
    return plain({"kind": kind, "title": f"a {kind} of $5", **figures[kind]})


def plain(value):
    """As in a file: lists, and None for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def labels(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_every_operation_has_its_own_colour_and_short_name():
    assert set(_OPERATIONS) == set(OPERATIONS)
    short, colours = zip(*_OPERATIONS.values(), strict=True)
    assert len(set(short)) == len(set(colours)) == len(OPERATIONS)


@pytest.mark.parametrize("cell", ["simplified", "darts"])
def test_edge_prob(cell):
    data = example("edge_prob", cell)
    figure = study_figure(data)
    assert [ax.get_title() for ax in figure.axes] == data["edges"]
    assert legend(figure) == data["ops"]
    for ax, intermediate in zip(figure.axes, data["intermediate"], strict=True):
        assert (to_rgba(ax.get_facecolor()) == to_rgba(_TINT)) == intermediate
        assert (ax.title.get_color() != INK) == intermediate
    first, last = figure.axes[0].lines, figure.axes[-1].lines
    # candidates that an edge lacks are not drawn; None is bold and black where there is one
    assert len(first) == len(last) == len(DARTS_OPS) - 1
    assert [(line.get_color(), line.get_linewidth()) for line in first if line.get_linewidth() > 2] == [
        ("#000000", 2.4)
    ]
    assert all(line.get_linewidth() < 2 for line in last)
    np.testing.assert_allclose(first[1].get_ydata(), np.array(data["p"], float)[:, 0, 2])
    # of one scale, which holds every value
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    assert figure.axes[0].get_ylim()[1] >= np.nanmax(np.array(data["p"], float))


def wiring_of(cell: str, chosen: str, q: float) -> dict:
    """Every edge has `chosen` at 0.6 and None at q; where None is chosen q is its probability."""
    data = example("wiring", cell)
    p = np.zeros((5, len(data["edges"]), len(DARTS_OPS)))
    p[:, :, DARTS_OPS.index(chosen)] = 0.6
    p[:, :, 0] = q
    return {**data, "steps": [0, 1, 2, 3, 4], "p": p.tolist()}


@pytest.mark.parametrize("cell", CELLS)
def test_wiring(cell):
    (inputs, nodes), count = CELLS[cell], len(edges_of(cell))
    figure = study_figure(wiring_of(cell, "sep_conv_5x5", 0.25))
    assert [ax.get_title() for ax in figure.axes] == [f"step {s}" for s in range(5)]
    assert set(legend(figure)) == {"sep_conv_5x5", "input node", "intermediate node", "output"}
    for ax in figure.axes:
        assert labels(ax) == ["sep 5"] * count + [*map(str, range(inputs + nodes)), "out"]
        arcs = [patch for patch in ax.patches if isinstance(patch, PathPatch)]
        # those to the output come first
        assert len(arcs) == nodes + count
        assert {arc.get_linestyle() for arc in arcs} == {"solid"}
        assert {round(arc.get_linewidth(), 3) for arc in arcs[nodes:]} == {round(0.6 + 2.9 * 0.75, 3)}
        assert [line.get_marker() for line in ax.lines] == ["s"] * inputs + ["o"] * nodes + ["D"]
        # edges of inputs are above the nodes, the others below
        above = [text.get_position()[1] > 0 for text in ax.texts[:count]]
        assert above == [source < inputs for source, _ in edges_of(cell)]


def test_none_edges_of_a_wiring_are_dashed_and_thin():
    figure = study_figure(wiring_of("darts", "none", 1.0))
    arcs = figure.axes[0].patches[4:]
    # the dashes' lengths, in widths of a line
    assert {arc.get_linestyle() for arc in arcs} == {(0, (5, 2.5))}
    assert {arc.get_linewidth() for arc in arcs} == {0.6}
    assert labels(figure.axes[0]) == ["0", "1", "2", "3", "4", "5", "out"]
    assert set(legend(figure)) == {"none", "input node", "intermediate node", "output"}
    # a removed edge has no candidates and no arc; one without None is drawn in full
    data = wiring_of("simplified", "skip_connect", 0.5)
    for step in data["p"]:
        step[0] = [None] * len(DARTS_OPS)
        step[1][0] = None
    ax = study_figure(data).axes[0]
    assert labels(ax)[:2] == ["skip", "skip"]
    assert [round(arc.get_linewidth(), 2) for arc in ax.patches[2:]] == [3.5, 2.05]


@pytest.mark.parametrize("cell", ["simplified", "darts"])
def test_cost_heatmap(cell):
    data = example("cost_heatmap", cell)
    figure = study_figure(data)
    # the third is the bar of the common scale
    first, second, _ = figure.axes
    assert first.get_title() == "at initialisation: 83% of the costs > 0"
    assert second.get_title() == "after training: 25% of the costs > 0"
    assert [tick.get_text() for tick in first.get_yticklabels()] == data["edges"]
    assert [tick.get_text() for tick in first.get_xticklabels()][:3] == ["none", "skip", "max 3"]
    assert [tick.get_fontweight() == "bold" for tick in first.get_yticklabels()] == data["intermediate"]
    low, high = first.images[0].get_clim()
    assert low == -high and second.images[0].get_clim() == (low, high)
    shown = first.images[0].get_array()
    assert shown.mask[:, 0].all() and shown.mask[0, 1]
    assert shown.mask.sum() == len(data["edges"]) + 1
    assert len(first.texts) == 7 * len(data["edges"]) - 1
    # as many digits as the largest has two of: hundredths here
    last = data["panels"][0]["mean"][-1][-1]
    assert first.texts[-1].get_text() == f"{last:.2f}"


def test_heatmaps_of_far_scales_have_a_bar_each():
    data = example("cost_heatmap", "minimal")
    small = [[None if v is None else v / 1000 for v in row] for row in data["panels"][0]["mean"]]
    data["panels"][0]["mean"] = small
    figure = study_figure(data)
    assert len(figure.axes) == 4
    top = max(abs(v) for row in small for v in row if v is not None)
    # in units of a power of ten, so that numbers have two digits
    assert figure.axes[0].images[0].get_clim()[1] == pytest.approx(top * 10**4)
    assert [ax.get_ylabel() for ax in figure.axes[2:]] == ["cost in units of 1e-04", "cost"]


@pytest.mark.parametrize("cell", ["simplified", "darts"])
def test_edge_cost(cell):
    data = example("edge_cost", cell)
    costs, total, learning, accuracy = study_figure(data).axes
    names = [text.get_text() for text in costs.get_legend().get_texts()]
    # of three edges and more
    means = ["mean, input", "mean, intermediate"] if cell == "darts" else []
    assert names == data["edges"] + means
    cost, kinds = np.array(data["cost"], float), np.array(data["intermediate"])
    for i, kind in enumerate([False, True][: len(means)]):
        mean = costs.lines[len(data["edges"]) + i].get_ydata()
        np.testing.assert_allclose(mean, np.nanmean(cost[:, kinds == kind], axis=1))
    np.testing.assert_array_equal(total.lines[0].get_ydata(), np.array(data["total"], float))
    for ax in (costs, total):
        assert list(ax.lines[-1].get_ydata()) == [0, 0] and ax.lines[-1].get_linestyle() == ":"
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), 100 * np.array(data["accuracy"]))
    assert learning.get_title() == "loss and accuracy"


def test_clh():
    data = example("clh")
    figure = study_figure(data)
    assert [ax.get_title() for ax in figure.axes] == ["all samples", "correctly classified", "wrongly classified"]
    assert legend(figure) == ["cost C = L - H", "loss L", "entropy H", "train", "search"]
    for ax in figure.axes:
        assert [line.get_linestyle() for line in ax.lines] == ["-"] * 3 + ["--"] * 3 + [":"]
        # a gap stays a gap
        assert np.isnan(ax.lines[0].get_ydata()).sum() == 1
    figure = study_figure({**data, "search": None})
    assert {line.get_linestyle() for line in figure.axes[0].lines} == {"-", ":"}
    assert legend(figure) == ["cost C = L - H", "loss L", "entropy H"]


def test_patterns():
    data = example("patterns")
    figure = study_figure(data)
    cost, none, kept, positive = figure.axes
    styles = [line.get_linestyle() for line in cost.lines]
    assert styles == ["-"] * 4 + ["--"] * 4 + [":"]
    bold = [line for line in cost.lines if line.get_linewidth() > 2]
    runs = np.array([run["C"] for run in data["runs"]], float)
    np.testing.assert_allclose(bold[0].get_ydata(), runs.mean(axis=0))
    assert len(none.lines) == 8
    # of the kind's edges, in per cent
    ends = [line.get_ydata()[-1] for line in kept.lines]
    np.testing.assert_allclose(ends, [100 * 3 / 8] * 4 + [100 * 3 / 6] * 4)
    assert positive.lines[0].get_ydata()[0] == pytest.approx(80)
    assert legend(figure) == ["one run: seed 0, seed 1, seed 2", "mean"]


@pytest.mark.parametrize("cell", ["simplified", "darts"])
def test_control(cell):
    data = example("control", cell)
    figure = study_figure(data)
    assert [ax.get_title() for ax in figure.axes] == [panel["label"] for panel in data["panels"]]
    assert legend(figure) == data["panels"][0]["edges"]
    count = len(edges_of(cell))
    for ax in figure.axes:
        # two runs, their mean, and zero
        assert len(ax.lines) == 3 * count + 1
        assert len({line.get_color() for line in ax.lines if line.get_linewidth() > 2}) == count
    assert len({ax.get_ylim() for ax in figure.axes}) == 1


@pytest.mark.slow
def test_a_page_of_every_figure(tmp_path):
    form = {
        "subject": "a cell",
        "explanation": "",
        "notes": [],
        "tables": [],
        "checks": [],
        "verdicts": {},
        "seconds": 2.0,
        "machine": {"threads": 1},
        "figures": [example(kind, "simplified") for kind in KINDS],
    }
    (tmp_path / "wiring.json").write_text(json.dumps(form, allow_nan=False))
    page = write_study_page(tmp_path, "wiring").read_text()
    assert page.count("<figure>") == len(KINDS)
    for i, kind in enumerate(KINDS, 1):
        caption = drawings()[kind].caption
        assert caption in page
        assert f"a {kind} of $5" in page
        assert (tmp_path / "wiring" / f"{i}_a_{kind}_of__5.svg").read_text().startswith("<svg ")
