"""The CUDA kernels of chains under test: on the GPU where it runs them, else their emulation on CPU tensors."""

from functools import partial
from typing import Any

import pytest
import torch
from devices import DEVICE, on_device
from torch import Tensor

from kernel_cases.chain import ChainInputs, converted_chain, run_chain
from nasfast import ops
from nasfast.ops import _native, backends

# whether they run on a GPU, and why they run nowhere
ON_GPU = DEVICE == "cuda" and not backends.why_not_cuda_kernels(torch.empty(0, device=DEVICE))
WHY_NOT = None if ON_GPU else _native.why_no_emulation()
# tests that skip would not show it
assert "cannot be loaded" not in str(WHY_NOT), WHY_NOT
PLACE = "cuda" if ON_GPU else "cpu"
# for modules whose tests need the kernels, and for tests of what only the emulation has
needs_kernels = [pytest.mark.usefixtures("device"), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
needs_emulation = pytest.mark.skipif(_native.why_no_emulation() is not None, reason=str(_native.why_no_emulation()))
emulated_only = pytest.mark.skipif(ON_GPU, reason="a GPU has its own multiprocessors, and its own order of threads")
cuda_chain = partial(ops.conv_bn_act_chain, backend="cuda")


def set_emulation(*settings: Any, **named: Any) -> None:
    """Set the emulated GPU, see nasfast/_emulation.pyi; a real one stays what it is."""
    if not ON_GPU:
        from nasfast import _emulation

        _emulation.set_emulation(*settings, **named)


def moved(inputs: ChainInputs) -> ChainInputs:
    """The same tensors where the kernels run."""
    return converted_chain(on_device, inputs) if ON_GPU else inputs


def run_cuda(inputs: ChainInputs, *, x_grad: bool = True) -> dict[str, Tensor]:
    """`run_chain` on the kernels, with results on the CPU."""
    return {name: tensor.cpu() for name, tensor in run_chain(cuda_chain, moved(inputs), x_grad=x_grad).items()}
