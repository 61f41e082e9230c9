"""Convolution-BatchNorm-activation units and MobileNetV2 blocks.

With `fused` their forward calls the operators of `nasfast.ops`; otherwise it runs only PyTorch's operators, and is what
is exported. Submodules and state_dict are the same.
"""

import functools
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.ops.bn import bn_act
from nasfast.ops.chain.call import conv_bn_act_chain, cuda_plan
from nasfast.ops.reference import ConvBNParams, Stage
from nasfast.ops.squeeze import is_faster, squeeze_excite

ACTIVATION_MODULES = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "tanh": nn.Tanh,
    "hswish": nn.Hardswish,
    "silu": nn.SiLU,
}


class HardSigmoid(nn.Module):
    """nn.Hardsigmoid, min(max(z + 3, 0), 6) / 6, with second derivatives, which PyTorch's has not; NASI needs them."""

    def forward(self, z: Tensor) -> Tensor:
        return F.relu6(z + 3) / 6


_GATE_MODULES = {"hsigmoid": HardSigmoid, "sigmoid": nn.Sigmoid}


class ConvBNAct(nn.Module):
    """A bias-free convolution (padding k // 2), BatchNorm and an activation: (N, Cin, H, W) -> (N, Cout, Ho, Wo).

    Args:
        in_channels, out_channels, kernel_size, stride, groups: arguments of the convolution.
        act: identity, relu, relu6, tanh, hswish or silu.
        eps, momentum, track_running_stats: arguments of the BatchNorm. Without tracking it always uses batch
            statistics and has no buffers.
        fused: run as one call of `nasfast.ops.conv_bn_act_chain`, or as a stage of a longer chain.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        groups: int = 1,
        act: str = "relu6",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, kernel_size // 2, groups=groups, bias=False
        )
        self.bn = nn.BatchNorm2d(out_channels, eps, momentum, track_running_stats=track_running_stats)
        self.act = activation_module(act)
        self.act_name = act
        self.fused = fused

    @property
    def block_indicator(self) -> nn.BatchNorm2d:
        """The BatchNorm that writes the unit's output."""
        return self.bn

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.fused:
            return conv_bn_act_chain(x, begin_stages([self]), residual=residual)
        y = self.act(self.bn(self.conv(x)))
        return y if residual is None else y + residual

    def stage(self) -> Stage:
        """This unit as a stage of a chain, in its present mode."""
        params = ConvBNParams(self.conv.weight, self.bn.weight, self.bn.bias, **running_statistics(self.bn))
        conv = self.conv
        return Stage(params, conv.stride[0], int(conv.padding[0]), conv.groups, self.act_name, **norm_settings(self.bn))


class ConvBNActSequential(nn.Sequential):
    """ConvBNAct units one after another; a residual is added to the result of the last.

    With shuffle, as in ShuffleNetV2's unit of stride 1, they run on the odd channels of (N, C, H, W), and their result
    follows the even channels. Then there is no residual. With `fused` it is one call of
    `nasfast.ops.conv_bn_act_chain`.
    """

    def __init__(self, *units: nn.Module, fused: bool = False) -> None:
        super().__init__(*units)
        self.fused = fused

    def forward(self, x: Tensor, residual: Tensor | None = None, *, shuffle: bool = False) -> Tensor:
        if self.fused:
            stages = begin_stages(self)  # type: ignore[arg-type]  # nn.Sequential does not say which modules it has
            return conv_bn_act_chain(x, stages, residual=residual, shuffle=shuffle)
        if shuffle:
            return torch.cat((x[:, 0::2], super().forward(x[:, 1::2])), dim=1)
        y = super().forward(x)
        return y if residual is None else y + residual


