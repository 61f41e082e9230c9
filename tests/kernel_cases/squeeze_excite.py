"""Inputs of squeeze_excite, and the check of its results against float64."""

from dataclasses import dataclass
from functools import partial

import torch
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close

from kernel_cases.case import KernelCase, outputs_and_grads, widened
from nasfast import ops
from nasfast.ops import reference


@dataclass(frozen=True)
class Case(KernelCase):
    """One input: shape (N, C, H, W), S, activation, gate, memory layout, type of x and of the weights."""

    shape: tuple[int, int, int, int]
    squeezed: int = 5
    act: str = "relu"
    gate: str = "hsigmoid"
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32

    def inputs(self):
        """x, the weights W1, b1, W2, b2, and grad, the gradient of the result."""
        generator = self.generator()
        channels, squeezed = self.shape[1], self.squeezed
        x, grad = torch.randn(2, *self.shape, generator=generator) + 0.5
        # so large that some factors are where a hard sigmoid is flat
        weights = {
            "squeeze_weight": (2 / channels**0.5, (squeezed, channels, 1, 1)),
            "squeeze_bias": (2, (squeezed,)),
            "excite_weight": (2 / squeezed**0.5, (channels, squeezed, 1, 1)),
            "excite_bias": (2, (channels,)),
        }
        weights = {
            name: (gain * torch.randn(shape, generator=generator)).to(self.weights)
            for name, (gain, shape) in weights.items()
        }
        return {"x": self.image(x), **weights, "grad": self.image(grad)}


SHAPES = [(1, 1, 1, 1), (2, 5, 1, 4), (3, 17, 3, 2), (2, 16, 8, 8), (2, 24, 9, 8), (1, 130, 5, 4), (1, 67, 33, 31)]
CASES = [Case(shape) for shape in SHAPES]
CASES += [Case((2, 20, 5, 7), act=act, gate=gate) for act in ("silu", "hswish") for gate in reference.GATES]
CASES += [Case((2, 6, 7, 8), layout=layout) for layout in ("nchw", "strided")]
CASES += [
    Case((2, 72, 9, 9), gate=gate, dtype=torch.bfloat16, weights=weights)
    for gate in reference.GATES
    for weights in (torch.float32, torch.bfloat16)
]


def run(function, case, inputs):
    """Result and gradients."""
    return outputs_and_grads(function, inputs, act=case.act, gate=case.gate)


def check_case(case, backend):
    inputs = case.inputs()
    got = run(partial(ops.squeeze_excite, backend=backend), case, inputs)
    want = run(reference.squeeze_excite, case, widened(inputs))
    assert got["y"].dtype == got["dx"].dtype == case.dtype
    # products of bfloat16 weights round between every two operators
    rounds = case.weights == torch.bfloat16
    for name, tensor in got.items():
        # the gradient of a factor is a sum over all pixels
        terms = 1 if name in ("y", "dx") else case.shape[2] * case.shape[3]
        tolerance = BFLOAT16_CHAIN if rounds else FLOAT32_CHAIN if tensor.dtype == torch.float32 else None
        assert_close(name, tensor, want[name], tolerance, floor=terms * float(inputs["grad"].abs().max()))
