"""Wiring, P3: on two levels every edge becomes None, and why (Xie et al., arXiv 2009.01272, sections 6 and 8).

Claimed: where the architecture learns from held-out images, their loss L grows with confident wrong answers while their
entropy H does not, so the cost C = L - H of the last cell stays positive, and None, which costs 0, wins everywhere.
On one level most edges stay. The signs of C, L and H are shown with DARTS's gates and fixed probabilities (table of
section 8, figure 10).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.probe import GROUPS
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import minimal_cell
from nasfast.research.studies.commands import PatternConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.research.studies.wiring import (
    PATTERN,
    SPACE,
    Setup,
    edge_figure,
    how,
    judged,
    kept_edges,
    measures_table,
    one_cell,
    output_figure,
    searched,
    searches,
)

GATES = Setup(channels=8, samples=300, noise=3.0, lr=0.1, steps=300, records=12)
PUBLISHED = {
    "correct, published": (-0.11, -0.11, 0.06, 0.08, 0.17, 0.19),
    "wrong, published": (0.80, 2.18, 1.70, 2.92, 0.90, 0.74),
}
"""The paper's C, L and H (section 8), each of training and search images."""


def collapse(cfg: PatternConfig, notes: Notebook) -> None:
    """P3: the search of P1 on two levels, and C, L and H of DARTS's gates on training and held-out images."""
    runs = searched("collapsed", cfg, notes, bilevel=True)
    single = searches(cfg.method, cfg, PATTERN, SPACE, how(cfg), notes.out)
    for seed, m in judged("collapsed", cfg, notes, runs, _collapse_signs):
        edges = m["n_in"] + m["n_int"]
        dropped = edges - m["kept_in"] - m["kept_int"]
        notes.mark(f"seed {seed}: edges that are None", dropped, at_least=edges - 1)
        notes.mark(f"seed {seed}: held-out C, smallest part", m["search_C_smallest"], at_least=0)
        difference = m["search_minus_train_C"]
        notes.mark(f"seed {seed}: held-out minus training C, smallest part", difference, at_least=0)
        alone = float((kept_edges(single[seed])[-1] == 0).sum())
        notes.mark(f"seed {seed}: edges that are None on one level", alone, at_least=0, at_most=6)
    measures_table("the same search on one level", single, notes)
    fixed = CellSearchConfig(method="darts", bilevel=True, alpha_lr=0.0, records=GATES.records)
    gates = searches("table", cfg, GATES, one_cell(minimal_cell(), GATES), fixed, notes.out)
    rows = []
    for seed, run in gates.items():
        train, held_out = (_third_quarter(run, which) for which in (TRAIN, SEARCH))
        wrong = {q: held_out["wrong"][q] - train["wrong"][q] for q in "CLH"}
        curve = run.means(SEARCH)
        rise = curve[len(curve) // 2 :].mean() - curve[: len(curve) // 2].mean()
        notes.mark(f"table, seed {seed}: correct C, training", train["correct"]["C"], at_most=0)
        notes.mark(f"table, seed {seed}: correct C, held out", held_out["correct"]["C"], at_most=0)
        notes.mark(f"table, seed {seed}: wrong L, held out minus training", wrong["L"], at_least=0)
        notes.mark(f"table, seed {seed}: wrong H, held out minus training", wrong["H"], at_most=0)
        notes.mark(f"table, seed {seed}: wrong C, held out minus training", wrong["C"], at_least=0.5)
        notes.mark(f"table, seed {seed}: held-out C, second half minus first", rise, at_least=0)
        for group in ("correct", "wrong"):
            rows.append((f"{group}, seed {seed}", *(part[group][q] for q in "CLH" for part in (train, held_out))))
    columns = {"": "", **{f"{q} {part}": "+.2f" for q in "CLH" for part in ("train", "search")}}
    rows += [(name, *values) for name, values in PUBLISHED.items()]
    notes.table("C, L, H with DARTS's gates, probabilities fixed, middle of the run", columns, rows)
    output_figure("DARTS's gates, probabilities fixed (figure 10)", gates[cfg.seed], notes)
    edge_figure("DARTS's gates: costs of training batches", gates[cfg.seed], notes)


def _collapse_signs(m: Mapping[str, float]) -> dict[str, bool]:
    return {
        "all edges are None": m["kept_in"] + m["kept_int"] == 0,
        "held-out C stays positive": m["search_C_smallest"] > 0,
        "training C is below it": m["search_minus_train_C"] > 0,
    }


def _third_quarter(run: CellSearchResult, which: int) -> dict[str, dict[str, float]]:
    """Means of C, L and H over the third quarter of the run, by group of samples."""
    records = len(run.steps)
    part = run.outputs[records // 2 : max(records // 2 + 1, 3 * records // 4), which].sum(0)
    with np.errstate(invalid="ignore"):
        return {group: dict(zip("CLH", part[g, :3] / part[g, 3], strict=True)) for g, group in enumerate(GROUPS)}
