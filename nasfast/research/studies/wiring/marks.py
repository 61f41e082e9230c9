"""The pass marks and the verdicts of the wiring study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.studies.parts import Check
from nasfast.research.studies.wiring.measure import edge_means, half_and_quarter, kept_edges, measures

_INF = float("inf")


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


def grown(found: CellSearchResult) -> Signs:
    """P1: None takes over first, then other operations do."""
    m = measures(found)
    seen = {
        "C turns from positive to negative": m["C_first"] > 0 > m["C_last"],
        "None gains at first": m["q_in_peak"] > 1.02 * m["q_in_start"],
        "and loses in the end": m["q_in_end"] < m["q_in_start"],
        "fewer costs are positive": m["positive_last"] < m["positive_first"],
    }
    return Signs("growing", seen)


def growth_checks(seed: int, found: CellSearchResult) -> list[Check]:
    """Marks of P1, for one seed."""
    m = measures(found)
    return [
        Check(f"seed {seed}: C of the first part", 0, _INF, m["C_first"]),
        Check(f"seed {seed}: C of the last part", -_INF, 0, m["C_last"]),
        Check(f"seed {seed}: peak of q of input edges", 0.13, 1, m["q_in_peak"]),
        Check(f"seed {seed}: q of input edges at the end", 0, 0.06, m["q_in_end"]),
        Check(f"seed {seed}: input edges kept", m["n_in"], m["n_in"], m["kept_in"]),
    ]


def widened(found: CellSearchResult) -> Signs:
    """P2: intermediate edges are dropped."""
    m = measures(found)
    seen = {
        "intermediate edges are less probable": m["q_int_end"] > m["q_in_end"],
        "fewer of them are kept": m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
        "they cost more than input edges of their nodes": m["intermediate_minus_input_cost"] > 0,
    }
    return Signs("width preferred", seen)


def width_checks(seed: int, found: CellSearchResult) -> list[Check]:
    """Marks of P2, for one seed."""
    m = measures(found)
    return [
        Check(f"seed {seed}: intermediate edges kept", 0, 2, m["kept_int"]),
        Check(f"seed {seed}: input edges kept", m["n_in"], m["n_in"], m["kept_in"]),
        Check(
            f"seed {seed}: cost of intermediate minus input edges of a node",
            0,
            _INF,
            m["intermediate_minus_input_cost"],
        ),
    ]


def control_checks(controls: Mapping[str, Mapping[int, CellSearchResult]]) -> list[Check]:
    """Marks of the control for the cause of P2, for every control and seed."""
    checks = []
    for label, runs in controls.items():
        fixed = label.endswith("fixed")
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            difference = float(late[2] - late[1])
            low, high = (-_INF, 0.0) if fixed else (0.0, _INF)
            checks.append(
                Check(f"{label}, seed {seed}: cost of (1,2) minus (0,2), last quarter", low, high, difference)
            )
            if label == "modified, sampled":
                checks.append(
                    Check(
                        f"{label}, seed {seed}: cost of (1,2) minus (0,1), first half",
                        0.0,
                        _INF,
                        float(early[2] - early[0]),
                    )
                )
    return checks


def collapsed(found: CellSearchResult) -> Signs:
    """P3: None takes all edges."""
    m = measures(found)
    seen = {
        "all edges are None": m["kept_in"] + m["kept_int"] == 0,
        "held-out C stays positive": m["search_C_smallest"] > 0,
        "training C is below it": m["search_minus_train_C"] > 0,
    }
    return Signs("collapsed", seen)


def collapse_checks(seed: int, found: CellSearchResult, one_level: CellSearchResult) -> list[Check]:
    """Marks of P3, for one seed: its search on two levels, and the same search on one."""
    m = measures(found)
    total = m["n_in"] + m["n_int"]
    dropped = float((kept_edges(one_level)[-1] == 0).sum())
    return [
        Check(f"seed {seed}: edges that are None", total - 1, total, total - m["kept_in"] - m["kept_int"]),
        Check(f"seed {seed}: held-out C, smallest part", 0, _INF, m["search_C_smallest"]),
        Check(f"seed {seed}: held-out minus training C, smallest part", 0, _INF, m["search_minus_train_C"]),
        Check(f"seed {seed}: edges that are None on one level", 0, 6, dropped),
    ]


def sign_checks(seed: int, found: CellSearchResult, window: Mapping[int, Any]) -> list[Check]:
    """Marks of the signs of C, L and H with DARTS's gates."""
    name = f"table, seed {seed}:"
    train, search = window[TRAIN], window[SEARCH]
    curve = found.means(SEARCH)
    late = len(curve) // 2

    def apart(group: str, quantity: str) -> float:
        return search[group][quantity] - train[group][quantity]

    return [
        Check(f"{name} correct C, training", -_INF, 0, train["correct"]["C"]),
        Check(f"{name} correct C, held out", -_INF, 0, search["correct"]["C"]),
        Check(f"{name} wrong L, held out minus training", 0, _INF, apart("wrong", "L")),
        Check(f"{name} wrong H, held out minus training", -_INF, 0, apart("wrong", "H")),
        Check(f"{name} wrong C, held out minus training", 0.5, _INF, apart("wrong", "C")),
        Check(f"{name} held-out C, second half minus first", 0, _INF, float(curve[late:].mean() - curve[:late].mean())),
    ]
