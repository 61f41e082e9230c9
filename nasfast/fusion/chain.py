"""A chain by the names of its modules, and its modules in one model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from nasfast.fusion.calls import square_conv
from nasfast.ops.modules import count_batch, running_of, settings_of
from nasfast.ops.reference import ConvBNParams, Stage

Path = tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """One chain of a module. It holds names, so it is also right for every copy of the module.

    Attributes:
        convs, norms: paths of its convolutions and BatchNorms below the module, one of each per stage.
        acts: activation of each stage.
        residual: whether the forward adds something to its result; the operator then makes the addition.
        watched: paths of the modules whose hooks would get a placeholder.
    """

    convs: tuple[Path, ...]
    norms: tuple[Path, ...]
    acts: tuple[str, ...]
    residual: bool
    watched: tuple[Path, ...]

    @property
    def start(self) -> str:
        """Path of the first convolution, as in messages."""
        return ".".join(self.convs[0])

    def below(self, path: Path) -> Chain:
        """The chain as one of the module that has its module at this path."""
        convs, norms, watched = (tuple(path + p for p in paths) for paths in (self.convs, self.norms, self.watched))
        return replace(self, convs=convs, norms=norms, watched=watched)

    def start_weight(self, module: nn.Module) -> Tensor | None:
        """Weight of the first convolution; None if a watched module has a hook or no longer exists."""
        try:
            if self.hooked(module):
                return None
            return descendant(module, self.convs[0])._parameters["weight"]
        except KeyError:
            return None

    def hooked(self, module: nn.Module) -> list[str]:
        """Paths of the watched modules that have hooks now."""
        return [".".join(path) for path in self.watched if any(hooks_of(descendant(module, path)))]

    def members(self, module: nn.Module) -> Members | None:
        """The chain's modules below this one; None if they can no longer be a chain."""
        try:
            convs = [descendant(module, path) for path in self.convs]
            norms = [descendant(module, path) for path in self.norms]
        except KeyError:
            return None
        if not all(map(_is_conv, convs)) or not all(map(_is_norm, norms)):
            return None
        return Members(tuple(convs), tuple(norms), self.acts, self.residual)  # type: ignore[arg-type]


class FusedForward:
    """Base of the forward that `fuse` gives to a module."""


@dataclass(frozen=True)
class Members:
    """The modules of a chain: a convolution, a BatchNorm and the name of an activation for each stage."""

    convs: tuple[nn.Conv2d, ...]
    norms: tuple[nn.BatchNorm2d, ...]
    acts: tuple[str, ...]
    residual: bool

    def stages(self) -> list[Stage]:
        """The stages in the present modes; their BatchNorms do not count a batch."""
        return [_stage(conv, bn, act) for conv, bn, act in zip(self.convs, self.norms, self.acts, strict=True)]

    def begin(self) -> list[Stage]:
        """The stages of one forward; their BatchNorms count its batch."""
        for bn in self.norms:
            count_batch(bn)
        return self.stages()

    def settings(self) -> list[tuple]:
        """What `fold.settings_of` says of the stages."""
        return [
            (conv.stride[0], conv.padding[0], conv.groups, act, bn.eps)
            for conv, bn, act in zip(self.convs, self.norms, self.acts, strict=True)
        ]

    def tensors(self) -> list[Tensor | None]:
        """Weights and statistics of each stage in the order of `ConvBNParams`, without biases that are None."""
        found: list[Tensor | None] = []
        for conv, bn in zip(self.convs, self.norms, strict=True):
            affine, buffers = bn._parameters, bn._buffers
            found += (conv._parameters["weight"], affine["weight"], affine["bias"])
            found += (buffers["running_mean"], buffers["running_var"])
            bias = conv._parameters["bias"]
            found += () if bias is None else (bias,)
        return found


def descendant(module: nn.Module, path: Path) -> nn.Module:
    """The module at this path below a module.

    Raises:
        KeyError: there is none.
    """
    for name in path:
        child = module._modules[name]
        if child is None:
            raise KeyError(name)
        module = child
    return module


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    """The dictionaries of the hooks that a call of the module runs."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _stage(conv: nn.Conv2d, bn: nn.BatchNorm2d, act: str) -> Stage:
    # nn.Module finds parameters by their names ten times as slowly
    affine: dict[str, Any] = bn._parameters
    weight: Any = conv._parameters["weight"]
    bias = conv._parameters["bias"]
    params = ConvBNParams(weight, affine["weight"], affine["bias"], **running_of(bn), conv_bias=bias)
    return Stage(params, conv.stride[0], int(conv.padding[0]), conv.groups, act, **settings_of(bn))


def _is_conv(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Conv2d) or weight is None or "bias" not in module._parameters:
        return False
    return square_conv(weight, None, module.stride, module.padding, module.dilation, module.groups) is not None


def _is_norm(module: nn.Module) -> bool:
    there = isinstance(module, nn.BatchNorm2d) and {"running_mean", "running_var"} <= module._buffers.keys()
    return there and module._parameters.get("weight") is not None and module._parameters.get("bias") is not None
