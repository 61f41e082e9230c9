"""Chains of convolutions: inputs, results in float64 and in eager PyTorch, and the check of the native chain."""

import re
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tolerances import BFLOAT16_CHAIN, NATIVE_CHAIN, assert_close
from torch import Tensor

from kernel_cases.bn_act import KINKS
from kernel_cases.case import saved_by, with_layout
from nasfast import ops
from nasfast.ops import ConvBNParams, Stage, reference
from nasfast.ops.chain.plan import StageShape, make_plan

BFLOAT16 = torch.bfloat16
native_chain = partial(ops.conv_bn_act_chain, backend="cpu")
ACTS = tuple(reference.ACTIVATIONS)

# One stage of a ChainCase: kind and channels of the result (a depthwise one keeps those of its input), kernel, stride,
# activation (tanh unless named), ! for running statistics.
_UNIT = re.compile(r"(pw|dense|dw)(\d+)?(?:k(\d+))?(?:s(\d+))?(?:/(\w+))?(!)?")
# Elements closer to a kink of their activation than this, in units of the condition number of the stages, may get the
# other slope by rounding in float32.
CHAIN_KINK_MARGIN = 1e-5
MAX_DRAWS = 50


class ChainInputs(NamedTuple):
    """Arguments of one chain, and the gradient of its result; residual may be x itself."""

    x: Tensor
    stages: list[Stage]
    residual: Tensor | None
    shuffle: bool
    grad: Tensor


def converted(function: Callable[[Tensor], Tensor], params: ConvBNParams) -> ConvBNParams:
    """The parameters with the function applied to each tensor that is there."""
    return ConvBNParams(*(None if tensor is None else function(tensor) for tensor in params))


def converted_images(function: Callable[[Tensor], Tensor], inputs: ChainInputs) -> ChainInputs:
    """The same for x, the gradient and the residual, which stays x where it is x."""
    x, residual = function(inputs.x), inputs.residual
    residual = x if residual is inputs.x else None if residual is None else function(residual)
    return inputs._replace(x=x, residual=residual, grad=function(inputs.grad))


def converted_chain(function: Callable[[Tensor], Tensor], inputs: ChainInputs) -> ChainInputs:
    """The same for all of its tensors."""
    stages = [stage._replace(params=converted(function, stage.params)) for stage in inputs.stages]
    return converted_images(function, inputs)._replace(stages=stages)


def planned_numbers(inputs: ChainInputs, *, recompute: bool = False) -> tuple[int, ...]:
    """The plan that the operators get for this chain."""
    n, channels, *size = inputs.x.shape
    shape = n, channels // 2 if inputs.shuffle else channels, *size
    stages = [
        StageShape(s.params.conv_weight.shape, s.params.conv_weight.dtype, False, s.stride, s.padding, s.groups, s.act)
        for s in inputs.stages
    ]
    return make_plan(shape, stages, recompute=recompute, shuffle=inputs.shuffle).numbers


def forward_arguments(inputs: ChainInputs, *, recompute: bool = False, **changes: Any) -> dict[str, Any]:
    """Arguments of the registered conv_bn_act_chain_fwd by name."""
    params = [stage.params for stage in inputs.stages]
    empty = inputs.x.new_empty(0, dtype=torch.float32)
    return {
        "x": inputs.x,
        "conv_weights": [p.conv_weight for p in params],
        "bn_weights": [p.bn_weight for p in params],
        "bn_biases": [p.bn_bias for p in params],
        "running_means": [empty if s.training else s.params.running_mean for s in inputs.stages],
        "running_vars": [empty if s.training else s.params.running_var for s in inputs.stages],
        "residual": None if inputs.residual is inputs.x else inputs.residual,
        "plan": planned_numbers(inputs, recompute=recompute),
        "eps": [stage.eps for stage in inputs.stages],
        "add_input": inputs.residual is inputs.x,
        "keep": True,
        **changes,
    }


