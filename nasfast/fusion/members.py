"""Which modules and calls of functions can be members of a chain, and why others cannot."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from nasfast.ops.modules import ACTIVATION_MODULES, BNAct2d
from nasfast.ops.reference import ConvBNParams, Stage


def convolutions(module: nn.Module) -> dict[str, _ConvNd]:
    """All convolutions by path, including transposed, 1-d and 3-d ones."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _ConvNd)}


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """All BatchNorms by path."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}


def norm_problem(bn: _BatchNorm) -> str | None:
    """Why no stage can have this BatchNorm; None if one can."""
    if isinstance(bn, BNAct2d):
        return "fused already (BNAct2d)"
    if not _runs(bn, nn.BatchNorm2d, _NORM_FORWARD) and not has_activation(bn):
        return f"is a {type(bn).__name__}, whose forward is not nn.BatchNorm2d's"
    if bn.weight is None or bn.bias is None:
        return "has no affine parameters"
    return None


def conv_problem(conv: _ConvNd) -> str | None:
    """Why no stage can have this convolution; None if one can."""
    if torch.nn.utils.parametrize.is_parametrized(conv):
        return "its weight is parametrized"
    if isinstance(conv, LazyModuleMixin):
        return "its shape is not known before its first forward"
    if not runs_conv(conv):
        return f"is a {type(conv).__name__}, whose forward is not nn.Conv2d's"
    if conv.padding_mode != "zeros":
        return f"has padding_mode={conv.padding_mode!r}"
    if isinstance(conv.padding, str):
        return f"has padding={conv.padding!r}"
    if set(conv.dilation) != {1}:
        return f"has dilation={conv.dilation}"
    for name in ("stride", "padding"):
        value = getattr(conv, name)
        if len(set(value)) > 1:
            return f"has {name}={value}"
    for name in ("weight", "bias"):
        if name not in conv._parameters:
            return f"its {name} is no parameter"
    return None


def runs_conv(module: nn.Module | None) -> bool:
    """Whether a call of the module runs what nn.Conv2d runs."""
    runs = _runs(module, nn.Conv2d, _CONV_FORWARD)
    return runs and isinstance(module, nn.Conv2d) and type(module)._conv_forward is _CONV_FUNCTION


def _runs(module: nn.Module | None, cls: type[nn.Module], forward: Callable) -> bool:
    """Whether a call of the module runs this forward of cls."""
    return isinstance(module, cls) and type(module).forward is forward and "forward" not in vars(module)


# as PyTorch has them: users may patch classes
_CONV_FORWARD, _CONV_FUNCTION, _NORM_FORWARD = nn.Conv2d.forward, nn.Conv2d._conv_forward, nn.BatchNorm2d.forward
_ACTIVATIONS = {(cls, getattr(cls, "forward")): name for name, cls in ACTIVATION_MODULES.items()}  # noqa: B009
_CLAMPS = [(cls, cls.forward) for cls in (nn.Hardtanh, nn.ReLU6)]
# whose forwards TorchDynamo takes as known and does not guard: some in each version, all of them in torch 2.11
_KNOWN_CLASSES: tuple[Any, ...] = (
    *(nn.Conv2d, nn.BatchNorm2d, nn.Sequential, nn.Identity, nn.Dropout, nn.Dropout2d, nn.Linear, nn.Flatten),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d, nn.Sigmoid, nn.Hardsigmoid, nn.Hardtanh),
    *ACTIVATION_MODULES.values(),
)
_KNOWN = [(cls, cls.forward) for cls in _KNOWN_CLASSES]


def has_patched_classes() -> bool:
    """Whether somebody has replaced what classes of PyTorch run that TorchDynamo takes as known."""
    patched = [cls for cls, forward in _KNOWN if cls.forward is not forward]
    return bool(patched) or nn.Conv2d._conv_forward is not _CONV_FUNCTION


def forward_name(module: nn.Module) -> str:
    """Qualified name of the forward of the module's class; "" if it has none, or if somebody has wrapped it."""
    forward = type(module).forward
    if hasattr(forward, "__wrapped__"):
        return ""
    return f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}"


def has_activation(bn: nn.Module) -> bool:
    """Whether this is timm's BatchNorm with its own activation, and nothing random between the two."""
    return forward_name(bn) == "timm.layers.norm_act.BatchNormAct2d.forward" and type(bn.drop) is nn.Identity


