"""Cases of conv_bn_act and conv_bn_act_chain: convolutions are frozen, BatchNorms train.

They are the units (convolution, BatchNorm, activation) and the inverted residuals on the mean path of the MobileNetV2
space, and the units of ShuffleNetV2 on the mean path of its space: the first of each kind and resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from benchmarks import floor
from benchmarks.ops.cases import BOTH, DTYPES, Call, Case, Setting, Size
from nasfast.ops.modules import ConvBNAct
from nasfast.spaces import Block, Layer, SearchSpace, mean_path, mobilenet_v2, shufflenet_v2
from nasfast.supernet import UnitFactory
from nasfast.supernet.blocks import build_block

BATCH = 32


@dataclass(frozen=True)
class Part:
    """A unit or a block of a network.

    Attributes:
        op: `conv_bn_act` for a unit, `conv_bn_act_chain` for a block.
        kind: such as `depthwise k5 s1` or `inverted residual s2`.
        label: kernel and width.
        channels, size: channels and side of the input.
        input_grad: whether training needs the gradient of its input.
        make: builds the module, fused or plain.
    """

    op: str
    kind: str
    label: str
    channels: int
    size: int
    input_grad: bool
    make: Callable[[bool], nn.Module]


def cases(size: Size) -> list[Case]:
    return [_case(part, size) for part in parts()]


@cache
def parts() -> list[Part]:
    """The first part of each kind and resolution: units and blocks of MobileNetV2's path, units of ShuffleNetV2's."""
    mobilenet, shufflenet = mobilenet_v2(), shufflenet_v2()
    every = [part for layer, block in _layers(mobilenet) for part in _units(mobilenet, layer, block)]
    every += [_block(mobilenet, layer, block) for layer, block in _layers(mobilenet) if block.kind == "mbconv"]
    every += [_block(shufflenet, layer, block) for layer, block in _layers(shufflenet) if "shuffle" in block.kind]
    # a later entry of a dictionary replaces an earlier one
    return list({(part.kind, part.size): part for part in reversed(every)}.values())[::-1]


def _layers(space: SearchSpace) -> list[tuple[Layer, Block]]:
    searched = [(layer, layer.choices[choice]) for layer, choice in zip(space.layers, mean_path(space), strict=True)]
    fixed = [[(layer, layer.choices[0]) for layer in part] for part in (space.stem_layers, space.head_layers)]
    return [*fixed[0], *searched, *fixed[1]]


def _block(space: SearchSpace, layer: Layer, block: Block) -> Part:
    names = {"mbconv": "inverted residual", "shuffle": "shuffle unit", "shuffle_xception": "xception unit"}
    kind = f"{names[block.kind]} s{layer.stride}"
    label = f"{block.label} {layer.in_channels} to {layer.out_channels}"

    def make(fused: bool) -> nn.Module:
        return build_block(block, layer, UnitFactory(act=space.activation, fused=fused, track_running_stats=False))

    return Part("conv_bn_act_chain", kind, label, layer.in_channels, layer.size, True, make)


def _units(space: SearchSpace, layer: Layer, block: Block) -> list[Part]:
    """The convolution units of a block."""
    units = UnitFactory(act=space.activation, fused=False, track_running_stats=False)
    parts = []

    def note(unit: ConvBNAct, inputs: tuple, output: Tensor) -> None:
        conv, size = unit.conv, inputs[0].shape[-1]
        arguments = (conv.in_channels, conv.out_channels, conv.kernel_size[0])
        options = {"stride": conv.stride[0], "groups": conv.groups, "act": unit.act_name, "track_running_stats": False}
        parts.append(
            Part(
                op="conv_bn_act",
                kind=_kind(conv, unit.act_name),
                label=f"{conv.in_channels} to {conv.out_channels}",
                channels=conv.in_channels,
                size=size,
                input_grad=conv.in_channels != space.in_channels,
                make=lambda fused: ConvBNAct(*arguments, **options, fused=fused),
            )
        )

    with torch.device("meta"):
        module = build_block(block, layer, units)
        for unit in module.modules():
            if isinstance(unit, ConvBNAct):
                unit.register_forward_hook(note)
        module(torch.empty(2, layer.in_channels, layer.size, layer.size))
    return parts


def _kind(conv: nn.Conv2d, act: str) -> str:
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if conv.groups > 1:
        return f"depthwise k{kernel} s{stride}"
    if kernel > 1:
        return f"stem k{kernel} s{stride}"
    return "pointwise project" if act == "identity" else "pointwise expand"


def _case(part: Part, size: Size) -> Case:
    batch, side = BATCH // size.divisor, min(part.size, size.side)
    shape = (batch, part.channels, side, side)
    return Case(
        part.op,
        part.kind,
        f"{part.label} {batch}x{side}x{side}",
        partial(_call, part, shape),
        floor=partial(_least_ms, part, shape),
    )


def _call(part: Part, shape: tuple[int, ...], setting: Setting) -> Call:
    # the module is drawn first, so that plain and fused modules get the same weights
    module = part.make(setting.ours).to(setting.device, memory_format=setting.memory_format).train()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    x = setting.images(shape, grad=part.input_grad)

    def run(x: Tensor) -> Tensor:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.dtype == "bf16"):
            return module(x)

    return Call(run, [x], list(module.parameters()))


def _least_ms(part: Part, shape: tuple[int, ...], machine: floor.Machine, dtype: str, passes: str) -> float:
    traced = floor.trace(lambda: part.make(False), shape)
    least = floor.alone_floor(traced, machine, DTYPES[dtype], input_grad=part.input_grad)
    return 1e3 * (least.step if passes == BOTH else least.forward)
