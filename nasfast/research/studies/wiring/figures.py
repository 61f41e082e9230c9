"""The figures of the wiring study: what they show, as data; `drawings` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nasfast.research.cells.costs import NONE
from nasfast.research.cells.probe import GROUPS
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import CellSpace
from nasfast.research.studies.page import Drawing
from nasfast.research.studies.parts import Figure
from nasfast.research.studies.wiring.drawings import (
    draw_clh,
    draw_control,
    draw_cost_heatmap,
    draw_edge_cost,
    draw_edge_prob,
    draw_patterns,
    draw_wiring,
)
from nasfast.research.studies.wiring.measure import (
    edge_means,
    intermediate_edges,
    kept_edges,
    live_operations,
    none_probability,
    output_costs,
    positive_share,
    window_steps,
)

Curve = np.ndarray
"""One value for each record or window."""


@dataclass(frozen=True)
class EdgeProbabilities(Figure):
    """Probabilities p (records + 1, edges, ops) of the candidates, nan where an edge has no such candidate."""

    kind: ClassVar[str] = "edge_prob"
    steps: list[int]
    ops: list[str]
    p: np.ndarray
    edges: list[str]
    intermediate: list[bool]


@dataclass(frozen=True)
class Wiring(Figure):
    """The graph of a cell at some steps; p as in `EdgeProbabilities`, `edges` are pairs of nodes."""

    kind: ClassVar[str] = "wiring"
    steps: list[int]
    ops: list[str]
    p: np.ndarray
    inputs: int
    nodes: int
    outputs: list[int]
    edges: list[list[int]]


def architecture_figures(title: str, found: CellSearchResult) -> list[Figure]:
    """Probabilities per edge, and the graph at five steps, for every type of cell (figures 3 and 12 to 14)."""
    space, steps = found.space, _steps(found)
    cell = space.cell
    figures: list[Figure] = []
    at = np.unique(np.linspace(0, len(steps) - 1, 5).round().astype(int))
    for t, kind in enumerate(space.types):
        name = title if len(space.types) == 1 else f"{title}, {kind} cell"
        p = np.where(np.isfinite(found.logits[t]), found.probabilities[:, t], np.nan)
        figures.append(
            EdgeProbabilities(
                f"{name}: probabilities", steps, list(space.ops), p, _edge_names(space), list(cell.intermediate)
            )
        )
        figures.append(
            Wiring(
                f"{name}: wiring",
                [steps[i] for i in at],
                list(space.ops),
                p[at],
                cell.inputs,
                cell.nodes,
                list(cell.outputs),
                [[e.source, e.target] for e in cell.edges],
            )
        )
    return figures


@dataclass(frozen=True)
class EdgeCosts(Figure):
    """Edge costs of the last cell (records, edges) and their sum, beside loss and accuracy (figures 7 and 10)."""

    kind: ClassVar[str] = "edge_cost"
    steps: np.ndarray
    cost: np.ndarray
    total: Curve
    loss: Curve
    accuracy: Curve
    edges: list[str]
    intermediate: list[bool]

    @classmethod
    def of(cls, title: str, found: CellSearchResult) -> EdgeCosts:
        """The figure of a search."""
        edges, space = found.edge_costs[:, TRAIN, -1], found.space
        right, everything = found.outputs[:, TRAIN, GROUPS.index("correct"), -1], found.outputs[:, TRAIN, 0, -1]
        loss = found.means(quantity="L")
        intermediate = list(space.cell.intermediate)
        return cls(title, found.steps, edges, edges.sum(1), loss, right / everything, _edge_names(space), intermediate)


@dataclass(frozen=True)
class OutputCosts(Figure):
    """C, L and H of the output by group of samples and quantity; `search` only where there are two levels."""

    kind: ClassVar[str] = "clh"
    steps: np.ndarray
    train: dict[str, dict[str, Curve]]
    search: dict[str, dict[str, Curve]] | None

    @classmethod
    def of(cls, title: str, found: CellSearchResult) -> OutputCosts:
        """The figure of a search."""

        def curves(which: int) -> dict[str, dict[str, Curve]]:
            return {group: {q: found.means(which, group, q) for q in "CLH"} for group in GROUPS}

        return cls(title, found.steps, curves(TRAIN), curves(SEARCH) if found.cfg.bilevel else None)


@dataclass(frozen=True)
class RunPatterns:
    """One search in `Patterns`: costs by window, probabilities of None and edges kept by record."""

    name: str
    steps: list[int]
    C: Curve
    q_steps: list[int]
    q_in: Curve
    q_int: Curve
    kept_in: Curve
    kept_int: Curve
    positive: Curve
    search_C: Curve | None


@dataclass(frozen=True)
class Patterns(Figure):
    """Growth, width preference and collapse; `n_in` and `n_int` count input and intermediate edges."""

    kind: ClassVar[str] = "patterns"
    runs: list[RunPatterns]
    n_in: int
    n_int: int

    @classmethod
    def of(cls, title: str, runs: Mapping[int, CellSearchResult]) -> Patterns:
        """The figure of the searches of all seeds."""
        inner = intermediate_edges(next(iter(runs.values())).space)
        rows = []
        for seed, found in runs.items():
            q, kept = none_probability(found), kept_edges(found)
            rows.append(
                RunPatterns(
                    name=f"seed {seed}",
                    steps=window_steps(found),
                    C=output_costs(found),
                    q_steps=_steps(found),
                    q_in=q[:, ~inner].mean(1),
                    q_int=q[:, inner].mean(1),
                    kept_in=kept[:, ~inner].sum(1),
                    kept_int=kept[:, inner].sum(1),
                    positive=positive_share(found),
                    search_C=output_costs(found, SEARCH) if found.cfg.bilevel else None,
                )
            )
        return cls(title, rows, int((~inner).sum()), int(inner.sum()))


@dataclass(frozen=True)
class HeatPanel:
    """Mean costs (edges, ops), nan where they are not known, and the share of them above zero."""

    label: str
    mean: np.ndarray
    positive: float


@dataclass(frozen=True)
class CostHeatmap(Figure):
    """Figure 4: mean local costs of the last cell."""

    kind: ClassVar[str] = "cost_heatmap"
    ops: list[str]
    panels: list[HeatPanel]
    edges: list[str]
    intermediate: list[bool]

    @classmethod
    def of(cls, space: CellSpace, title: str, costs: Mapping[str, np.ndarray]) -> CostHeatmap:
        """The figure of costs (edges, ops) by label."""
        live, panels = live_operations(space), []
        for label, values in costs.items():
            known = values[:, live][np.isfinite(values[:, live])]
            shown = values.copy()
            shown[:, space.ops.index(NONE)] = np.nan
            panels.append(HeatPanel(label, shown, float((known > 0).mean())))
        return cls(title, list(space.ops), panels, _edge_names(space), list(space.cell.intermediate))


@dataclass(frozen=True)
class ControlPanel:
    """The costs (records, edges) of every run of one control."""

    label: str
    steps: np.ndarray
    edges: list[str]
    runs: list[np.ndarray]


@dataclass(frozen=True)
class Control(Figure):
    """Figures 8 and 9: costs of the edges in every control."""

    kind: ClassVar[str] = "control"
    panels: list[ControlPanel]

    @classmethod
    def of(cls, title: str, controls: Mapping[str, Mapping[int, CellSearchResult]]) -> Control:
        """The figure of the searches of every control and seed."""
        panels = []
        for label, runs in controls.items():
            first = next(iter(runs.values()))
            costs = [
                np.stack([edge_means(found, slice(r, r + 1)) for r in range(len(found.steps))])
                for found in runs.values()
            ]
            panels.append(ControlPanel(label, first.steps, _edge_names(first.space), costs))
        return cls(title, panels)


def _edge_names(space: CellSpace) -> list[str]:
    return [e.name for e in space.cell.edges]


def _steps(found: CellSearchResult) -> list[int]:
    return [0, *found.steps.tolist()]


FIGURES = {
    "edge_prob": Drawing(
        draw_edge_prob,
        "Probability of every candidate of every edge. Bold black: None. Shaded, with coloured titles: edges between "
        "intermediate nodes.",
    ),
    "wiring": Drawing(
        draw_wiring,
        "The most probable operation of every edge; the line is the wider the less probable None is. Dashed grey: None "
        "is the most probable. Arcs above the nodes come from inputs, those below from intermediate nodes; thin light "
        "arcs lead to the output.",
    ),
    "cost_heatmap": Drawing(
        draw_cost_heatmap,
        "Mean cost of every operation on every edge: red above zero, blue below. Grey: None, which costs nothing, and "
        "what is no candidate or was not measured. Bold, coloured: edges between intermediate nodes.",
    ),
    "edge_cost": Drawing(
        draw_edge_cost,
        "Mean cost of every edge, bold the means over input and over intermediate edges; their sum; the training loss "
        "and accuracy of the same steps.",
    ),
    "clh": Drawing(
        draw_clh,
        "Cost, loss and entropy of the output, averaged over the samples of each kind. Solid: training batches; "
        "dashed: search batches.",
    ),
    "patterns": Drawing(
        draw_patterns,
        "Growth, width preference and collapse. Thin: one run each; bold: their mean.",
    ),
    "control": Drawing(
        draw_control,
        "Mean cost of every edge in each setting. Thin: one run each; bold: their mean.",
    ),
}
"""Kind of figure -> what draws it from its form, and its caption."""
