"""Inputs of bn_act, and the check of its results against float64."""

from dataclasses import dataclass

import torch
from devices import on_device
from tolerances import assert_close
from torch import Tensor

from kernel_cases.case import KernelCase, outputs_and_grads, widened
from nasfast import ops
from nasfast.ops import reference

ACTS = tuple(reference.ACTIVATIONS)
# where the slope of an activation jumps
KINKS = {"relu": (0,), "relu6": (0, 6), "hswish": (-3, 3)}
EPS = 1e-3

# Distance from a kink of the activation below which rounding may choose the other slope; there the incoming gradient is
# zero. PyTorch's batch_norm rounds terms as large as the mean, hence the second margin, per unit of it.
KINK_MARGIN = 1e-3
KINK_MARGIN_OF_MEAN = 1e-6


@dataclass(frozen=True)
class Case(KernelCase):
    """One input of bn_act: shape (N, C, H, W), memory layout, type, and mean of x (its standard deviation is 1)."""

    shape: tuple[int, int, int, int]
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    mean: float = 0.5

    def inputs(self, act: str, *, residual: bool) -> dict[str, Tensor]:
        """x, weight, bias, running_mean, running_var, grad, and residual when asked for."""
        generator = self.generator()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        channels = self.shape[1]
        tensors = {
            "x": normal(*self.shape) + self.mean,
            "weight": normal(channels) + 2,
            "bias": normal(channels) + 1,
            "running_mean": normal(channels) + self.mean,
            "running_var": normal(channels).abs() + 0.5,
            "grad": normal(*self.shape),
        }
        if residual:
            tensors["residual"] = normal(*self.shape)
        for name in ("x", "grad", "residual"):
            if name in tensors:
                tensors[name] = self.image(tensors[name])
        for training in (True, False):
            z = reference.bn_act(
                *(tensors[n].double() for n in ("x", "weight", "bias")),
                running_mean=tensors["running_mean"].double(),
                running_var=tensors["running_var"].double(),
                act="identity",
                training=training,
                momentum=0.0,
            )
            for kink in KINKS.get(act, ()):
                tensors["grad"][(z - kink).abs() < KINK_MARGIN + KINK_MARGIN_OF_MEAN * abs(self.mean)] = 0
        return tensors


CASES = [
    Case((1, 1, 2, 2)),
    Case((1, 3, 5, 7)),
    Case((1, 3, 5, 7), "nchw"),
    Case((2, 17, 1, 1)),
    Case((2, 17, 9, 5)),
    Case((2, 17, 9, 5), "nchw"),
    Case((2, 17, 9, 5), "strided"),
    Case((3, 1, 8, 11)),
    Case((4, 72, 14, 14)),
    Case((2, 5, 37, 41), "nchw"),
    # more rows than work items, so that an item has several tiles
    Case((4, 9, 60, 61)),
    Case((2, 24, 12, 12), mean=1e3),
    Case((2, 24, 12, 12), mean=1e4),
    Case((2, 24, 12, 12), "nchw", mean=1e4),
    Case((2, 24, 12, 12), "strided", mean=-1e4),
    Case((2, 17, 9, 5), dtype=torch.bfloat16),
    Case((2, 17, 9, 5), "nchw", dtype=torch.bfloat16),
    Case((2, 17, 9, 5), "strided", dtype=torch.bfloat16),
    Case((4, 72, 14, 14), dtype=torch.bfloat16),
    Case((2, 24, 12, 12), dtype=torch.bfloat16, mean=100),
]


def run(function, tensors, *, act, training):
    """Run function forward and backward on copies of the tensors: result, running statistics, every gradient."""
    running = {name: tensors[name].clone() for name in ("running_mean", "running_var")}
    arguments = {name: tensor for name, tensor in tensors.items() if name not in running}
    settings = {"act": act, "training": training, "momentum": 0.3, "eps": EPS}
    return outputs_and_grads(function, arguments, **running, **settings) | running


def rstd(x):
    return (x.double().var((0, 2, 3), correction=0) + EPS).rsqrt()


def check_case(case, act, residual, training, backend):
    check(case.inputs(act, residual=residual), act, training, backend)


def check(tensors, act, training, backend):
    """The results for these tensors are those of float64; a GPU's backend gets them where it runs."""
    arguments = tensors if backend in ("cpu", "reference") else {name: on_device(t) for name, t in tensors.items()}
    got = run(lambda **kw: ops.bn_act(**kw, backend=backend), arguments, act=act, training=training)
    want = run(reference.bn_act, widened(tensors), act=act, training=training)
    assert got["y"].dtype == got["dx"].dtype == tensors["x"].dtype
    # of a gradient, dz and its projections on 1 and xhat may cancel: their size is that of grad * weight / std
    floor = float(tensors["grad"].abs().max() * (tensors["weight"].abs() * rstd(tensors["x"])).max().clamp(min=1))
    # the native kernel subtracts the mean from x; PyTorch's batch_norm, which the reference calls, subtracts products
    # of both with weight / std, as large as this
    terms = 0.0
    if backend == "reference":
        std = rstd(tensors["x"]) if training else (tensors["running_var"].double() + EPS).rsqrt()
        terms = float((tensors["x"].double().abs().amax((0, 2, 3)) * tensors["weight"].abs() * std).max())
    for name, tensor in got.items():
        size = floor * max(1.0, terms) if name.startswith("d") else terms
        assert_close(name, tensor.cpu(), want[name], floor=size)
