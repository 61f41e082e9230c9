"""The verdicts on the claims of the isometry study, for made-up measurements."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from nasfast.research.analysis.fairness import SPREADS
from nasfast.research.studies.isometry.claims import judge, judge_claims
from nasfast.research.studies.isometry.marks import relative_gain
from nasfast.research.studies.isometry.measure import Measured, Row

TANH, ORTHO, GAUSS = "orthogonal, tanh", "orthogonal, relu6", "gaussian, relu6"
R = relative_gain("relu6")


def claim(which: int, *, rows=None, **measured):
    return judge_claims("relu6", Measured({**make_rows(GAUSS), **(rows or {})}, **measured))[which]


def make_rows(setting: str, *, phi: float = 1.0, varphi: float | list[float] = 0.0) -> dict[str, list[Row]]:
    values = varphi if isinstance(varphi, list) else [varphi] * 4
    branches = [SimpleNamespace(phi=phi, varphi=value) for value in values]
    # with white inputs a phi of 1 is a gain of 1
    return {setting: [Row(setting, i, "k3", branch, None, 1.0, 1.0, 2, ()) for i, branch in enumerate(branches)]}


def make_both(orthogonal: list[float], gaussian: list[float]) -> dict[str, list[Row]]:
    return make_rows(ORTHO, varphi=orthogonal) | make_rows(GAUSS, varphi=gaussian)


def make_kinds(**moments: tuple[float, float]) -> list:
    return [
        {"setting": ORTHO, "kind": kind, "count": 1, "phi": phi, "varphi": varphi, "expected_varphi": None}
        for kind, (phi, varphi) in moments.items()
    ]


def make_spreads(value: float, gaussian: float, **changes: tuple[float, float]) -> list:
    """All spreads alike, except those named as `f_var_bare`, without the indicator BatchNorm."""
    spreads = []
    for index, setting in enumerate((ORTHO, GAUSS)):
        for block_indicator in (True, False):
            values = dict.fromkeys(SPREADS, (value, gaussian)[index])
            values |= {
                k.removesuffix("_bare"): v[index] for k, v in changes.items() if k.endswith("_bare") != block_indicator
            }
            spreads.append({"setting": setting, "layer": 0, "block_indicator": block_indicator, **values})
    return spreads


FLAT, RISING = [0.1] * 20, [0.1 * math.sqrt(i + 1) for i in range(20)]


def make_depths(orthogonal: list[float], gaussian: list[float], gaussian_bare: list[float] | None = None) -> list:
    stds = {(ORTHO, True): orthogonal, (GAUSS, True): gaussian}
    stds |= {(ORTHO, False): orthogonal, (GAUSS, False): gaussian_bare or gaussian}
    return [{"setting": s, "block_indicator": bn, "std": std} for (s, bn), std in stds.items()]


@pytest.mark.parametrize(
    ("which", "measured", "verdict"),
    [
        (0, {}, "-."),
        (0, {"convolutions": make_kinds(projection=(1, 0))}, "holds."),
        (
            0,
            {"convolutions": make_kinds(projection=(1, 0), expansion=(1, 2))},
            "holds in part: projection; theory: an expansion",
        ),
        (0, {"convolutions": make_kinds(dense=(2, 0))}, "does not hold"),
        (1, {"rows": make_rows(TANH) | make_rows(ORTHO)}, "holds."),
        (1, {"rows": make_rows(TANH) | make_rows(ORTHO, varphi=1)}, "holds in part: (orthogonal, tanh)"),
        (1, {"rows": make_rows(TANH, phi=2) | make_rows(ORTHO, varphi=1)}, "does not hold"),
        (3, {"rows": make_both([9] * 4, [1] * 4)}, "does not hold"),
        (3, {"rows": make_both([1] * 4, [2] * 4)}, "holds in part: nearly everywhere, clearly."),
        (3, {"rows": make_both([0.05] * 4, [2] * 4)}, "holds."),
        (3, {"rows": make_both([1, 1, 1, 9], [2] * 4)}, "holds in part: clearly."),
        (3, {"rows": make_both([1.9] * 4, [2] * 4)}, "holds in part: nearly everywhere."),
        (3, {"rows": make_both([1], [-0.1])}, "-."),
        (4, {"fairness": make_spreads(0.1, 0.9)}, "holds."),
        (5, {"fairness": make_spreads(0.1, 0.9)}, "holds."),
        (4, {"fairness": make_spreads(1, 1, f_var_bare=(0.1, 1))}, "holds in part: f_var without indicator BN"),
        (5, {"fairness": make_spreads(1, 1, f_iso=(0.1, 1))}, "does not hold; theory: a BatchNorm"),
        (5, {"fairness": make_spreads(1, 1, f_var=(math.nan, math.nan))}, "does not hold"),
        # rounding is not compared
        (4, {"fairness": make_spreads(1e-7, 1e-6)}, "does not hold"),
        (6, {"depth": make_depths([0.1], [0.2])}, "-."),
        (6, {"depth": make_depths([1e-7] * 20, [1e-6] * 20)}, "-."),
        (6, {"depth": make_depths(FLAT, RISING)}, "holds."),
        (6, {"depth": make_depths([0.0] * 20, RISING)}, "holds."),
        (6, {"depth": make_depths(FLAT, FLAT, RISING)}, "holds in part: without indicator BN"),
        (6, {"depth": make_depths(FLAT, FLAT)}, "does not hold"),
        (6, {"depth": make_depths(RISING, RISING)}, "does not hold"),
        # a reduction sets the spread to 0, which is no growth from there
        (6, {"depth": make_depths([0.0, 0.1, 0.1, 0.1], [0.0, 0.1, 0.1, 0.1])}, "does not hold"),
    ],
)
def test_verdicts(which, measured, verdict):
    assert f"{claim(which, **measured).verdict.removesuffix('.')}.".startswith(verdict)


def test_verdict_on_the_gain():
    assert claim(2, rows=make_rows(ORTHO)).verdict == "holds."
    result = claim(2, rows=make_rows(ORTHO, phi=R**2))
    assert result.verdict.startswith("does not hold; theory: BatchNorm")
    # two activations explain it whole
    assert f"r = {R:.3f} for relu6: median 1.00, 5 % to 95 % from 1.00 to 1.00" in result.measured


def test_a_sentence_holds_in_part():
    part = judge("c", {"a": ("1", True), "b": ("2", False)}, "because")
    assert (part.claim, part.measured, part.verdict) == ("c", "a 1; b 2", "holds in part: a; theory: because.")
