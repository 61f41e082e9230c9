"""Inputs of mixed_bn, and the check of its results against float64."""

from dataclasses import dataclass
from functools import partial

import torch
from tolerances import assert_close

from kernel_cases.case import KernelCase
from nasfast import ops
from nasfast.ops import reference

EPS = 1e-3


@dataclass(frozen=True)
class MixedCase(KernelCase):
    """One input of mixed_bn, for example `MixedCase((2, 6, 9, 7), "nxn")`.

    Attributes:
        shape: (N, C, H, W) of every tensor.
        kinds: a letter per tensor: n is normalised, x is not.
        layout, dtype: layout and type of the tensors and the gradient.
        mean: mean of the tensors; their standard deviation is 1.
    """

    shape: tuple[int, int, int, int]
    kinds: str
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    mean: float = 0.5

    @property
    def normalize(self) -> list[bool]:
        return [kind == "n" for kind in self.kinds]

    def draw(self, device="cpu") -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """xs, gates (the second of which is 0, as is the first of one), and the gradient of the result."""
        generator = self.generator()

        def image(mean):
            return self.image((torch.randn(self.shape, generator=generator) + mean).to(device))

        xs = [image(self.mean) for _ in self.kinds]
        gates = torch.randn(len(xs), generator=generator)
        gates[min(1, len(xs) - 1)] = 0
        return xs, gates.to(device), image(0)


CASES = [
    MixedCase((1, 1, 2, 2), "n"),
    MixedCase((1, 6, 5, 7), "nnn"),
    MixedCase((1, 6, 1, 3), "nxn"),  # fewer pixels than one row of the kernels
    MixedCase((2, 1, 9, 5), "nxn"),
    MixedCase((2, 16, 8, 8), "nxn", "nchw"),
    MixedCase((2, 16, 9, 7), "nxn", "strided"),
    MixedCase((2, 48, 5, 3), "xnn"),
    MixedCase((2, 17, 9, 5), "nnxxnnnnnnn"),
    MixedCase((3, 64, 4, 4), "nn"),
    MixedCase((2, 100, 3, 5), "nx"),
    MixedCase((2, 16, 8, 8), "nnnnx" * 7),
    MixedCase((2, 3, 1, 1), "xxx"),
    # more rows than one block, and more than one item per thread
    MixedCase((3, 16, 93, 95), "nx"),
    MixedCase((4, 6, 61, 60), "nn"),
    MixedCase((2, 6, 12, 13), "nn", mean=1e3),
    MixedCase((2, 24, 12, 12), "nxn", mean=1e4),
    MixedCase((2, 24, 12, 12), "nn", "strided", mean=-1e4),
    MixedCase((2, 6, 9, 7), "nxn", dtype=torch.bfloat16),
    MixedCase((2, 16, 9, 7), "nnx", "nchw", dtype=torch.bfloat16),
    MixedCase((4, 72, 7, 7), "nn", "strided", dtype=torch.bfloat16),
    MixedCase((2, 24, 12, 12), "nn", dtype=torch.bfloat16, mean=100),
]


def run(function, xs, gates, grad, normalize):
    """Run function both ways on copies: the result and every gradient."""
    leaves = [x.detach().requires_grad_() for x in xs]
    gates = gates.detach().clone().requires_grad_()
    y = function(leaves, gates, normalize=normalize, eps=EPS)
    y.backward(grad)
    return {"y": y, "dgates": gates.grad, **{f"dx{k}": leaf.grad for k, leaf in enumerate(leaves)}}


def widened(xs, gates, grad):
    return [x.double() for x in xs], gates.double(), grad.double()


def check_case(case, backend, device="cpu"):
    inputs = case.draw()
    got = run(partial(ops.mixed_bn, backend=backend), *case.draw(device), case.normalize)
    got = {name: tensor.cpu() for name, tensor in got.items()}
    assert got["y"].dtype == got["dx0"].dtype == case.dtype and got["dgates"].dtype == torch.float32
    xs, gates, grad = widened(*inputs)
    want = run(reference.mixed_bn, xs, gates, grad, case.normalize)
    # the sizes of the terms; the errors of n terms add up to the root of the sum of their squares
    normal = [
        ops.reference.mixed_bn([x], torch.ones(1).double(), normalize=[n], eps=EPS)
        for x, n in zip(xs, case.normalize, strict=True)
    ]
    rstd = [
        (x.var((0, 2, 3), correction=0) + EPS).rsqrt().max() if n else torch.ones(())
        for x, n in zip(xs, case.normalize, strict=True)
    ]
    floors = {
        "y": max(float((g * x).abs().max()) for g, x in zip(gates, normal, strict=True)),
        "dgates": max(float((grad * x).square().sum().sqrt()) for x in normal),
    }
    for k, gate in enumerate(gates):
        floors[f"dx{k}"] = float(grad.abs().max() * (gate * rstd[k]).abs())
    # PyTorch's batch_norm, which the reference calls, subtracts products of x and of the mean with rstd
    terms = max(float(x.abs().max() * r) for x, r in zip(xs, rstd, strict=True)) if backend == "reference" else 1.0
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], floor=floors[name] * max(1.0, terms))
