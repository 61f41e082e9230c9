"""A chain by the names of its modules, and its modules in one model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.fusion.members import Conv, norm_problem, runs_conv, square_conv
from nasfast.fusion.replaced import hooks_of
from nasfast.ops.modules import running_of, settings_of
from nasfast.ops.reference import ConvBNParams, Stage

Path = tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """One chain of a module. It holds names, so it is also right for every copy of the module.

    Attributes:
        convs, norms: paths of its convolutions and BatchNorms below the module, one of each per stage.
        acts: activation of each stage.
        residual: whether the forward adds something to its result; the chain then makes the addition.
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
        # TorchDynamo does not trace dataclasses.replace
        convs, norms, watched = [tuple([path + p for p in paths]) for paths in (self.convs, self.norms, self.watched)]
        return Chain(convs, norms, self.acts, self.residual, watched)

    def hooked(self, module: nn.Module) -> list[str]:
        """Paths of the watched modules that have hooks now."""
        there = [(path, passed(module, path)) for path in self.watched]
        return [".".join(path) for path, found in there if len(found) > len(path) and any(hooks_of(found[-1]))]

    def members(self, module: nn.Module) -> Members | None:
        """The chain's modules below this one; None if they can no longer be a chain."""
        try:
            convs = [descendant(module, path) for path in self.convs]
            norms = [descendant(module, path) for path in self.norms]
        except KeyError:
            return None
        if not all(map(runs_conv, convs)) or any(not isinstance(bn, _BatchNorm) or norm_problem(bn) for bn in norms):
            return None
        return Members(tuple(convs), tuple(norms), self.acts, self.residual)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Members:
    """The modules of a chain: a convolution, a BatchNorm and the name of an activation for each stage."""

    convs: tuple[nn.Conv2d, ...]
    norms: tuple[nn.BatchNorm2d, ...]
    acts: tuple[str, ...]
    residual: bool

    def stages(self) -> list[Stage] | None:
        """The stages in the present modes, without counting a batch; None if a setting is one that no stage has."""
        stages = [_stage(conv, bn, act) for conv, bn, act in zip(self.convs, self.norms, self.acts, strict=True)]
        found = [stage for stage in stages if stage is not None]
        return found if len(found) == len(stages) else None

    def places(self) -> list[tuple[dict, str]]:
        """Where everything is on which `stages` depends, but for the value of a counter of batches; see `Watch`."""
        places: list[tuple[dict, str]] = []
        for conv, bn in zip(self.convs, self.norms, strict=True):
            places += [(vars(conv), name) for name in _CONV_SETTINGS]
            places += [(conv._parameters, "weight"), (conv._parameters, "bias")]
            places += [(vars(bn), name) for name in _NORM_SETTINGS]
            places += [(bn._parameters, "weight"), (bn._parameters, "bias")]
            places += [(bn._buffers, name) for name in ("running_mean", "running_var", "num_batches_tracked")]
        return places

    def count_batch(self) -> None:
        """Increase the numbers of batches as the forwards of the BatchNorms do."""
        counters = [bn.num_batches_tracked for bn in self.norms if bn.training and bn.track_running_stats]
        if counters := [counter for counter in counters if counter is not None]:
            torch._foreach_add_(counters, 1)


_CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode", "_parameters")
_NORM_SETTINGS = ("training", "momentum", "eps", "track_running_stats", "_parameters", "_buffers")


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


def passed(module: nn.Module, path: Path) -> list[nn.Module]:
    """The modules at this path and above it, as far as they exist."""
    found = [module]
    for name in path:
        child = found[-1]._modules.get(name)
        if child is None:
            break
        found.append(child)
    return found


def stage_of(
    conv: Conv,
    act: str,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Stage | None:
    """The stage of a convolution, an activation and a call of F.batch_norm with these arguments behind its input.

    None if BatchNorm has no affine parameters, as every stage has.
    """
    if weight is None or bias is None:
        return None
    params = ConvBNParams(conv.weight, weight, bias, running_mean, running_var, conv.bias)
    return Stage(params, conv.stride, conv.padding, conv.groups, act, training, momentum, eps)


def _stage(conv: nn.Conv2d, bn: nn.BatchNorm2d, act: str) -> Stage | None:
    # nn.Module finds parameters by their names ten times as slowly
    weight, affine, buffers = conv._parameters.get("weight"), bn._parameters, bn._buffers
    if weight is None or conv.padding_mode != "zeros":
        return None
    if "running_mean" not in buffers or "running_var" not in buffers or "bias" not in conv._parameters:
        return None
    square = square_conv(weight, conv._parameters["bias"], conv.stride, conv.padding, conv.dilation, conv.groups)
    if square is None:
        return None
    learned = {name: affine.get(name) for name in ("weight", "bias")}
    return stage_of(square, act, **running_of(bn), **learned, **settings_of(bn))
