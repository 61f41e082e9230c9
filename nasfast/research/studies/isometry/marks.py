"""The pass marks of the isometry study: convolutions and blocks whose moments have closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from nasfast.ops.modules import ConvBNAct, InvertedResidual
from nasfast.research.analysis.fairness import channel_moments
from nasfast.research.analysis.jacobian import circular_conv_moments, isometry
from nasfast.research.analysis.meanfield import activation, normal_nodes
from nasfast.research.studies.isometry.measure import select_branch
from nasfast.research.studies.report import Check
from nasfast.supernet import Init, initialize
from nasfast.supernet.init import GAINS

# Pass marks of the spec: phi of a convolution, varphi of a convolution, gain of a block with BatchNorm.
_PHI_MARK, _VARPHI_MARK, _GAIN_MARK = 0.02, 0.05, 0.10
# Standard errors that are allowed where a mark is a mean over random filters or probes.
_SIGMAS = 4
# The mean of fewer squared Gaussian weights scatters by more than 0.5 %, a quarter of the mark.
_MIN_GAUSSIAN_WEIGHTS = 80_000
# Channels of the linear pair of the spec, and of the blocks with BatchNorm and the size of their map.
_PAIR_CHANNELS, _BLOCK_CHANNELS, _BLOCK_SIZE = 96, 32, 14
# Expansion of both.
_EXPANSION = 6
# One Gaussian pair scatters by more than the mark allows, and finite width adds a percent.
_PAIR_DRAWS = 32


def relative_gain(act: str) -> float:
    """r = E sigma'(z)^2 / Var sigma(z), z normal: the gain of one BatchNorm -> activation -> convolution -> BatchNorm.

    1 for the identity, 1.178 for tanh, 1.467 for ReLU; ReLU6 differs from ReLU by less than 1e-7.
    """
    a = activation(act)
    nodes, weights = normal_nodes([0.0, *a.kinks])
    values = a.value(nodes)
    return float(weights @ a.slope(nodes) ** 2 / (weights @ values**2 - (weights @ values) ** 2))


def _convolution_kind(conv: nn.Conv2d) -> tuple[str, dict[str, float]]:
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
        (name, forms), g2 = _convolution_kind(unit.conv), GAINS[unit.act_name] ** 2
        firsts, seconds = circular_conv_moments(unit.conv.weight, unit.conv.groups)
        weights[name] = weights.get(name, 0) + unit.conv.weight.numel()
        closed = np.full(len(firsts), forms.get(scheme, math.nan))
        pooled.setdefault(name, []).append((firsts / g2, seconds / g2**2, closed))
    rows, marks = [], []
    for name, convolutions in sorted(pooled.items()):
        # a depthwise convolution has moments for each of its filters, any other one for all of it
        firsts, seconds, closed = (np.concatenate(parts) for parts in zip(*convolutions, strict=True))
        phi = float(firsts.mean())
        varphi = float(seconds.mean() - phi**2)
        expected = None if np.isnan(closed).any() else float(closed.mean())
        row = {"setting": setting, "kind": name, "count": len(convolutions), "phi": phi, "varphi": varphi}
        rows.append({**row, "expected_varphi": expected})
        if scheme == "gaussian" and weights[name] < _MIN_GAUSSIAN_WEIGHTS:
            continue
        tolerance = max(_PHI_MARK, _SIGMAS * _standard_error(firsts))
        marks.append(Check.near(f"{setting}: {name}: phi / g^2", 1.0, tolerance, phi))
        if expected is not None:
            error = _standard_error(seconds - 2 * phi * firsts - closed)
            tolerance = max(_VARPHI_MARK * (expected or 1), _SIGMAS * error)
            marks.append(Check.near(f"{setting}: {name}: varphi / g^4", expected, tolerance, varphi))
    return rows, marks


def _standard_error(values: np.ndarray) -> float:
    """Standard error of the mean; 0 of a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def block_marks(act: str, *, seed: int = 0) -> list[Check]:
    """Marks of blocks with known moments: a linear pair, and a MobileNetV2 branch with BatchNorm on white noise.

    Both wrap around at the border, because the closed forms hold for maps without a border. The branch is measured with
    `act`, with tanh and with the identity.
    """
    marks = []
    generator = torch.Generator().manual_seed(seed)
    narrow, wide = _PAIR_CHANNELS, _EXPANSION * _PAIR_CHANNELS
    signs: dict[Init, int] = {"orthogonal": -1, "gaussian": 1}
    for scheme, sign in signs.items():
        varphis = []
        for i in range(_PAIR_DRAWS):
            pair = nn.Sequential(nn.Linear(narrow, wide, bias=False), nn.Linear(wide, narrow, bias=False))
            initialize(pair, scheme, seed=_PAIR_DRAWS * seed + i)
            varphis.append(isometry(pair, torch.zeros(1, narrow), samples=1).varphi)
        expected, name = 1 + sign / _EXPANSION, f"{scheme}: linear pair, expansion {_EXPANSION}: varphi"
        marks.append(Check.near(name, expected, _VARPHI_MARK * expected, float(np.mean(varphis))))
    for name in dict.fromkeys(("identity", "tanh", act)):
        block = InvertedResidual(_BLOCK_CHANNELS, _BLOCK_CHANNELS, kernel_size=3, stride=1, expand=_EXPANSION, act=name)
        initialize(block, "orthogonal", seed=seed)
        h = torch.randn(64, _BLOCK_CHANNELS, _BLOCK_SIZE, _BLOCK_SIZE, generator=generator)
        branch = isometry(select_branch(block)[0], h, probes=32, samples=4, lanczos_steps=0, circular=True, seed=seed)
        expected, gain = relative_gain(name) ** 2, branch.phi * channel_moments(h)[1]
        mark = f"orthogonal: branch with BatchNorm, {name}: phi Var(h)"
        marks.append(Check.near(mark, expected, _GAIN_MARK * expected, gain))
    return marks
