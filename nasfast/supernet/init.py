"""Weight initialisation by role: orthogonal, delta-orthogonal and the Gaussian baselines (docs/method.md 1).

Scale rule: the mean squared row norm of the flattened (out x fan_in) weight is g^2, so that white inputs keep their
per-channel variance times g^2. Every tensor has its own seed made from its qualified name, so results do not depend on
module order, device or on which other candidates exist.

The paper's literal reading, QR of every k x k slice of every convolution, turns a 1x1 convolution into +-1 entries,
which is not orthogonal; pointwise convolutions are orthogonalised as matrices instead. A 3x3 or larger depthwise filter
with one live tap (`delta_orthogonal`) is exactly isometric but makes all kernel sizes the same function.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from nasfast.config import nearest
from nasfast.ops import reference

Init = Literal["orthogonal", "delta_orthogonal", "gaussian", "he"]

_LOG = logging.getLogger(__name__)

GAINS = {"identity": 1.0, "relu": math.sqrt(2), "relu6": math.sqrt(2), "tanh": 1.0}
"""g of a convolution by the activation behind it; tanh at its critical point (docs/method.md 1)."""

_ACTIVATION_NAMES = {nn.Identity: "identity", nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Tanh: "tanh"}


def tensor_generator(name: str, seed: int) -> torch.Generator:
    """CPU generator of one tensor: the first 8 bytes of SHA-256("di-init|seed|name")."""
    digest = hashlib.sha256(f"di-init|{seed}|{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def _gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _haar(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Haar (semi-)orthogonal matrix under the scale rule with g = 1."""
    (q,) = reference.orthogonalize([_gaussian((rows, cols), generator)])
    return q * math.sqrt(max(1.0, rows / cols))


def _is_depthwise(layer: nn.Module) -> bool:
    # in / groups == 1 alone would also catch the stem of a grey-scale network
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1


def _orthogonal(layer: nn.Conv2d | nn.Linear, generator: torch.Generator) -> Tensor:
    """Pointwise and dense: Haar on the flattened matrix. Depthwise: every k x k filter orthogonal over sqrt(k)."""
    shape = layer.weight.shape
    if _is_depthwise(layer):
        (q,) = reference.orthogonalize([_gaussian((shape[0], shape[2], shape[3]), generator)])
        return q.reshape(shape) / math.sqrt(shape[3])
    return _haar(shape[0], math.prod(shape[1:]), generator).reshape(shape)


def _delta_orthogonal(layer: nn.Conv2d | nn.Linear, generator: torch.Generator) -> Tensor:
    """Only the centre tap lives: Haar across channels (Xiao et al. 2018), a random sign for depthwise filters."""
    shape = layer.weight.shape
    if len(shape) == 2 or shape[2] * shape[3] == 1:
        return _orthogonal(layer, generator)
    weight = torch.zeros(shape, dtype=torch.float64)
    centre = (..., shape[2] // 2, shape[3] // 2)
    if _is_depthwise(layer):
        weight[centre] = torch.where(_gaussian((shape[0], 1), generator) < 0, -1.0, 1.0)
    else:
        weight[centre] = _haar(shape[0], shape[1], generator)
    return weight


def _gaussian_fan_in(layer: nn.Conv2d | nn.Linear, generator: torch.Generator) -> Tensor:
    """N(0, 1 / fan_in), scaled by the gain like the orthogonal schemes."""
    return _gaussian(layer.weight.shape, generator) / math.sqrt(layer.weight[0].numel())


def _he(layer: nn.Conv2d | nn.Linear, generator: torch.Generator) -> Tensor:
    """N(0, 2 / (k^2 out)), as the published BN-NAS and SPOS code; classifier N(0, 0.01^2). The gain is not applied."""
    shape = layer.weight.shape
    std = 0.01 if len(shape) == 2 else math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
    return _gaussian(shape, generator) * std


_SCHEMES: dict[str, tuple[Callable[[nn.Conv2d | nn.Linear, torch.Generator], Tensor], bool]] = {
    "orthogonal": (_orthogonal, True),
    "delta_orthogonal": (_delta_orthogonal, True),
    "gaussian": (_gaussian_fan_in, True),
    "he": (_he, False),
}


@torch.no_grad()
def initialize(module: nn.Module, scheme: Init, *, seed: int = 0) -> None:
    """Fill the weights of every convolution and linear layer; BN gamma = 1, beta = 0, biases 0.

    Args:
        module: any module; a convolution's gain comes from the activation of the ConvBNAct-like unit that holds it
            (attributes `conv` and `act`), 1 where there is none.
        scheme: one of `orthogonal`, `delta_orthogonal`, `gaussian`, `he`.
        seed: global seed; each tensor derives its own from it and its name.

    Raises:
        ValueError: unknown scheme.
    """
    if scheme not in get_args(Init):
        raise ValueError(f"init: unknown scheme {scheme!r}; {nearest(scheme, get_args(Init))}")
    fill, apply_gain = _SCHEMES[scheme]
    modules = dict(module.named_modules())
    for name, layer in modules.items():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
        if not isinstance(layer, (nn.Conv2d, nn.Linear)):
            continue
        gain = _gain_of(modules.get(name.rpartition(".")[0]), layer) if apply_gain else 1.0
        weight = fill(layer, tensor_generator(f"{name}.weight", seed)) * gain
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.zero_()
    if scheme == "delta_orthogonal":
        _warn_if_kernels_coincide(modules)


def _gain_of(parent: nn.Module | None, layer: nn.Module) -> float:
    act = getattr(parent, "act", None) if getattr(parent, "conv", None) is layer else None
    return GAINS.get(_ACTIVATION_NAMES.get(type(act), "identity"), 1.0)


def _warn_if_kernels_coincide(modules: dict[str, nn.Module]) -> None:
    sizes = {m.kernel_size[0] for m in modules.values() if _is_depthwise(m)}
    if len(sizes) > 1:
        _LOG.warning(
            "init='delta_orthogonal': depthwise kernels of sizes %s all become one signed tap, the same function; "
            "a search over them cannot rank kernel sizes. Use init='orthogonal'.",
            ", ".join(map(str, sorted(sizes))),
        )
