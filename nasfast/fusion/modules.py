"""What `fuse` asks of modules: which are convolutions, and which forwards must stay what they are."""

from __future__ import annotations

import dis
import os
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from nasfast.ops.modules import ACTIVATION_MODULES, ConvBNAct, InvertedResidual

_TORCH, _PYTHON = (os.path.dirname(str(module.__file__)) for module in (torch, os))
# whose forwards TorchDynamo takes as known and does not guard: some in each version, all of them in torch 2.11
_KNOWN_CLASSES: tuple[Any, ...] = (
    *(nn.Conv2d, nn.BatchNorm2d, nn.Sequential, nn.Identity, nn.Dropout, nn.Dropout2d, nn.Linear, nn.Flatten),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d, nn.Sigmoid, nn.Hardsigmoid, nn.Hardtanh),
    *ACTIVATION_MODULES.values(),
)
# as PyTorch has them: users may patch classes
_KNOWN, _CONV_FUNCTION = [(cls, cls.forward) for cls in _KNOWN_CLASSES], nn.Conv2d._conv_forward


def convolutions(module: nn.Module) -> dict[str, _ConvNd]:
    """All convolutions by path, including transposed, 1-d and 3-d ones."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _ConvNd)}


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """All BatchNorms by path."""
    return {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}


def has_patched_classes() -> bool:
    """Whether somebody has replaced what classes of PyTorch run that TorchDynamo takes as known."""
    patched = [cls for cls, forward in _KNOWN if cls.forward is not forward]
    return bool(patched) or nn.Conv2d._conv_forward is not _CONV_FUNCTION


def catches_exceptions(code: CodeType) -> bool:
    """Whether this code, which is not PyTorch's or Python's own, catches exceptions."""
    if code.co_filename.startswith(_TORCH) or os.path.dirname(code.co_filename) == _PYTHON:
        return False
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return "CHECK_EXC_MATCH" in names or ("PUSH_EXC_INFO", "POP_TOP") in zip(names, names[1:], strict=False)


def why_opaque(module: nn.Module) -> str | None:
    """Why the forward of this module must stay what it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule"
    if isinstance(module, (ConvBNAct, InvertedResidual)) and module.fused:
        return f"a {type(module).__name__} that is fused already"
    if isinstance(module, LazyModuleMixin):
        return "a lazy module, whose shape is not known before its first forward"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule)):
        return "a module compiled by torch.compile, which fuses by itself"
    if "forward" in vars(module):
        return "a module whose forward was replaced on the instance"
    return None
