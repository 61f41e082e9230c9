"""The rows of `bench_cell_search` as Markdown tables."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.cell_judge import JUDGE
from nasfast.cells import nas_bench_201_space
from nasfast.spaces.cell_costs import NONE

Row = dict[str, Any]
MODES = ("random labels", "random images")


def in_table(row: Row, choice: str = "logits") -> dict[str, Any] | None:
    """The cell of the table that a search prefers, with its accuracy and percentile; None if it prefers none."""
    if "choices" in row:
        return row["choices"][choice]["in_table"]
    return row.get("candidates", {}).get("in_table")


def seconds(row: Row) -> float:
    """CPU seconds of the whole search; one that was continued was timed for its last part only."""
    share = row["steps_here"] / row["steps"] if "steps_here" in row else 1
    return row["cpu_s"] / share if share else float("nan")


def comparison(found: Sequence[Row]) -> str:
    """A line per method: medians over the seeds of what the cell of the table that it prefers is worth.

    The other rules choose from the same search: no edge may be removed, every edge has the operation that cost least on
    the images that the logits learn from (`none` costs 0), or both.
    """
    lines = [
        f"| method | seeds | steps | {JUDGE} | percentile | without `none` | by lowest cost | both | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in found):
        mine = [row for row in found if row["name"] == name]
        other = ("logits, without none", "cost", "cost, without none")
        columns = [
            _spread(_values(mine, "accuracy")),
            _spread(_values(mine, "percentile")),
            *(_spread(_values((r for r in mine if c in r.get("choices", {})), "percentile", c)) for c in other),
            f"{statistics.median(map(seconds, mine)):.0f}",
        ]
        lines.append(f"| {name} | {len(mine)} | {mine[0].get('steps', '-')} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _values(found: Iterable[Row], key: str, choice: str = "logits") -> list[float]:
    return [form[key] for row in found if (form := in_table(row, choice)) is not None]


def _spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f} to {max(values):.1f})"


def searches(found: Sequence[Row]) -> str:
    """A line per search: the cell that it chose, whether the table has it or not, and the one of the table."""
    lines = [
        f"| method | network | seed | {JUDGE} | percentile | one edge away | in the table: percentile "
        "| skips, removed | CPU s | cell |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [*lines, *(f"| {r['name']} | {r['cells']} x {r['channels']} | {r['seed']} | {line(r)} |" for r in found)]
    )


def line(row: Row) -> str:
    """What one search found."""
    accuracy = "not in the table" if row["accuracy"] is None else f"{row['accuracy'][JUDGE]:.2f}"
    percentile = "-" if row["percentile"] is None else f"{row['percentile']:.1f}"
    away, mine = row.get("one_edge_away"), in_table(row)
    near = "-" if away is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*away["accuracy"])
    preferred = "-" if mine is None else f"{mine['percentile']:.1f}"
    columns = (accuracy, percentile, near, preferred, f"{row['skips']}, {row['removed']}", f"{seconds(row):.0f}")
    return " | ".join((*columns, f"`{row['arch']}`"))


def rankings(found: Sequence[Row]) -> str:
    """How well scores rank: sums over edges all cells of the table, within an edge its candidates; single cells."""
    lines = ["| method | seed | tau of cells, of an edge's candidates |", "|---|---|---|"]
    for row in found:
        each = [f"{name} {tau['cells']:+.2f}, {tau['candidates']:+.2f}" for name, tau in row.get("tau", {}).items()]
        known = row.get("candidates", {})
        if known.get("tau") is not None:
            each.append(f"{known['tau']:+.2f} on {known['cells']} of {known['all']} cells")
        if each:
            lines.append(f"| {row['name']} | {row['seed']} | {'; '.join(each)} |")
    return "\n".join(lines)


def wiring(found: Sequence[Row]) -> str:
    """What the local costs of each search predict, and what it chose.

    Costs are those of the images that the logits learn from. "Output" is the largest cost of the last cell's output
    node in a record, relative to the mean size of the edges' costs. "Intermediate minus input cost" is that of the mean
    edges, with its standard error over the records. "Signs" counts the operations that cost less than
    0, the cost of `none`, and end above `none`, or cost more and end below; "lowest" counts the edges whose chosen
    operation has the lowest cost.
    """
    space = nas_bench_201_space()
    lines = [
        "| method | seed | top-1 | L - H, first and last | output | edges' cost, first and last "
        f"| {', '.join(space.ops[1:])}: cost / 1e-4 "
        "| None on input edges: start, peak, end; kept | on intermediate edges | intermediate minus input cost / 1e-4 "
        "| signs: whole search, first half | lowest: whole, first half | patterns |",
        "|" + "---|" * 13,
    ]
    for row in (r for r in found if "output_cost" in r):
        which, m = int(row["settings"]["bilevel"]), row["measures"]
        of_logits, top1 = ([record[which] for record in row[key]] for key in ("C", "top1"))
        edges = [statistics.fmean(record[which]) for record in row["edge_costs"]]
        size = statistics.fmean(abs(c) for record in row["edge_costs"] for c in record[which])
        output = max(abs(record[which]) for record in row["output_cost"])
        none = [
            f"{m[f'q_{k}_start']:.2f}, {m[f'q_{k}_peak']:.2f}, {m[f'q_{k}_end']:.2f}; "
            f"{m[f'kept_{k}']:.0f} of {m[f'n_{k}']:.0f}"
            for k in ("in", "int")
        ]
        agree = [agreement(row, costs) for costs in (row["op_costs"][which], row["op_costs_first_half"][which])]
        seen = "; ".join(f"{name} {sum(p.values())} of {len(p)}" for name, p in row["patterns"].items())
        columns = (
            row["name"],
            row["seed"],
            f"{100 * top1[-1]:.0f} %",
            f"{of_logits[0]:+.3f}, {of_logits[-1]:+.3f}",
            f"{output / size:.1e}",
            "{:+.4f}, {:+.4f}".format(*_quarters(edges)),
            ", ".join(f"{1e4 * cost:+.0f}" for cost in np.mean(row["op_costs"][which], 0)[1:]),
            *none,
            _difference(row),
            ", ".join(f"{a['signs']} of {a['operations']}" for a in agree),
            ", ".join(f"{a['lowest']} of {a['edges']}" for a in agree),
            seen,
        )
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(lines)


def _difference(row: Row) -> str:
    inner = np.array(nas_bench_201_space().cell.intermediate)
    cost = 1e4 * np.array(row["edge_costs"])[:, int(row["settings"]["bilevel"])]
    apart = cost[:, inner].mean(1) - cost[:, ~inner].mean(1)
    return f"{apart.mean():+.0f} ± {np.std(apart, ddof=1) / len(apart) ** 0.5:.0f}"


def _quarters(values: Sequence[float]) -> tuple[float, float]:
    quarter = max(1, len(values) // 4)
    return statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])


def agreement(row: Row, costs: Sequence[Sequence[float]]) -> dict[str, int]:
    """How far the costs (edges, ops) of operations predict the logits of a row; costs of 0 were not measured."""
    space = nas_bench_201_space()
    none, chosen = space.ops.index(NONE), space.parse(row["arch"])
    pairs = [
        (cost < 0) == (logits[k] > logits[none])
        for of_edge, logits in zip(costs, row["logits"], strict=True)
        for k, cost in enumerate(of_edge)
        if k != none and cost
    ]
    lowest = [min(range(len(of_edge)), key=of_edge.__getitem__) for of_edge in costs]
    return {
        "signs": sum(pairs),
        "operations": len(pairs),
        "lowest": sum(a == b for a, b in zip(chosen, lowest, strict=True)),
        "edges": len(lowest),
    }


def agnosticism(found: Sequence[Row]) -> str:
    """Looked-up accuracy of random labels or images minus that of the same search and seed on the true ones."""
    rows = {(row["name"], row["seed"]): row for row in found}
    names = [name for name in dict.fromkeys(name for name, _ in rows) if not name.endswith(MODES)]
    lines = [
        f"| search | mode | seeds | {JUDGE} minus that of true ones, by seed | mean, 95 % "
        "| of two seeds, true ones: mean size | same cell |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        seeds = [seed for n, seed in rows if n == name]
        with_logits = any("choices" in rows[name, seed] for seed in seeds)
        for choice in ("logits", "logits, without none") if with_logits else ("logits",):
            for mode in MODES:
                pairs = [(rows[name, seed], other) for seed in seeds if (other := rows.get((f"{name}, {mode}", seed)))]
                true = [rows[name, seed] for seed in seeds]
                if columns := _differences(pairs, _values(true, "accuracy", choice), choice):
                    lines.append(f"| {name + choice.removeprefix('logits')} | {mode} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _differences(pairs: Sequence[tuple[Row, Row]], true: Sequence[float], choice: str) -> list[str]:
    forms = [(a, b) for row, other in pairs if (a := in_table(row, choice)) and (b := in_table(other, choice))]
    changes = [b["accuracy"] - a["accuracy"] for a, b in forms]
    apart = [abs(a - b) for i, a in enumerate(true) for b in true[i + 1 :]]
    if not changes:
        return []
    return [
        str(len(changes)),
        " ".join(f"{c:+.1f}" for c in changes),
        interval(changes),
        f"{statistics.fmean(apart):.1f}" if apart else "-",
        f"{sum(a['arch'] == b['arch'] for a, b in forms)} of {len(forms)}",
    ]


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t."""
    if len(values) < 2:
        return "-"
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.1f} ± {half:.1f}"


def summary(found: Sequence[Row]) -> str:
    """All tables."""
    return "\n\n".join(function(found) for function in (comparison, searches, rankings, wiring, agnosticism))
