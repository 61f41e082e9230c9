"""Inputs of pool_3x3, and the check of its results against float64."""

from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from tolerances import assert_close

from kernel_cases.case import KernelCase, outputs_and_grads, widened, with_layout
from nasfast import ops
from nasfast.ops import reference

KINDS = ("max", "avg")


@dataclass(frozen=True)
class Case(KernelCase):
    """One input: shape (N, C, H, W), kind, stride, memory layout, type."""

    shape: tuple[int, int, int, int]
    kind: str = "max"
    stride: int = 1
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32

    def inputs(self):
        """x, of few values so that maxima are often tied, and grad, the gradient of the result."""
        generator = self.generator()
        x = torch.randint(-2, 3, self.shape, generator=generator)
        size = [(n - 1) // self.stride + 1 for n in self.shape[2:]]
        grad = torch.randn(*self.shape[:2], *size, generator=generator)
        return {"x": self.image(x), "grad": self.image(grad)}


SHAPES = [
    (1, 1, 1, 1),
    (2, 5, 1, 4),
    (2, 5, 4, 1),
    (1, 17, 2, 2),
    (1, 1, 3, 2),
    (3, 6, 7, 9),
    (2, 16, 8, 8),
    (2, 64, 5, 6),
    (1, 17, 33, 31),
]
CASES = [Case(shape, kind, stride) for shape, kind, stride in product(SHAPES, KINDS, (1, 2))]
CASES += [
    Case((2, 6, 7, 8), kind, stride, layout, dtype)
    for kind, stride in product(KINDS, (1, 2))
    for layout, dtype in (("nchw", torch.float32), ("strided", torch.float32), ("nhwc", torch.bfloat16))
]
CASES += [Case((2, 64, 8, 9), kind, stride, "nhwc", torch.bfloat16) for kind, stride in product(KINDS, (1, 2))]


def run(function, case, inputs):
    """Result and gradient."""
    return outputs_and_grads(function, inputs, kind=case.kind, stride=case.stride)


def check_case(case, backend):
    inputs = case.inputs()
    got = run(partial(ops.pool_3x3, backend=backend), case, inputs)
    want = run(reference.pool_3x3, case, widened(inputs))
    assert got["y"].dtype == got["dx"].dtype == case.dtype
    if case.kind == "max":
        assert torch.equal(got["y"].double(), want["y"])
    for name, tensor in got.items():
        # PyTorch adds up to nine gradients in bfloat16
        loose = 9 * 2**-8 if backend == "reference" and case.dtype == torch.bfloat16 else 0
        assert_close(
            name, tensor, want[name], (loose, loose) if loose else None, floor=float(inputs["grad"].abs().max())
        )


def check_special_values(stride):
    """Infinite numbers and NaN go where PyTorch sends them, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0])
    for weights in ([1.0, 0, 0, 0], [8.0, 1, 1, 4]):
        index = torch.multinomial(torch.tensor(weights), 2 * 17 * 9 * 7, replacement=True, generator=generator)
        x = with_layout(values[index].view(2, 17, 9, 7), "nhwc")
        case = Case((2, 17, 9, 7), "max", stride)
        grad = torch.randn(case.inputs()["grad"].shape, generator=generator)
        got = run(partial(ops.pool_3x3, backend="cpu"), case, {"x": x, "grad": grad})
        want = run(reference.pool_3x3, case, {"x": x, "grad": grad})
        torch.testing.assert_close(got["y"], want["y"], rtol=0, atol=0, equal_nan=True)
        assert_close("dx", got["dx"], want["dx"].double(), floor=float(grad.abs().max()))
