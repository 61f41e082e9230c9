"""Closed forms of Jacobians at initialisation that must hold: pass marks of the isometry study (DI-NAS, section 3).

    a convolution of gain g           phi = g^2; varphi / g^4 is known for depthwise and pointwise ones
    two linear layers, expansion t    varphi = 1 - 1 / t with orthogonal weights, 1 + 1 / t with Gaussian ones
    a block with two BatchNorms       gain phi Var(in) / Var(out) = r^2, whatever the weights

with r = E sigma'^2 / Var sigma(z) of the activation. All are measured as if they wrapped around at the border, because
the forms hold for maps without a border.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.ops.modules import ConvBNAct, InvertedResidual
from nasfast.research.analysis.fairness import channel_moments
from nasfast.research.analysis.jacobian import isometry
from nasfast.research.analysis.meanfield import activation, normal_nodes
from nasfast.research.studies.notebook import Notebook
from nasfast.supernet import Init, initialize
from nasfast.supernet.blocks import DenseInvertedResidual, ShuffleUnit
from nasfast.supernet.init import GAINS

# Pass marks of phi and varphi of a convolution, and of the gain of a block with BatchNorm; where a mark is a mean over
# random filters, four standard errors are allowed.
PHI_MARK, VARPHI_MARK, GAIN_MARK, SIGMAS = 0.02, 0.05, 0.10, 4
# The mean of fewer squared Gaussian weights scatters by more than 0.5 %, a quarter of the mark.
MIN_GAUSSIAN_WEIGHTS = 80_000
# The linear pair: channels, expansion, and draws, because one Gaussian pair scatters by more than the mark allows.
PAIR_CHANNELS, EXPANSION, PAIR_DRAWS = 96, 6, 32
BLOCK_CHANNELS, BLOCK_SIZE = 32, 14


def relative_gain(act: str) -> float:
    """r = E sigma'(z)^2 / Var sigma(z), z normal: the gain of one BatchNorm -> activation -> convolution -> BatchNorm.

    1 for the identity, 1.178 for tanh, 1.467 for ReLU; ReLU6 differs from ReLU by less than 1e-7.
    """
    a = activation(act)
    nodes, weights = normal_nodes([0.0, *a.kinks])
    values = a.value(nodes)
    return float(weights @ a.slope(nodes) ** 2 / (weights @ values**2 - (weights @ values) ** 2))


def block_marks(act: str, notes: Notebook, *, seed: int = 0) -> None:
    """A linear pair, and MobileNetV2 branches with BatchNorm on white noise."""
    generator = torch.Generator().manual_seed(seed)
    narrow, wide = PAIR_CHANNELS, EXPANSION * PAIR_CHANNELS
    signs: dict[Init, int] = {"orthogonal": -1, "gaussian": 1}
    for scheme, sign in signs.items():
        varphis = []
        for i in range(PAIR_DRAWS):
            pair = nn.Sequential(nn.Linear(narrow, wide, bias=False), nn.Linear(wide, narrow, bias=False))
            initialize(pair, scheme, seed=PAIR_DRAWS * seed + i)
            varphis.append(isometry(pair, torch.zeros(1, narrow), samples=1).varphi)
        name = f"{scheme}: linear pair, expansion {EXPANSION}: varphi"
        _mark_near(notes, name, float(np.mean(varphis)), 1 + sign / EXPANSION, VARPHI_MARK * (1 + sign / EXPANSION))
    for name in dict.fromkeys(("identity", "tanh", act)):
        block = InvertedResidual(BLOCK_CHANNELS, BLOCK_CHANNELS, kernel_size=3, stride=1, expand=EXPANSION, act=name)
        initialize(block, "orthogonal", seed=seed)
        h = torch.randn(64, BLOCK_CHANNELS, BLOCK_SIZE, BLOCK_SIZE, generator=generator)
        branch = isometry(select_branch(block)[0], h, probes=32, samples=4, lanczos_steps=0, circular=True, seed=seed)
        expected, gain = relative_gain(name) ** 2, branch.phi * channel_moments(h)[1]
        mark = f"orthogonal: branch with BatchNorm, {name}: phi Var(h)"
        _mark_near(notes, mark, gain, expected, GAIN_MARK * expected)


def convolution_marks(
    module: nn.Module, setting: str, scheme: str, notes: Notebook
) -> dict[str, tuple[int, float, float, float | None]]:
    """phi / g^2 and varphi / g^4 of every kind of convolution, as circular ones of stride 1; see `isometry.Measured`.

    `scheme` chooses the closed forms; kinds with few Gaussian weights get no mark. The activations of the module's
    ConvBNAct units give g.
    """
    pooled: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    weights: dict[str, int] = {}
    for unit in (unit for unit in module.modules() if isinstance(unit, ConvBNAct)):
        (name, forms), g2 = _convolution_kind(unit.conv), GAINS[unit.act_name] ** 2
        firsts, seconds = circular_conv_moments(unit.conv)
        weights[name] = weights.get(name, 0) + unit.conv.weight.numel()
        closed = np.full(len(firsts), forms.get(scheme, math.nan))
        pooled.setdefault(name, []).append((firsts / g2, seconds / g2**2, closed))
    found = {}
    for name, parts in sorted(pooled.items()):
        # a depthwise convolution has moments for each of its filters, any other one for all of it
        firsts, seconds, closed = (np.concatenate(part) for part in zip(*parts, strict=True))
        phi = float(firsts.mean())
        varphi = float(seconds.mean() - phi**2)
        expected = None if np.isnan(closed).any() else float(closed.mean())
        found[name] = len(parts), phi, varphi, expected
        if scheme == "gaussian" and weights[name] < MIN_GAUSSIAN_WEIGHTS:
            continue
        _mark_near(notes, f"{setting}: {name}: phi / g^2", phi, 1.0, max(PHI_MARK, SIGMAS * _error(firsts)))
        if expected is not None:
            tolerance = max(VARPHI_MARK * (expected or 1), SIGMAS * _error(seconds - 2 * phi * firsts - closed))
            _mark_near(notes, f"{setting}: {name}: varphi / g^4", varphi, expected, tolerance)
    return found


@torch.no_grad()
def circular_conv_moments(conv: nn.Conv2d) -> tuple[np.ndarray, np.ndarray]:
    """Exact (1 / w_out) tr J J^T and (1 / w_out) tr (J J^T)^2 of a square convolution, as a circular one of stride 1.

    The Fourier transform makes J block diagonal, with one (out, in) matrix per group and frequency; for a depthwise
    filter this is a number. The map is of 2 k - 1 pixels, from which on the moments do not depend on its size.

    Returns:
        Two float64 arrays (groups,), the moments of each group.
    """
    weight, groups = conv.weight.double(), conv.groups
    size = 2 * weight.shape[-1] - 1
    spectrum = torch.fft.fft2(weight, s=(size, size)).permute(2, 3, 0, 1)
    blocks = spectrum.reshape(size * size, groups, weight.shape[0] // groups, weight.shape[1])
    gram = blocks @ blocks.mH if blocks.shape[2] <= blocks.shape[3] else blocks.mH @ blocks
    firsts = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).mean(0) / blocks.shape[2]
    seconds = gram.abs().square().sum((-2, -1)).mean(0) / blocks.shape[2]
    return firsts.cpu().numpy(), seconds.cpu().numpy()


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


def _mark_near(notes: Notebook, name: str, value: float, expected: float, tolerance: float) -> None:
    notes.mark(name, value, at_least=expected - tolerance, at_most=expected + tolerance)


def _error(values: np.ndarray) -> float:
    """Standard error of the mean; 0 of a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def select_branch(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The branch of a block, without skip connection or bypass, and what selects its part of the block's input."""
    if isinstance(block, (InvertedResidual, DenseInvertedResidual)) and block.has_residual:
        branch = copy.deepcopy(block)
        branch.has_residual = False
        return branch, lambda x: x
    if isinstance(block, ShuffleUnit):
        return block.main, (lambda x: x[:, 1::2].contiguous()) if block.projection is None else (lambda x: x)
    return block, lambda x: x
