"""The claims of the isometry study: sentences of the DI-NAS paper beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nasfast.research.studies.isometry.measure import relative_gain
from nasfast.research.studies.isometry.rows import ConvolutionMoments, PathSpread, Row, Spread, bn_text, spread_means
from nasfast.research.studies.parts import Claim

# A spread counts as smaller if it is smaller by a fifth, because it varies by a tenth between seeds.
_CLEARLY = 0.8
# Spreads below this are rounding and BatchNorm's eps; they are not compared.
_ROUNDING = 1e-4
# A pattern counts as one of all candidates if at most a twentieth of them differ.
_NEARLY_ALL = 0.95
# The largest deviation that still counts as "~ 1" or "~ 0".
_NEAR = 0.1


def claims_of(
    own: str,
    rows: Sequence[Row],
    spreads: Sequence[Spread],
    depth: Sequence[PathSpread],
    convolutions: Sequence[ConvolutionMoments],
) -> list[Claim]:
    """The paper's sentences beside the numbers.

    Every verdict follows from the numbers by the thresholds above. The text behind "theory:" is the reason that a
    closed form gives.
    """
    tanh, orthogonal, gaussian = "orthogonal, tanh", f"orthogonal, {own}", f"gaussian, {own}"
    return [
        claim_convolutions(orthogonal, convolutions),
        claim_modules(tanh, orthogonal, rows),
        claim_gain(own, orthogonal, rows),
        claim_closer(orthogonal, gaussian, rows),
        claim_fair(orthogonal, gaussian, spreads),
        claim_norm(orthogonal, gaussian, spreads),
        claim_depth(orthogonal, gaussian, depth),
    ]


def _isometric(phi: float, varphi: float) -> bool:
    return abs(phi - 1) <= _NEAR and abs(varphi) <= _NEAR


def _clearly_smaller(a: float, b: float) -> bool:
    return a < _CLEARLY * b and b > _ROUNDING


def _in_part(names: Sequence[str], of: Sequence[str]) -> str:
    """Whether a claim holds that is true for `names` and false for the others of `of`."""
    if not names:
        return "does not hold"
    return "holds" if len(names) == len(of) else f"holds in part: {', '.join(names)}"


def claim_convolutions(setting: str, convolutions: Sequence[ConvolutionMoments]) -> Claim:
    """The claim about single convolutions."""
    claim = "orthogonal convolutions are dynamical isometries: phi = 1 and varphi = 0 (up to g^2)"
    kinds = [c for c in convolutions if c.setting == setting]
    if not kinds:
        return Claim(claim, "no convolutions", "-")
    names = [c.kind.replace(",", "") for c in kinds]
    isometric, biased = [], []
    closed: list[str] = []
    missed: list[str] = []
    for name, c in zip(names, kinds, strict=True):
        expected = c.expected_varphi
        if _isometric(c.phi, c.varphi):
            isometric.append(name)
        elif expected is not None:
            (closed if abs(c.varphi - expected) <= _NEAR * (expected or 1) else missed).append(name)
        biased += [name] if abs(c.phi - 1) > _NEAR else []
    verdict = _in_part(isometric, names)
    verdict += f"; phi is not 1 for {', '.join(biased)}" if biased else ""
    verdict += f"; varphi is not that of the closed form for {', '.join(missed)}" if missed else ""
    verdict += f"; other kinds with the varphi of their closed form: {len(closed)}" if closed else ""
    if any(name.startswith("pointwise expansion") for name in closed):
        verdict += "; theory: an expansion by t has t - 1, as its output has directions that no input reaches"
    if any(name.startswith("depthwise") for name in closed):
        verdict += "; theory: a depthwise filter has 0 only with a single live tap"
    return Claim(
        claim,
        f"phi / g^2 from {min(c.phi for c in kinds):.3f} to {max(c.phi for c in kinds):.3f}; varphi / g^4: "
        + ", ".join(f"{name} {c.varphi:.2f}" for name, c in zip(names, kinds, strict=True)),
        f"{verdict}.",
    )


def claim_modules(tanh: str, orthogonal: str, rows: Sequence[Row]) -> Claim:
    """The claim about whole candidates."""
    claim = "candidate modules with orthogonal weights are dynamical isometries"
    values = {}
    for setting in dict.fromkeys((tanh, orthogonal)):
        found = [(r.branch.phi, r.branch.varphi) for r in rows if r.setting == setting]
        if found:
            values[setting] = np.median(found, axis=0)
    if not values:
        return Claim(claim, "no candidates", "-")
    near = [f"({setting})" for setting, (phi, varphi) in values.items() if _isometric(phi, varphi)]
    return Claim(
        claim,
        "medians over branches: " + "; ".join(f"{s}: phi {a:.2f}, varphi {b:.2f}" for s, (a, b) in values.items()),
        f"{_in_part(near, list(values))}; the theory assumes tanh.",
    )


def claim_gain(own: str, setting: str, rows: Sequence[Row]) -> Claim:
    """The claim about BatchNorm, which the theory leaves out."""
    claim = "the theory of layers without BatchNorm carries over to blocks with it: differences grow as the signal does"
    r = relative_gain(own)
    # a branch with a constant output has no gain
    found = [
        (row.gain, row.acts)
        for row in rows
        if row.setting == setting and row.acts is not None and math.isfinite(row.gain)
    ]
    if not found:
        return Claim(claim, "no candidates", "-")
    gain = float(np.median([measured for measured, _ in found]))
    ratios = [measured / r**acts for measured, acts in found]
    middle, low, high = np.quantile(ratios, (0.5, 0.05, 0.95))
    if abs(gain - 1) <= _NEAR:
        verdict = "holds: the gain is near 1"
    else:
        verdict = "does not hold; theory: BatchNorm makes the gain r^(number of activations), whatever the weights; "
        if abs(middle - 1) <= _NEAR:
            verdict += "this explains it"
        elif min(middle, gain) > 0 and abs(math.log(middle)) < abs(math.log(gain)) / 2:
            verdict += f"this explains most of it, but for a factor {middle:.2f}"
        else:
            verdict += "this does not explain it"
    return Claim(
        claim,
        f"gain phi Var(in) / Var(out): median {gain:.2f}; over r^(number of activations), r = {r:.3f} for {own}: "
        f"median {middle:.2f}, 5 % to 95 % from {low:.2f} to {high:.2f}; {len(found)} candidates",
        f"{verdict}.",
    )


def claim_closer(orthogonal: str, gaussian: str, rows: Sequence[Row]) -> Claim:
    """The claim that compares orthogonal with Gaussian weights."""
    claim = "orthogonal weights are nearer to isometry than Gaussian ones"
    by_place = {(r.layer, r.name): r.branch.varphi for r in rows if r.setting == gaussian}
    pairs = [(r.branch.varphi, by_place[r.layer, r.name]) for r in rows if r.setting == orthogonal]
    # the estimate of a varphi of 0 may be negative
    ratios = [a / b for a, b in pairs if b > 0]
    if not ratios:
        return Claim(claim, "no candidates with a varphi to compare", "-")
    smaller, ratio = sum(a < b for a, b in pairs), float(np.median(ratios))
    middle = float(np.median([a for a, _ in pairs]))
    if smaller <= len(pairs) / 2 or ratio >= 1:
        verdict = "does not hold"
    elif smaller > _NEARLY_ALL * len(pairs) and ratio < _CLEARLY:
        verdict = "holds, " + ("and varphi is near 0" if abs(middle) <= _NEAR else "relatively: varphi is not near 0")
    else:
        verdict = "holds in part: the difference is small, or not everywhere"
    return Claim(
        claim,
        f"varphi of the branch is smaller in {smaller} of {len(pairs)} candidates; median {middle:.2f}, median ratio "
        f"{ratio:.2f}",
        f"{verdict}.",
    )


def _compared(
    orthogonal: str, gaussian: str, spreads: Sequence[Spread], measured: Sequence[tuple[str, bool]]
) -> dict[str, tuple[float, float]]:
    """Means over layers of the spreads `measured`, orthogonal and Gaussian; spreads that no layer has are left out."""
    means = {(m.setting, m.indicator_bn): m for m in spread_means(spreads)}
    if not means:
        return {}
    both = {
        f"{key} {bn_text(indicator_bn)}": tuple(getattr(means[s, indicator_bn], key) for s in (orthogonal, gaussian))
        for key, indicator_bn in measured
    }
    return {name: pair for name, pair in both.items() if all(v is not None and math.isfinite(v) for v in pair)}


def _told(pairs: dict[str, tuple[float, float]]) -> str:
    return "; ".join(f"{name} {a:.4f} against {b:.4f}" for name, (a, b) in pairs.items())


def _sides(pairs: dict[str, tuple[float, float]]) -> tuple[list[str], list[str]]:
    """The names whose first value is clearly smaller, and those whose first is clearly larger."""
    better = [name for name, (a, b) in pairs.items() if _clearly_smaller(a, b)]
    return better, [name for name, (a, b) in pairs.items() if _clearly_smaller(b, a)]


def claim_fair(orthogonal: str, gaussian: str, spreads: Sequence[Spread]) -> Claim:
    """The claim about the candidates of a layer."""
    claim = "orthogonal candidates of a layer transmit signals equally, Gaussian ones do not"
    measured = (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    pairs = _compared(orthogonal, gaussian, spreads, measured)
    if not pairs:
        return Claim(claim, "one candidate", "-")
    better, worse = _sides(pairs)
    verdict = _in_part(better, list(pairs))
    verdict += "; no spread is clearly smaller with orthogonal weights" if not better else ""
    verdict += f"; clearly larger is {', '.join(worse)}" if worse else ""
    if max(b for _, b in pairs.values()) <= _NEAR:
        verdict += f"; Gaussian spreads are small too, all below {_NEAR}"
    return Claim(
        claim, f"spread over candidates, mean over layers, orthogonal against Gaussian: {_told(pairs)}", f"{verdict}."
    )


def claim_norm(orthogonal: str, gaussian: str, spreads: Sequence[Spread]) -> Claim:
    """The claim about the cause of equal variances."""
    claim = "equal variances of the candidates come from the orthogonal weights"
    pairs = _compared(orthogonal, gaussian, spreads, (("f_var", True), ("f_var", False)))
    if len(pairs) < 2:
        return Claim(claim, "one candidate", "-")
    better, worse = _sides(pairs)
    verdict = _in_part([name.removeprefix("f_var ") for name in better], list(pairs))
    verdict += f"; clearly larger with them is {', '.join(worse)}" if worse else ""
    by_init = dict(zip(("orthogonal", "Gaussian"), zip(*pairs.values(), strict=True), strict=True))
    lowered, _ = _sides(by_init)
    if lowered:
        verdict += f"; the indicator BN makes them clearly more equal with {' and '.join(lowered)} weights"
    else:
        verdict += "; the indicator BN does not make them clearly more equal"
    return Claim(claim, f"orthogonal against Gaussian: {_told(pairs)}", f"{verdict}.")


def _growth(std: Sequence[float]) -> tuple[float, float]:
    """How much a spread grows from the first quarter of the layers to the last, and how much the root of depth grows.

    The root of depth is how a spread grows where every layer adds a difference of its own.

    Layers without any spread are left out, because a BatchNorm at the end of a reduction sets it to 0 at any depth.
    """
    deep = np.array([i for i, value in enumerate(std) if value > _ROUNDING], dtype=int)
    if len(deep) < 2:
        return 1.0, 1.0
    quarter = max(1, len(deep) // 4)
    first, last = deep[:quarter], deep[-quarter:]
    known = np.array(std)
    return float(known[last].mean() / known[first].mean()), float(np.sqrt(last + 1).mean() / np.sqrt(first + 1).mean())


def claim_depth(orthogonal: str, gaussian: str, depth: Sequence[PathSpread]) -> Claim:
    """The claim about differences between paths."""
    claim = "with orthogonal weights the differences between paths do not add up with depth, with Gaussian ones they do"
    # 64 paths give the std of one layer to a tenth
    std = {(d.setting, d.indicator_bn): d.std for d in depth}
    texts, apart = [], []
    adding: dict[bool, list[str]] = {True: [], False: []}
    means: dict[str, tuple[float, float]] = {}
    for indicator_bn in (True, False):
        pair = [std.get((s, indicator_bn), ()) for s in (orthogonal, gaussian)]
        if min(map(len, pair)) < 2 or max(map(max, pair)) <= _ROUNDING:
            continue
        grown = [_growth(values) for values in pair]
        name = bn_text(indicator_bn)
        means[name] = float(np.mean(pair[0])), float(np.mean(pair[1]))
        adds = [value >= max(1 / _CLEARLY, _CLEARLY * alone) for value, alone in grown]
        for kind, so in zip(("orthogonal", "Gaussian"), adds, strict=True):
            adding[so].append(f"{kind} {name}")
        apart += [name] if adds == [False, True] else []
        texts.append(
            f"{name} mean over layers {means[name][0]:.4f} against {means[name][1]:.4f}, last quarter over first "
            f"{grown[0][0]:.2f} against {grown[1][0]:.2f} (adding up: {grown[0][1]:.2f} and {grown[1][1]:.2f})"
        )
    if not texts:
        return Claim(claim, "no differences between paths", "-")
    better, worse = _sides(means)
    verdict = f"{_in_part(apart, list(means))}; differences add up with {', '.join(adding[True]) or 'neither'}"
    verdict += f"; clearly smaller with orthogonal weights: {', '.join(better)}" if better else ""
    verdict += f"; clearly larger with orthogonal weights: {', '.join(worse)}" if worse else ""
    return Claim(
        claim, f"std of log Var(h) over random paths, orthogonal against Gaussian: {'; '.join(texts)}", f"{verdict}."
    )
