"""Weight initialisation by role: orthogonal, delta-orthogonal and the Gaussian baselines (docs/method.md 1).

Scale rule: the mean squared row norm of the flattened (out x fan_in) weight is g^2, so that the per-channel variance of
white inputs is multiplied by g^2. Every tensor has its own seed, made from its qualified name, so results do not depend
on the order of modules, the device or which other candidates exist.

One call draws, orthogonalises and writes all weights that are orthogonal matrices times a number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import get_args

import torch
from torch import Tensor, nn

from nasfast.config import nearest
from nasfast.ops.modules import ACTIVATION_MODULES, ConvBNAct
from nasfast.ops.orthogonal import Target, draw_gaussians, fill_orthogonal
from nasfast.settings import DEEP_LAYERS, Init
from nasfast.supernet.aligned import align

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

# tanh is most linear at 0, so a shift makes its factor larger
_SHIFTED = {"relu", "relu6", "hswish", "silu"}

# standard deviation of the classifiers in the published BN-NAS and SPOS code
_SMALL_STD = 0.01


_OPTIONS = {
    "pointwise": ("haar", "gaussian", "kaiming_out"),
    "depthwise": ("per_filter", "unit_norm", "delta", "gaussian", "kaiming_out"),
    "dense": ("flatten_qr", "delta", "gaussian", "kaiming_out"),
    "linear": ("haar", "gaussian", "small"),
}


def _whole(weight: Shape) -> Shape:
    return weight


def _flat(weight: Shape) -> Shape:
    return weight[0], math.prod(weight[1:])


def _centre(weight: Shape) -> Shape:
    return weight[:2]


def _expansion_scale(rows: int, cols: int) -> float:
    """The factor of the scale rule for a semi-orthogonal matrix, whose rows are shorter than 1 if rows > columns."""
    return math.sqrt(max(1.0, rows / cols))


def _filter_scale(out: int, channels: int, height: int, width: int) -> float:
    # a k x k orthogonal matrix has Frobenius norm sqrt(k)
    return 1 / math.sqrt(channels * min(height, width))


# the kinds and options whose weights, or centre taps, are orthogonal: shape of the draw by that of the weight, and the
# factor of the orthogonalised draw by its shape
_ORTHOGONAL: dict[tuple[str, str], tuple[Callable[[Shape], Shape], Callable[..., float]]] = {
    ("pointwise", "haar"): (_flat, _expansion_scale),
    ("depthwise", "per_filter"): (_whole, _filter_scale),
    ("dense", "flatten_qr"): (_flat, _expansion_scale),
    ("dense", "delta"): (_centre, _expansion_scale),
    ("linear", "haar"): (_flat, _expansion_scale),
}
_WITHOUT_GAIN = ("kaiming_out", "small")


def _centre_tap(weight: Tensor) -> Tensor:
    return weight[..., weight.shape[2] // 2, weight.shape[3] // 2]


def _weight_from(z: Tensor, option: str, shape: Shape) -> Tensor:
    """The weight for g = 1 by one of the other options.

    Args:
        z: a Gaussian draw of the weight's shape, or of its centre taps for `delta`; it is written into.
        option, shape: how the weight is made, and its shape.
    """
    if option == "gaussian":
        return z.div_(math.sqrt(math.prod(shape[1:])))
    if option == "kaiming_out":
        return z.mul_(math.sqrt(2 / (shape[0] * shape[2] * shape[3])))
    if option == "small":
        return z.mul_(_SMALL_STD)
    if option == "unit_norm":
        return z.div_(z.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1))
    assert option == "delta"
    weight = z.new_zeros(shape)
    _centre_tap(weight).copy_(torch.where(z < 0, -1.0, 1.0))
    return weight


@dataclass(frozen=True)
class InitScheme:
    """How each kind of layer is initialised; weights are (out, in / groups, k, k), fan_in = in / groups * k^2.

    Attributes:
        pointwise: 1 x 1 convolutions. `haar`: semi-orthogonal matrix times sqrt(max(1, out / in)). Then J J^T has the
            eigenvalue g^2; for an expansion in = out / t it has the eigenvalues t g^2 and 0 (variance t - 1).
            `gaussian`: N(0, 1 / fan_in). `kaiming_out`: N(0, 2 / (k^2 out)) without gain, as in the published BN-NAS
            and SPOS code.
        depthwise: depthwise convolutions. `per_filter`: every k x k filter is orthogonal, divided by sqrt(k).
            `unit_norm`: Gaussian filters of Frobenius norm 1. `delta`: a centre tap of +-1, which is exactly isometric
            but the same function for every k, so that a search cannot rank kernel sizes. `gaussian`, `kaiming_out`: as
            for pointwise. With circular padding phi = g^2, and the variance of the eigenvalues over g^4 is
            (k^2 - 1) / (k (k + 2)) for `per_filter`, (k^2 - 1) / (k^2 + 2) for `unit_norm`, 0 for `delta` and
            1 + 1 / k^2 for `gaussian`.
        dense: other convolutions. `flatten_qr`: `haar` on the flattened out x fan_in matrix. `delta`: `haar` across
            channels in the centre tap. `gaussian`, `kaiming_out`: as for pointwise.
        linear: linear layers. `haar` and `gaussian`: as for pointwise. `small`: N(0, 0.01^2) without gain.
        alignment: share of the centre tap in a depthwise filter, from 0 to 1. The candidates of a layer then agree in
            their linear part (`nasfast.supernet.aligned`). It needs pointwise `haar` and depthwise `unit_norm`. None
            draws candidates independently.
        linear_share: share of that linear part in the last pointwise weight of a candidate, from 0 to 1; the rest reads
            what the activations add. Only an alignment uses it.
        shift: beta of the BatchNorms in front of activations that are linear far above 0, except the last of a path. A
            unit and the next BatchNorm multiply the squared norm of gradients by E s'(z + b)^2 / Var s(z + b) for
            normal z: for a ReLU 1.47 with b = 0, 1.25 with 0.5, 1.12 with 1 and 1.02 with 2.
        branch_scale: gamma of the last BatchNorm of blocks that add their input. Two candidates of such a layer, and
            its skip, then differ only in a part of their output.

    Raises:
        ValueError: the kind does not have the option, the alignment or its linear share is outside of [0, 1], or the
            alignment has other options than those it needs; shift or branch scale is negative or not finite.
    """

    pointwise: str = "haar"
    depthwise: str = "per_filter"
    dense: str = "flatten_qr"
    linear: str = "haar"
    alignment: float | None = None
    linear_share: float = 0.85
    shift: float = 0.0
    branch_scale: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            kind, option = field.name, getattr(self, field.name)
            if kind in _OPTIONS and option not in _OPTIONS[kind]:
                raise ValueError(f"init: unknown {kind}={option!r}; {nearest(str(option), _OPTIONS[kind])}")
        for name in ("shift", "branch_scale"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"init: {name} must be finite and not negative, got {value}")
        if self.alignment is None:
            return
        if not 0 <= self.alignment <= 1:
            raise ValueError(f"init: alignment must be from 0 to 1, got {self.alignment}")
        if not 0 <= self.linear_share <= 1:
            raise ValueError(f"init: linear_share must be from 0 to 1, got {self.linear_share}")
        if (self.pointwise, self.depthwise) != ("haar", "unit_norm"):
            raise ValueError(
                "init: alignment needs pointwise='haar' and depthwise='unit_norm', "
                f"got {self.pointwise!r} and {self.depthwise!r}"
            )


SCHEMES: dict[Init, InitScheme] = {
    "orthogonal": InitScheme(),
    "aligned": InitScheme(depthwise="unit_norm", alignment=0.7),
    "delta_orthogonal": InitScheme(depthwise="delta", dense="delta"),
    "gaussian": InitScheme("gaussian", "gaussian", "gaussian", "gaussian"),
    "he": InitScheme("kaiming_out", "kaiming_out", "kaiming_out", "small"),
}

ALIGNED_DEEP = InitScheme(depthwise="unit_norm", alignment=0.9, linear_share=0.95, shift=1.0, branch_scale=0.3)
"""`aligned` for many layers: two paths of mobilenet_v2 then have features in common (docs/ranking.md 1)."""


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

    Gammas become 1 and betas 0, except where the scheme has a shift or a branch scale.
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
    targets: list[Target] = []
    options: dict[str, str] = {}
    for name, layer in layers.items():
        kind, weight = _kind(layer), layer.weight
        option = getattr(scheme, kind)
        if (kind, option) in _ORTHOGONAL:
            shape_of, scale = _ORTHOGONAL[kind, option]
            shape = shape_of(tuple(weight.shape))
            taps = _centre_tap(weight.zero_()) if shape_of is _centre else weight
            targets.append(Target(f"{name}.weight", taps, shape, scale(*shape) * _gain(modules, name)))
        else:
            options[name] = option
        if layer.bias is not None:
            layer.bias.zero_()
    fill_orthogonal(targets, seed)
    shapes = {name: tuple(layers[name].weight.shape) for name in options}
    draw_shapes = {name: shapes[name][:2] if option == "delta" else shapes[name] for name, option in options.items()}
    draws = draw_gaussians([(f"{name}.weight", shape) for name, shape in draw_shapes.items()], seed)
    for (name, option), z in zip(options.items(), draws, strict=True):
        weight = _weight_from(z, option, shapes[name])
        layers[name].weight.copy_(weight if option in _WITHOUT_GAIN else weight.mul_(_gain(modules, name)))
    _begin_norms(module, scheme.shift, scheme.branch_scale)
    if scheme.alignment is not None:
        align(module, scheme.alignment, scheme.linear_share, GAINS, seed=seed)
    if scheme.depthwise == "delta":
        _warn_if_kernels_coincide(modules)


def _gain(modules: dict[str, nn.Module], name: str) -> float:
    """The gain of the convolution of this name, by the activation of its unit."""
    unit = modules.get(name.rpartition(".")[0])
    act = getattr(unit, "act", None) if getattr(unit, "conv", None) is modules[name] else None
    return GAINS.get(_ACTIVATION_NAMES.get(type(act), "identity"), 1.0)


def _begin_norms(module: nn.Module, shift: float, branch_scale: float) -> None:
    """Set betas and gammas as `InitScheme` says."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_parameters()
    for block in module.modules():
        if getattr(block, "has_residual", False):
            nn.init.constant_(block.block_indicator.weight, branch_scale)  # type: ignore[union-attr,arg-type]
    # behind the last unit no BatchNorm removes the mean of its channels, which grows with the shift
    for unit in set(_units(module)).difference(_last_units(module)):
        if unit.act_name in _SHIFTED:
            nn.init.constant_(unit.bn.bias, shift)


def _units(module: nn.Module) -> list[ConvBNAct]:
    return [unit for unit in module.modules() if isinstance(unit, ConvBNAct)]


def _last_units(module: nn.Module) -> list[ConvBNAct]:
    """The last unit of a network; in a supernet without a head, the last one of each candidate of its last layer."""
    last = _units(module)[-1:]
    for layer in module.modules():
        candidates = getattr(layer, "candidates", None)
        if isinstance(candidates, nn.ModuleList) and not set(last).isdisjoint(_units(candidates)):
            return [unit for candidate in candidates for unit in _units(candidate)[-1:]]
    return last


def _warn_if_kernels_coincide(modules: dict[str, nn.Module]) -> None:
    sizes = {m.kernel_size[0] for m in modules.values() if isinstance(m, nn.Conv2d) and _kind(m) == "depthwise"}
    if len(sizes) > 1:
        _LOG.warning(
            "init: with delta filters, depthwise kernels of sizes %s are all one signed tap and so the same function; "
            "a search cannot rank these kernel sizes. Use init='orthogonal'.",
            ", ".join(map(str, sorted(sizes))),
        )
