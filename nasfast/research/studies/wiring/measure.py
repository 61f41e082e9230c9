"""What the wiring study reads from the records of a search (section 6 of its description)."""

from __future__ import annotations

import numpy as np

from nasfast.research.cells.costs import NONE
from nasfast.research.cells.probe import GROUPS
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import CellSpace

_WINDOWS = 15
"""Parts of a run over which costs are averaged. Probabilities do not scatter and are shown at every record."""


def none_probability(run: CellSearchResult) -> np.ndarray:
    """(records + 1, edges) probability of None, averaged over types of cells."""
    return run.probabilities[..., run.space.ops.index(NONE)].mean(1)


def kept_edges(run: CellSearchResult) -> np.ndarray:
    """(records + 1, edges): the share of types of cells in which the most probable operation is not None."""
    return (run.probabilities.argmax(-1) != run.space.ops.index(NONE)).mean(1)


def live_operations(space: CellSpace) -> list[int]:
    """The indices of the operations other than None."""
    return [k for k, op in enumerate(space.ops) if op != NONE]


def windows(records: np.ndarray) -> list[np.ndarray]:
    """Equal parts of the records of a run."""
    return np.array_split(records, min(_WINDOWS, len(records)))


def _sums(records: np.ndarray) -> np.ndarray:
    return np.stack([part.sum(0) for part in windows(records)])


def output_costs(run: CellSearchResult, which: int = TRAIN) -> np.ndarray:
    """(windows,) mean C over all samples."""
    sums = _sums(run.outputs[:, which, GROUPS.index("all")])
    return sums[:, 0] / sums[:, -1]


def positive_share(run: CellSearchResult) -> np.ndarray:
    """(windows,) share of (cell, edge, operation) mean costs above 0, without None."""
    total, count = (_sums(run.costs[:, TRAIN, i][..., live_operations(run.space)]) for i in (0, 2))
    with np.errstate(invalid="ignore"):
        return (np.where(count > 0, total, 0) > 0).sum((1, 2, 3)) / (count > 0).sum((1, 2, 3))


def edge_means(run: CellSearchResult, records: slice = slice(None)) -> np.ndarray:
    """(edges,) mean cost over the batches in which an operation other than None ran, all cells together."""
    total, count = (run.costs[records, TRAIN, i][..., live_operations(run.space)].sum((0, 1, 3)) for i in (0, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count


def _same_node_difference(run: CellSearchResult) -> float:
    """Mean cost of intermediate edges minus that of input edges into the same node, averaged over such nodes."""
    cell, means, differences = run.space.cell, edge_means(run), []
    for node in cell.inner:
        edges = np.array(cell.into(node))
        inner = np.array(cell.intermediate)[edges]
        if inner.any() and not inner.all():
            differences.append(np.nanmean(means[edges[inner]]) - np.nanmean(means[edges[~inner]]))
    return float(np.mean(differences)) if differences else float("nan")


def measures(run: CellSearchResult) -> dict[str, float]:
    """The numbers of section 6 of one search; `MEASURES` has words for each."""
    inner, q, kept_share = np.array(run.space.cell.intermediate), none_probability(run), kept_edges(run)
    cost, positive = output_costs(run), positive_share(run)
    result = {
        "C_first": cost[0],
        "C_last": cost[-1],
        "positive_first": positive[0],
        "positive_last": positive[-1],
        "intermediate_minus_input_cost": _same_node_difference(run),
    }
    for name, edges in (("in", ~inner), ("int", inner)):
        if edges.any():
            mean = q[:, edges].mean(1)
            result |= {f"q_{name}_start": mean[0], f"q_{name}_peak": mean.max(), f"q_{name}_end": mean[-1]}
            result |= {f"kept_{name}": kept_share[-1, edges].sum(), f"n_{name}": edges.sum()}
    if run.cfg.bilevel:
        search = output_costs(run, SEARCH)
        result |= {"search_C_first": search[0], "search_C_last": search[-1], "search_C_smallest": search.min()}
        result["search_minus_train_C"] = (search - cost).min()
    return {name: float(value) for name, value in result.items()}


MEASURES = {
    "C_first": "C, first part",
    "C_last": "C, last part",
    "positive_first": "costs > 0, first part",
    "positive_last": "costs > 0, last part",
    "intermediate_minus_input_cost": "cost of intermediate minus input edges of a node",
    "q_in_start": "q of input edges, start",
    "q_in_peak": "peak",
    "q_in_end": "end",
    "kept_in": "input edges kept",
    "n_in": "of",
    "q_int_start": "q of intermediate edges, start",
    "q_int_peak": "peak (intermediate)",
    "q_int_end": "end (intermediate)",
    "kept_int": "intermediate edges kept",
    "n_int": "of (intermediate)",
    "search_C_first": "held-out C, first part",
    "search_C_last": "held-out C, last part",
    "search_C_smallest": "held-out C, smallest part",
    "search_minus_train_C": "held-out minus training C, smallest",
}
"""Name of a measure -> its words in the tables."""


def early_and_late(run: CellSearchResult) -> tuple[np.ndarray, np.ndarray]:
    """`edge_means` of the first half of a run, and of its last quarter."""
    records = len(run.steps)
    return edge_means(run, slice(records // 2)), edge_means(run, slice(records - max(1, records // 4), None))


def sign_window(run: CellSearchResult) -> dict[int, dict[str, dict[str, float]]]:
    """Means of C, L, H over the third quarter of the run: by set of images and group."""
    records = len(run.steps)
    part = run.outputs[records // 2 : max(records // 2 + 1, 3 * records // 4)].sum(0)
    with np.errstate(invalid="ignore"):
        means = part[..., :3] / part[..., 3:]
    return {
        which: {group: dict(zip("CLH", means[which, g].tolist(), strict=True)) for g, group in enumerate(GROUPS)}
        for which in (TRAIN, SEARCH)
    }
