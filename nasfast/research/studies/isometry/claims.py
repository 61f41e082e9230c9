"""The claims of the isometry study: sentences of the DI-NAS paper beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nasfast.research.studies.isometry.measure import SPREADS, Row, relative_gain
from nasfast.research.studies.report import Claim, Form

# A spread counts as smaller if it is smaller by a fifth, because it varies by a tenth between seeds.
_CLEARLY = 0.8
# Spreads below this are rounding and BatchNorm's eps; they are not compared.
_ROUNDING = 1e-4
# A pattern counts as one of all candidates if at most a twentieth of them differ.
_NEARLY_ALL = 0.95
# The largest deviation that still counts as "~ 1" or "~ 0".
_NEAR = 0.1


def claims_of(
    own: str, rows: Sequence[Row], spreads: Sequence[Form], depth: Sequence[Form], convolutions: Sequence[Form]
) -> list[Claim]:
    """The paper's sentences beside the numbers, for a space whose activation is `own`.

    Every verdict follows from the numbers by the thresholds above. The text behind "theory:" is the reason that a
    closed form gives.
    """
    tanh, orthogonal, gaussian = "orthogonal, tanh", f"orthogonal, {own}", f"gaussian, {own}"
    return [
        claim_convolutions(orthogonal, convolutions),
        claim_modules((tanh, orthogonal), rows),
        claim_gain(own, orthogonal, rows),
        claim_closer(orthogonal, gaussian, rows),
        claim_fair(orthogonal, gaussian, spreads),
        claim_norm(orthogonal, gaussian, spreads),
        claim_depth(orthogonal, gaussian, depth),
    ]


def judged(claim: str, found: Mapping[str, tuple[str, bool]], theory: str = "") -> Claim:
    """A sentence and its verdict: it holds, holds in part, or does not hold.

    Args:
        claim: the sentence.
        found: what the sentence speaks of -> what was measured, and whether the sentence holds for it.
        theory: why it may not hold.
    """
    held = [name for name, (_, so) in found.items() if so]
    if not found:
        return Claim(claim, "nothing to compare", "-")
    verdict = (
        "does not hold" if not held else "holds" if len(held) == len(found) else f"holds in part: {', '.join(held)}"
    )
    verdict += f"; theory: {theory}" if theory and len(held) < len(found) else ""
    return Claim(claim, "; ".join(f"{name} {words}" for name, (words, _) in found.items()), f"{verdict}.")


def bn_text(indicator_bn: bool) -> str:
    """Whether the indicator BatchNorms are there, in words."""
    return f"{'with' if indicator_bn else 'without'} indicator BN"


def spread_means(spreads: Sequence[Form]) -> list[Form]:
    """Means over layers, by setting, with and without indicator BatchNorms; None where no layer has a value."""
    means: list[Form] = []
    for setting in dict.fromkeys(s["setting"] for s in spreads):
        for bn in (True, False):
            found = [s for s in spreads if (s["setting"], s["indicator_bn"]) == (setting, bn)]
            known = {key: [s[key] for s in found if s[key] is not None] for key in SPREADS}
            mean = {key: float(np.mean(values)) if values else None for key, values in known.items()}
            means.append({"setting": setting, "indicator_bn": bn, **mean})
    return means


def _isometric(phi: float, varphi: float) -> bool:
    return abs(phi - 1) <= _NEAR and abs(varphi) <= _NEAR


def _clearly_smaller(a: float, b: float) -> bool:
    return a < _CLEARLY * b and b > _ROUNDING


def claim_convolutions(setting: str, convolutions: Sequence[Form]) -> Claim:
    """The claim about single convolutions."""
    found = {}
    for c in (c for c in convolutions if c["setting"] == setting):
        expected = "" if c["expected_varphi"] is None else f" (closed form {c['expected_varphi']:.2f})"
        words = f"{c['phi']:.3f}, {c['varphi']:.2f}{expected}"
        found[c["kind"].replace(",", "")] = words, _isometric(c["phi"], c["varphi"])
    return judged(
        "orthogonal convolutions are dynamical isometries: phi / g^2 = 1 and varphi / g^4 = 0",
        found,
        "an expansion by t has varphi t - 1, as its output has directions that no input reaches, and a depthwise "
        "filter 0 only with a single live tap",
    )


def claim_modules(settings: Sequence[str], rows: Sequence[Row]) -> Claim:
    """The claim about whole candidates: medians over their branches."""
    found = {}
    for setting in dict.fromkeys(settings):
        values = [(r.branch.phi, r.branch.varphi) for r in rows if r.setting == setting]
        if values:
            phi, varphi = np.median(values, axis=0)
            found[f"({setting})"] = f"phi {phi:.2f}, varphi {varphi:.2f}", _isometric(phi, varphi)
    claim = "candidate modules with orthogonal weights are dynamical isometries (medians over branches)"
    return judged(claim, found, "it assumes tanh and has no BatchNorm")


def claim_gain(own: str, setting: str, rows: Sequence[Row]) -> Claim:
    """The claim about BatchNorm, which the theory leaves out."""
    r = relative_gain(own)
    # a branch with a constant output has no gain
    measured = [(x.gain, x.acts) for x in rows if x.setting == setting and x.acts is not None and math.isfinite(x.gain)]
    found = {}
    if measured:
        gain = float(np.median([value for value, _ in measured]))
        middle, low, high = np.quantile([value / r**acts for value, acts in measured], (0.5, 0.05, 0.95))
        words = (
            f"{gain:.2f} of {len(measured)} candidates; over r^(number of activations), r = {r:.3f} for {own}: median "
            f"{middle:.2f}, 5 % to 95 % from {low:.2f} to {high:.2f}"
        )
        found["median gain phi Var(in) / Var(out)"] = words, abs(gain - 1) <= _NEAR
    return judged(
        "the theory of layers without BatchNorm carries over to blocks with it: differences grow as the signal does",
        found,
        "BatchNorm makes the gain r^(number of activations), whatever the weights",
    )


def claim_closer(orthogonal: str, gaussian: str, rows: Sequence[Row]) -> Claim:
    """The claim that compares orthogonal with Gaussian weights, by varphi of the branches."""
    by_place = {(r.layer, r.name): r.branch.varphi for r in rows if r.setting == gaussian}
    pairs = [(r.branch.varphi, by_place[r.layer, r.name]) for r in rows if r.setting == orthogonal]
    # the estimate of a varphi of 0 may be negative
    ratios = [a / b for a, b in pairs if b > 0]
    found = {}
    if ratios:
        smaller, ratio = sum(a < b for a, b in pairs), float(np.median(ratios))
        middle = float(np.median([a for a, _ in pairs]))
        found = {
            "nearly everywhere": (f"smaller in {smaller} of {len(pairs)}", smaller > _NEARLY_ALL * len(pairs)),
            "clearly": (f"median ratio {ratio:.2f}", ratio < _CLEARLY),
            "near 0": (f"median {middle:.2f}", abs(middle) <= _NEAR),
        }
    return judged("orthogonal weights are nearer to isometry than Gaussian ones (varphi of the branch)", found)


def _compared(
    orthogonal: str, gaussian: str, spreads: Sequence[Form], measured: Sequence[tuple[str, bool]]
) -> dict[str, tuple[str, bool]]:
    """Means over layers of spreads, orthogonal against Gaussian; the claim is that the first is clearly smaller."""
    means = {(m["setting"], m["indicator_bn"]): m for m in spread_means(spreads)}
    found = {}
    for key, bn in measured if means else ():
        a, b = (means[setting, bn][key] for setting in (orthogonal, gaussian))
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
            found[f"{key} {bn_text(bn)}"] = f"{a:.4f} against {b:.4f}", _clearly_smaller(a, b)
    return found


def claim_fair(orthogonal: str, gaussian: str, spreads: Sequence[Form]) -> Claim:
    """The claim about the candidates of a layer."""
    measured = (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    claim = "orthogonal candidates of a layer transmit signals equally, Gaussian ones do not (spreads over candidates)"
    return judged(claim, _compared(orthogonal, gaussian, spreads, measured))


def claim_norm(orthogonal: str, gaussian: str, spreads: Sequence[Form]) -> Claim:
    """The claim about the cause of equal variances."""
    claim = "equal variances of the candidates come from the orthogonal weights"
    found = _compared(orthogonal, gaussian, spreads, (("f_var", True), ("f_var", False)))
    return judged(claim, found, "a BatchNorm at the end makes variances equal with any weights")


def _growth(std: Sequence[float]) -> tuple[float, float]:
    """How much a spread grows from the first quarter of the layers to the last, and how much the root of depth grows.

    The root of depth is how a spread grows where every layer adds a difference of its own. Layers without any spread
    are left out, because a BatchNorm at the end of a reduction sets it to 0 at any depth.
    """
    deep = np.array([i for i, value in enumerate(std) if value > _ROUNDING], dtype=int)
    if len(deep) < 2:
        return 1.0, 1.0
    quarter = max(1, len(deep) // 4)
    first, last = deep[:quarter], deep[-quarter:]
    known = np.array(std)
    return float(known[last].mean() / known[first].mean()), float(np.sqrt(last + 1).mean() / np.sqrt(first + 1).mean())


def claim_depth(orthogonal: str, gaussian: str, depth: Sequence[Form]) -> Claim:
    """The claim about differences between paths: std of log Var(h), last quarter of the layers over first."""
    std = {(d["setting"], d["indicator_bn"]): d["std"] for d in depth}
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
    return judged(
        "with orthogonal weights the differences between paths do not add up with depth, with Gaussian ones they do",
        found,
    )
