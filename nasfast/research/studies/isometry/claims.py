"""The sentences of the paper beside what the isometry study measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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

Found = dict[str, tuple[str, bool]]
"""What a sentence speaks of -> what was measured, and whether the sentence holds for it."""


def claims_of(own: str, measured: Measured) -> list[Claim]:
    """The paper's sentences beside the numbers, for a space whose activation is `own`.

    Every verdict follows from the numbers by the thresholds above. The text behind "theory:" is the reason that a
    closed form gives.
    """
    tanh, orthogonal, gaussian = "orthogonal, tanh", f"orthogonal, {own}", f"gaussian, {own}"
    rows = measured.rows
    fair = (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    return [
        judged(
            "orthogonal convolutions are dynamical isometries: phi / g^2 = 1 and varphi / g^4 = 0",
            _convolutions_isometric(orthogonal, measured),
            "an expansion by t has varphi t - 1, as its output has directions that no input reaches, and a depthwise "
            "filter 0 only with a single live tap",
        ),
        judged(
            "candidate modules with orthogonal weights are dynamical isometries (medians over branches)",
            _modules_isometric((tanh, orthogonal), measured),
            "it assumes tanh and has no BatchNorm",
        ),
        judged(
            "the theory of layers without BatchNorm carries over to blocks with it: differences grow as the signal "
            "does",
            _gain_is_one(own, rows.get(orthogonal, ())),
            "BatchNorm makes the gain r^(number of activations), whatever the weights",
        ),
        judged(
            "orthogonal weights are nearer to isometry than Gaussian ones (varphi of the branch)",
            _nearer(rows.get(orthogonal, ()), rows.get(gaussian, ())),
        ),
        judged(
            "orthogonal candidates of a layer transmit signals equally, Gaussian ones do not (spreads over candidates)",
            _clearly_smaller(orthogonal, gaussian, measured, fair),
        ),
        judged(
            "equal variances of the candidates come from the orthogonal weights",
            _clearly_smaller(orthogonal, gaussian, measured, (("f_var", True), ("f_var", False))),
            "a BatchNorm at the end makes variances equal with any weights",
        ),
        judged(
            "with orthogonal weights the differences between paths do not add up with depth, with Gaussian ones they "
            "do",
            _adds_up(orthogonal, gaussian, measured),
        ),
    ]


def judged(claim: str, found: Mapping[str, tuple[str, bool]], theory: str = "") -> Claim:
    """A sentence and its verdict: it holds, holds in part, or does not hold; `theory` is why it may not."""
    if not found:
        return Claim(claim, "nothing to compare", "-")
    held = [name for name, (_, so) in found.items() if so]
    whole = len(held) == len(found)
    verdict = "holds" if whole else f"holds in part: {', '.join(held)}" if held else "does not hold"
    verdict += f"; theory: {theory}" if theory and not whole else ""
    return Claim(claim, "; ".join(f"{name} {words}" for name, (words, _) in found.items()), f"{verdict}.")


def bn_text(indicator_bn: bool) -> str:
    """Whether the indicator BatchNorms are there, in words."""
    return f"{'with' if indicator_bn else 'without'} indicator BN"


def _isometric(phi: float, varphi: float) -> bool:
    return abs(phi - 1) <= _NEAR and abs(varphi) <= _NEAR


def _convolutions_isometric(setting: str, measured: Measured) -> Found:
    found = {}
    for c in (c for c in measured.convolutions if c["setting"] == setting):
        expected = "" if c["expected_varphi"] is None else f" (closed form {c['expected_varphi']:.2f})"
        words = f"{c['phi']:.3f}, {c['varphi']:.2f}{expected}"
        found[c["kind"].replace(",", "")] = words, _isometric(c["phi"], c["varphi"])
    return found


def _modules_isometric(settings: Sequence[str], measured: Measured) -> Found:
    found = {}
    for setting in dict.fromkeys(s for s in settings if s in measured.rows):
        phi, varphi = np.median([(r.branch.phi, r.branch.varphi) for r in measured.rows[setting]], axis=0)
        found[f"({setting})"] = f"phi {phi:.2f}, varphi {varphi:.2f}", _isometric(phi, varphi)
    return found


def _gain_is_one(own: str, rows: Sequence[Row]) -> Found:
    r = relative_gain(own)
    # a branch with a constant output has no gain
    found = [(x.gain, x.acts) for x in rows if x.acts is not None and math.isfinite(x.gain)]
    if not found:
        return {}
    gain = float(np.median([value for value, _ in found]))
    middle, low, high = np.quantile([value / r**acts for value, acts in found], (0.5, 0.05, 0.95))
    words = (
        f"{gain:.2f} of {len(found)} candidates; over r^(number of activations), r = {r:.3f} for {own}: median "
        f"{middle:.2f}, 5 % to 95 % from {low:.2f} to {high:.2f}"
    )
    return {"median gain phi Var(in) / Var(out)": (words, abs(gain - 1) <= _NEAR)}


def _nearer(orthogonal: Sequence[Row], gaussian: Sequence[Row]) -> Found:
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


def _clearly_smaller(orthogonal: str, gaussian: str, measured: Measured, which: Sequence[tuple[str, bool]]) -> Found:
    """Means over layers of spreads, with or without indicator BN, orthogonal against Gaussian."""
    means = {(m["setting"], m["indicator_bn"]): m for m in measured.fairness_means}
    found = {}
    for key, bn in which if means else ():
        a, b = (means[setting, bn][key] for setting in (orthogonal, gaussian))
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
            found[f"{key} {bn_text(bn)}"] = f"{a:.4f} against {b:.4f}", a < _CLEARLY * b and b > _ROUNDING
    return found


def _growth(std: Sequence[float]) -> tuple[float, float]:
    """How much a spread grows from the first quarter of the layers to the last, and how much the root of depth grows.

    The root of depth is how a spread grows where every layer adds a difference of its own. Layers without any spread
    are left out, because a BatchNorm at the end of a reduction sets it to 0 at any depth.
    """
    known = np.array(std)
    deep = np.flatnonzero(known > _ROUNDING)
    if len(deep) < 2:
        return 1.0, 1.0
    quarter = max(1, len(deep) // 4)
    first, last = deep[:quarter], deep[-quarter:]
    return float(known[last].mean() / known[first].mean()), float(np.sqrt(last + 1).mean() / np.sqrt(first + 1).mean())


def _adds_up(orthogonal: str, gaussian: str, measured: Measured) -> Found:
    """Differences between paths: std of log Var(h), last quarter of the layers over first."""
    std = {(d["setting"], d["indicator_bn"]): d["std"] for d in measured.depth}
    found = {}
    for bn in (True, False):
        pair = [std.get((s, bn), ()) for s in (orthogonal, gaussian)]
        if min(map(len, pair)) < 2 or max(map(max, pair)) <= _ROUNDING:
            continue
        grown = [_growth(values) for values in pair]
        # 64 paths give the std of one layer to a tenth
        adds = [value >= max(1 / _CLEARLY, _CLEARLY * alone) for value, alone in grown]
        words = " against ".join(
            f"{np.mean(values):.4f}, growing by {value:.2f} ({alone:.2f} if differences add up)"
            for values, (value, alone) in zip(pair, grown, strict=True)
        )
        found[bn_text(bn)] = words, adds == [False, True]
    return found