class ConvAct(nn.Module):
    """A 1x1 convolution with bias and an activation, without BatchNorm: (N, Cin, H, W) -> (N, Cout, H, W).

    Args:
        in_channels, out_channels: Cin, Cout.
        act: the activation.
    """

    def __init__(self, in_channels: int, out_channels: int, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by gate(W2 act(W1 mean(x) + b1) + b2) (Hu et al. 2018): (N, C, H, W) -> (N, C, H, W).

    Args:
        channels: C.
        squeezed: rows of W1.
        act: a key of `ACTIVATION_MODULES`.
        gate: hsigmoid or sigmoid.
        fused: run as `nasfast.ops.squeeze_excite`, where that is faster than PyTorch's operators.
    """

    def __init__(
        self, channels: int, squeezed: int, *, act: str = "relu", gate: str = "hsigmoid", fused: bool = False
    ) -> None:
        super().__init__()
        if gate not in _GATE_MODULES:
            raise ValueError(f"gate must be one of {', '.join(_GATE_MODULES)}, got {gate!r}")
        self.act, self.gate, self.fused = act, gate, fused
        self.squeeze = ConvAct(channels, squeezed, activation_module(act))
        self.excite = ConvAct(squeezed, channels, _GATE_MODULES[gate]())

    def forward(self, x: Tensor) -> Tensor:
        weights = [getattr(unit.conv, name) for unit in (self.squeeze, self.excite) for name in ("weight", "bias")]
        compiles = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if self.fused and not compiles and is_faster(x, trains=any(weight.requires_grad for weight in weights)):
            return squeeze_excite(x, *weights, act=self.act, gate=self.gate)
        return x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)))


class InvertedResidual(nn.Module):
    """The MobileNetV2 block: (N, Cin, H, W) -> (N, Cout, ceil(H / stride), ceil(W / stride)).

    Its submodules are the units expand (None when expand is 1), depthwise, and project (without an activation), and se,
    which runs before project. The block adds x to its result when stride is 1 and Cin == Cout.

    Args:
        in_channels, out_channels: Cin, Cout.
        kernel_size: size of the depthwise kernel, odd.
        stride: stride of the depthwise convolution.
        expand: hidden channels per input channel, at least 1; their number is rounded.
        se: for example a SqueezeExcitation of the hidden channels; None for none.
        act: identity, relu, relu6, tanh, hswish or silu.
        track_running_stats: as in ConvBNAct.
        fused: run as one call of `nasfast.ops.conv_bn_act_chain`, or as one before se and one behind it. The BatchNorms
            may differ in mode.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int,
        stride: int,
        expand: float,
        se: nn.Module | None = None,
        act: str = "relu6",
        track_running_stats: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"{type(self).__name__}: kernel_size must be odd, got {kernel_size}")
        if expand < 1:
            raise ValueError(f"{type(self).__name__}: expand must be at least 1, got {expand}")
        unit = functools.partial(ConvBNAct, track_running_stats=track_running_stats, fused=fused)
        self.hidden_channels = hidden = round(in_channels * expand)
        self.stride = stride
        self.has_residual = stride == 1 and in_channels == out_channels
        self.fused = fused
        self.expand = unit(in_channels, hidden, 1, act=act) if expand > 1 else None
        self.depthwise = unit(hidden, hidden, kernel_size, stride=stride, groups=hidden, act=act)
        self.se = se
        self.project = unit(hidden, out_channels, 1, act="identity")

    @property
    def block_indicator(self) -> nn.BatchNorm2d:
        """The BatchNorm behind the projection. It writes the result of the branch, to which the residual is added."""
        return self.project.bn

    @property
    def units(self) -> list[ConvBNAct]:
        """The units in order."""
        return [unit for unit in (self.expand, self.depthwise, self.project) if unit is not None]

    def linear_paths(self) -> dict[str, list[ConvBNAct]]:
        """The branch as units in order, which `nasfast.supernet.aligned` reads."""
        return {"": self.units}

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.has_residual else None
        if self.fused and self.se is None:
            return conv_bn_act_chain(x, begin_stages(self.units), residual=residual)
        if self.fused:
            hidden = conv_bn_act_chain(x, begin_stages(self.units[:-1]))
        else:
            hidden = self.depthwise(x if self.expand is None else self.expand(x))
        return self.project(hidden if self.se is None else self.se(hidden), residual)


