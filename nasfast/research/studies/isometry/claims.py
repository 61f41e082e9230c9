"""The sentences of the paper beside what the isometry study measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nasfast.research.studies.isometry.marks import relative_gain
from nasfast.research.studies.isometry.measure import Measured, Row
from nasfast.research.studies.report import Claim

# A spread counts as smaller if it is smaller by a fifth, because it varies by a tenth between seeds.
_CLEARLY = 0.8
# Spreads below this are rounding and BatchNorm's eps; they are not compared.
_ROUNDING = 1e-4
# A pattern counts as one of all candidates if at most a twentieth of them differ.
_NEARLY_ALL = 0.95
# The largest deviation that still counts as "~ 1" or "~ 0".
_NEAR = 0.1

Evidence = dict[str, tuple[str, bool]]
"""What a sentence speaks of -> what was measured, and whether the sentence holds for it."""


def judge_claims(act: str, measured: Measured) -> list[Claim]:
    """The paper's sentences beside the numbers, for a space whose activation is `act`.

    Every verdict follows from the numbers by the thresholds above. The text behind "theory:" is the reason that a
    closed form gives.
    """
    tanh, orthogonal, gaussian = "orthogonal, tanh", f"orthogonal, {act}", f"gaussian, {act}"
    rows = measured.rows
    spreads = (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    return [
        judge(
            "orthogonal convolutions are dynamical isometries: phi / g^2 = 1 and varphi / g^4 = 0",
            _convolutions_isometric(orthogonal, measured),
            "an expansion by t has varphi t - 1, as its output has directions that no input reaches, and a depthwise "
            "filter 0 only with a single live tap",
        ),
        judge(
            "candidate modules with orthogonal weights are dynamical isometries (medians over branches)",
            _modules_isometric((tanh, orthogonal), measured),
            "it assumes tanh and has no BatchNorm",
        ),
        judge(
            "the theory of layers without BatchNorm carries over to blocks with it: differences grow as the signal "
            "does",
            _gain_is_one(act, rows.get(orthogonal, ())),
            "BatchNorm makes the gain r^(number of activations), whatever the weights",
        ),
        judge(
            "orthogonal weights are nearer to isometry than Gaussian ones (varphi of the branch)",
            _nearer(rows.get(orthogonal, ()), rows.get(gaussian, ())),
        ),
        judge(
            "orthogonal candidates of a layer transmit signals equally, Gaussian ones do not (spreads over candidates)",
            _clearly_smaller(orthogonal, gaussian, measured, spreads),
        ),
        judge(
            "equal variances of the candidates come from the orthogonal weights",
            _clearly_smaller(orthogonal, gaussian, measured, (("f_var", True), ("f_var", False))),
            "a BatchNorm at the end makes variances equal with any weights",
        ),
        judge(
            "with orthogonal weights the differences between paths do not add up with depth, with Gaussian ones they "
            "do",
            _adds_up(orthogonal, gaussian, measured),
        ),
    ]


def judge(claim: str, evidence: Evidence, theory: str = "") -> Claim:
    """A sentence and its verdict: it holds, holds in part, or does not hold; `theory` is why it may not."""
    if not evidence:
        return Claim(claim, "nothing to compare", "-")
    confirmed = [name for name, (_, holds) in evidence.items() if holds]
    whole = len(confirmed) == len(evidence)
    verdict = "holds" if whole else f"holds in part: {', '.join(confirmed)}" if confirmed else "does not hold"
    verdict += f"; theory: {theory}" if theory and not whole else ""
    return Claim(claim, "; ".join(f"{name} {words}" for name, (words, _) in evidence.items()), f"{verdict}.")


def indicator_text(block_indicator: bool) -> str:
    """Whether the block indicators are there, in words."""
    return f"{'with' if block_indicator else 'without'} indicator BN"


def _isometric(phi: float, varphi: float) -> bool:
    return abs(phi - 1) <= _NEAR and abs(varphi) <= _NEAR


def _convolutions_isometric(setting: str, measured: Measured) -> Evidence:
    evidence = {}
    for c in (c for c in measured.convolutions if c["setting"] == setting):
        expected = "" if c["expected_varphi"] is None else f" (closed form {c['expected_varphi']:.2f})"
        words = f"{c['phi']:.3f}, {c['varphi']:.2f}{expected}"
        evidence[c["kind"].replace(",", "")] = words, _isometric(c["phi"], c["varphi"])
    return evidence


def _modules_isometric(settings: Sequence[str], measured: Measured) -> Evidence:
    evidence = {}
    for setting in dict.fromkeys(s for s in settings if s in measured.rows):
        phi, varphi = np.median([(r.branch.phi, r.branch.varphi) for r in measured.rows[setting]], axis=0)
        evidence[f"({setting})"] = f"phi {phi:.2f}, varphi {varphi:.2f}", _isometric(phi, varphi)
    return evidence


def _gain_is_one(act: str, rows: Sequence[Row]) -> Evidence:
    r = relative_gain(act)
    # a branch with a constant output has no gain
    gains = [(row.gain, row.acts) for row in rows if row.acts is not None and math.isfinite(row.gain)]
    if not gains:
        return {}
    gain = float(np.median([value for value, _ in gains]))
    middle, low, high = np.quantile([value / r**acts for value, acts in gains], (0.5, 0.05, 0.95))
    words = (
        f"{gain:.2f} of {len(gains)} candidates; over r^(number of activations), r = {r:.3f} for {act}: median "
        f"{middle:.2f}, 5 % to 95 % from {low:.2f} to {high:.2f}"
    )
    return {"median gain phi Var(in) / Var(out)": (words, abs(gain - 1) <= _NEAR)}


def _nearer(orthogonal: Sequence[Row], gaussian: Sequence[Row]) -> Evidence:
    """Orthogonal with Gaussian weights, by varphi of the branches."""
    by_place = {(r.layer, r.name): r.branch.varphi for r in gaussian}
    pairs = [(r.branch.varphi, by_place[r.layer, r.name]) for r in orthogonal]
    # the estimate of a varphi of 0 may be negative
    ratios = [a / b for a, b in pairs if b > 0]
    if not ratios:
        return {}
    smaller, ratio = sum(a < b for a, b in pairs), float(np.median(ratios))
    middle = float(np.median([a for a, _ in pairs]))
    return {
        "nearly everywhere": (f"smaller in {smaller} of {len(pairs)}", smaller > _NEARLY_ALL * len(pairs)),
        "clearly": (f"median ratio {ratio:.2f}", ratio < _CLEARLY),
        "near 0": (f"median {middle:.2f}", abs(middle) <= _NEAR),
    }


def _clearly_smaller(
    orthogonal: str, gaussian: str, measured: Measured, spreads: Sequence[tuple[str, bool]]
) -> Evidence:
    """Means over layers of spreads, with or without block indicators, orthogonal against Gaussian."""
    means = {(m["setting"], m["block_indicator"]): m for m in measured.fairness_means}
    evidence = {}
    for spread, indicator in spreads if means else ():
        a, b = (means[setting, indicator][spread] for setting in (orthogonal, gaussian))
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
            name = f"{spread} {indicator_text(indicator)}"
            evidence[name] = f"{a:.4f} against {b:.4f}", a < _CLEARLY * b and b > _ROUNDING
    return evidence


def _growth(std: Sequence[float]) -> tuple[float, float]:
    """How much a spread grows from the first quarter of the layers to the last, and how much the root of depth grows.

    The root of depth is how a spread grows where every layer adds a difference of its own. Layers without any spread
    are left out, because a BatchNorm at the end of a reduction sets it to 0 at any depth.
    """
    spread = np.array(std)
    layers = np.flatnonzero(spread > _ROUNDING)
    if len(layers) < 2:
        return 1.0, 1.0
    quarter = max(1, len(layers) // 4)
    first, last = layers[:quarter], layers[-quarter:]
    root = np.sqrt(last + 1).mean() / np.sqrt(first + 1).mean()
    return float(spread[last].mean() / spread[first].mean()), float(root)


def _adds_up(orthogonal: str, gaussian: str, measured: Measured) -> Evidence:
    """Differences between paths: std of log Var(h), last quarter of the layers over first."""
    std = {(d["setting"], d["block_indicator"]): d["std"] for d in measured.depth}
    evidence = {}
    for indicator in (True, False):
        pair = [std.get((setting, indicator), ()) for setting in (orthogonal, gaussian)]
        if min(map(len, pair)) < 2 or max(map(max, pair)) <= _ROUNDING:
            continue
        growths = [_growth(values) for values in pair]
        # 64 paths give the std of one layer to a tenth
        adds_up = [growth >= max(1 / _CLEARLY, _CLEARLY * root) for growth, root in growths]
        words = " against ".join(
            f"{np.mean(values):.4f}, growing by {growth:.2f} ({root:.2f} if differences add up)"
            for values, (growth, root) in zip(pair, growths, strict=True)
        )
        evidence[indicator_text(indicator)] = words, adds_up == [False, True]
    return evidence