def module_activation(module: nn.Module) -> str | None:
    """Name of the activation that this module computes; None if no stage can have it."""
    runs = type(module), type(module).forward
    if "forward" in vars(module):
        return None
    if runs in _CLAMPS:
        # since torch 2.15 the forward of nn.ReLU6 reads its bounds, too
        return activation_of(F.hardtanh, module.min_val, module.max_val)
    return _ACTIVATIONS.get(runs)


def own_activation(bn: nn.Module) -> str | None:
    """The activation that a BatchNorm computes itself, "identity" if there is none; None if no stage can have it."""
    return module_activation(bn.get_submodule("act")) if has_activation(bn) else "identity"


def called(node: fx.Node) -> object:
    """The function or the method of tensors that a traced call is one of; None for other nodes."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def function_activation(node: fx.Node) -> str | None:
    """Name of the activation that a traced call of a function or method computes; None if no stage can have it."""
    if len(node.all_input_nodes) != 1:
        return None
    # the input comes first unless it is named
    rest = node.args[1:] if node.args and isinstance(node.args[0], fx.Node) else node.args
    return activation_of(called(node), *rest, **{name: value for name, value in node.kwargs.items() if name != "input"})


def untouchable(module: nn.Module) -> str | None:
    """Why the forward of this module must stay what it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule)):
        return "a module compiled by torch.compile, which fuses by itself"
    if "forward" in vars(module):
        return "a module whose forward was replaced on the instance"
    return None


def wraps_functions(module: nn.Module) -> bool:
    """Whether this is a module without state and submodules that can be traced, such as a user's activation."""
    if module._modules or module._parameters or module._buffers:
        return False
    try:
        fx.Tracer().trace(module)
    except Exception:
        return False
    return True


class Conv(NamedTuple):
    """The arguments of F.conv2d behind its input for a convolution that a stage can have; its dilation is 1."""

    weight: Tensor
    bias: Tensor | None
    stride: int
    padding: int
    dilation: int
    groups: int


def activation_of(function: object, *args: Any, **kwargs: Any) -> str | None:
    """The value of `Stage.act` for a call of this function; None if no stage has this activation.

    Args:
        function: the function that is called.
        args, kwargs: its arguments without the input.
    """
    if function is F.hardtanh:
        return _hardtanh(*args, **kwargs)
    return ACTIVATION_FUNCTIONS.get(function)


def square_conv(
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Conv | None:
    """The convolution that F.conv2d computes with these arguments; None if no stage can have it."""
    step, pad = _one(stride), _one(padding)
    if step is None or pad is None or _one(dilation) != 1:
        return None
    return Conv(weight, bias, step, pad, 1, groups)


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
    """The stage of a convolution, an activation and a call of F.batch_norm with these arguments behind its input;
    None if BatchNorm has no affine parameters, as every stage has.
    """
    if weight is None or bias is None:
        return None
    params = ConvBNParams(conv.weight, weight, bias, running_mean, running_var, conv.bias)
    return Stage(params, conv.stride, conv.padding, conv.groups, act, training, momentum, eps)


def _one(value: str | int | Sequence[int]) -> int | None:
    """The value of a convolution's setting if it is the same in both directions, else None."""
    if isinstance(value, str):
        return None
    if isinstance(value, int):
        return value
    return value[0] if len(set(value)) == 1 else None


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> str | None:
    return "relu6" if (min_val, max_val) == (0, 6) else None


def describe(weight: Sequence[int], stride: int, groups: int, act: str) -> str:
    """A stage in words, such as "dw3x3 s2 144 relu6" or "1x1 24->144", for a weight of this shape."""
    out_channels, per_group, *kernel = weight
    depthwise = per_group == 1 and groups == out_channels > 1
    parts = [
        f"{'dw' if depthwise else ''}{kernel[0]}x{kernel[1]}",
        f"s{stride}" if stride > 1 else "",
        f"g{groups}" if groups > 1 and not depthwise else "",
        f"{out_channels}" if depthwise else f"{per_group * groups}->{out_channels}",
        "" if act == "identity" else act,
    ]
    return " ".join(filter(None, parts))


ADDITIONS: dict[object, bool] = {
    torch.add: False,
    operator.add: False,
    operator.iadd: True,
    Tensor.add: False,
    Tensor.add_: True,
    Tensor.__add__: False,
    Tensor.__iadd__: True,
}
"""The additions that can belong to a chain, and whether they change their first argument."""

ACTIVATION_FUNCTIONS: dict[object, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    Tensor.relu: "relu",
    Tensor.relu_: "relu",
    F.relu6: "relu6",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    Tensor.tanh_: "tanh",
    F.hardswish: "hswish",
    F.silu: "silu",
}
