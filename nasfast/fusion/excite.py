"""Squeeze-and-excitation: finds the modules of well-known classes that compute it, and runs each as one operator.

It needs the means of all pixels before it changes the first one, so it ends a chain, and the next chain begins behind
it. Its own forward reads and writes the tensor up to ten times in a step; the operator reads it four times and writes
two tensors.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nasfast.fusion import members
from nasfast.fusion.members import ACTIVATION_FUNCTIONS
from nasfast.fusion.replaced import ReplacedForward, Watch, hooks_of, must_run_unfused
from nasfast.fusion.stages import plain
from nasfast.ops import squeeze


class _Layout(NamedTuple):
    """The submodules of a class that computes x * gate(excite(act(squeeze(mean of x)))).

    Attributes:
        squeeze, excite, act, gate: names of the modules in the formula.
        others: types of the other modules, which compute the mean or nothing.
        off: name of an attribute that must be false, or None.
    """

    squeeze: str
    excite: str
    act: str
    gate: str
    others: dict[str, type[nn.Module]] = {}
    off: str | None = None


_LAYOUTS = {
    "torchvision.ops.misc.SqueezeExcitation.forward": _Layout(
        "fc1", "fc2", "activation", "scale_activation", {"avgpool": nn.AdaptiveAvgPool2d}
    ),
    "timm.layers.squeeze_excite.SEModule.forward": _Layout(
        "fc1", "fc2", "act", "gate", {"bn": nn.Identity}, off="add_maxpool"
    ),
    "timm.models._efficientnet_blocks.SqueezeExcite.forward": _Layout("conv_reduce", "conv_expand", "act1", "gate"),
}
_GATES = {
    "torch.nn.modules.activation.Sigmoid.forward": "sigmoid",
    "torch.nn.modules.activation.Hardsigmoid.forward": "hsigmoid",
    "timm.layers.activations.Sigmoid.forward": "sigmoid",
    "timm.layers.activations.HardSigmoid.forward": "hsigmoid",
}


class Excitation(NamedTuple):
    """What a module computes: its two convolutions, and act and gate as in `nasfast.ops.squeeze_excite`."""

    convs: tuple[nn.Conv2d, nn.Conv2d]
    act: str
    gate: str


def find_excitations(model: nn.Module) -> list[str]:
    """The paths of the squeeze-and-excitations of a model."""
    candidates = [(path, module) for path, module in model.named_modules() if members.untouchable(module) is None]
    return [path for path, module in candidates if excitation_of(module) is not None]


def excitation_of(module: nn.Module) -> Excitation | None:
    """The module as a squeeze-and-excitation; None if it is none, or if a hook sees its inside."""
    layout = _LAYOUTS.get(members.forward_name(module))
    # an attribute or a module that is not known here may change what a later version of the library computes
    if layout is None or set(module._modules) != {*layout[:4], *layout.others}:
        return None
    inner: dict[str, Any] = dict(module._modules)
    if any("forward" in vars(m) or any(hooks_of(m)) for m in module.modules() if m is not module):
        return None
    if layout.off is not None and vars(module).get(layout.off) is not False:
        return None
    for name, cls in layout.others.items():
        if type(inner[name]) is not cls or getattr(inner[name], "output_size", 1) not in (1, (1, 1)):
            return None
    convs: Any = inner[layout.squeeze], inner[layout.excite]
    act, gate = members.module_activation(inner[layout.act]), _GATES.get(members.forward_name(inner[layout.gate]))
    if gate is None or act not in {*ACTIVATION_FUNCTIONS.values(), "identity"} or not all(map(_is_product, convs)):
        return None
    return Excitation(convs, act, gate) if convs[0].weight.shape[:2] == convs[1].weight.shape[1::-1] else None


def _is_product(conv: nn.Module) -> bool:
    """Whether this convolution multiplies one pixel by a matrix and adds a bias."""
    if not isinstance(conv, nn.Conv2d) or members.conv_problem(conv) is not None or conv.weight.shape[2:] != (1, 1):
        return False
    return conv.bias is not None and math.prod((*conv.stride, conv.groups)) == 1 and set(conv.padding) == {0}


class ExcitationForward(ReplacedForward):
    """The forward of a squeeze-and-excitation: the operator where that is faster, else the module's own.

    The operator needs an x in channels_last on a CPU.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._bound: tuple[Watch, Excitation | None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if len(args) == 1 and not kwargs and not must_run_unfused() and not torch.compiler.is_compiling():
            y = self._run(module, args[0])
            if y is not None:
                return y
        return type(module).forward(module, *args, **kwargs)

    def _run(self, module: nn.Module, x: Any) -> Tensor | None:
        """The result of the operator, if it can run on x now."""
        if type(x) is not Tensor or x.dim() != 4 or not squeeze.is_faster(x, trains=False):
            return None
        if self._bound is None or not self._bound[0].same(module):
            self._bound = _watch(module), excitation_of(module)
        excitation = self._bound[1]
        if excitation is None:
            return None
        weights = [conv._parameters.get(name) for conv in excitation.convs for name in ("weight", "bias")]
        given = [weight for weight in weights if weight is not None]
        trains = any(weight.requires_grad for weight in given)
        if len(given) < 4 or not squeeze.is_faster(x, trains=trains) or not plain(x, *given):
            return None
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if autocast != torch.bfloat16 if autocast is not None else given[0].dtype != x.dtype:
            return None
        with suppress(TypeError, ValueError):  # it refuses before it computes; PyTorch may accept the same
            return squeeze.squeeze_excite(x, *given, act=excitation.act, gate=excitation.gate, backend="cpu")
        return None


def _watch(module: nn.Module) -> Watch:
    inner = [m for m in module.modules() if m is not module]
    settings = [(vars(m), name) for m in inner for name in vars(m) if not name.startswith("_")]
    own = [name for name, value in vars(module).items() if isinstance(value, bool)]
    return Watch(module, own, inner, [*settings, *((vars(m), "_parameters") for m in inner)])
