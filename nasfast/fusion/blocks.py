"""The forwards of well-known blocks, spelled out, so that their chains run without their Python code.

A block calls its parts one after the other, may add its input or what a shortcut makes of it, and may activate the sum.
`bind` reads the modules as they are now and keeps nothing of a trace, so that it is right after any change of them. A
forward that is not listed here runs itself, while placeholders record its chains.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nasfast.fusion import members
from nasfast.fusion.chain import BoundChain
from nasfast.fusion.members import ACTIVATION_FUNCTIONS
from nasfast.fusion.replaced import ReplacedForward, hooks_of
from nasfast.fusion.stages import Way, result_dtype


class Block(NamedTuple):
    """The forward of a class. A submodule whose name ends with "?" is not called where it is None.

    Attributes:
        parts: names of the submodules that it calls in order, and functions; None for all submodules.
        adds: whether it adds to the result of the parts; a name stands for an attribute or submodule, and the block
            adds where that is neither false nor None.
        shortcut: name of the submodule that computes from the input what is added; without it, that is the input.
        before: name of a submodule that is called behind the parts where the block adds.
        last: name of the submodule that is called behind the addition.
        add: the addition, of the result of the parts and the other; in place that result keeps its type.
    """

    parts: tuple[str | Callable[[Tensor], Tensor], ...] | None
    adds: bool | str = False
    shortcut: str = ""
    before: str = ""
    last: str = ""
    add: Callable[[Tensor, Tensor], Tensor] = operator.add


def _add_to_first_channels(y: Tensor, x: Tensor) -> Tensor:
    return torch.cat([y[:, : x.shape[1]] + x, y[:, x.shape[1] :]], dim=1)


_resnet = partial(Block, adds=True, shortcut="downsample?", last="relu", add=operator.iadd)
_efficientnet = partial(Block, adds="has_skip", before="drop_path")
WELL_KNOWN = {
    "torch.nn.modules.container.Sequential": Block(None),
    "torchvision.models.googlenet.BasicConv2d": Block(("conv", "bn", torch.relu_)),
    "torchvision.models.mnasnet._InvertedResidual": Block(("layers",), "apply_residual"),
    "torchvision.models.mobilenetv2.InvertedResidual": Block(("conv",), "use_res_connect"),
    "torchvision.models.mobilenetv3.InvertedResidual": Block(("block",), "use_res_connect", add=operator.iadd),
    "torchvision.models.regnet.ResBottleneckBlock": Block(("f",), True, "proj?", last="activation"),
    "torchvision.models.resnet.BasicBlock": _resnet(("conv1", "bn1", "relu", "conv2", "bn2")),
    "torchvision.models.resnet.Bottleneck": _resnet(("conv1", "bn1", "relu", "conv2", "bn2", "relu", "conv3", "bn3")),
    "timm.layers.conv_bn_act.ConvNormAct": Block(("conv", "bn", "aa?")),
    "timm.models._efficientnet_blocks.ConvBnAct": _efficientnet(("conv", "bn1", "aa")),
    "timm.models._efficientnet_blocks.DepthwiseSeparableConv": _efficientnet(
        ("conv_s2d?", "bn_s2d?", "conv_dw", "bn1", "aa", "se", "conv_pw", "bn2")
    ),
    "timm.models._efficientnet_blocks.InvertedResidual": _efficientnet(
        ("conv_s2d?", "bn_s2d?", "conv_pw", "bn1", "conv_dw", "bn2", "aa", "se", "conv_pwl", "bn3")
    ),
    "timm.models._efficientnet_blocks.UniversalInvertedResidual": _efficientnet(
        ("dw_start", "pw_exp", "dw_mid", "se", "pw_proj", "dw_end", "layer_scale")
    ),
    "timm.models.ghostnet.GhostBottleneck": Block(
        ("ghost1", "conv_dw?", "bn_dw?", "se?", "ghost2"), True, "shortcut", add=operator.iadd
    ),
    "timm.models.regnet.Bottleneck": Block(
        ("conv1", "conv2", "se", "conv3"), "downsample", "downsample", before="drop_path", last="act3"
    ),
    "timm.models.rexnet.LinearBottleneck": Block(
        ("conv_exp?", "conv_dw", "se?", "act_dw", "conv_pwl"),
        "use_shortcut",
        before="drop_path?",
        add=_add_to_first_channels,
    ),
}
"""By the name of the class; its forward reads nothing else of the module."""


def block_of(module: nn.Module) -> Block | None:
    """The block whose forward the class of the module has. A subclass may change what that forward calls."""
    kind, name = type(module), members.forward_name(module).removesuffix(".forward")
    block = WELL_KNOWN.get(name)
    if block is not None and block.parts is None:
        return block if getattr(kind, "__iter__", None) is nn.Sequential.__iter__ else None
    return block if f"{kind.__module__}.{kind.__qualname__}" == name else None


def bind(module: nn.Module, chains: Sequence[BoundChain], opened: Sequence[nn.Module]) -> BoundBlock | None:
    """The forward of a well-known block as it is now; None for other modules, and where it does not have the chains.

    Args:
        chains: all chains that the module's forward runs, without those that have hooks.
        opened: the modules between it and the modules of its chains. Their forwards are not called.
    """
    block = block_of(module)
    if block is None:
        return None
    adds = _adds(module, block)
    if adds is None:
        return None
    parts = _leaves(_parts(module, block, adds), opened)
    shortcut = _leaves(_modules(module, (block.shortcut,)) if adds else [], opened)
    last = _leaves(_modules(module, (block.last,)), ())
    if not parts or shortcut is None or last is None:
        return None
    steps, shortcut_steps = _steps(parts, chains), _steps(shortcut, chains)
    if sum([isinstance(step, _ChainCall) for step in (*steps, *shortcut_steps)]) < len(chains):
        return None
    return BoundBlock(steps, shortcut_steps if adds else None, last, block.add)


class BoundBlock:
    """The forward of a block.

    Args:
        steps, last, add: its parts, what is called behind the addition, and the addition, as in `Block`.
        shortcut: what computes from its input what is added; None if nothing is added.
    """

    def __init__(
        self, steps: list[Callable], shortcut: list[Callable] | None, last: list[Callable], add: Callable
    ) -> None:
        *self._before, self._end = steps
        self._shortcut, self._last, self._add = shortcut, last, add
        self._end_adds = isinstance(self._end, _ChainCall) and self._end.residual

    def run(self, x: Tensor) -> Any:
        """The result of the forward for (N, C, H, W)."""
        y = x
        for step in self._before:
            y = step(y)
        if self._shortcut is None:
            y = self._end(y)
        else:
            other = x
            for step in self._shortcut:
                other = step(other)
            y = self._end(y, other, self._add) if self._end_adds else self._add(self._end(y), other)
        for step in self._last:
            y = step(y)
        return y


class _ChainCall:
    """A chain, and what it calls where it runs on PyTorch."""

    def __init__(self, found: BoundChain, calls: list[Callable]) -> None:
        self._runs, self._calls, self.residual = found, calls, found.chain.residual

    def __call__(self, x: Tensor, residual: Tensor | None = None, add: Callable = operator.add) -> Tensor:
        way = self._runs.way(x)
        if way is not Way.PLAIN:
            y = self._runs.run_all(way, x, residual)
            return y.to(result_dtype(x)) if add is operator.iadd else y
        for call in self._calls:
            x = call(x)
        return x if residual is None else add(x, residual)


def _parts(module: nn.Module, block: Block, adds: bool) -> list[Callable] | None:
    if block.parts is None:
        return [child for child in module._modules.values() if child is not None]
    return _modules(module, (*block.parts, block.before) if adds else block.parts)


def _modules(module: nn.Module, parts: Sequence[str | Callable]) -> list[Callable] | None:
    """The submodules of these names, and the functions; None where the forward would find something else."""
    found: list[Callable] = []
    for part in parts:
        if not isinstance(part, str):
            found.append(part)
            continue
        if not (name := part.removesuffix("?")):
            continue
        submodule = module._modules.get(name)
        if submodule is not None:
            found.append(submodule)
        elif part == name or getattr(module, name, None) is not None:
            return None
    return found


def _adds(module: nn.Module, block: Block) -> bool | None:
    """Whether the block adds; None where its flag is not the module's own."""
    if isinstance(block.adds, bool):
        return block.adds
    for own in (module._modules, vars(module)):
        if block.adds in own:
            return own[block.adds] not in (None, False)
    return None


