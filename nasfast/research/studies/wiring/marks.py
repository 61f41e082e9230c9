"""The pass marks of the wiring study, and the signs by which a pattern is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.studies.report import Check, name_checks
from nasfast.research.studies.wiring.measure import early_and_late
from nasfast.research.studies.wiring.searches import Runs

Measures = Mapping[str, float]
Mark = tuple[float, float, float]
"""The ends of a mark's interval, and the value."""


@dataclass(frozen=True)
class Pattern:
    """A pattern in the measures of a search.

    Attributes:
        title: name in the subject.
        name: verdict where all signs are seen.
        signs: what is seen -> whether it is.
        marks: pass marks of the default settings.
    """

    title: str
    name: str
    signs: Mapping[str, Callable[[Measures], bool]]
    marks: Callable[[Measures], Mapping[str, Mark]]


PATTERNS = {
    "P1": Pattern(
        "growing",
        "growing",
        {
            "C turns from positive to negative": lambda m: m["C_first"] > 0 > m["C_last"],
            "None gains at first": lambda m: m["q_in_peak"] > 1.02 * m["q_in_start"],
            "and loses in the end": lambda m: m["q_in_end"] < m["q_in_start"],
            "fewer costs are positive": lambda m: m["positive_last"] < m["positive_first"],
        },
        lambda m: {
            "C of the first part": (0, math.inf, m["C_first"]),
            "C of the last part": (-math.inf, 0, m["C_last"]),
            "peak of q of input edges": (0.13, 1, m["q_in_peak"]),
            "q of input edges at the end": (0, 0.06, m["q_in_end"]),
            "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
        },
    ),
    "P2": Pattern(
        "width preference",
        "width preferred",
        {
            "intermediate edges are less probable": lambda m: m["q_int_end"] > m["q_in_end"],
            "fewer of them are kept": lambda m: m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
            "they cost more than input edges of their nodes": lambda m: m["intermediate_minus_input_cost"] > 0,
        },
        lambda m: {
            "intermediate edges kept": (0, 2, m["kept_int"]),
            "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
            "cost of intermediate minus input edges of a node": (0, math.inf, m["intermediate_minus_input_cost"]),
        },
    ),
    "P3": Pattern(
        "collapse on two levels",
        "collapsed",
        {
            "all edges are None": lambda m: m["kept_in"] + m["kept_int"] == 0,
            "held-out C stays positive": lambda m: m["search_C_smallest"] > 0,
            "training C is below it": lambda m: m["search_minus_train_C"] > 0,
        },
        lambda m: {
            "edges that are None": (
                m["n_in"] + m["n_int"] - 1,
                m["n_in"] + m["n_int"],
                m["n_in"] + m["n_int"] - m["kept_in"] - m["kept_int"],
            ),
            "held-out C, smallest part": (0, math.inf, m["search_C_smallest"]),
            "held-out minus training C, smallest part": (0, math.inf, m["search_minus_train_C"]),
        },
    ),
}


def control_checks(controls: Mapping[str, Runs]) -> list[Check]:
    """Marks of the control for the cause of P2, for every control and seed."""
    checks = []
    for label, runs in controls.items():
        for seed, run in runs.items():
            early, late = early_and_late(run)
            sign = (-math.inf, 0.0) if label.endswith("fixed") else (0.0, math.inf)
            marks = {"cost of (1,2) minus (0,2), last quarter": (*sign, float(late[2] - late[1]))}
            if label == "modified, sampled":
                marks["cost of (1,2) minus (0,1), first half"] = (0.0, math.inf, float(early[2] - early[0]))
            checks += name_checks(f"{label}, seed {seed}", marks)
    return checks


def sign_checks(seed: int, run: CellSearchResult, window: Mapping[int, Any]) -> list[Check]:
    """Marks of the signs of C, L and H with DARTS's gates."""
    train, search = window[TRAIN], window[SEARCH]
    curve = run.means(SEARCH)
    half = len(curve) // 2

    def apart(group: str, quantity: str) -> float:
        return search[group][quantity] - train[group][quantity]

    marks = {
        "correct C, training": (-math.inf, 0, train["correct"]["C"]),
        "correct C, held out": (-math.inf, 0, search["correct"]["C"]),
        "wrong L, held out minus training": (0, math.inf, apart("wrong", "L")),
        "wrong H, held out minus training": (-math.inf, 0, apart("wrong", "H")),
        "wrong C, held out minus training": (0.5, math.inf, apart("wrong", "C")),
        "held-out C, second half minus first": (0, math.inf, float(curve[half:].mean() - curve[:half].mean())),
    }
    return name_checks(f"table, seed {seed}", marks)
