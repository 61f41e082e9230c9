"""What the isometry study measures: candidates of a space, parts of any module, and kinds of convolutions."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.ops.modules import ConvBNAct, InvertedResidual
from nasfast.research.analysis.fairness import channel_moments, fairness, without_indicator_bn
from nasfast.research.analysis.jacobian import Isometry, applied, circular_conv_moments, frozen_copy, isometry
from nasfast.research.analysis.meanfield import activation, normal_nodes
from nasfast.research.studies.isometry.config import Effort
from nasfast.research.studies.report import Check
from nasfast.research.studies.run import Task, no_task
from nasfast.spaces import SKIP, Arch
from nasfast.supernet import Init, Supernet, initialize
from nasfast.supernet.blocks import DenseInvertedResidual, ShuffleUnit
from nasfast.supernet.init import GAINS

_LOG = logging.getLogger(__name__)

EDGES = np.linspace(0, 5, 51)
"""Bins of the singular value histograms."""
SPREADS = ("f_mean", "f_var", "f_iso", "f_phi", "distortion", "disagreement")
"""The spreads of `nasfast.research.analysis.fairness.Fairness` that a row of fairness has."""

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


@dataclass(frozen=True)
class Row:
    """One candidate of one layer, or one part of a module, under one setting.

    Attributes:
        setting: initialisation and activation.
        layer: index, or -1 in a module that is no supernet.
        name: name of the candidate or part.
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
        """The row as JSON, with the gain; densities are quantiles."""
        module = None if self.module is None else self.module.to_dict()
        return {**vars(self), "branch": self.branch.to_dict(), "module": module, "gain": self.gain}


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
    module: nn.Module, h: Tensor, effort: Effort, *, setting: str, layer: int = -1, name: str, acts: int | None = None
) -> Row:
    """Measure one module at the inputs h (N, ...), as a row whose branch is the module."""
    found = isometry(module, h, max_exact=_MAX_EXACT, **vars(effort))
    with torch.no_grad():
        var_out = _variance(applied(frozen_copy(module, h), h))
    histogram = tuple(found.histogram(EDGES).tolist())
    return Row(setting, layer, name, found, None, _variance(h), var_out, acts, histogram)


def _variance(y: Tensor) -> float:
    return channel_moments(y)[1] if y.ndim > 1 else float(y.double().var(correction=0))


def measure_supernet(
    net: Supernet, images: Tensor, effort: Effort, *, setting: str, path: Arch | None, task: Task = no_task
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measure every candidate of every layer, and how much the candidates of a layer differ.

    Args:
        net: a supernet of plain modules (`fused=False`); not changed.
        images: (N, C, H, W); their number is that of the white inputs too.
        effort: per candidate.
        setting: name of the rows.
        path: through which the images propagate to each layer; None gives every layer white noise of its own shape.
        task: tells the progress.

    Returns:
        Rows, and per layer the SPREADS (None where they are not known) with and without the indicator BatchNorms.
    """
    rows, spreads = [], []
    done = task(setting, len(net.layers))
    generator = torch.Generator().manual_seed(effort.seed)
    with torch.no_grad():
        h = net.stem(images)
    for index, choice_layer in enumerate(net.layers):
        layer = choice_layer.layer
        if path is None:
            h = torch.randn(len(images), layer.in_channels, layer.size, layer.size, generator=generator)
        blocks = {layer.label(c): m for c, m in enumerate(choice_layer.candidates) if not isinstance(m, nn.Identity)}
        measured = [_measure_block(block, h, effort, setting, index, name) for name, block in blocks.items()]
        rows += measured
        if len(blocks) > 1:
            for indicator_bn in (True, False):
                chosen = [b if indicator_bn else without_indicator_bn(b) for b in blocks.values()]
                # the Jacobians were measured with the BatchNorms
                phi = [row.branch.phi for row in measured] if indicator_bn else None
                found = fairness(chosen, h, names=list(blocks), phi=phi)
                of_layer = {key: getattr(found, key) for key in SPREADS}
                spreads.append({"setting": setting, "layer": index, "indicator_bn": indicator_bn, **of_layer})
        if path is not None and path[index] != SKIP:
            with torch.no_grad():
                h = choice_layer.candidates[path[index]](h)
        done(index + 1)
    return rows, spreads


def _measure_block(block: nn.Module, h: Tensor, effort: Effort, setting: str, layer: int, name: str) -> Row:
    branch, part = branch_of(block)
    acts = sum(isinstance(m, ConvBNAct) and m.act_name != "identity" for m in branch.modules())
    row = measure(branch, part(h), effort, setting=setting, layer=layer, name=name, acts=acts)
    if branch is block:
        return row
    # no density is computed, because it takes most of the time
    whole = isometry(block, h, max_exact=_MAX_EXACT, **{**vars(effort), "lanczos_steps": 0})
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


def measure_module(module: nn.Module, x: Tensor, effort: Effort, *, setting: str, task: Task = no_task) -> list[Row]:
    """Measure a module as a whole, and each of its parts at the input that reaches it.

    Parts without parameters, parts that are used several times, and parts that do not map one tensor to one are left
    out.

    Args:
        module: not changed.
        x: (N, ...).
        effort: per part.
        setting: name of the rows.
        task: tells the progress.

    Raises:
        ValueError: as `isometry` of the whole; a part that cannot be measured is left out.
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
    rows = [measure(module, x, effort, setting=setting, name="whole")]
    own = parts_of(module)
    for index, (name, given) in enumerate(inputs.items(), 1):
        done(index)
        # a part that is used several times has several Jacobians, none of which is its own
        whole = len(given) == 1 and isinstance(given[0], Tensor) and given[0].ndim > 1
        if not whole or next(own[name].parameters(), None) is None:
            continue
        try:
            rows.append(measure(own[name], given[0], effort, setting=setting, name=name))
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
    Gaussian weights get no mark.

    Args:
        module: a module of ConvBNAct units, whose activations give g; not changed.
        setting: name of the rows.
        scheme: `orthogonal` or `gaussian`; chooses the closed forms.

    Returns:
        Rows (`expected_varphi` is None where there is no closed form), and the marks.
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

    Both wrap around at the border, because the closed forms hold for maps without a border.

    Args:
        act: activation of the branch; tanh and the identity are measured too.
        seed: seed of weights and inputs.
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