def _leaves(parts: Sequence[Callable] | None, opened: Sequence[nn.Module]) -> list[Callable] | None:
    """What is called, without identities; None if the forward of an opened module must be called, or is not known."""
    if parts is None:
        return None
    leaves: list[Callable] = []
    for part in parts:
        if isinstance(part, nn.Module) and any([part is module for module in opened]):
            block = block_of(part)
            own = isinstance(vars(part).get("forward"), (ReplacedForward, NoneType))
            if block is None or block.adds or not own or any(hooks_of(part)):
                return None
            inner = _leaves(_parts(part, block, False), opened)
            if inner is None:
                return None
            leaves += inner
        elif not is_idle(part):
            leaves.append(part)
    return leaves


def is_idle(part: Callable) -> bool:
    """Whether a call of it need not be made: its result is its input."""
    return isinstance(part, nn.Module) and members.module_activation(part) == "identity" and not any(hooks_of(part))


def _steps(leaves: Sequence[Callable], chains: Sequence[BoundChain]) -> list[Callable]:
    """The leaves, with those of a chain in one call."""
    steps: list[Callable] = []
    place = 0
    while place < len(leaves):
        length = 0
        for found in chains:
            if leaves[place] is found.convs[0]:
                length = _length(leaves[place:], found)
                if length:
                    steps.append(_ChainCall(found, list(leaves[place : place + length])))
                break
        if not length:
            steps.append(leaves[place])
        place += length or 1
    return steps


def _length(leaves: Sequence[Callable], found: BoundChain) -> int:
    """The number of first leaves that are the calls of the chain; 0 if they are not."""
    place = 0
    for conv, norm, act in zip(found.convs, found.norms, found.chain.acts, strict=True):
        if len(leaves) < place + 2 or leaves[place] is not conv or leaves[place + 1] is not norm:
            return 0
        place += 2
        own = members.own_activation(norm)
        if own == act:
            continue
        if own != "identity" or len(leaves) == place or _activation(leaves[place]) != act:
            return 0
        place += 1
    return place


def _activation(call: Callable) -> str | None:
    return members.module_activation(call) if isinstance(call, nn.Module) else ACTIVATION_FUNCTIONS.get(call)