def backward_arguments(
    inputs: ChainInputs, operators: Any = torch.ops.nasfast, *, recompute: bool = False, **changes: Any
) -> dict[str, Any]:
    """Arguments of conv_bn_act_chain_bwd by name, after a forward of these operators with the changes it shares."""
    forward = forward_arguments(inputs, recompute=recompute)
    forward |= {name: value for name, value in changes.items() if name in forward}
    with torch.no_grad():
        _, saved, statistics = operators.conv_bn_act_chain_fwd(**forward)
    shared = ("conv_weights", "bn_weights", "bn_biases", "plan", "eps", "add_input")
    return {
        "grad": inputs.grad,
        "x": inputs.x if recompute else None,
        "saved": saved,
        "statistics": statistics,
        "batch_statistics": [stage.training for stage in inputs.stages],
        "wants": [True] * (1 + 2 * len(inputs.stages)),
        **{name: forward[name] for name in shared},
        **changes,
    }


def check_opcheck(
    inputs: ChainInputs, operators: Any = torch.ops.nasfast, *, x_grad: bool = True, **changes: Any
) -> None:
    """Fake kernels, autograd and tracing of both operators of a namespace; changes: see `forward_arguments`.

    The outputs of the chain must leave no gap in the saved tensor, whose content is undefined.
    """
    arguments = forward_arguments(inputs, **changes)
    arguments["x"] = inputs.x.detach().clone(memory_format=torch.channels_last).requires_grad_(x_grad)
    for name in ("bn_weights", "bn_biases"):
        arguments[name] = [tensor.clone().requires_grad_() for tensor in arguments[name]]
    # aot_dispatch compares gradients of traced and untraced calls too, with tensors of dynamic shape
    torch.library.opcheck(operators.conv_bn_act_chain_fwd.default, (), arguments)
    if not x_grad:
        return
    arguments = backward_arguments(inputs, operators, **changes)
    for wants in (arguments["wants"], [False, True, False] + [True] * (2 * len(inputs.stages) - 2)):
        torch.library.opcheck(operators.conv_bn_act_chain_bwd.default, (), arguments | {"wants": wants})


class Exact(NamedTuple):
    """The results of a chain in float64.

    Attributes:
        tensors: the result, running statistics and every gradient, under the names that `run_chain` gives.
        floors: for each tensor, the size of the terms of which it is a sum or difference.
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
        layout, dtype: layout and type of x, residual and grad; the convolution weights have this type too.
        mean: mean of x; its standard deviation is 1.
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
        parts = ["x".join(map(str, self.shape)), self.units.replace(" ", "_")]
        if self.residual != "none":
            parts.append(f"plus_{self.residual}")
        if self.shuffle:
            parts.append("shuffle")
        if self.layout != "nhwc":
            parts.append(self.layout)
        if self.dtype != torch.float32:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.mean != 0.5:
            parts.append(f"mean{self.mean:g}")
        return "-".join(parts + ["input"] * (not self.x_grad))

    @property
    def pixels(self) -> int:
        """Pixels of x: N * H * W."""
        n, _, height, width = self.shape
        return n * height * width

    def draw(self) -> tuple[ChainInputs, Exact]:
        """Inputs and their results in float64, drawn again until no element is close to a kink.

        Raises:
            ValueError: after MAX_DRAWS attempts; the case has too many elements behind relu or relu6.
        """
        for attempt in range(MAX_DRAWS):
            inputs = self.draw_once(attempt)
            exact = exact_chain(inputs, x_grad=self.x_grad)
            if exact.kink > CHAIN_KINK_MARGIN:
                return inputs, exact
        raise ValueError(f"{self}: {MAX_DRAWS} draws all had an element at a kink")

    def draw_once(self, attempt: int = 0) -> ChainInputs:
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
        return ChainInputs(x, stages, residual[self.residual], self.shuffle, with_layout(grad, self.layout))


def run_chain(
    function: Callable[..., Tensor], inputs: ChainInputs, *, x_grad: bool = True, wants: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Run function(x, stages, residual=..., shuffle=...) both ways: result, running statistics, every gradient.

    Args:
        x_grad: whether dx is among the gradients.
        wants: names of the gradients that are wanted, None for all; the others are None if they are not computed.
    """
    x = inputs.x.detach()
    residual, leaves = None, {"dx": x} if x_grad else {}
    if inputs.residual is inputs.x:
        residual = x
    elif inputs.residual is not None:
        leaves["dresidual"] = residual = inputs.residual.detach()
    stages, running = [], {}
    for i, stage in enumerate(inputs.stages):
        params = converted(lambda tensor: tensor.detach().clone(), stage.params._replace(conv_weight=None))
        _, gamma, beta, mean, var, bias = params
        leaves |= {f"dgamma{i}": gamma, f"dbeta{i}": beta}
        if bias is not None:
            leaves[f"dbias{i}"] = bias
        running |= {f"running_mean{i}": mean, f"running_var{i}": var}
        stages.append(stage._replace(params=params._replace(conv_weight=stage.params.conv_weight)))
    for name, leaf in leaves.items():
        leaf.requires_grad_(wants is None or name in wants)
    y = function(x, stages, residual=residual, shuffle=inputs.shuffle)
    assert y.requires_grad == any(leaf.requires_grad for leaf in leaves.values())
    if y.requires_grad:
        y.backward(inputs.grad)
    return {"y": y.detach(), **running, **{name: leaf.grad for name, leaf in leaves.items()}}


