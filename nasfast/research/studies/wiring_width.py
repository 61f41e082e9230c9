"""Wiring, P2: intermediate edges are dropped, and why (Xie et al., arXiv 2009.01272, sections 5 and 6).

Claimed: with sampling and shared weights, of the edges into one node those from intermediate nodes cost more, because
they are trained less, and are dropped. Control for this cause (figures 8 and 9), operations drawn uniformly:

    simplified               the intermediate edge (1,2) costs more than (0,2)
    modified, sampled        so it does where node 2 alone leads on, and at first more than (0,1) too
    modified, (0,1) fixed    with the edge in front of it trained in every step, (1,2) costs least
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nasfast.report.plots import GREY, SERIES, new_figure
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.search import CellSearchResult
from nasfast.research.cells.space import CELLS, DARTS_OPS
from nasfast.research.studies.commands import PatternConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.research.studies.wiring import Runs, Setup, edge_means, judged, lines, one_cell, searched, searches

CONTROL = Setup(channels=8, samples=1000, noise=3.0, lr=0.1, steps=600, records=12)
CONTROLS = {
    "simplified": ("control-simplified", CELLS["simplified"](DARTS_OPS), False),
    "modified, sampled": ("control-modified__sampled", CELLS["modified"](DARTS_OPS), True),
    "modified, (0,1) fixed": (
        "control-modified___0_1__fixed",
        CELLS["modified"](DARTS_OPS).restricted(0, 1, ("sep_conv_5x5",)),
        True,
    ),
}
"""Control for P2 -> name of its searches, its cell, and whether draws without a path are repeated."""
EDGES = ("(0,1)", "(0,2)", "(1,2)")


def width(cfg: PatternConfig, notes: Notebook) -> None:
    """P2: the search of P1, and the control for its cause on cells with one input and uniformly drawn operations."""
    runs = searched("width preferred", cfg, notes)
    for seed, m in judged("width preferred", cfg, notes, runs, _width_signs):
        notes.mark(f"seed {seed}: intermediate edges kept", m["kept_int"], at_least=0, at_most=2)
        notes.mark(f"seed {seed}: input edges kept", m["kept_in"], at_least=m["n_in"])
        difference = m["intermediate_minus_input_cost"]
        notes.mark(f"seed {seed}: cost of intermediate minus input edges of a node", difference, at_least=0)
    controls, rows = {}, []
    for label, (name, cell, redraw) in CONTROLS.items():
        how = CellSearchConfig(method="uniform", redraw=redraw, records=CONTROL.records)
        controls[label] = searches(name, cfg, CONTROL, one_cell(cell, CONTROL), how, notes.out)
        for seed, run in controls[label].items():
            early, late = early_and_late(run)
            rows.append((label, f"seed {seed}", *early, *late))
            mark = f"{label}, seed {seed}: cost of (1,2) minus"
            if label.endswith("fixed"):
                notes.mark(f"{mark} (0,2), last quarter", late[2] - late[1], at_most=0)
            else:
                notes.mark(f"{mark} (0,2), last quarter", late[2] - late[1], at_least=0)
            if label == "modified, sampled":
                notes.mark(f"{mark} (0,1), first half", early[2] - early[0], at_least=0)
    edges = [f"{edge} {part}" for part in ("first half", "last quarter") for edge in EDGES]
    columns = {"control": "", "": "", **dict.fromkeys(edges, "+.3f")}
    notes.table("mean cost of the edges, operations drawn uniformly", columns, rows)
    _control_figure(controls, notes)


def _width_signs(m: Mapping[str, float]) -> dict[str, bool]:
    return {
        "intermediate edges are less probable": m["q_int_end"] > m["q_in_end"],
        "fewer of them are kept": m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
        "they cost more than input edges of their nodes": m["intermediate_minus_input_cost"] > 0,
    }


def early_and_late(run: CellSearchResult) -> tuple[np.ndarray, np.ndarray]:
    """`edge_means` of the first half of a run, and of its last quarter."""
    records = len(run.steps)
    return edge_means(run, slice(records // 2)), edge_means(run, slice(records - max(1, records // 4), None))


def _control_figure(controls: Mapping[str, Runs], notes: Notebook) -> None:
    """Figures 8 and 9: the costs of every edge in every run of every control, by record."""
    figure, axes = new_figure(11, 3.4, columns=len(controls), sharey=True)
    for ax, (label, runs) in zip(axes, controls.items(), strict=True):
        steps = next(iter(runs.values())).steps
        costs = [np.stack([edge_means(run, slice(r, r + 1)) for r in range(len(steps))]) for run in runs.values()]
        for e, (colour, edge) in enumerate(zip(SERIES, EDGES, strict=False)):
            lines(ax, steps, [values[:, e] for values in costs], colour, edge)
        ax.axhline(0, color=GREY, ls=":")
        ax.set(title=label, xlabel="step", ylabel="mean cost")
    notes.figure("control for the cause (figures 8 and 9)", "Thin: one run each; bold: their mean.", figure)
