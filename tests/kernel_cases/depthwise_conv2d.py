"""Inputs of depthwise_conv2d, and the check of its results against float64."""

from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from tolerances import BFLOAT16_CHAIN, assert_close

from kernel_cases.case import KernelCase, outputs_and_grads, widened
from nasfast import ops
from nasfast.ops import reference


@dataclass(frozen=True)
class Case(KernelCase):
    """One input: shape (N, C, H, W), kernel, stride, dilation, memory layout, type of x and of the weight."""

    shape: tuple[int, int, int, int]
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32

    def inputs(self):
        """x, weight and grad, the gradient of the result."""
        generator = self.generator()
        n, channels, height, width = self.shape
        x = torch.randn(self.shape, generator=generator) + 0.5
        weight = torch.randn(channels, 1, self.kernel, self.kernel, generator=generator).to(self.weight_dtype)
        size = ((height - 1) // self.stride + 1, (width - 1) // self.stride + 1)
        grad = torch.randn(n, channels, *size, generator=generator)
        return {"x": self.image(x), "weight": weight, "grad": self.image(grad)}


# every kernel with every stride and dilation; the channels fill vectors, several images share one, or neither
CASES = [
    Case(shape, kernel, stride, dilation)
    for kernel, stride, dilation in product((3, 5, 7), (1, 2), (1, 2))
    for shape in ((2, 16, 8, 8), (5, 6, 9, 7), (1, 17, 2, 3))
]
CASES += [
    Case((1, 1, 1, 1), 7, 2, 2),
    Case((1, 1, 5, 4), 5),
    Case((33, 1, 4, 4), 5, 2),
    Case((3, 4, 6, 5), 3, 2, 2),
    Case((2, 64, 7, 5), 5, 1, 2),
    Case((2, 64, 14, 14), 3),
    Case((2, 64, 14, 14), 7, 2),
    # several strips, sums flushed in between
    Case((1, 8, 33, 31), 5, 1, 2),
    Case((1, 8, 33, 31), 3, 2, 2),
    # groups of channels
    Case((1, 200, 6, 40), 7, 1, 2),
    Case((1, 200, 6, 40), 7, 2, 1),
]
CASES += [
    Case((2, 6, 9, 8), kernel, stride, dilation, layout)
    for layout in ("nchw", "strided")
    for kernel, stride, dilation in ((3, 1, 1), (5, 2, 1), (5, 1, 2))
]
CASES += [
    Case(shape, kernel, stride, dilation, layout, torch.bfloat16, weight_dtype)
    for weight_dtype in (torch.float32, torch.bfloat16)
    for shape, layout in (((2, 16, 8, 8), "nhwc"), ((3, 6, 7, 9), "nhwc"), ((1, 17, 5, 6), "strided"))
    for kernel, stride, dilation in ((3, 1, 1), (5, 2, 1), (5, 1, 2), (3, 2, 2))
]


def run(function, case, inputs):
    """Result and both gradients."""
    return outputs_and_grads(function, inputs, stride=case.stride, dilation=case.dilation)


def check_case(case, backend):
    inputs = case.inputs()
    wide = widened(inputs)
    got = run(partial(ops.depthwise_conv2d, backend=backend), case, inputs)
    want = run(reference.depthwise_conv2d, case, wide)
    # for every sum, the root of the sum of its squared terms
    sizes = run(reference.depthwise_conv2d, case, {name: tensor.square() for name, tensor in wide.items()})
    for name, tensor in got.items():
        assert tensor.dtype == (case.weight_dtype if name == "dweight" else case.dtype)
        tolerance = BFLOAT16_CHAIN if backend == "reference" and case.dtype == torch.bfloat16 else None
        assert_close(name, tensor, want[name], tolerance, floor=float(sizes[name].sqrt().max()))
