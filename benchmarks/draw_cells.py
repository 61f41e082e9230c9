"""Draws docs/cell_searches.svg from the rows of `bench_cell_search`: `python -m benchmarks.draw_cells`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bench_cell_search import OUT, rows
from benchmarks.harness import ROOT
from nasfast.cells import nas_bench_201_space
from nasfast.report.plots import SERIES, new_figure

PICTURE = ROOT / "docs" / "cell_searches.svg"


def curves(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Cost and probability of None, of input and intermediate edges, and the percentile; records x lines."""
    inner = np.array(nas_bench_201_space().cell.intermediate)
    cost, none = np.array(row["edge_costs"])[:, int(row["settings"]["bilevel"])], np.array(row["none"])
    by_kind = {key: np.stack([v[:, ~inner].mean(1), v[:, inner].mean(1)], 1) for key, v in (("c", cost), ("q", none))}
    return {**by_kind, "percentile": np.array(row["trajectory"], dtype=float)[:, None]}


def picture(found: Sequence[dict[str, Any]]) -> Figure:
    """A column for every differentiable method: thin lines are seeds, bold ones their means."""
    drawn = [row for row in found if "trajectory" in row]
    names = list(dict.fromkeys(row["name"] for row in drawn))
    labels = {"c": "cost of an edge", "q": "probability of None", "percentile": "percentile"}
    figure, axes = new_figure(2.0 * len(names) + 0.8, 6, rows=3, columns=len(names), sharey="row", sharex="col")
    for i, (key, label) in enumerate(labels.items()):
        for j, name in enumerate(names):
            ax, mine = axes[i * len(names) + j], [row for row in drawn if row["name"] == name]
            values = [curves(row)[key] for row in mine]
            count = len(values[0])
            # a cost is the mean of a record, and the others are known before the search and at the end of each record
            at = (np.arange(count) + 0.5) / count if key == "c" else np.linspace(0, 1, count)
            _lines(ax, mine[0]["steps"] * at, values)
            if key == "c":
                ax.axhline(0, color="0.4", lw=0.8)
                ax.set_title(name, fontsize=10)
            if j == 0:
                ax.set_ylabel(label)
            if key == "percentile":
                ax.set(xlabel="step", ylim=(0, 100))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _lines(ax: Axes, x: np.ndarray, values: Sequence[np.ndarray]) -> None:
    of_edges = {"input edges": SERIES[0], "intermediate edges": SERIES[1]}
    kinds = of_edges if values[0].shape[1] == len(of_edges) else {"cell": SERIES[2]}
    for k, (name, colour) in enumerate(kinds.items()):
        for one in values:
            ax.plot(x, one[:, k], color=colour, lw=0.7, alpha=0.5)
        ax.plot(x, np.mean([one[:, k] for one in values], 0), color=colour, lw=2, label=name)


if __name__ == "__main__":
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cells", "path.simplify": True}):
        picture(rows(OUT)).savefig(PICTURE, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
