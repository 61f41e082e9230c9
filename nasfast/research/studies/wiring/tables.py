"""The tables of the wiring study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from nasfast.research.cells.costs import NONE
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.probe import LocalCosts
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import CellSpace
from nasfast.research.studies.parts import Table
from nasfast.research.studies.wiring.config import CostConfig
from nasfast.research.studies.wiring.measure import (
    Runner,
    edge_means,
    half_and_quarter,
    initial_costs,
    last_cell,
    live_operations,
    measures,
)
from nasfast.research.studies.wiring.theorems import Residual

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


def _interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return "-"
    half = stats.t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / np.sqrt(len(sample))
    return f"{sample.mean():.3f} ± {half:.3f}"


def theorems_table(rows: Sequence[Residual]) -> Table:
    """The theorems, with what was measured and its bound."""
    columns = {"": "", "measured": ".2g", "at most": ".0e", "the numbers behind it": ""}
    return Table.of("theorems", columns, [(row.name, row.measured, row.bound, row.note) for row in rows])


def measures_table(title: str, runs: Mapping[int, CellSearchResult]) -> Table:
    """The measures of every seed, and their mean with its interval."""
    of = [measures(found) for found in runs.values()]
    rows = []
    for name in of[0]:
        values = [m[name] for m in of]
        rows.append((MEASURES.get(name, name), *(v if np.isfinite(v) else None for v in values), _interval(values)))
    columns = {"": "", **{f"seed {seed}": ".3f" for seed in runs}, "mean, 95 %": ""}
    return Table.of(title, columns, rows)


def derivation_table(runs: Mapping[int, CellSearchResult]) -> Table:
    """The cells derived by argmax with None (the rule of SNAS, DSNAS and ProxylessNAS) and by DARTS's rule."""
    rows = []
    for seed, found in runs.items():
        own = "darts" if found.cfg.method == "darts" else "argmax"
        for rule, arch in derivations(found.space, found.logits).items():
            text = "; ".join(
                f"{kind}: "
                + " ".join(
                    f"{e.name}={found.space.ops[k]}"
                    for e, k in zip(found.space.cell.edges, part, strict=True)
                    if found.space.ops[k] != NONE
                )
                for kind, part in zip(found.space.types, found.space.parts(arch), strict=True)
            )
            rows.append((f"seed {seed}", rule + (" (its own)" if rule == own else ""), text))
    return Table("cells derived; edges that are None are left out", ("", "rule", "operations"), tuple(rows))


def control_table(controls: Mapping[str, Mapping[int, CellSearchResult]]) -> Table:
    """The costs of the edges early and late, for every control and seed."""
    rows = []
    for label, runs in controls.items():
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            rows.append((label, f"seed {seed}", *(f"{v:+.3f}" for v in (*early, *late))))
    edges = [e.name for e in found.space.cell.edges]
    header = ("control", "", *(f"{e} {part}" for part in ("first half", "last quarter") for e in edges))
    return Table("mean cost of the edges, operations sampled uniformly", header, tuple(rows))


def signs_table(windows: Mapping[int, Mapping[int, Any]]) -> Table:
    """C, L and H of every seed by set of images, and below them the published ones."""
    rows = []
    for seed, window in windows.items():
        for group in ("correct", "wrong"):
            values = [window[which][group][q] for q in "CLH" for which in (TRAIN, SEARCH)]
            rows.append((f"{group}, seed {seed}", *(f"{v:+.2f}" for v in values)))
    rows.append(("correct, published", *"-0.11 -0.11 0.06 0.08 0.17 0.19".split()))
    rows.append(("wrong, published", *"0.80 2.18 1.70 2.92 0.90 0.74".split()))
    header = ("", *(f"{q} {s}" for q in "CLH" for s in ("train", "search")))
    return Table("C, L, H with DARTS's gates, probabilities fixed, middle of the run", header, tuple(rows))


def local_costs_table(space: CellSpace, costs: Mapping[str, Sequence[LocalCosts]]) -> Table:
    """The costs of the last cell, for every state of the networks."""
    columns = {"last cell": "", "networks": "", "costs > 0": ".2f", "of single networks": ".2f"}
    columns |= {"mean cost": "+.4f", "error over batches": ".4f", "clearly + / -": ""}
    live, rows = live_operations(space), []
    for label, tables in costs.items():
        joined = last_cell(tables)
        shares = [last_cell([t]).positive(live) for t in tables]
        mean, error = (v[0][:, live].numpy() for v in (joined.mean, joined.error))
        clear = np.abs(mean) > 2 * error
        signs = f"{(clear & (mean > 0)).sum()} / {(clear & (mean < 0)).sum()}"
        share = joined.positive(live)
        rows.append((label, len(tables), share, np.mean(shares), np.nanmean(mean), np.nanmean(error), signs))
    return Table.of("local costs", columns, rows)


def sums_table(cfg: CostConfig, runner: Runner) -> Table:
    """Figure 19: without the skip term, the costs of the cells before the last add up to next to nothing."""
    two = cfg.replace(cells=2, reductions=False, no_skip_on_intermediate=True)
    tables, _ = initial_costs(two, runner, two.space(), [cfg.seed])
    sums = tables[0].total.sum((1, 2)) / cfg.batches
    columns = {"": "", "C": "+.2e"}
    rows = zip(("second last cell", "last cell"), sums.tolist(), strict=True)
    return Table.of("sum of the edges' costs, two cells without skip on intermediate edges", columns, list(rows))


def variants_table(cfg: CostConfig, runner: Runner) -> Table:
    """Figures 29 to 31: other orders of convolution, norm and ReLU, and other norms, at initialisation."""
    rows = []
    variants: list[dict[str, Any]] = [{"order": "conv_relu_norm"}, {"order": "conv_norm_relu"}, {"norm": "layer"}]
    for changes in [{}, *variants, {"norm": "instance"}]:
        other = cfg.replace(**changes)
        space = other.space()
        tables, mean = initial_costs(other, runner, space, range(cfg.seed, cfg.seed + max(1, cfg.nets // 3)))
        joined, live = last_cell(tables), live_operations(space)
        name = ", ".join(f"{k} {v}" for k, v in changes.items()) or "as above"
        rows.append((name, mean, joined.positive(live), float(np.nanmean(joined.mean[0][:, live]))))
    return Table.of("at initialisation", {"": "", "C": "+.4f", "costs > 0": ".2f", "mean cost": "+.5f"}, rows)
