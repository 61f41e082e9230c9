"""The pass marks and the verdicts of the wiring study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.studies.parts import Check
from nasfast.research.studies.wiring.measure import edge_means, half_and_quarter, kept_edges, measures

_INF = float("inf")
Measures = Mapping[str, float]


@dataclass(frozen=True)
class Signs:
    """A verdict by signs alone: its name where all of them are seen, otherwise those that are not."""

    name: str
    seen: Mapping[str, bool]

    @property
    def names(self) -> list[str]:
        """The name, or the signs that are missing."""
        missing = [what for what, is_so in self.seen.items() if not is_so]
        return [self.name if not missing else f"not seen: {', '.join(missing)}"]

    def to_dict(self) -> dict[str, Any]:
        """The names, and whether each sign was seen."""
        return {"names": self.names, **self.seen}


PATTERNS: dict[str, tuple[str, dict[str, Callable[[Measures], bool]]]] = {
    "P1": (
        "growing",
        {
            "C turns from positive to negative": lambda m: m["C_first"] > 0 > m["C_last"],
            "None gains at first": lambda m: m["q_in_peak"] > 1.02 * m["q_in_start"],
            "and loses in the end": lambda m: m["q_in_end"] < m["q_in_start"],
            "fewer costs are positive": lambda m: m["positive_last"] < m["positive_first"],
        },
    ),
    "P2": (
        "width preferred",
        {
            "intermediate edges are less probable": lambda m: m["q_int_end"] > m["q_in_end"],
            "fewer of them are kept": lambda m: m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
            "they cost more than input edges of their nodes": lambda m: m["intermediate_minus_input_cost"] > 0,
        },
    ),
    "P3": (
        "collapsed",
        {
            "all edges are None": lambda m: m["kept_in"] + m["kept_int"] == 0,
            "held-out C stays positive": lambda m: m["search_C_smallest"] > 0,
            "training C is below it": lambda m: m["search_minus_train_C"] > 0,
        },
    ),
}
"""Pattern -> its name where all signs are seen in the measures of a search, and the signs."""


def verdicts(pattern: str, runs: Mapping[int, CellSearchResult]) -> dict[str, Signs]:
    """The signs of a pattern in the search of every seed."""
    name, signs = PATTERNS[pattern]
    found = {seed: measures(result) for seed, result in runs.items()}
    return {
        f"{pattern}, seed {seed}": Signs(name, {what: bool(seen(m)) for what, seen in signs.items()})
        for seed, m in found.items()
    }


def _checks(name: str, marks: Mapping[str, tuple[float, float, float]]) -> list[Check]:
    return [Check(f"{name}: {what}", low, high, value) for what, (low, high, value) in marks.items()]


def growth_checks(seed: int, found: CellSearchResult) -> list[Check]:
    """Marks of P1, for one seed."""
    m = measures(found)
    marks = {
        "C of the first part": (0, _INF, m["C_first"]),
        "C of the last part": (-_INF, 0, m["C_last"]),
        "peak of q of input edges": (0.13, 1, m["q_in_peak"]),
        "q of input edges at the end": (0, 0.06, m["q_in_end"]),
        "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
    }
    return _checks(f"seed {seed}", marks)


def width_checks(seed: int, found: CellSearchResult) -> list[Check]:
    """Marks of P2, for one seed."""
    m = measures(found)
    marks = {
        "intermediate edges kept": (0, 2, m["kept_int"]),
        "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
        "cost of intermediate minus input edges of a node": (0, _INF, m["intermediate_minus_input_cost"]),
    }
    return _checks(f"seed {seed}", marks)


def control_checks(controls: Mapping[str, Mapping[int, CellSearchResult]]) -> list[Check]:
    """Marks of the control for the cause of P2, for every control and seed."""
    checks = []
    for label, runs in controls.items():
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            sign = (-_INF, 0.0) if label.endswith("fixed") else (0.0, _INF)
            marks = {"cost of (1,2) minus (0,2), last quarter": (*sign, float(late[2] - late[1]))}
            if label == "modified, sampled":
                marks["cost of (1,2) minus (0,1), first half"] = (0.0, _INF, float(early[2] - early[0]))
            checks += _checks(f"{label}, seed {seed}", marks)
    return checks


def collapse_checks(seed: int, found: CellSearchResult, one_level: CellSearchResult) -> list[Check]:
    """Marks of P3, for one seed: its search on two levels, and the same search on one."""
    m = measures(found)
    total = m["n_in"] + m["n_int"]
    dropped = float((kept_edges(one_level)[-1] == 0).sum())
    marks = {
        "edges that are None": (total - 1, total, total - m["kept_in"] - m["kept_int"]),
        "held-out C, smallest part": (0, _INF, m["search_C_smallest"]),
        "held-out minus training C, smallest part": (0, _INF, m["search_minus_train_C"]),
        "edges that are None on one level": (0, 6, dropped),
    }
    return _checks(f"seed {seed}", marks)


def sign_checks(seed: int, found: CellSearchResult, window: Mapping[int, Any]) -> list[Check]:
    """Marks of the signs of C, L and H with DARTS's gates."""
    train, search = window[TRAIN], window[SEARCH]
    curve = found.means(SEARCH)
    late = len(curve) // 2

    def apart(group: str, quantity: str) -> float:
        return search[group][quantity] - train[group][quantity]

    marks = {
        "correct C, training": (-_INF, 0, train["correct"]["C"]),
        "correct C, held out": (-_INF, 0, search["correct"]["C"]),
        "wrong L, held out minus training": (0, _INF, apart("wrong", "L")),
        "wrong H, held out minus training": (-_INF, 0, apart("wrong", "H")),
        "wrong C, held out minus training": (0.5, _INF, apart("wrong", "C")),
        "held-out C, second half minus first": (0, _INF, float(curve[late:].mean() - curve[:late].mean())),
    }
    return _checks(f"table, seed {seed}", marks)
