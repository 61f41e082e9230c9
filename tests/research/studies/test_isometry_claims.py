"""The verdicts on the claims of the isometry study, for made-up measurements."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from nasfast.research.studies.isometry import claims
from nasfast.research.studies.isometry.measure import relative_gain
from nasfast.research.studies.isometry.rows import SPREADS, ConvolutionMoments, PathSpread, Row, Spread

TANH, ORTHO, GAUSS = "orthogonal, tanh", "orthogonal, relu6", "gaussian, relu6"
R = relative_gain("relu6")


def rows_of(setting: str, *, phi: float = 1.0, varphi: float = 0.0, acts: int = 2, count: int = 4) -> list[Row]:
    branch = SimpleNamespace(phi=phi, varphi=varphi)
    return [Row(setting, i, "k3", branch, None, 1.0, 1.0, acts, ()) for i in range(count)]


def kinds_of(**found: tuple[float, float, float | None]) -> list:
    names = {"projection": "pointwise, projection", "expansion": "pointwise, expansion x 3", "dense": "dense 3 x 3"}
    names["depthwise"] = "depthwise 3 x 3"
    return [
        ConvolutionMoments(ORTHO, names[kind], 1, phi, varphi, expected)
        for kind, (phi, varphi, expected) in found.items()
    ]


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ([], "-"),
        (kinds_of(projection=(1, 0, 0)), "holds."),
        (
            kinds_of(projection=(1, 0, 0), expansion=(1, 2, 2)),
            "holds in part: pointwise projection; other kinds with the varphi of their closed form: 1; theory: an "
            "expansion by t has t - 1, as its output has directions that no input reaches.",
        ),
        (
            kinds_of(depthwise=(1, 8 / 15, 8 / 15), dense=(1, 12, None)),
            "does not hold; other kinds with the varphi of their closed form: 1; theory: a depthwise filter has 0 "
            "only with a single live tap.",
        ),
        (
            kinds_of(projection=(1, 5, 0), depthwise=(1, 3, 8 / 15)),
            "does not hold; varphi is not that of the closed form for pointwise projection, depthwise 3 x 3.",
        ),
        (kinds_of(dense=(2, 0, None)), "does not hold; phi is not 1 for dense 3 x 3."),
    ],
)
def test_verdict_on_convolutions(kinds, verdict):
    assert claims.claim_convolutions(ORTHO, kinds).verdict == verdict


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([], "-"),
        (rows_of(TANH) + rows_of(ORTHO), "holds; "),
        (rows_of(TANH) + rows_of(ORTHO, varphi=1), "holds in part: (orthogonal, tanh); "),
        (rows_of(TANH, phi=2) + rows_of(ORTHO, varphi=1), "does not hold; "),
    ],
)
def test_verdict_on_modules(rows, verdict):
    assert claims.claim_modules(TANH, ORTHO, rows).verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("act", "rows", "starts", "ends"),
    [
        ("relu6", [], "-", "-"),
        ("relu6", rows_of(ORTHO, acts=0), "holds", "near 1."),
        ("relu6", rows_of(ORTHO, acts=2), "holds", "near 1."),
        ("relu6", rows_of(ORTHO, phi=R**2), "does not hold", "this explains it."),
        ("relu6", rows_of(ORTHO, phi=0.87 * R**2), "does not hold", "explains most of it, but for a factor 0.87."),
        ("relu6", rows_of(ORTHO, phi=0.46), "does not hold", "this does not explain it."),
        ("relu6", rows_of(ORTHO, phi=0.0), "does not hold", "this does not explain it."),
        ("identity", rows_of(ORTHO, phi=7.0), "does not hold", "this does not explain it."),
    ],
)
def test_verdict_on_the_gain(act, rows, starts, ends):
    verdict = claims.claim_gain(act, ORTHO, rows).verdict
    assert verdict.startswith(starts) and verdict.endswith(ends)


@pytest.mark.parametrize(
    ("orthogonal", "gaussian", "verdict"),
    [
        ([], [], "-"),
        ([9] * 4, [1] * 4, "does not hold."),
        ([1, 1, 9, 9], [2] * 4, "does not hold."),
        ([1] * 4, [2] * 4, "holds, relatively: varphi is not near 0."),
        ([0.05] * 4, [2] * 4, "holds, and varphi is near 0."),
        ([1, 1, 1, 9], [2] * 4, "holds in part: the difference is small, or not everywhere."),
        ([1.9] * 4, [2] * 4, "holds in part: the difference is small, or not everywhere."),
        ([1], [-0.1], "-"),
    ],
)
def test_verdict_on_closer(orthogonal, gaussian, verdict):
    rows = [
        Row(setting, i, "k3", SimpleNamespace(phi=1.0, varphi=value), None, 1.0, 1.0, 2, ())
        for setting, values in ((ORTHO, orthogonal), (GAUSS, gaussian))
        for i, value in enumerate(values)
    ]
    assert claims.claim_closer(ORTHO, GAUSS, rows).verdict == verdict


def spreads_of(value: float, gaussian: float, **changes: tuple[float, float]) -> list:
    """All spreads alike, except those named as `f_var_bare`, without the indicator BatchNorm."""
    spreads = []
    for which, setting in enumerate((ORTHO, GAUSS)):
        for indicator_bn in (True, False):
            values = dict.fromkeys(SPREADS, (value, gaussian)[which])
            values |= {
                k.removesuffix("_bare"): v[which] for k, v in changes.items() if k.endswith("_bare") != indicator_bn
            }
            spreads.append(Spread(setting, 0, indicator_bn, **values))
    return spreads


@pytest.mark.parametrize(
    ("spreads", "verdict"),
    [
        ([], "-"),
        (spreads_of(0.1, 0.9), "holds."),
        (spreads_of(0.01, 0.09), "holds; Gaussian spreads are small too, all below 0.1."),
        (spreads_of(1, 1, f_var_bare=(0.1, 1)), "holds in part: f_var without indicator BN."),
        (spreads_of(1, 1), "does not hold; no spread is clearly smaller with orthogonal weights."),
        (
            spreads_of(1, 1, f_phi=(2, 1), f_iso=(0.1, 1)),
            "holds in part: f_iso with indicator BN; clearly larger is f_phi with indicator BN.",
        ),
        (
            spreads_of(1e-7, 1e-6),
            "does not hold; no spread is clearly smaller with orthogonal weights; Gaussian spreads are small too, all "
            "below 0.1.",
        ),
    ],
)
def test_verdict_on_fairness(spreads, verdict):
    assert claims.claim_fair(ORTHO, GAUSS, spreads).verdict == verdict


EQUALISED = "the indicator BN makes them clearly more equal with"


@pytest.mark.parametrize(
    ("spreads", "verdict"),
    [
        ([], "-"),
        (spreads_of(1, 1, f_var=(math.nan, math.nan)), "-"),
        (spreads_of(0.01, 0.01), "does not hold; the indicator BN does not make them clearly more equal."),
        (spreads_of(0.01, 0.1), "holds; the indicator BN does not make them clearly more equal."),
        (
            spreads_of(1, 1, f_var=(1e-7, 1e-6), f_var_bare=(0.1, 1)),
            f"holds in part: without indicator BN; {EQUALISED} orthogonal and Gaussian weights.",
        ),
        (
            spreads_of(1, 1, f_var=(0.5, 0.1), f_var_bare=(0.5, 0.5)),
            f"does not hold; clearly larger with them is f_var with indicator BN; {EQUALISED} Gaussian weights.",
        ),
    ],
)
def test_verdict_on_batchnorm(spreads, verdict):
    assert claims.claim_norm(ORTHO, GAUSS, spreads).verdict == verdict


FLAT, RISING = [0.1] * 20, [0.1 * math.sqrt(i + 1) for i in range(20)]


def depth_of(orthogonal: list[float], gaussian: list[float], gaussian_bare: list[float] | None = None) -> list:
    found = {(ORTHO, True): orthogonal, (GAUSS, True): gaussian}
    found |= {(ORTHO, False): orthogonal, (GAUSS, False): gaussian_bare or gaussian}
    return [PathSpread(s, bn, (), tuple(std), ()) for (s, bn), std in found.items()]


@pytest.mark.parametrize(
    ("depth", "starts", "contains"),
    [
        ([], "-", ""),
        (depth_of([0.1], [0.2]), "-", ""),
        (depth_of([1e-7] * 20, [1e-6] * 20), "-", ""),
        (depth_of(FLAT, RISING), "holds; differences add up with Gaussian with indicator BN, Gaussian without", ""),
        (depth_of([0.0] * 20, RISING), "holds; ", "clearly smaller with orthogonal weights: with indicator BN"),
        (depth_of(FLAT, FLAT, RISING), "holds in part: without indicator BN; ", "smaller"),
        (depth_of(FLAT, FLAT), "does not hold; differences add up with neither.", ""),
        (depth_of(RISING, RISING), "does not hold; ", "orthogonal with indicator BN, Gaussian with indicator BN"),
        (depth_of(RISING, FLAT), "does not hold; ", "clearly larger with orthogonal weights: with indicator BN"),
        (depth_of([9.0] * 20, FLAT), "does not hold; differences add up with neither; clearly larger", ""),
        # a reduction sets the spread to 0, which is no growth from there
        (depth_of([0.0, 0.1, 0.1, 0.1], [0.0, 0.1, 0.1, 0.1]), "does not hold; differences add up with neither.", ""),
    ],
)
def test_verdict_on_depth(depth, starts, contains):
    verdict = claims.claim_depth(ORTHO, GAUSS, depth).verdict
    assert verdict.startswith(starts) and contains in verdict
