"""Inputs shared by the operator tests, and what float64 makes of them."""

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import ConvBNParams, Stage, reference

# Distance from a kink of the activation below which rounding may choose the other slope; there the incoming gradient is
# zero. PyTorch's batch_norm rounds terms as large as the mean, hence the second margin, per unit of it.
KINK_MARGIN = 1e-3
KINK_MARGIN_OF_MEAN = 1e-6


@dataclass(frozen=True)
class Case:
    """One input of bn_act: shape (N, C, H, W), memory layout, type, and mean of x (its standard deviation is 1)."""

    shape: tuple[int, int, int, int]
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    mean: float = 0.5

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{'x'.join(map(str, self.shape))}-{self.layout}-{dtype}-mean{self.mean:g}"

    def inputs(self, act: str, *, residual: bool) -> dict[str, Tensor]:
        """x, weight, bias, running_mean, running_var, grad, and residual when asked for."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

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
                tensors[name] = with_layout(tensors[name].to(self.dtype), self.layout)
        for training in (True, False):
            z = reference.bn_act(
                *(tensors[n].double() for n in ("x", "weight", "bias")),
                running_mean=tensors["running_mean"].double(), running_var=tensors["running_var"].double(),
                act="identity", training=training, momentum=0.0,
            )  # fmt: skip
            for kink in {"relu": (0,), "relu6": (0, 6)}.get(act, ()):
                tensors["grad"][(z - kink).abs() < KINK_MARGIN + KINK_MARGIN_OF_MEAN * abs(self.mean)] = 0
        return tensors


def with_layout(x: Tensor, layout: str) -> Tensor:
    """x as contiguous (nchw), channels_last (nhwc), or a slice of a larger tensor that is neither (strided)."""
    if layout == "nchw":
        return x.contiguous()
    if layout == "nhwc":
        return x.contiguous(memory_format=torch.channels_last)
    larger = torch.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 2, x.shape[3] + 3), torch.nan, dtype=x.dtype)
    view = larger[:, 1:, 1:-1, 2:-1]
    view.copy_(x)
    return view


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


# One stage of a ChainCase: kind and channels of the result (a depthwise one keeps those of its input), kernel, stride,
# activation (tanh unless named), ! for running statistics.
_UNIT = re.compile(r"(pw|dense|dw)(\d+)?(?:k(\d+))?(?:s(\d+))?(?:/(\w+))?(!)?")
# Elements closer to a kink of their activation than this, in units of the condition number of the stages, may get the
# other slope by rounding in float32.
CHAIN_KINK_MARGIN = 1e-5
MAX_DRAWS = 50


class Drawn(NamedTuple):
    """Arguments of one chain, and the gradient of its result; residual may be x itself."""

    x: Tensor
    stages: list[Stage]
    residual: Tensor | None
    shuffle: bool
    grad: Tensor


class Exact(NamedTuple):
    """What float64 makes of a chain.

    Attributes:
        tensors: the result, running statistics and every gradient, under the names that `run_chain` gives.
        floors: of each, the size of the terms of which it is a sum or difference.
        kink: the smallest distance of an element from the kink of its activation, in units of the condition number.
    """

    tensors: dict[str, Tensor]
    floors: dict[str, float]
    kink: float


@dataclass(frozen=True)
class ChainCase:
    """One input of conv_bn_act_chain, for example `ChainCase((2, 8, 9, 7), "pw24/relu6 dw3s2! pw8", residual="x")`.

    Attributes:
        shape: (N, C, H, W) of x.
        units: the stages, one word each: pw16, pw16s2, dw7 (depthwise, kernel 7), dw7s2, dense8k3s2.
        residual: none, tensor, or x (x itself is added).
        shuffle: the stages see the odd channels of x.
        layout, dtype: of x, residual and grad; the convolution weights have this type too.
        mean: of x; its standard deviation is 1.
        x_grad: whether x requires grad; a dense convolution is native only without.
    """

    shape: tuple[int, int, int, int]
    units: str
    residual: str = "none"
    shuffle: bool = False
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32
    mean: float = 0.5
    x_grad: bool = True

    def __str__(self) -> str:
        said = ["x".join(map(str, self.shape)), self.units.replace(" ", "_")]
        if self.residual != "none":
            said.append(f"plus_{self.residual}")
        if self.shuffle:
            said.append("shuffle")
        if self.layout != "nhwc":
            said.append(self.layout)
        if self.dtype != torch.float32:
            said.append(str(self.dtype).removeprefix("torch."))
        if self.mean != 0.5:
            said.append(f"mean{self.mean:g}")
        return "-".join(said + ["input"] * (not self.x_grad))

    @property
    def pixels(self) -> int:
        """Of x: N * H * W."""
        n, _, height, width = self.shape
        return n * height * width

    def draw(self) -> tuple[Drawn, Exact]:
        """Inputs and what float64 makes of them, drawn again until no element is close to a kink.

        Raises:
            ValueError: after MAX_DRAWS attempts; the case has too many elements behind relu or relu6.
        """
        for attempt in range(MAX_DRAWS):
            drawn = self.draw_once(attempt)
            exact = exact_chain(drawn, x_grad=self.x_grad)
            if exact.kink > CHAIN_KINK_MARGIN:
                return drawn, exact
        raise ValueError(f"{self}: {MAX_DRAWS} draws all had an element at a kink")

    def draw_once(self, attempt: int = 0) -> Drawn:
        """The inputs; the same for the same case and attempt."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self} {attempt}".encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        x = normal(*self.shape) + self.mean
        # channels differ in mean and spread
        x = (x * (0.5 + torch.rand(1, x.shape[1], 1, 1, generator=generator))).to(self.dtype)
        n, channels, *size = self.shape
        shape, stages = (n, channels // 2 if self.shuffle else channels, *size), []
        for unit in self.units.split():
            kind, out, kernel, stride, act, running = _UNIT.fullmatch(unit).groups()
            n, channels, height, width = shape
            if kind == "dw":
                kernel, out = out, channels
            kernel, stride, out = int(kernel or 1), int(stride or 1), int(out)
            groups = channels if kind == "dw" else 1
            fan_in = channels // groups * kernel**2
            gamma = 1 + 0.5 * normal(out)
            if out > 2:
                gamma[0], gamma[-1] = 0, -1.5
            params = ConvBNParams(
                (normal(out, channels // groups, kernel, kernel) / fan_in**0.5).to(self.dtype),
                gamma,
                normal(out),
                0.5 * normal(out) + self.mean * (not stages),
                normal(out).abs() + 0.5,
            )
            stages.append(Stage(params, stride, kernel // 2, groups, act or "tanh", running is None, 0.3, 1e-3))
            shape = n, out, (height - 1) // stride + 1, (width - 1) // stride + 1
        x = with_layout(x, self.layout)
        residual = {"none": None, "x": x, "tensor": with_layout(normal(*shape).to(self.dtype), self.layout)}
        grad = normal(*(self.shape if self.shuffle else shape)).to(self.dtype)
        return Drawn(x, stages, residual[self.residual], self.shuffle, with_layout(grad, self.layout))


def run_chain(function: Callable[..., Tensor], drawn: Drawn, *, x_grad: bool = True) -> dict[str, Tensor]:
    """Run function(x, stages, residual=..., shuffle=...) both ways: result, running statistics, every gradient."""
    x = drawn.x.detach().requires_grad_(x_grad)
    residual, leaves = None, {"dx": x} if x_grad else {}
    if drawn.residual is drawn.x:
        residual = x
    elif drawn.residual is not None:
        leaves["dresidual"] = residual = drawn.residual.detach().requires_grad_()
    stages, running = [], {}
    for i, stage in enumerate(drawn.stages):
        weight, *affine_and_running = stage.params
        gamma, beta, mean, var = (t.detach().clone() for t in affine_and_running)
        leaves |= {f"dgamma{i}": gamma.requires_grad_(), f"dbeta{i}": beta.requires_grad_()}
        running |= {f"running_mean{i}": mean, f"running_var{i}": var}
        stages.append(stage._replace(params=ConvBNParams(weight, gamma, beta, mean, var)))
    y = function(x, stages, residual=residual, shuffle=drawn.shuffle)
    y.backward(drawn.grad)
    return {"y": y.detach(), **running, **{name: leaf.grad for name, leaf in leaves.items()}}


def widened_chain(drawn: Drawn) -> Drawn:
    """The same inputs in float64."""
    x = drawn.x.double()
    residual = x if drawn.residual is drawn.x else None if drawn.residual is None else drawn.residual.double()
    stages = [s._replace(params=ConvBNParams(*(t.double() for t in s.params))) for s in drawn.stages]
    return Drawn(x, stages, residual, drawn.shuffle, drawn.grad.double())


def exact_chain(drawn: Drawn, *, x_grad: bool = True) -> Exact:
    """Results in float64 by the reference's functions, and the sizes of what was added up on the way."""
    wide = widened_chain(drawn)
    tensors = run_chain(lambda *args, **kw: _chain(*args, **kw, at=[], fixed=False), wide, x_grad=x_grad)
    # Gradients are sums and differences of those that BatchNorm with fixed statistics has.
    at: list[dict[str, Tensor]] = []
    fixed = run_chain(lambda *args, **kw: _chain(*args, **kw, at=at, fixed=True), wide, x_grad=x_grad)
    floors, condition, kink = dict.fromkeys(tensors, 0.0), 1.0, torch.inf
    for i, (stage, seen) in enumerate(zip(wide.stages, at, strict=True)):
        weight, gamma = stage.params.conv_weight, stage.params.bn_weight
        conv, z, dz, rstd = (seen[name].detach() for name in ("conv", "z", "dz", "rstd"))
        # root of the sum of squares of a convolution's terms, per standard deviation of their sum: how rounding grows
        squares = F.conv2d(seen["x"].detach().square(), weight.square(), None, *stage[1:3], 1, stage.groups)
        condition = max(condition, float((squares.mean((0, 2, 3)).sqrt() * rstd).max()))
        for point in {"relu": (0,), "relu6": (0, 6)}.get(stage.act, ()):
            moving = z[:, gamma != 0]
            if moving.numel():
                kink = min(kink, float((moving - point).abs().min()) / condition)
        size = float(conv.square().mean((0, 2, 3)).sqrt().max())
        xhat = (conv - conv.mean((0, 2, 3), keepdim=True)) * rstd.view(1, -1, 1, 1)
        floors |= {
            "y": float(gamma.abs().max()) * condition,
            f"running_mean{i}": size * condition,
            f"running_var{i}": size**2 * condition,
            f"dbeta{i}": float(dz.square().sum((0, 2, 3)).sqrt().max()) * condition,
            f"dgamma{i}": float((dz * xhat).square().sum((0, 2, 3)).sqrt().max()) * condition,
        }
    if x_grad:
        floors["dx"] = float(fixed["dx"].abs().max()) * condition
    return Exact(tensors, floors, kink)


def _chain(
    x: Tensor,
    stages: Sequence[Stage],
    *,
    residual: Tensor | None,
    shuffle: bool,
    at: list[dict[str, Tensor]],
    fixed: bool,
) -> Tensor:
    """The reference's chain, leaving in `at` what it passes; `fixed`: statistics of the batch count as constants."""
    if shuffle:
        return torch.cat((x[:, 0::2], _chain(x[:, 1::2], stages, residual=None, shuffle=False, at=at, fixed=fixed)), 1)
    for stage in stages:
        params, stride, padding, groups, act, training, momentum, eps = stage
        weight, *affine, mean, var = params
        conv = F.conv2d(x, weight, None, stride, padding, 1, groups)
        rstd = ((conv.var((0, 2, 3), correction=0) if training else var) + eps).rsqrt()
        if fixed and training:
            mean, var = conv.detach().mean((0, 2, 3)), conv.detach().var((0, 2, 3), correction=0)
        z = reference.bn_act(
            conv, *affine, running_mean=mean, running_var=var,
            act="identity", training=training and not fixed, momentum=momentum, eps=eps,
        )  # fmt: skip
        seen = {"x": x, "conv": conv, "z": z, "rstd": rstd}
        z.register_hook(partial(seen.__setitem__, "dz"))
        at.append(seen)
        x = reference.ACTIVATIONS[act](z)
    return x if residual is None else x + residual
