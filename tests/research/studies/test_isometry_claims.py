"""The verdicts on the claims of the isometry study, for made-up measurements."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from nasfast.research.studies.isometry import claims
from nasfast.research.studies.isometry.measure import SPREADS, Row, relative_gain

TANH, ORTHO, GAUSS = "orthogonal, tanh", "orthogonal, relu6", "gaussian, relu6"
R = relative_gain("relu6")


def rows_of(setting: str, *, phi: float = 1.0, varphi: float = 0.0, acts: int = 2, count: int = 4) -> list[Row]:
    branch = SimpleNamespace(phi=phi, varphi=varphi)
    return [Row(setting, i, "k3", branch, None, 1.0, 1.0, acts, ()) for i in range(count)]


def kinds_of(**found: tuple[float, float]) -> list:
    return [
        {"setting": ORTHO, "kind": kind, "count": 1, "phi": phi, "varphi": varphi, "expected_varphi": None}
        for kind, (phi, varphi) in found.items()
    ]


def test_a_sentence_holds_in_part():
    found = {"a": ("1", True), "b": ("2", False)}
    part = claims.judged("c", found, "because")
    assert (part.claim, part.measured, part.verdict) == ("c", "a 1; b 2", "holds in part: a; theory: because.")
    assert claims.judged("c", {"a": ("1", True)}, "because").verdict == "holds."
    assert claims.judged("c", {"b": ("2", False)}).verdict == "does not hold."
    assert claims.judged("c", {}).verdict == "-"


def starts(found, verdict: str) -> bool:
    return found.verdict.startswith(verdict) and (verdict != "holds" or "in part" not in found.verdict)


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ([], "-"),
        (kinds_of(projection=(1, 0)), "holds"),
        (kinds_of(projection=(1, 0), expansion=(1, 2)), "holds in part: projection; theory: an expansion by t"),
        (kinds_of(dense=(2, 0)), "does not hold"),
    ],
)
def test_verdict_on_convolutions(kinds, verdict):
    assert starts(claims.claim_convolutions(ORTHO, kinds), verdict)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([], "-"),
        (rows_of(TANH) + rows_of(ORTHO), "holds"),
        (rows_of(TANH) + rows_of(ORTHO, varphi=1), "holds in part: (orthogonal, tanh)"),
        (rows_of(TANH, phi=2) + rows_of(ORTHO, varphi=1), "does not hold"),
    ],
)
def test_verdict_on_modules(rows, verdict):
    assert starts(claims.claim_modules((TANH, ORTHO), rows), verdict)


def test_verdict_on_the_gain():
    assert claims.claim_gain("relu6", ORTHO, []).verdict == "-"
    assert claims.claim_gain("relu6", ORTHO, rows_of(ORTHO)).verdict == "holds."
    found = claims.claim_gain("relu6", ORTHO, rows_of(ORTHO, phi=R**2))
    assert found.verdict.startswith("does not hold; theory: BatchNorm")
    # two activations explain it whole
    assert f"r = {R:.3f} for relu6: median 1.00, 5 % to 95 % from 1.00 to 1.00" in found.measured


@pytest.mark.parametrize(
    ("orthogonal", "gaussian", "verdict"),
    [
        ([], [], "-"),
        ([9] * 4, [1] * 4, "does not hold"),
        ([1] * 4, [2] * 4, "holds in part: nearly everywhere, clearly."),
        ([0.05] * 4, [2] * 4, "holds"),
        ([1, 1, 1, 9], [2] * 4, "holds in part: clearly."),
        ([1.9] * 4, [2] * 4, "holds in part: nearly everywhere."),
        ([1], [-0.1], "-"),
    ],
)
def test_verdict_on_closer(orthogonal, gaussian, verdict):
    rows = [
        Row(setting, i, "k3", SimpleNamespace(phi=1.0, varphi=value), None, 1.0, 1.0, 2, ())
        for setting, values in ((ORTHO, orthogonal), (GAUSS, gaussian))
        for i, value in enumerate(values)
    ]
    assert starts(claims.claim_closer(ORTHO, GAUSS, rows), verdict)


def spreads_of(value: float, gaussian: float, **changes: tuple[float, float]) -> list:
    """All spreads alike, except those named as `f_var_bare`, without the indicator BatchNorm."""
    spreads = []
    for which, setting in enumerate((ORTHO, GAUSS)):
        for indicator_bn in (True, False):
            values = dict.fromkeys(SPREADS, (value, gaussian)[which])
            values |= {
                k.removesuffix("_bare"): v[which] for k, v in changes.items() if k.endswith("_bare") != indicator_bn
            }
            spreads.append({"setting": setting, "layer": 0, "indicator_bn": indicator_bn, **values})
    return spreads


@pytest.mark.parametrize(
    ("spreads", "fair", "norm"),
    [
        ([], "-", "-"),
        (spreads_of(0.1, 0.9), "holds", "holds"),
        (spreads_of(1, 1, f_var_bare=(0.1, 1)), *["holds in part: f_var without indicator BN"] * 2),
        (
            spreads_of(1, 1, f_iso=(0.1, 1)),
            "holds in part: f_iso with indicator BN.",
            "does not hold; theory: a BatchNorm",
        ),
        (spreads_of(1, 1, f_var=(math.nan, math.nan)), "does not hold", "does not hold"),
        # rounding is not compared
        (spreads_of(1e-7, 1e-6), "does not hold", "does not hold"),
    ],
)
def test_verdicts_on_fairness_and_on_batchnorm(spreads, fair, norm):
    assert starts(claims.claim_fair(ORTHO, GAUSS, spreads), fair)
    assert starts(claims.claim_norm(ORTHO, GAUSS, spreads), norm)


FLAT, RISING = [0.1] * 20, [0.1 * math.sqrt(i + 1) for i in range(20)]


def depth_of(orthogonal: list[float], gaussian: list[float], gaussian_bare: list[float] | None = None) -> list:
    found = {(ORTHO, True): orthogonal, (GAUSS, True): gaussian}
    found |= {(ORTHO, False): orthogonal, (GAUSS, False): gaussian_bare or gaussian}
    return [{"setting": s, "indicator_bn": bn, "std": std} for (s, bn), std in found.items()]


@pytest.mark.parametrize(
    ("depth", "verdict"),
    [
        ([], "-"),
        (depth_of([0.1], [0.2]), "-"),
        (depth_of([1e-7] * 20, [1e-6] * 20), "-"),
        (depth_of(FLAT, RISING), "holds"),
        (depth_of([0.0] * 20, RISING), "holds"),
        (depth_of(FLAT, FLAT, RISING), "holds in part: without indicator BN"),
        (depth_of(FLAT, FLAT), "does not hold"),
        (depth_of(RISING, RISING), "does not hold"),
        # a reduction sets the spread to 0, which is no growth from there
        (depth_of([0.0, 0.1, 0.1, 0.1], [0.0, 0.1, 0.1, 0.1]), "does not hold"),
    ],
)
def test_verdict_on_depth(depth, verdict):
    assert starts(claims.claim_depth(ORTHO, GAUSS, depth), verdict)