# runs a chain with inputs both ways: run(drawn, x_grad=...), results as those of `run_chain`
Run = Callable[..., dict[str, Tensor]]
run_native = partial(run_chain, native_chain)


def check_wanted(
    chain: Callable[..., Tensor], inputs: ChainInputs, wants: Sequence[str], want: dict[str, Tensor]
) -> None:
    """Only these gradients are computed, and they are the same bits as in `want`, where all are."""
    got = run_chain(chain, inputs, wants=wants)
    for name in (name for name in got if name.startswith("d")):
        assert (got[name] is not None) == (name in wants), (name, wants)
        assert name not in wants or torch.equal(got[name], want[name]), (name, wants)


def check_kept(chain: Callable[..., Tensor], inputs: ChainInputs) -> None:
    """Where only the last BatchNorm trains, backward keeps what the plan says, and not x."""
    gamma = inputs.stages[-1].params.bn_weight.requires_grad_()
    saved, y = saved_by(lambda: chain(inputs.x, inputs.stages))
    n, _, height, width = inputs.x.shape
    assert all(stage.stride == 1 for stage in inputs.stages)
    channels = [stage.params.bn_weight.numel() for stage in inputs.stages]
    assert max(tensor.numel() for tensor in saved) == sum(-(-n * height * width * c // 64) * 64 for c in channels)
    assert not any(tensor.data_ptr() == inputs.x.data_ptr() for tensor in saved)
    y.backward(inputs.grad)
    assert gamma.grad is not None and inputs.x.grad is None


# the same inputs in float64
widened_chain = partial(converted_chain, Tensor.double)


def exact_chain(inputs: ChainInputs, *, x_grad: bool = True) -> Exact:
    """Results in float64 by the reference's functions, and the sizes of what was added up on the way."""
    wide = widened_chain(inputs)
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
        for point in KINKS.get(stage.act, ()):
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
        weight, *affine, mean, var, _ = params
        conv = F.conv2d(x, weight, None, stride, padding, 1, groups)
        rstd = ((conv.var((0, 2, 3), correction=0) if training else var) + eps).rsqrt()
        if fixed and training:
            mean, var = conv.detach().mean((0, 2, 3)), conv.detach().var((0, 2, 3), correction=0)
        z = reference.bn_act(
            conv,
            *affine,
            running_mean=mean,
            running_var=var,
            act="identity",
            training=training and not fixed,
            momentum=momentum,
            eps=eps,
        )
        seen = {"x": x, "conv": conv, "z": z, "rstd": rstd}
        z.register_hook(partial(seen.__setitem__, "dz"))
        at.append(seen)
        x = reference.ACTIVATIONS[act](z)
    return x if residual is None else x + residual


# channels around multiples of 4, 8 and 16 lanes; pixels around multiples of 8 and 64
POINTWISE = [
    ChainCase(shape, f"pw{out}")
    for shape, out in [
        ((1, 1, 1, 2), 1),
        ((1, 3, 7, 9), 97),
        ((2, 15, 5, 13), 17),
        ((3, 16, 8, 8), 16),
        ((1, 17, 8, 8), 15),
        ((2, 24, 9, 7), 49),
        ((5, 40, 13, 1), 3),
        ((1, 49, 1, 65), 40),
        ((2, 97, 5, 5), 1),
        ((3, 1, 4, 4), 24),
        # more rows than items, so that an item has several tiles
        ((2, 3, 65, 66), 5),
        # a depth whose rows would share one cache set if they were not moved apart
        ((1, 512, 3, 3), 7),
    ]
]
DEPTHWISE = [
    ChainCase((3, channels, *size), f"dw{kernel}s{stride}")
    for kernel, stride in product((3, 5, 7), (1, 2))
    for channels, size in [
        (5, (9, 8)),
        (17, (4, 4)),
        (3, (1, 5)),
        (33, (5, 1)),
        (4, (8, 11)),
        (16, (2, 2)),
        (1, (1, 1)),
    ]
]
CHAINS = [
    # groups of channels, because the rows of all of them would not fit the cache: many channels, and a wide map
    ChainCase((1, 1100, 5, 4), "dw7 dw7s2"),
    ChainCase((2, 40, 3, 500), "dw5 dw5s2"),
    # few tall images are cut into strips
    ChainCase((1, 8, 130, 3), "dw3 dw7s2 pw3"),
    ChainCase((2, 6, 67, 2), "pw13 dw5 dw5s2"),
    ChainCase((17, 6, 19, 2), "pw13 dw5 dw5s2"),
    # results of 8 MiB, which are written past the caches
    ChainCase((1, 16, 363, 362), "dw3 pw16 dw3s2"),
    ChainCase((1, 32, 257, 256), "pw32 dw3 pw16"),
    # dense stems, whose input has no gradient
    ChainCase((2, 3, 9, 11), "dense8k3s2", x_grad=False),
    ChainCase((1, 3, 9, 11), "dense8k3 dw3 pw8/identity", x_grad=False),
    ChainCase((2, 2, 8, 7), "dense17k5s2/relu6 pw5", x_grad=False),
    ChainCase((2, 7, 4, 5), "dense3k3s3 pw33", "tensor", x_grad=False),
    ChainCase((2, 1, 5, 5), "dense4k7", x_grad=False),
    # which a stem with a gradient gets from PyTorch
    ChainCase((2, 3, 9, 11), "dense8k3s2/relu dw3 pw8"),
    ChainCase((2, 3, 9, 11), "pw8s2 dw3 pw5"),
    ChainCase((2, 3, 9, 11), "pw8 dw3 pw5s2 dw3"),
    # blocks: expansions and residuals
    ChainCase((2, 24, 9, 7), "pw144/relu6 dw3/relu6 pw24/identity", "x"),
    ChainCase((1, 24, 12, 1), "pw72/tanh dw5s2/tanh pw40/identity"),
    ChainCase((2, 65, 4, 4), "pw195 dw7 pw65/identity", "x"),
    ChainCase((2, 6, 5, 5), "dw3 pw6/identity", "x"),
    ChainCase((2, 6, 5, 5), "pw6", "x"),
    ChainCase((2, 6, 5, 5), "dw5/relu6", "x"),
    ChainCase((2, 1, 5, 5), "pw7 dw3 pw1/identity", "x"),
    # any length
    ChainCase((2, 8, 8, 8), "dw3 pw8"),
    ChainCase((2, 8, 8, 8), "pw8/relu dw3/identity pw8/relu dw3s2/identity"),
    ChainCase((2, 8, 8, 8), "dw3/identity pw8/relu dw3/identity pw8/relu dw3/identity"),
    ChainCase((2, 8, 8, 8), "dw3 pw16 dw5 pw16 dw7 pw8", "x"),
    ChainCase((2, 16, 8, 8), "pw8/relu dw3/identity pw8/relu", shuffle=True),
    ChainCase((1, 34, 5, 3), "dw3 pw17 dw5 pw17", shuffle=True),
    # running statistics, in some stages or in all
    ChainCase((2, 24, 9, 7), "pw48! dw3! pw24/identity!", "x"),
    ChainCase((2, 24, 9, 7), "pw48! dw3 pw24/identity", "x"),
    ChainCase((2, 24, 9, 7), "pw48 dw3! pw24/identity!", "x"),
    ChainCase((1, 6, 1, 1), "pw12! dw3! pw6!", "x"),
    # far from zero: squares must not be subtracted
    ChainCase((2, 24, 9, 7), "pw48 dw3 pw24/identity", "x", mean=1e3),
    ChainCase((2, 24, 9, 7), "dw5 pw48", mean=-1e3),
    ChainCase((2, 3, 9, 7), "dense24k3", mean=1e3, x_grad=False),
    *(ChainCase((2, 9, 6, 5), "pw27 dw3 pw9/identity", "x", layout=layout) for layout in ("nchw", "strided")),
    *(ChainCase((2, 9, 6, 5), "dw3", "tensor", layout=layout) for layout in ("nchw", "strided")),
    *(ChainCase((2, 9, 6, 5), f"pw27/{act} dw3/{act} pw9/{act}", "tensor") for act in ACTS),
]
# With others in CHAINS, expansions on both sides of the width from which the native chain computes them again. No other
# backend makes a difference there.
PLANS = [
    ChainCase((3, 64, 4, 4), "pw192 dw7 pw64/identity", "x"),
    ChainCase((2, 72, 5, 7), "pw144/relu dw3s2/relu pw33/identity", "tensor"),
    ChainCase((2, 72, 4, 4), "pw144! dw3 pw72!"),
    ChainCase((2, 72, 4, 4), "pw144 dw3! pw72"),
    ChainCase((2, 72, 9, 7), "pw48 dw3s2 pw24/identity", mean=1e3),
    ChainCase((2, 72, 5, 7), "pw144/hswish dw3s2/hswish pw33/identity", "tensor"),
    ChainCase((2, 72, 5, 7), "pw144/silu dw5/silu pw72/identity", "x"),
]

BFLOAT16_CASES = [
    ChainCase((4, 24, 14, 14), "pw144 dw3 pw24/identity", "x"),
    ChainCase((4, 24, 14, 14), "pw144/relu6 dw3s2/relu6 pw33/identity"),
    ChainCase((4, 72, 7, 7), "pw216 dw7 pw72/identity", "x"),
    ChainCase((4, 72, 7, 7), "pw216/relu dw5s2/relu pw17/identity"),
    ChainCase((4, 17, 14, 13), "dw3", "tensor"),
    ChainCase((4, 49, 14, 13), "pw17/relu6"),
    ChainCase((8, 3, 14, 13), "pw9 dw3 pw5"),
    ChainCase((4, 3, 15, 15), "dense32k3s2", x_grad=False),
    ChainCase((2, 24, 14, 14), "dw3/identity pw24/relu dw3/identity pw24/relu"),
    ChainCase((2, 48, 14, 14), "pw24/relu dw3/identity pw24/relu", shuffle=True),
    ChainCase((4, 24, 14, 14), "pw48! dw3 pw24/identity!", "x"),
    ChainCase((1, 24, 130, 3), "pw48 dw5 pw24", "x"),
    ChainCase((4, 24, 14, 14), "pw144/hswish dw3s2/hswish pw33/identity"),
    ChainCase((4, 72, 7, 7), "pw216/hswish dw5/hswish pw72/identity", "x"),
    ChainCase((4, 24, 14, 14), "pw144/silu dw3/silu pw24/identity", "x"),
    ChainCase((4, 3, 15, 15), "dense32k3s2/silu", x_grad=False),
]


# large enough for several threads
BIG = [
    ChainCase((4, 24, 40, 40), "pw144/relu6 dw3/relu6 pw24/identity", "x"),
    ChainCase((2, 72, 28, 28), "pw144/relu6 dw7s2/relu6 pw72/identity"),
    ChainCase((1, 32, 120, 16), "dw5 pw40 dw3s2", dtype=BFLOAT16),
    ChainCase((4, 3, 40, 40), "dense24k3s2 dw3 pw16", x_grad=False),
    ChainCase((2, 48, 28, 28), "pw24/relu dw3/identity pw24/relu", shuffle=True),
    ChainCase((2, 16, 257, 256), "dw3 pw16/relu6 dw3/relu6 pw16"),
]


def eager_autocast(x, stages, *, residual, shuffle):
    """The chain in plain PyTorch, as a user has it without nasfast."""
    if shuffle:
        return torch.cat((x[:, 0::2], eager_autocast(x[:, 1::2], stages, residual=None, shuffle=False)), dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        for params, *geometry, act, training, momentum, eps in stages:
            stride, padding, groups = geometry
            x = F.conv2d(x, params.conv_weight, None, stride, padding, 1, groups)
            running = params.running_mean, params.running_var
            x = reference.ACTIVATIONS[act](
                F.batch_norm(x, *running, params.bn_weight, params.bn_bias, training, momentum, eps)
            )
        return x if residual is None else x + residual


def relative_errors(got, exact):
    """Norm of the error over that of the truth, or of its terms where they cancel; without running statistics."""
    names = [name for name in exact.tensors if not name.startswith("running")]
    return {
        name: float((got[name].double() - (want := exact.tensors[name])).norm())
        / max(float(want.norm()), exact.floors[name])
        for name in names
    }


def mean_errors(
    case: ChainCase, *runs: Run, draws: int, change: Callable[[ChainInputs], ChainInputs] = lambda inputs: inputs
) -> list[dict[str, float]]:
    """For each of these runs, its `relative_errors` as means over some draws, whose inputs `change` may change."""
    means: list[dict[str, float]] = [{} for _ in runs]
    for attempt in range(draws):
        inputs = change(case.draw_once(attempt))
        exact = exact_chain(inputs, x_grad=case.x_grad)
        for run, mean in zip(runs, means, strict=True):
            for name, error in relative_errors(run(inputs, x_grad=case.x_grad), exact).items():
                mean[name] = mean.get(name, 0.0) + error / draws
    return means


def check(case: ChainCase, inputs: ChainInputs, exact: Exact, run: Run = run_native) -> None:
    """The results of a chain are those of float64, element by element."""
    got = run(inputs, x_grad=case.x_grad)
    assert got["y"].dtype == case.dtype
    for name, want in exact.tensors.items():
        if name.startswith("running") and not inputs.stages[int(name[-1])].training:
            assert torch.equal(got[name].double(), want), name
        assert_close(name, got[name], want, NATIVE_CHAIN, floor=exact.floors[name])


def check_case(case: ChainCase) -> None:
    """`check` for the inputs that the case draws."""
    check(case, *case.draw())


def native_autocast(x, stages, **arguments):
    """The native chain as autocast to bfloat16 calls it."""
    with torch.autocast("cpu", BFLOAT16):
        return native_chain(x, stages, **arguments)


BFLOAT16_DRAWS = 4


def check_bfloat16(case, *, autocast=True, shift=0.0):
    """The relative norm stays within bounds, and no result is worse than eager autocast's.

    One result's error is a sum of random roundings, so draws are averaged, and what remains is a fifth of it.
    """

    def change(inputs: ChainInputs) -> ChainInputs:
        if autocast:  # which usually has float32 weights
            inputs = converted_images(Tensor.bfloat16, inputs)
        return inputs._replace(grad=inputs.grad + shift)

    case = case if autocast else replace(case, dtype=BFLOAT16)
    runs = partial(run_chain, native_autocast) if autocast else run_native, partial(run_chain, eager_autocast)
    ours, theirs = mean_errors(case, *runs, draws=BFLOAT16_DRAWS, change=change)
    # at a kink roundings choose slopes: few and large errors, of which only the sum can be compared, and that roughly
    smooth = not KINKS.keys() & {stage.act for stage in case.draw_once().stages}
    assert sum(ours.values()) <= (1.05 if smooth else 1.25) * sum(theirs.values()), (ours, theirs)
    assert ours["y"] <= BFLOAT16_CHAIN.relative
    for name in ours if smooth else ():
        assert ours[name] <= max(1.2 * theirs[name], 1e-4), (name, ours[name], theirs[name])
        assert ours[name] <= BFLOAT16_CHAIN.relative, (name, ours[name])