class BNAct2d(nn.BatchNorm2d):
    """nn.BatchNorm2d followed by an activation, as one call of `nasfast.ops.bn_act`; same state_dict as nn.BatchNorm2d.

    Args:
        num_features: C.
        act: identity, relu, relu6, tanh, hswish or silu.
        eps, momentum, track_running_stats: as in nn.BatchNorm2d; the affine parameters are always there.
    """

    def __init__(
        self,
        num_features: int,
        *,
        act: str = "relu6",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, track_running_stats=track_running_stats)
        activation_module(act)
        self.act_name = act

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        count_batch(self)
        return bn_act(
            x,
            self.weight,
            self.bias,
            residual=residual,
            act=self.act_name,
            **running_statistics(self),
            **norm_settings(self),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act_name}"


def activation_module(act: str) -> nn.Module:
    """A module of the activation `act`."""
    if act not in ACTIVATION_MODULES:
        raise ValueError(f"act must be one of {', '.join(ACTIVATION_MODULES)}, got {act!r}")
    return ACTIVATION_MODULES[act]()


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module or one inside has hooks that a caller of its operators would leave out."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def run_in_order(modules: nn.Sequential, x: Tensor) -> Tensor:
    """Call modules one after another: as one chain if the CUDA kernels run it, because they then write nothing between.

    Hooks of the modules inside are not called then, so modules that have any are called as they are.
    """
    units, adds_input = as_chain(modules)
    if units and not has_forward_hooks(modules) and cuda_plan(x, [unit.stage() for unit in units]) is not None:
        return conv_bn_act_chain(x, begin_stages(units), residual=x if adds_input else None)
    return modules(x)


def as_chain(modules: Iterable[nn.Module]) -> tuple[list[ConvBNAct], bool]:
    """The units of modules that could be one chain, and whether it adds its input at the end; no units of others."""
    units: list[ConvBNAct] = []
    blocks = list(modules)
    adds_input = False
    for module in blocks:
        if "forward" in vars(module):  # somebody replaced it
            return [], False
        if type(module) is ConvBNAct and module.fused:
            units.append(module)
            continue
        if type(module) is not InvertedResidual or not module.fused or module.se is not None:
            return [], False
        adds_input = module.has_residual
        if adds_input and len(blocks) > 1:
            return [], False
        units += module.units
    return units, adds_input


def begin_stages(units: Iterable[ConvBNAct]) -> list[Stage]:
    """The stages of one forward through these units; their BatchNorms count its batch."""
    stages = []
    for unit in units:
        count_batch(unit.bn)
        stages.append(unit.stage())
    return stages


def count_batch(bn: nn.BatchNorm2d) -> None:
    """Count one more batch, as nn.BatchNorm2d does before it normalises."""
    if bn.training and bn.track_running_stats:
        batches = bn._buffers["num_batches_tracked"]  # by its name nn.Module finds a buffer ten times as slowly
        if batches is not None:
            batches.add_(1)


class RunningStatistics(TypedDict):
    running_mean: Tensor | None
    running_var: Tensor | None


def running_statistics(bn: nn.BatchNorm2d) -> RunningStatistics:
    """The running statistics that a forward of bn reads or updates, chosen as nn.BatchNorm2d does."""
    if bn.training and not bn.track_running_stats:
        return {"running_mean": None, "running_var": None}
    return {"running_mean": bn._buffers["running_mean"], "running_var": bn._buffers["running_var"]}


class NormSettings(TypedDict):
    training: bool
    momentum: float
    eps: float


def norm_settings(bn: nn.BatchNorm2d) -> NormSettings:
    """training, momentum and eps of the forward whose batch bn has counted last."""
    momentum = bn.momentum
    if momentum is None:
        # the running statistics are the mean over all batches so far
        batches = bn.num_batches_tracked if bn.training and bn.track_running_stats else None
        momentum = 0.0 if batches is None else 1.0 / max(1.0, float(batches))
    training = bn.training or bn._buffers["running_mean"] is None
    return {"training": training, "momentum": momentum, "eps": bn.eps}
