"""Inputs of squeeze_excite, and the check of its results against float64."""

import zlib
from dataclasses import dataclass

import torch
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close

from kernel_cases.layout import with_layout
from nasfast import ops
from nasfast.ops import reference


@dataclass(frozen=True)
class Case:
    """One input: shape (N, C, H, W), S, activation, gate, memory layout, type of x and of the weights."""

    shape: tuple[int, int, int, int]
    squeezed: int = 5
    act: str = "relu"
    gate: str = "hsigmoid"
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32

    def __str__(self) -> str:
        types = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.weights))
        return f"{'x'.join(map(str, self.shape))}-{self.squeezed}-{self.act}-{self.gate}-{self.layout}-{types}"

    def inputs(self):
        """x, W1, b1, W2, b2, and the gradient of the result."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        channels, squeezed = self.shape[1], self.squeezed
        x, grad = torch.randn(2, *self.shape, generator=generator) + 0.5
        shapes = (squeezed, channels, 1, 1), (squeezed,), (channels, squeezed, 1, 1), (channels,)
        # so large that some factors are where a hard sigmoid is flat
        gains = 2 / channels**0.5, 2, 2 / squeezed**0.5, 2
        drawn = [gain * torch.randn(shape, generator=generator) for gain, shape in zip(gains, shapes, strict=True)]
        drawn = [tensor.to(self.weights) for tensor in drawn]
        return with_layout(x.to(self.dtype), self.layout), *drawn, with_layout(grad.to(self.dtype), self.layout)


SHAPES = [(1, 1, 1, 1), (2, 5, 1, 4), (3, 17, 3, 2), (2, 16, 8, 8), (2, 24, 9, 8), (1, 130, 5, 4), (1, 67, 33, 31)]
CASES = [Case(shape) for shape in SHAPES]
CASES += [Case((2, 20, 5, 7), act=act, gate=gate) for act in ("silu", "hswish") for gate in reference.GATES]
CASES += [Case((2, 6, 7, 8), layout=layout) for layout in ("nchw", "strided")]
CASES += [
    Case((2, 72, 9, 9), gate=gate, dtype=torch.bfloat16, weights=weights)
    for gate in reference.GATES
    for weights in (torch.float32, torch.bfloat16)
]


def run(function, case, *inputs, **settings):
    """Result and gradients of function."""
    *given, grad = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    y = function(*leaves, act=case.act, gate=case.gate, **settings)
    names = ("dx", "dsqueeze_weight", "dsqueeze_bias", "dexcite_weight", "dexcite_bias")
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, leaves, grad), strict=True))}


def check_case(case, backend):
    inputs = case.inputs()
    got = run(ops.squeeze_excite, case, *inputs, backend=backend)
    want = run(reference.squeeze_excite, case, *(tensor.double() for tensor in inputs))
    assert got["y"].dtype == got["dx"].dtype == case.dtype
    # products of bfloat16 weights round between every two operators
    rounds = case.weights == torch.bfloat16
    for name, tensor in got.items():
        # the gradient of a factor is a sum over all pixels
        terms = 1 if name in ("y", "dx") else case.shape[2] * case.shape[3]
        tolerance = BFLOAT16_CHAIN if rounds else FLOAT32_CHAIN if tensor.dtype == torch.float32 else None
        assert_close(name, tensor, want[name], tolerance, floor=terms * float(inputs[-1].abs().max()))
