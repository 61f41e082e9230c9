"""Weight initialisation by role: orthogonal, delta-orthogonal and the Gaussian baselines (docs/method.md 1).

Scale rule: the mean squared row norm of the flattened (out x fan_in) weight is g^2, so that the per-channel variance of
white inputs is multiplied by g^2. Every tensor has its own seed, made from its qualified name, so results do not depend
on the order of modules, the device or which other candidates exist.

One call draws, orthogonalises and writes all weights that are orthogonal matrices times a number. Other weights are
made in two steps, drawing and building, so that one call orthogonalises all their matrices.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor, nn

from nasfast.config import nearest
from nasfast.ops.modules import ACTIVATION_MODULES, InvertedResidual
from nasfast.ops.orthogonal import Target, draw_gaussians, fill_orthogonal, orthogonalize_draws
from nasfast.settings import DEEP_LAYERS, Init
from nasfast.supernet.aligned import align
from nasfast.supernet.norms import begin_norms

Shape = tuple[int, ...]

_LOG = logging.getLogger(__name__)

GAINS = {
    "identity": 1.0,
    "relu": math.sqrt(2),
    "relu6": math.sqrt(2),
    "tanh": 1.0,
    "hswish": 2.0,
    "silu": 2.0,
}
"""The gain g of a convolution by the activation behind it; tanh, h-swish and SiLU have that of their critical point, 1
over their slope at 0 (docs/method.md 1)."""

_ACTIVATION_NAMES = {module: name for name, module in ACTIVATION_MODULES.items()}

# standard deviation of the classifiers in the published BN-NAS and SPOS code
_SMALL_STD = 0.01

# "layers.3.candidates.2.expand.conv.weight" has the role "layers.3.expand.conv.weight" in its layer
_CANDIDATE = re.compile(r"\bcandidates\.\d+\.")


@dataclass(frozen=True)
class _Recipe:
    """How weights of one kind are made.

    Attributes:
        draws: layer of this kind -> shapes of the Gaussian tensors to draw for its weight, in order.
        build: (shape of the weight, the draws) -> weight for g = 1; it may write into the draws. None if the weight is
            `scale` times its one draw, orthogonalised.
        orthogonal: whether the draws are matrices (or batches of them) that are orthogonalised before `build`.
        gain: whether the weight is then multiplied by g.
        scale: shape of the draw -> factor; only without `build`.
    """

    draws: Callable[[Any], list[Shape]]
    build: Callable[[Shape, list[Tensor]], Tensor] | None = None
    orthogonal: bool = False
    gain: bool = True
    scale: Callable[..., float] | None = None


def _whole(layer: nn.Conv2d | nn.Linear) -> list[Shape]:
    return [tuple(layer.weight.shape)]


def _flat(layer: nn.Conv2d | nn.Linear) -> list[Shape]:
    return [(layer.weight.shape[0], math.prod(layer.weight.shape[1:]))]


def _across(layer: nn.Conv2d | nn.Linear) -> list[Shape]:
    return [tuple(layer.weight.shape[:2])]


def _expansion_scale(rows: int, cols: int) -> float:
    """The factor of the scale rule for a semi-orthogonal matrix, whose rows are shorter than 1 if rows > columns."""
    return math.sqrt(max(1.0, rows / cols))


def _signs(z: Tensor) -> Tensor:
    """1 x 1 matrices, orthogonalised."""
    return torch.where(z < 0, -1.0, 1.0).to(z.dtype)


def _filter_scale(out: int, channels: int, height: int, width: int) -> float:
    # a k x k orthogonal matrix has Frobenius norm sqrt(k), and a row of the weight has `channels` of them
    return 1 / math.sqrt(channels * min(height, width))


def _literal_pointwise(shape: Shape, draws: list[Tensor]) -> Tensor:
    # the paper's wording is QR of every 1 x 1 slice: entries +-1, here scaled by the rule; the result is not orthogonal
    return _signs(draws[0]).div_(math.sqrt(shape[1]))


def _unit_norm(shape: Shape, draws: list[Tensor]) -> Tensor:
    (z,) = draws
    return z.div_(z.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1))


def _centre(shape: Shape, taps: Tensor) -> Tensor:
    weight = taps.new_zeros(shape)
    weight[..., shape[2] // 2, shape[3] // 2] = taps
    return weight


def _delta(shape: Shape, draws: list[Tensor]) -> Tensor:
    return _centre(shape, draws[0].mul_(_expansion_scale(*shape[:2])))


def _sign_tap(shape: Shape, draws: list[Tensor]) -> Tensor:
    return _centre(shape, _signs(draws[0]))


def _block_draws(layer: nn.Conv2d) -> list[Shape]:
    out, in_channels, height, width = layer.weight.shape
    if in_channels > out or height != width or layer.groups > 1:
        raise ValueError(
            f"init: dense='block_orth' needs square kernels, one group and no more inputs than outputs, got {layer}: "
            f"choose 'flatten_qr' or 'delta'"
        )
    return [(out, in_channels), *[(out, out // 2)] * (2 * (height - 1))]


def _block_orth(shape: Shape, draws: list[Tensor]) -> Tensor:
    """Xiao et al. 2018, algorithm 1: taps of full support whose circular convolution of stride 1 is an isometry.

    A 1 x 1 orthogonal kernel is convolved as blocks with [P; 1 - P] down and [Q, 1 - Q] across, k - 1 times each. P and
    Q are projectors of rank out // 2, and J^T J of each step is the identity because P (1 - P) = 0.
    """
    first, *bases = draws
    out = shape[0]
    # (row, column, out, in): taps are multiplied as matrices
    taps = first.mul_(_expansion_scale(*first.shape))[None, None]
    for i_step, basis in enumerate(bases):
        p = basis @ basis.mT
        axis = i_step % 2
        here, there = p @ taps, (torch.eye(out, dtype=p.dtype) - p) @ taps
        grown = [*taps.shape]
        grown[axis] += 1
        taps = taps.new_zeros(grown)
        taps.narrow(axis, 0, grown[axis] - 1).add_(here)
        taps.narrow(axis, 1, grown[axis] - 1).add_(there)
    return taps.permute(2, 3, 0, 1)


def _fan_in(shape: Shape, draws: list[Tensor]) -> Tensor:
    return draws[0].div_(math.sqrt(math.prod(shape[1:])))


def _fan_out(shape: Shape, draws: list[Tensor]) -> Tensor:
    return draws[0].mul_(math.sqrt(2 / (shape[0] * shape[2] * shape[3])))


def _small(shape: Shape, draws: list[Tensor]) -> Tensor:
    return draws[0].mul_(_SMALL_STD)


_HAAR = _Recipe(_flat, scale=_expansion_scale)
_PER_FILTER = _Recipe(_whole, scale=_filter_scale)
_GAUSSIAN = _Recipe(_whole, _fan_in)
_KAIMING_OUT = _Recipe(_whole, _fan_out, gain=False)

_RECIPES: dict[str, dict[str, _Recipe]] = {
    "pointwise": {
        "haar": _HAAR,
        "paper_literal": _Recipe(_whole, _literal_pointwise),
        "gaussian": _GAUSSIAN,
        "kaiming_out": _KAIMING_OUT,
    },
    "depthwise": {
        "per_filter": _PER_FILTER,
        "unit_norm": _Recipe(_whole, _unit_norm),
        "delta": _Recipe(_across, _sign_tap),
        "gaussian": _GAUSSIAN,
        "kaiming_out": _KAIMING_OUT,
    },
    "dense": {
        "flatten_qr": _HAAR,
        "delta": _Recipe(_across, _delta, orthogonal=True),
        "per_filter": _PER_FILTER,
        "block_orth": _Recipe(_block_draws, _block_orth, orthogonal=True),
        "gaussian": _GAUSSIAN,
        "kaiming_out": _KAIMING_OUT,
    },
    "linear": {
        "haar": _HAAR,
        "gaussian": _GAUSSIAN,
        "small": _Recipe(_whole, _small, gain=False),
    },
}


@dataclass(frozen=True)
class InitScheme:
    """How each kind of layer is initialised; weights are (out, in / groups, k, k), fan_in = in / groups * k^2.

    Attributes:
        pointwise: 1 x 1 convolutions. `haar`: semi-orthogonal matrix times sqrt(max(1, out / in)). Then J J^T has the
            eigenvalue g^2; for an expansion in = out / t it has the eigenvalues t g^2 and 0 (variance t - 1).
            `paper_literal`: +-1 / sqrt(in), as the paper's wording says; not orthogonal, and for ablation only.
            `gaussian`: N(0, 1 / fan_in). `kaiming_out`: N(0, 2 / (k^2 out)) without gain, as in the published BN-NAS
            and SPOS code.
        depthwise: depthwise convolutions. `per_filter`: every k x k filter is orthogonal, divided by sqrt(k).
            `unit_norm`: Gaussian filters of Frobenius norm 1. `delta`: a centre tap of +-1, which is exactly isometric
            but the same function for every k, so that a search cannot rank kernel sizes. `gaussian`, `kaiming_out`: as
            for pointwise. With circular padding phi = g^2, and the variance of the eigenvalues over g^4 is
            (k^2 - 1) / (k (k + 2)) for `per_filter`, (k^2 - 1) / (k^2 + 2) for `unit_norm`, 0 for `delta` and
            1 + 1 / k^2 for `gaussian`.
        dense: other convolutions. `flatten_qr`: `haar` on the flattened out x fan_in matrix. `delta`: `haar` across
            channels in the centre tap. `per_filter`: every k x k slice is orthogonal, divided by sqrt(k in).
            `block_orth`: exact isometry with all k x k taps, for out >= in. `gaussian`, `kaiming_out`: as for
            pointwise.
        linear: linear layers. `haar` and `gaussian`: as for pointwise. `small`: N(0, 0.01^2) without gain.
        tied_projection: whether the projection of an inverted residual with equal input and output width is
            expansion^T / t of the weights for g = 1, so that the linear pair of pointwise convolutions is the identity;
            it needs `haar`.
        shared_streams: whether the seed of a weight comes from its layer, role and shape instead of its name.
            Candidates of a layer then share the draws of equal shapes, so that comparisons have less noise of seeds.
        alignment: share of the centre tap in a depthwise filter, from 0 to 1. The candidates of a layer then agree in
            their linear part (`nasfast.supernet.aligned`). It needs pointwise `haar` and depthwise `unit_norm`. None
            draws candidates independently.
        linear_share: share of that linear part in the last pointwise weight of a candidate, from 0 to 1; the rest reads
            what the activations add. Only an alignment uses it.
        shift: beta of the BatchNorms in front of activations, except the last (`nasfast.supernet.norms`).
        branch_scale: gamma of the last BatchNorm of blocks that add their input.

    Raises:
        ValueError: the kind does not have the option, tied projections are not `haar`, the alignment or its linear
            share is outside of [0, 1], or the alignment has other options than those it needs; shift or branch scale
            is negative or not finite.
    """

    pointwise: str = "haar"
    depthwise: str = "per_filter"
    dense: str = "flatten_qr"
    linear: str = "haar"
    tied_projection: bool = False
    shared_streams: bool = False
    alignment: float | None = None
    linear_share: float = 0.85
    shift: float = 0.0
    branch_scale: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            kind, option = field.name, getattr(self, field.name)
            if kind in _RECIPES and option not in _RECIPES[kind]:
                raise ValueError(f"init: unknown {kind}={option!r}; {nearest(str(option), _RECIPES[kind])}")
        if self.tied_projection and self.pointwise != "haar":
            raise ValueError(f"init: tied_projection needs pointwise='haar', got {self.pointwise!r}")
        for name in ("shift", "branch_scale"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"init: {name} must be finite and not negative, got {value}")
        if self.alignment is None:
            return
        if not 0 <= self.alignment <= 1:
            raise ValueError(f"init: alignment must be from 0 to 1, got {self.alignment}")
        if not 0 <= self.linear_share <= 1:
            raise ValueError(f"init: linear_share must be from 0 to 1, got {self.linear_share}")
        if (self.pointwise, self.depthwise, self.tied_projection) != ("haar", "unit_norm", False):
            raise ValueError(
                f"init: alignment needs pointwise='haar', depthwise='unit_norm' and tied_projection=False, "
                f"got {self.pointwise!r}, {self.depthwise!r} and {self.tied_projection}"
            )


SCHEMES: dict[Init, InitScheme] = {
    "orthogonal": InitScheme(),
    "aligned": InitScheme(depthwise="unit_norm", alignment=0.7),
    "delta_orthogonal": InitScheme(depthwise="delta", dense="delta"),
    "gaussian": InitScheme("gaussian", "gaussian", "gaussian", "gaussian"),
    "he": InitScheme("kaiming_out", "kaiming_out", "kaiming_out", "small"),
}

ALIGNED_DEEP = InitScheme(depthwise="unit_norm", alignment=0.9, linear_share=0.95, shift=1.0, branch_scale=0.3)
"""`aligned` for many layers: two paths of mobilenet_v2 then have features in common (docs/ranking.md 3)."""


def aligned_scheme(layers: int) -> InitScheme:
    """What `init: aligned` means in a supernet of so many searched layers, unless settings say otherwise."""
    return ALIGNED_DEEP if layers > DEEP_LAYERS else SCHEMES["aligned"]


def _kind(layer: nn.Conv2d | nn.Linear) -> str:
    """The field of `InitScheme` that decides about a layer."""
    if isinstance(layer, nn.Linear):
        return "linear"
    # the stem of a grey-scale network also has in / groups == 1, but is not depthwise
    if layer.groups == layer.in_channels > 1:
        return "depthwise"
    return "pointwise" if max(layer.kernel_size) == 1 else "dense"


@torch.no_grad()
def initialize(module: nn.Module, scheme: Init | InitScheme, *, seed: int = 0) -> None:
    """Fill the weights of all convolutions and linear layers by a scheme, and set where the BatchNorms begin.

    Gammas become 1 and betas 0, except where the scheme has a shift or a branch scale (`nasfast.supernet.norms`).
    Draws are float64 on the CPU, wherever the module is; weights are cast once at the end.

    Args:
        module: any module. A convolution's gain comes from the activation of the unit that has it (attributes `conv`
            and `act`, as in ConvBNAct); without such a unit it is 1.
        scheme: one of `orthogonal`, `aligned`, `delta_orthogonal`, `gaussian`, `he`, or an InitScheme. Here `aligned`
            is that of small spaces; `aligned_scheme` chooses by the number of layers.
        seed: global seed; the seed of each tensor derives from it and the tensor's name.

    Raises:
        ValueError: the scheme is unknown, or has no construction for a convolution.
    """
    if not isinstance(scheme, InitScheme):
        if scheme not in get_args(Init):
            raise ValueError(f"init: unknown scheme {scheme!r}; {nearest(scheme, get_args(Init))}")
        scheme = SCHEMES[scheme]
    modules = dict(module.named_modules())
    layers = {name: layer for name, layer in modules.items() if isinstance(layer, (nn.Conv2d, nn.Linear))}
    recipes = {name: _RECIPES[_kind(layer)][getattr(scheme, _kind(layer))] for name, layer in layers.items()}

    def stream(name: str) -> str:
        if not scheme.shared_streams:
            return f"{name}.weight"
        return f"{_CANDIDATE.sub('', f'{name}.weight')}|{tuple(layers[name].weight.shape)}"

    targets = []
    for name, layer in layers.items():
        if (scale := recipes[name].scale) is not None:
            (shape,) = recipes[name].draws(layer)
            targets.append(Target(stream(name), layer.weight, shape, scale(*shape) * _gain_of(modules, name)))
    fill_orthogonal(targets, seed)
    built = [name for name in layers if recipes[name].build is not None]
    draws = dict(
        zip(built, draw_gaussians([(stream(n), recipes[n].draws(layers[n])) for n in built], seed), strict=True)
    )
    orthogonal = iter(orthogonalize_draws([z for name in built if recipes[name].orthogonal for z in draws[name]]))
    for name, layer in layers.items():
        recipe = recipes[name]
        if recipe.build is not None:
            parts = draws.pop(name)
            if recipe.orthogonal:
                parts = [next(orthogonal) for _ in parts]
            weight = recipe.build(tuple(layer.weight.shape), parts)
            layer.weight.copy_(weight.mul_(_gain_of(modules, name)) if recipe.gain else weight)
        if layer.bias is not None:
            layer.bias.zero_()
    begin_norms(module, scheme.shift, scheme.branch_scale)
    if scheme.alignment is not None:
        align(module, scheme.alignment, scheme.linear_share, GAINS, seed=seed)
    if scheme.tied_projection:
        _tie_projections(modules)
    if scheme.depthwise == "delta":
        _warn_if_kernels_coincide(modules)


def _gain_of(modules: dict[str, nn.Module], name: str) -> float:
    """The gain of the convolution of this name, by the activation of its unit."""
    unit = modules.get(name.rpartition(".")[0])
    act = getattr(unit, "act", None) if getattr(unit, "conv", None) is modules[name] else None
    return GAINS.get(_ACTIVATION_NAMES.get(type(act), "identity"), 1.0)


def _tie_projections(modules: dict[str, nn.Module]) -> None:
    """See `InitScheme.tied_projection`."""
    for name, block in modules.items():
        if not isinstance(block, InvertedResidual) or block.expand is None:
            continue
        expand, project = block.expand.conv.weight, block.project.conv.weight
        if expand.shape[:2] == project.shape[1::-1]:
            t = expand.shape[0] / expand.shape[1]
            gains = [_gain_of(modules, f"{name}.{unit}.conv".lstrip(".")) for unit in ("expand", "project")]
            project.copy_(expand.transpose(0, 1) * (gains[1] / (gains[0] * t)))


def _warn_if_kernels_coincide(modules: dict[str, nn.Module]) -> None:
    sizes = {m.kernel_size[0] for m in modules.values() if isinstance(m, nn.Conv2d) and _kind(m) == "depthwise"}
    if len(sizes) > 1:
        _LOG.warning(
            "init: with delta filters, depthwise kernels of sizes %s are all one signed tap and so the same function; "
            "a search cannot rank these kernel sizes. Use init='orthogonal'.",
            ", ".join(map(str, sorted(sizes))),
        )
