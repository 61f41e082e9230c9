"""The isometry study: `run(config, out, task) -> StudyReport`, with its numbers, marks, claims, tables and figures."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import TwoSlopeNorm
from torch import Tensor, nn

from nasfast.measure.timing import random_batch
from nasfast.ops.modules import ConvBNAct, InvertedResidual
from nasfast.research.analysis.fairness import SPREADS, channel_moments, depth_spread, fairness, without_indicator_bn
from nasfast.research.analysis.jacobian import Isometry, applied, circular_conv_moments, frozen_copy, isometry
from nasfast.research.analysis.meanfield import activation, normal_nodes, phase_diagram
from nasfast.research.studies.draw import GREY, INK, SERIES, Figure, level, literal
from nasfast.research.studies.inputs import initialised, reduced_space, sample_shape
from nasfast.research.studies.isometry.config import IsometryConfig
from nasfast.research.studies.report import Check, Claim, Form, StudyReport, Table
from nasfast.research.studies.run import Task, no_task
from nasfast.spaces import SKIP, Arch, SearchSpace, get_space, mean_path
from nasfast.supernet import Init, Supernet, initialize
from nasfast.supernet.blocks import DenseInvertedResidual, ShuffleUnit
from nasfast.supernet.init import GAINS

_LOG = logging.getLogger(__name__)

EDGES = np.linspace(0, 5, 51)
"""Bins of the singular value histograms."""

# Up to this many elements it is cheaper to form a Jacobian than to probe it.
_MAX_EXACT = 2**16
# Pass marks of the spec: phi of a convolution, varphi of a convolution, gain of a block with BatchNorm.
_PHI_MARK, _VARPHI_MARK, _GAIN_MARK = 0.02, 0.05, 0.10
# Standard errors that are allowed where a mark is a mean over random filters or probes.
_SIGMAS = 4
# The mean of fewer squared Gaussian weights scatters by more than 0.5 %, a quarter of the mark.
_MIN_GAUSSIAN_WEIGHTS = 80_000
# Channels of the linear pair of the spec, and of the blocks with BatchNorm and the size of their map.
_PAIR_CHANNELS, _BLOCK_CHANNELS, _BLOCK_SIZE = 96, 32, 14
# One Gaussian pair scatters by more than the mark allows, and finite width adds a percent.
_PAIR_DRAWS = 32
# A spread counts as smaller if it is smaller by a fifth, because it varies by a tenth between seeds.
_CLEARLY = 0.8
# Spreads below this are rounding and BatchNorm's eps; they are not compared.
_ROUNDING = 1e-4
# A pattern counts as one of all candidates if at most a twentieth of them differ.
_NEARLY_ALL = 0.95
# The largest deviation that still counts as "~ 1" or "~ 0".
_NEAR = 0.1
# Few images are enough, because variances are averaged over channels and positions.
_DEPTH_IMAGES = 16
_DIAGRAM_ACT = "tanh"
_DENSITIES = 6
_FAIRNESS = {
    "f_var": "f_var: std of log variance",
    "f_iso": "f_iso: std of log distance ratio",
    "distortion": "distortion of distances within a candidate",
    "disagreement": "disagreement of the candidates' outputs",
}
_EXPLANATION = (
    "phi is the mean and varphi the variance of the squared singular values of a Jacobian; an isometry has 1 and 0. "
    "The branch is the candidate without skip connection or bypass. Gain: phi Var(in) / Var(out), how much faster "
    "small differences grow than the signal."
)
_MOMENTS = {"phi": ".3f", "varphi": ".3f", "gain": ".3f"}


@dataclass(frozen=True)
class Row:
    """One candidate of one layer, or one part of a module, under one setting.

    Attributes:
        layer: index, or -1 in a module that is no supernet.
        branch: isometry without the skip connection or the bypassing half; this is what is judged.
        module: isometry with it; None where both are the same.
        var_in, var_out: variance of the branch's input and output, averaged over channels.
        acts: activations in the branch; None if unknown.
        histogram: share of the branch's singular values in every bin of EDGES.
    """

    setting: str
    layer: int
    name: str
    branch: Isometry
    module: Isometry | None
    var_in: float
    var_out: float
    acts: int | None
    histogram: tuple[float, ...]

    @property
    def gain(self) -> float:
        """phi Var(in) / Var(out): how much faster small differences grow than the signal; 1 for a linear branch."""
        return self.branch.phi * self.var_in / self.var_out if self.var_out > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The row with its gain."""
        return {**vars(self), "gain": self.gain}


Rows = Mapping[str, Sequence[Row]]
"""Setting -> its rows."""


def relative_gain(act: str) -> float:
    """r = E sigma'(z)^2 / Var sigma(z), z normal: the gain of one BatchNorm -> activation -> convolution -> BatchNorm.

    1 for the identity, 1.178 for tanh, 1.467 for ReLU; ReLU6 differs from ReLU by less than 1e-7.
    """
    a = activation(act)
    nodes, weights = normal_nodes([0.0, *a.kinks])
    values = a.value(nodes)
    return float(weights @ a.slope(nodes) ** 2 / (weights @ values**2 - (weights @ values) ** 2))


def branch_of(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The branch of a block, without skip connection or bypass, and what selects its part of the block's input."""
    if isinstance(block, (InvertedResidual, DenseInvertedResidual)) and block.has_residual:
        branch = copy.deepcopy(block)
        branch.has_residual = False
        return branch, lambda x: x
    if isinstance(block, ShuffleUnit):
        return block.main, (lambda x: x[:, 1::2].contiguous()) if block.projection is None else (lambda x: x)
    return block, lambda x: x


def measure(
    module: nn.Module,
    h: Tensor,
    cfg: IsometryConfig,
    *,
    setting: str,
    layer: int = -1,
    name: str,
    acts: int | None = None,
) -> Row:
    """Measure one module at the inputs h (N, ...), as a row whose branch is the module."""
    found = isometry(module, h, max_exact=_MAX_EXACT, **cfg.effort)
    with torch.no_grad():
        y = applied(frozen_copy(module, h), h)
    histogram = tuple(found.histogram(EDGES).tolist())
    return Row(setting, layer, name, found, None, _variance(h), _variance(y), acts, histogram)


def _variance(y: Tensor) -> float:
    return channel_moments(y)[1] if y.ndim > 1 else float(y.double().var(correction=0))


def measure_supernet(
    net: Supernet, images: Tensor, cfg: IsometryConfig, *, setting: str, path: Arch | None, task: Task = no_task
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measure every candidate of every layer, and how much the candidates of a layer differ.

    Args:
        net: a supernet of plain modules (`fused=False`); not changed.
        images: (N, C, H, W); their number is that of the white inputs too.
        cfg: how much to spend on each candidate, and the seed of white noise.
        setting: name of the rows.
        path: through which the images propagate to each layer; None gives every layer white noise of its own shape.
        task: tells the progress.

    Returns:
        Rows, and per layer the SPREADS (None where they are not known) with and without the indicator BatchNorms.
    """
    rows, spreads = [], []
    done = task(setting, len(net.layers))
    # the signs of the probes begin from the same seed; a stream of its own would change the published figures
    generator = torch.Generator().manual_seed(cfg.seed)
    with torch.no_grad():
        h = net.stem(images)
    for index, choice_layer in enumerate(net.layers):
        layer = choice_layer.layer
        if path is None:
            h = torch.randn(len(images), layer.in_channels, layer.size, layer.size, generator=generator)
        blocks = {layer.label(c): m for c, m in enumerate(choice_layer.candidates) if not isinstance(m, nn.Identity)}
        measured = [_measure_block(block, h, cfg, setting, index, name) for name, block in blocks.items()]
        rows += measured
        if len(blocks) > 1:
            for indicator_bn in (True, False):
                chosen = [b if indicator_bn else without_indicator_bn(b) for b in blocks.values()]
                # the Jacobians were measured with the BatchNorms
                phi = [row.branch.phi for row in measured] if indicator_bn else None
                place = {"setting": setting, "layer": index, "indicator_bn": indicator_bn}
                spreads.append({**place, **fairness(chosen, h, phi=phi)})
        if path is not None and path[index] != SKIP:
            with torch.no_grad():
                h = choice_layer.candidates[path[index]](h)
        done(index + 1)
    return rows, spreads


def _measure_block(block: nn.Module, h: Tensor, cfg: IsometryConfig, setting: str, layer: int, name: str) -> Row:
    branch, part = branch_of(block)
    acts = sum(isinstance(m, ConvBNAct) and m.act_name != "identity" for m in branch.modules())
    row = measure(branch, part(h), cfg, setting=setting, layer=layer, name=name, acts=acts)
    if branch is block:
        return row
    # no density is computed, because it takes most of the time
    whole = isometry(block, h, max_exact=_MAX_EXACT, **{**cfg.effort, "lanczos_steps": 0})
    return replace(row, module=whole)


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module by name; an `nn.Sequential` is replaced by its children."""

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if type(child) is nn.Sequential:
                yield from walk(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child

    return dict(walk(module, ""))


def measure_module(
    module: nn.Module, x: Tensor, cfg: IsometryConfig, *, setting: str, task: Task = no_task
) -> list[Row]:
    """Measure a module as a whole, and each of its parts at the input that reaches it; x is (N, ...).

    Parts without parameters, parts that are used several times, and parts that do not map one tensor to one are left
    out.
    """
    frozen = frozen_copy(module, x)
    inputs: dict[str, list[Any]] = {}
    parts = parts_of(frozen)
    handles = [
        # a part may be called with keywords alone
        part.register_forward_pre_hook(
            lambda _, given, name=name: inputs.setdefault(name, []).append(next(iter(given), None))
        )
        for name, part in parts.items()
    ]
    with torch.no_grad():
        applied(frozen, x)
    for handle in handles:
        handle.remove()
    done = task(setting, 1 + len(inputs))
    rows = [measure(module, x, cfg, setting=setting, name="whole")]
    own = parts_of(module)
    for index, (name, given) in enumerate(inputs.items(), 1):
        done(index)
        # a part that is used several times has several Jacobians, none of which is its own
        whole = len(given) == 1 and isinstance(given[0], Tensor) and given[0].ndim > 1
        if not whole or next(own[name].parameters(), None) is None:
            continue
        try:
            rows.append(measure(own[name], given[0], cfg, setting=setting, name=name))
        except ValueError as error:
            _LOG.info("%s: part %s left out: %s", setting, name, error)
    done(1 + len(inputs))
    return rows


def _kind_of(conv: nn.Conv2d) -> tuple[str, dict[str, float]]:
    """A kind of convolution, and the closed form of varphi / g^4 by scheme of its weights, where there is one."""
    k, out, fan_in = conv.kernel_size[0], conv.out_channels, conv.in_channels
    if conv.groups == fan_in > 1:
        return f"depthwise {k} x {k}", {"orthogonal": (k * k - 1) / (k * (k + 2)), "gaussian": 1 + 1 / k**2}
    if k > 1 or conv.groups > 1:
        return f"dense {k} x {k}", {}
    # Marchenko and Pastur, with the term that finite width adds
    gaussian = out / fan_in + 1 / fan_in
    if out <= fan_in:
        return "pointwise, projection", {"orthogonal": 0.0, "gaussian": gaussian}
    return f"pointwise, expansion x {out / fan_in:.3g}", {"orthogonal": out / fan_in - 1, "gaussian": gaussian}


def measure_convolutions(module: nn.Module, *, setting: str, scheme: str) -> tuple[list[dict[str, Any]], list[Check]]:
    """phi / g^2 and varphi / g^4 of every kind of convolution in a network, as circular ones of stride 1, with marks.

    A mark has the spec's tolerance, or four standard errors where few random filters scatter more. Kinds with few
    Gaussian weights get no mark. `scheme`, orthogonal or gaussian, chooses the closed forms; where there is none,
    `expected_varphi` of a row is None. The activations of the module's ConvBNAct units give g.
    """
    pooled: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    weights: dict[str, int] = {}
    for unit in module.modules():
        if not isinstance(unit, ConvBNAct):
            continue
        (name, forms), g2 = _kind_of(unit.conv), GAINS[unit.act_name] ** 2
        firsts, seconds = circular_conv_moments(unit.conv.weight, unit.conv.groups)
        weights[name] = weights.get(name, 0) + unit.conv.weight.numel()
        closed = np.full(len(firsts), forms.get(scheme, math.nan))
        pooled.setdefault(name, []).append((firsts / g2, seconds / g2**2, closed))
    rows, marks = [], []
    for name, found in sorted(pooled.items()):
        # the filters of a depthwise convolution share a row of `found`; any other convolution is one block
        firsts, seconds, closed = (np.concatenate(parts) for parts in zip(*found, strict=True))
        phi = float(firsts.mean())
        varphi = float(seconds.mean() - phi**2)
        expected = None if np.isnan(closed).any() else float(closed.mean())
        row: dict[str, Any] = {"setting": setting, "kind": name, "count": len(found), "phi": phi, "varphi": varphi}
        rows.append({**row, "expected_varphi": expected})
        if scheme == "gaussian" and weights[name] < _MIN_GAUSSIAN_WEIGHTS:
            continue
        marks.append(Check.near(f"{setting}: {name}: phi / g^2", 1.0, max(_PHI_MARK, _SIGMAS * _error(firsts)), phi))
        if expected is not None:
            allowed = max(_VARPHI_MARK * (expected or 1), _SIGMAS * _error(seconds - 2 * phi * firsts - closed))
            marks.append(Check.near(f"{setting}: {name}: varphi / g^4", expected, allowed, varphi))
    return rows, marks


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _pair_varphi(scheme: Init, expansion: int, seed: int) -> float:
    wide = expansion * _PAIR_CHANNELS
    pair = nn.Sequential(nn.Linear(_PAIR_CHANNELS, wide, bias=False), nn.Linear(wide, _PAIR_CHANNELS, bias=False))
    initialize(pair, scheme, seed=seed)
    return isometry(pair, torch.zeros(1, _PAIR_CHANNELS), samples=1).varphi


def block_marks(act: str, *, seed: int = 0) -> list[Check]:
    """Marks of blocks with known moments: a linear pair, and a MobileNetV2 branch with BatchNorm on white noise.

    Both wrap around at the border, because the closed forms hold for maps without a border. The branch is measured with
    `act`, with tanh and with the identity.
    """
    marks = []
    generator = torch.Generator().manual_seed(seed)
    expansion = 6
    signs: dict[Init, int] = {"orthogonal": -1, "gaussian": 1}
    for scheme, sign in signs.items():
        found = [_pair_varphi(scheme, expansion, _PAIR_DRAWS * seed + i) for i in range(_PAIR_DRAWS)]
        expected, name = 1 + sign / expansion, f"{scheme}: linear pair, expansion {expansion}: varphi"
        marks.append(Check.near(name, expected, _VARPHI_MARK * expected, float(np.mean(found))))
    for name in dict.fromkeys(("identity", "tanh", act)):
        block = InvertedResidual(_BLOCK_CHANNELS, _BLOCK_CHANNELS, kernel_size=3, stride=1, expand=expansion, act=name)
        initialize(block, "orthogonal", seed=seed)
        h = torch.randn(64, _BLOCK_CHANNELS, _BLOCK_SIZE, _BLOCK_SIZE, generator=generator)
        branch = isometry(branch_of(block)[0], h, probes=32, samples=4, lanczos_steps=0, circular=True, seed=seed)
        expected = relative_gain(name) ** 2
        marks.append(
            Check.near(
                f"orthogonal: branch with BatchNorm, {name}: phi Var(h)",
                expected,
                _GAIN_MARK * expected,
                branch.phi * channel_moments(h)[1],
            )
        )
    return marks


Found = dict[str, tuple[str, bool]]
"""What a sentence speaks of -> what was measured, and whether the sentence holds for it."""


def claims_of(
    own: str, rows: Rows, spreads: Sequence[Form], depth: Sequence[Form], convolutions: Sequence[Form]
) -> list[Claim]:
    """The paper's sentences beside the numbers, for a space whose activation is `own`.

    Every verdict follows from the numbers by the thresholds above. The text behind "theory:" is the reason that a
    closed form gives.
    """
    tanh, orthogonal, gaussian = "orthogonal, tanh", f"orthogonal, {own}", f"gaussian, {own}"
    fair = (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    return [
        judged(
            "orthogonal convolutions are dynamical isometries: phi / g^2 = 1 and varphi / g^4 = 0",
            _convolutions_isometric(orthogonal, convolutions),
            "an expansion by t has varphi t - 1, as its output has directions that no input reaches, and a depthwise "
            "filter 0 only with a single live tap",
        ),
        judged(
            "candidate modules with orthogonal weights are dynamical isometries (medians over branches)",
            _modules_isometric((tanh, orthogonal), rows),
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
            _clearly_smaller(orthogonal, gaussian, spreads, fair),
        ),
        judged(
            "equal variances of the candidates come from the orthogonal weights",
            _clearly_smaller(orthogonal, gaussian, spreads, (("f_var", True), ("f_var", False))),
            "a BatchNorm at the end makes variances equal with any weights",
        ),
        judged(
            "with orthogonal weights the differences between paths do not add up with depth, with Gaussian ones they "
            "do",
            _adds_up(orthogonal, gaussian, depth),
        ),
    ]


def judged(claim: str, found: Mapping[str, tuple[str, bool]], theory: str = "") -> Claim:
    """A sentence and its verdict: it holds, holds in part, or does not hold; `theory` is why it may not."""
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


def _convolutions_isometric(setting: str, convolutions: Sequence[Form]) -> Found:
    found = {}
    for c in (c for c in convolutions if c["setting"] == setting):
        expected = "" if c["expected_varphi"] is None else f" (closed form {c['expected_varphi']:.2f})"
        words = f"{c['phi']:.3f}, {c['varphi']:.2f}{expected}"
        found[c["kind"].replace(",", "")] = words, _isometric(c["phi"], c["varphi"])
    return found


def _modules_isometric(settings: Sequence[str], rows: Rows) -> Found:
    found = {}
    for setting in dict.fromkeys(settings):
        if setting in rows:
            phi, varphi = np.median([(r.branch.phi, r.branch.varphi) for r in rows[setting]], axis=0)
            found[f"({setting})"] = f"phi {phi:.2f}, varphi {varphi:.2f}", _isometric(phi, varphi)
    return found


def _gain_is_one(own: str, rows: Sequence[Row]) -> Found:
    r = relative_gain(own)
    # a branch with a constant output has no gain
    measured = [(x.gain, x.acts) for x in rows if x.acts is not None and math.isfinite(x.gain)]
    if not measured:
        return {}
    gain = float(np.median([value for value, _ in measured]))
    middle, low, high = np.quantile([value / r**acts for value, acts in measured], (0.5, 0.05, 0.95))
    words = (
        f"{gain:.2f} of {len(measured)} candidates; over r^(number of activations), r = {r:.3f} for {own}: median "
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


def _clearly_smaller(
    orthogonal: str, gaussian: str, spreads: Sequence[Form], measured: Sequence[tuple[str, bool]]
) -> Found:
    """Means over layers of spreads, with or without indicator BN, orthogonal against Gaussian."""
    means = {(m["setting"], m["indicator_bn"]): m for m in spread_means(spreads)}
    found = {}
    for key, bn in measured if means else ():
        a, b = (means[setting, bn][key] for setting in (orthogonal, gaussian))
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
            found[f"{key} {bn_text(bn)}"] = f"{a:.4f} against {b:.4f}", a < _CLEARLY * b and b > _ROUNDING
    return found


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


def _adds_up(orthogonal: str, gaussian: str, depth: Sequence[Form]) -> Found:
    """Differences between paths: std of log Var(h), last quarter of the layers over first."""
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
    return found


def run(cfg: IsometryConfig, out: Path | None, task: Task) -> StudyReport:
    """Measure every candidate of a space, or the parts of a module, under orthogonal and Gaussian weights."""
    return _space(cfg, task) if cfg.module is None else _module(cfg, cfg.module, task)


def _space(cfg: IsometryConfig, task: Task) -> StudyReport:
    space = reduced_space(cfg.space, cfg.resolution, "isometry")
    own = space.activation
    # the setting of the theory first, then that of the space, then the baseline
    settings: dict[str, tuple[Init, str]] = {
        "orthogonal, tanh": ("orthogonal", "tanh"),
        f"orthogonal, {own}": ("orthogonal", own),
        f"gaussian, {own}": ("gaussian", own),
    }
    images, _ = random_batch(space, cfg.batch, seed=cfg.seed)
    images = images.contiguous()
    few = images[:_DEPTH_IMAGES]
    rows: dict[str, list[Row]] = {}
    spreads, depth, convolutions = [], [], []
    marks = block_marks(own, seed=cfg.seed)
    for setting, (init, act) in settings.items():
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        path = mean_path(space) if cfg.inputs == "propagated" else None
        rows[setting], spreads_of_setting = measure_supernet(net, images, cfg, setting=setting, path=path, task=task)
        spreads += spreads_of_setting
        for indicator_bn in (True, False):
            found = depth_spread(net, few, paths=cfg.paths, indicator_bn=indicator_bn, seed=cfg.seed)
            depth.append({"setting": setting, "indicator_bn": indicator_bn, **found})
        if act == own:
            kinds, of_convolutions = measure_convolutions(net, setting=setting, scheme=init)
            convolutions += kinds
            marks += of_convolutions
    inputs = "white noise at every layer" if cfg.inputs == "white" else "white images, propagated along the mean path"
    report = _report(
        f"space {space.name}, {len(space)} layers, inputs: {inputs}",
        _reductions(cfg, space, len(few)),
        rows,
        fairness=spreads,
        depth=depth,
        convolutions=convolutions,
    )
    return replace(report, checks=tuple(marks), claims=tuple(claims_of(own, rows, spreads, depth, convolutions)))


def _module(cfg: IsometryConfig, name: str, task: Task) -> StudyReport:
    x = torch.randn(cfg.batch, *sample_shape(cfg.input), generator=torch.Generator().manual_seed(cfg.seed))

    def measured(setting: str, module: nn.Module) -> list[Row]:
        return measure_module(module, x, cfg, setting=setting, task=task)

    found = initialised(name, cfg.input, cfg.seed, measured)
    reduced = f"{cfg.samples} samples and {cfg.probes} random probes per part; statistics of {cfg.batch} samples"
    return _report(f"module {name}, inputs: white noise of shape {cfg.input}", (reduced,), found)


def _report(
    subject: str,
    reduced: Sequence[str],
    rows: Rows,
    *,
    fairness: Sequence[Form] = (),
    depth: Sequence[Form] = (),
    convolutions: Sequence[Form] = (),
) -> StudyReport:
    """The report without marks and claims; what there is none of has neither table nor figure."""
    figures = [_moments_figure("candidates" if fairness else "parts", rows), _densities(rows)]
    tables = [_medians_table(rows), _rows_table(_all(rows))]
    if convolutions:
        tables.append(_convolutions_table(convolutions))
    if fairness:
        text = "Spread over the candidates of a layer; 0 is fair."
        figures.append(_by_layer("fairness", text, fairness, _FAIRNESS))
        panels = {"std": "std of log Var(h) over paths", "ratio": "largest Var(h) over smallest"}
        text = "Spread of log Var(h) over random paths, by depth."
        figures.append(_by_layer("fairness with depth", text, depth, panels))
        tables.append(_fairness_table(spread_means(fairness)))
    if depth:
        tables.append(_depth_table(depth))
    return StudyReport(
        subject=subject,
        explanation=_EXPLANATION,
        notes=tuple(f"reduced: {text}" for text in reduced),
        tables=tuple(tables),
        figures=(*figures, _diagram()),
        data={
            "settings": list(rows),
            "rows": _all(rows),
            "histogram_edges": EDGES,
            "fairness": fairness,
            "fairness_means": spread_means(fairness),
            "depth": depth,
            "convolutions": convolutions,
        },
    )


def _reductions(cfg: IsometryConfig, space: SearchSpace, images: int) -> tuple[str, ...]:
    """What is smaller than in the paper, so that a study takes minutes."""
    full = get_space(cfg.space).resolution
    smaller = f" instead of {full}" if full != space.resolution else ""
    return (
        f"{space.resolution} x {space.resolution} images{smaller}",
        f"{cfg.samples} samples and {cfg.probes} random probes per candidate, {cfg.lanczos_steps} Lanczos steps per "
        f"density; statistics of {cfg.batch} samples",
        f"{cfg.paths} random paths, {images} images, one seed",
    )


def _all(rows: Rows) -> list[Row]:
    return [row for of_setting in rows.values() for row in of_setting]


def _medians_table(rows: Rows) -> Table:
    lines = []
    for setting, own in rows.items():
        values = [(r.branch.phi, r.branch.varphi, r.gain) for r in own]
        lines.append((setting, *np.nanmedian(values, axis=0).tolist()))
    return Table.of("medians over branches", {"": "", **_MOMENTS}, lines)


def _rows_table(rows: Sequence[Row]) -> Table:
    """Every candidate or part under every setting; the last columns count the skip connection too."""
    lines = []
    for row in rows:
        place = row.name if row.layer < 0 else f"{row.layer} {row.name}"
        moments = (
            _with_error(row.branch.phi, row.branch.phi_error),
            _with_error(row.branch.varphi, row.branch.varphi_error),
        )
        whole = row.module or row.branch
        lines.append((place, row.setting, *moments, row.gain, whole.phi, whole.varphi))
    columns = {"": "", "setting": "", **_MOMENTS, "module phi": ".3f", "module varphi": ".3f"}
    return Table.of("branches, and whole modules", columns, lines)


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"


def _convolutions_table(convolutions: Sequence[Form]) -> Table:
    columns = {"": "", "kind": "", "count": "", "phi / g²": ".4f", "varphi / g⁴": ".4f", "closed form": ".4f"}
    lines = [tuple(c.values()) for c in convolutions]
    return Table.of("convolutions, each as one of stride 1 that wraps around at the border", columns, lines)


def _fairness_table(means: Sequence[Form]) -> Table:
    lines = [(m["setting"], bn_text(m["indicator_bn"]), *(m[key] for key in SPREADS)) for m in means]
    columns = {"": "", "indicator BN": "", **dict.fromkeys(SPREADS, ".4f")}
    return Table.of("fairness, mean over layers (0 is fair)", columns, lines)


def _depth_table(depth: Sequence[Form]) -> Table:
    layers = len(depth[0]["std"])
    shown = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    columns = {"": "", "indicator BN": "", **{f"layer {i}": ".4f" for i in shown}}
    lines = [(d["setting"], bn_text(d["indicator_bn"]), *(d["std"][i] for i in shown)) for d in depth]
    return Table.of("std of log Var(h_l) over random paths", columns, lines)


def _places(rows: Sequence[Row]) -> list[str]:
    """The places of the horizontal axis: layers, or the parts of a module without the whole, which would dwarf them."""
    places = list(dict.fromkeys(map(_place, rows)))
    return [place for place in places if place != "whole"] or places


def _place(row: Row) -> str:
    return f"layer {row.layer}" if row.layer >= 0 else row.name


def _moments_figure(title: str, rows: Rows) -> Figure:
    places = _places(_all(rows))
    quantities: dict[str, tuple[float, Callable[[Row], float]]] = {
        "phi of the branch": (1, lambda row: row.branch.phi),
        "varphi of the branch": (0, lambda row: row.branch.varphi),
        "gain: phi Var(in) / Var(out)": (1, lambda row: row.gain),
    }
    caption = "Every dot is one candidate (or part); lines join the medians of a layer. Dashed: isometry."
    figure = Figure(title, caption, len(quantities), columns=3, height=3.9)
    for ax, (text, (ideal, value)) in zip(figure.axes, quantities.items(), strict=True):
        shifts = np.linspace(-0.22, 0.22, len(rows))
        for colour, shift, (setting, of_setting) in zip(SERIES, shifts, rows.items(), strict=False):
            own = [(places.index(_place(r)), value(r)) for r in of_setting if _place(r) in places]
            x, y = np.array(own, dtype=float).T
            ax.plot(x + shift, y, "o", color=colour, ms=3, alpha=0.55)
            medians = [np.nanmedian(y[x == at]) for at in np.unique(x)]
            ax.plot(np.unique(x) + shift, medians, color=colour, label=setting)
        level(ax, ideal, ls="--")
        names = [literal(place.removeprefix("layer ")) for place in places]
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        ax.set(title=text, ylim=(0, None))
    return figure


def _densities(rows: Rows) -> Figure:
    places = _places(_all(rows))
    chosen = np.unique(np.linspace(0, len(places) - 1, min(_DENSITIES, len(places))).astype(int))
    caption = (
        "Share of the branch's singular values per bin of 0.1, pooled over the candidates of the layer; isometry would "
        "be one spike at 1. The bin at 0 is cut off."
    )
    figure = Figure("singular values", caption, len(chosen), columns=3, height=2.4)
    for ax, place in zip(figure.axes, (places[i] for i in chosen), strict=True):
        top = 0.0
        for colour, (setting, own) in zip(SERIES, rows.items(), strict=False):
            shares = [row.histogram for row in own if _place(row) == place]
            if shares:
                mean = np.mean(shares, axis=0)
                # the bin of singular values at 0 would hide the rest
                top = max(top, 1.15 * mean[1:].max())
                ax.stairs(mean, EDGES, color=colour, label=setting)
        ax.axvline(1, color=GREY, lw=1, ls="--")
        ax.set(title=literal(place), xlabel="singular value", ylim=(0, top or None))
    return figure


def _by_layer(title: str, caption: str, found: Sequence[Form], panels: Mapping[str, str]) -> Figure:
    """A line for every setting: solid with indicator BatchNorms, dotted without; a panel for every key of `found`.

    A row has the values of all layers, or is one layer's.
    """
    figure = Figure(title, caption + " Solid: with indicator BN. Dotted: without it.", len(panels))
    for ax, (key, text) in zip(figure.axes, panels.items(), strict=True):
        for colour, setting in zip(SERIES, dict.fromkeys(f["setting"] for f in found), strict=False):
            for indicator_bn in (True, False):
                rows = [f for f in found if (f["setting"], f["indicator_bn"]) == (setting, indicator_bn)]
                values = rows[0][key] if rows and "layer" not in rows[0] else [row[key] for row in rows]
                x = [row["layer"] for row in rows] if rows and "layer" in rows[0] else range(len(values))
                y = np.array(values, dtype=float)  # None becomes nan
                ax.plot(x, y, "-" if indicator_bn else ":", color=colour, label=setting if indicator_bn else None)
        ax.set(title=text, xlabel="layer", ylim=(1 if key == "ratio" else 0, None))
    return figure


def _diagram() -> Figure:
    sigma_w, sigma_b = np.linspace(0.5, 3, 51), np.linspace(0, 1, 26)
    _, chi, critical = phase_diagram(_DIAGRAM_ACT, sigma_w, sigma_b)
    caption = (
        "chi of an infinitely wide tanh network without BatchNorm: below 1 signals merge and gradients vanish, above 1 "
        "they explode. The black line is chi = 1; the dot is the initialisation that the theory asks for."
    )
    figure = Figure("mean field", caption, 1, width=6.4, height=3.6)
    (ax,) = figure.axes
    ax.grid(False)
    norm = TwoSlopeNorm(1, 0, max(2.0, chi.max()))
    image = ax.pcolormesh(sigma_w, sigma_b, chi, cmap="RdBu_r", norm=norm, shading="nearest", rasterized=True)
    ax.plot(*critical.T, color=INK)
    ax.plot(1, 0, "o", color=INK, ms=7, clip_on=False)
    ax.figure.colorbar(image, ax=ax, label="chi")
    ax.set(title=f"order and chaos of {_DIAGRAM_ACT}", xlabel="sigma_w", ylabel="sigma_b")
    return figure
