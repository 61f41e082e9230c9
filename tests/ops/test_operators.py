"""What every operator promises: results of float64, only the gradients and memory that are needed, errors that help."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import NamedTuple

import pytest
import torch
from kernel_cases import IMAGE_OPERATORS, bn_act, chain, depthwise_conv2d, mixed_bn, pool_3x3
from kernel_cases.case import saved_by, with_layout
from pairs import pairwise
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, TOLERANCES, assert_close
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nasfast import ops
from nasfast.ops import reference

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
NHWC = torch.channels_last


class Operator(NamedTuple):
    """One operator with fixed settings, as a function of the tensors that may have gradients.

    Attributes:
        call: call(*tensors, backend=...).
        shapes: of the tensors, the images first.
        images: how many of the tensors are images.
        saved: bytes that forward keeps on the CPU, by tensors that want a gradient and their sizes in bytes.
        autocast: the type of the result of float32 tensors under autocast to bfloat16.
    """

    call: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    images: int
    saved: Callable[[Sequence[bool], Sequence[int]], int]
    autocast: torch.dtype = FLOAT32

    def draw(self, dtype: torch.dtype = FLOAT32) -> list[Tensor]:
        """The tensors; vectors and weights are float32, or float64 like the images."""
        inputs = [torch.randn(shape) for shape in self.shapes]
        narrow = torch.promote_types(dtype, FLOAT32)
        return [with_layout(t.to(dtype), "nhwc") if i < self.images else t.to(narrow) for i, t in enumerate(inputs)]

    def run(self, tensors: Sequence[Tensor], wants: Sequence[bool], backend: str | None) -> dict[str, Tensor | None]:
        """Result and gradients, by place; None for those that do not exist."""
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wants, strict=True)]
        y = self.call(*leaves, backend=backend)
        assert y.requires_grad == any(wants)
        if any(wants):
            generator = torch.Generator().manual_seed(1)
            y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        return {"y": y.detach(), **{f"d{i}": leaf.grad for i, leaf in enumerate(leaves)}}


def saved_by_bn_act(wants, sizes):
    # x, weight and bias, mean and variance of every channel in float64
    return sum(sizes[:3]) + 2 * 8 * 6 if any(wants[:3]) else 0


FILTERS = torch.linspace(-1, 1, 54).view(6, 1, 3, 3)


def chain_of_one(x, weight, bias, backend):
    params = ops.ConvBNParams(FILTERS.to(x.dtype), weight, bias)
    return ops.conv_bn_act_chain(x, [ops.Stage(params, 1, 1, 6, "tanh")], backend=backend)


IMAGE = (2, 6, 8, 6)
OPERATORS = {
    "bn_act": Operator(
        lambda x, weight, bias, residual, backend: ops.bn_act(
            x, weight, bias, residual=residual, act="tanh", backend=backend
        ),
        [IMAGE, (6,), (6,), IMAGE],
        1,
        saved_by_bn_act,
    ),
    "conv_bn_act_chain": Operator(
        chain_of_one,
        [IMAGE, (6,), (6,)],
        1,
        # the output of the convolution, which has the size of x, mean and variance in float64, and the parameters
        lambda wants, sizes: any(wants) * (sum(sizes) + sizes[0] // 576 * FILTERS.numel() + 2 * 8 * 6),
        BFLOAT16,
    ),
    "depthwise_conv2d": Operator(
        lambda x, weight, backend: ops.depthwise_conv2d(x, weight, dilation=2, backend=backend),
        [IMAGE, (6, 1, 5, 5)],
        1,
        # x only for the gradient of the weight
        lambda wants, sizes: wants[1] * sizes[0] + any(wants) * sizes[1],
        BFLOAT16,
    ),
    "mixed_bn": Operator(
        lambda a, b, c, gates, backend: ops.mixed_bn([a, b, c], gates, normalize=[True, False, True], backend=backend),
        [IMAGE, IMAGE, IMAGE, (3,)],
        3,
        lambda wants, sizes: sum(sizes) + 2 * 2 * 8 * 6 if any(wants) else 0,
    ),
    "max_pool_3x3": Operator(
        lambda x, backend: ops.pool_3x3(x, kind="max", backend=backend),
        [IMAGE],
        1,
        lambda wants, sizes: wants[0] * 2 * 6 * 8 * 6,  # a byte per maximum
    ),
    "avg_pool_3x3": Operator(
        lambda x, backend: ops.pool_3x3(x, kind="avg", stride=2, backend=backend), [IMAGE], 1, lambda wants, sizes: 0
    ),
    "squeeze_excite": Operator(
        lambda x, w1, b1, w2, b2, backend: ops.squeeze_excite(
            x, w1, b1, w2, b2, act="silu", gate="sigmoid", backend=backend
        ),
        [IMAGE, (5, 6, 1, 1), (5,), (6, 5, 1, 1), (6,)],
        1,
        # x, the weights, the means, and what goes into the activation and the gate
        lambda wants, sizes: any(wants) * (sizes[0] + sizes[1] + sizes[3] + 2 * 4 * (6 + 5 + 6)),
    ),
}


@pytest.fixture(params=OPERATORS)
def op(request):
    return OPERATORS[request.param]


MODES = {"train": (False, True), "train-residual": (True, True), "eval-residual": (True, False)}
# every activation in every layout and type, and every case in every mode
KINDS = {(case.layout, case.dtype): case for case in bn_act.CASES if case.mean == 0.5}
SETTINGS = pairwise(list(KINDS.values()), bn_act.ACTS, list(MODES))
SETTINGS += [(c, bn_act.ACTS[(i + j) % 6], mode) for i, c in enumerate(bn_act.CASES) for j, mode in enumerate(MODES)]
MODULES = [import_module(f"kernel_cases.{name}") for name in IMAGE_OPERATORS]
PARITY = [(module, case) for module in MODULES for case in module.CASES]


@pytest.mark.parametrize("case", bn_act.CASES, ids=str)
def test_bn_act_matches_float64(case, native):
    for _, act, mode in (setting for setting in SETTINGS if setting[0] == case):
        bn_act.check_case(case, act, *MODES[mode], "cpu")


@pytest.mark.parametrize(
    ("module", "case"), PARITY, ids=[f"{module.__name__.rpartition('.')[2]}-{case}" for module, case in PARITY]
)
def test_others_match_float64(module, case, native):
    module.check_case(case, "cpu")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_reference_in_other_types_and_layouts_matches_float64(module):
    """One case of each; what the reference computes, the tests of formulas below compare."""
    kinds = {(case.dtype, case.layout): case for case in module.CASES}
    for case in kinds.values():
        module.check_case(case, "reference")


def test_bn_act_of_the_reference_matches_float64():
    for case, act, mode in SETTINGS[::4]:
        bn_act.check_case(case, act, *MODES[mode], "reference")


def test_only_wanted_gradients_exist(op, backend):
    tensors = op.draw()
    want = op.run([t.double() for t in tensors], [True] * len(tensors), "reference")
    for wants in product([True, False], repeat=len(tensors)):
        for name, got in op.run(tensors, wants, backend).items():
            assert (got is not None) == (name == "y" or wants[int(name[1:])]), (name, wants)
            if got is not None:
                assert_close(name, got, want[name], FLOAT32_CHAIN, floor=10.0)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_saves_only_what_backward_needs(op, dtype, native):
    tensors = op.draw(dtype)
    for wants in product([True, False], repeat=len(tensors)):
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wants, strict=True)]
        run = partial(op.call, *leaves, backend="cpu")
        saved, _ = saved_by(run)
        assert sum(t.nbytes for t in saved) == op.saved(wants, [t.nbytes for t in tensors]), wants
        with torch.no_grad():
            assert saved_by(run)[0] == []


def test_second_derivatives_are_refused_by_the_native_backend_only(op, backend):
    x, *rest = op.draw()
    y = op.call(x.requires_grad_(), *rest, backend=backend)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    if backend == "reference":
        assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()
    else:
        refused = pytest.raises(RuntimeError, match="second derivatives are not implemented in the native .*: use back")
        with refused:
            gradient.square().sum().backward()
        # as in a gradient penalty: the gradient of the sum is a constant, and nothing but x requires grad
        y = op.call(x, *rest, backend=backend)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with refused:
            (y.sum() + gradient.square().sum()).backward()


def test_reference_gradcheck(op):
    leaves = [t.requires_grad_() for t in op.draw(torch.float64)]
    assert torch.autograd.gradcheck(partial(op.call, backend="reference"), leaves, fast_mode=True)


def test_compiles_without_graph_break(native):
    # modules.SqueezeExcitation leaves squeeze_excite to PyTorch when it is compiled
    compiled = [op for name, op in OPERATORS.items() if name != "squeeze_excite"]
    leaves = [[t.requires_grad_() for t in op.draw()] for op in compiled]
    torch.compiler.reset()

    def step(leaves):
        return [op.call(*tensors, backend=None) * 2 for op, tensors in zip(compiled, leaves, strict=True)]

    want, got = step(leaves), torch.compile(step, fullgraph=True, backend="aot_eager")(leaves)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    flat = [leaf for tensors in leaves for leaf in tensors]
    grads = [torch.autograd.grad(ys, flat, [torch.ones_like(y) for y in ys]) for ys in (got, want)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_autocast_checkpoint_and_inference(op, backend):
    leaves = [t.requires_grad_() for t in op.draw()]
    run = partial(op.call, backend=backend)
    want = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    got = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False).square().sum(), leaves)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(run(*leaves), run(*(t.detach() for t in leaves)), rtol=0, atol=0)
    with torch.autocast("cpu", BFLOAT16):
        y = run(*leaves)
        gradients = torch.autograd.grad(y.float().square().sum(), leaves)
    if backend == "cpu" or op is not OPERATORS["squeeze_excite"]:
        assert y.dtype == op.autocast
    for name, tensor, exact in zip("y" + "d" * len(leaves), (y, *gradients), (run(*leaves), *want), strict=True):
        assert_close(name, tensor, exact.double(), BFLOAT16_CHAIN, floor=10.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_reference_serves_the_other_types(op, dtype):
    tensors = op.draw(dtype)
    everything = [True] * len(tensors)
    got = op.run(tensors, everything, None)
    want = op.run([t.double() for t in tensors], everything, "reference")
    assert got["y"].dtype == torch.promote_types(dtype, FLOAT32 if op is OPERATORS["bn_act"] else dtype)
    for name, tensor in got.items():
        # PyTorch rounds sums and convolutions of float16 on the way
        assert_close(name, tensor, want[name], None if dtype == torch.float64 else BFLOAT16_CHAIN, floor=10.0)


def run_native(name, case):
    """Result and gradients of an operator on the native backend."""
    function = partial(getattr(ops, name), backend="cpu")
    if name == "bn_act":
        return bn_act.run(function, case.inputs("relu6", residual=True), act="relu6", training=True)
    if name == "mixed_bn":
        return mixed_bn.run(function, *case.draw(), case.normalize)
    if name == "conv_bn_act_chain":
        return chain.run_chain(function, case.draw_once(), x_grad=case.x_grad)
    return {"depthwise_conv2d": depthwise_conv2d, "pool_3x3": pool_3x3}[name].run(function, case, case.inputs())


THREADED = [
    ("bn_act", bn_act.Case((8, 24, 40, 40))),
    ("bn_act", bn_act.Case((8, 24, 40, 40), "nchw")),
    ("mixed_bn", mixed_bn.MixedCase((8, 6, 61, 60), "nxn")),
    ("depthwise_conv2d", depthwise_conv2d.Case((3, 6, 40, 40), 3, 2)),
    ("depthwise_conv2d", depthwise_conv2d.Case((70, 4, 9, 9), 5, 1, 2)),
    ("pool_3x3", pool_3x3.Case((9, 16, 20, 20), "max", 2)),
    ("pool_3x3", pool_3x3.Case((9, 16, 20, 20), "avg")),
    *(("conv_bn_act_chain", case) for case in chain.BIG),
]


@pytest.mark.parametrize(("name", "case"), THREADED, ids=str)
def test_bitwise_equal_for_every_run_and_thread_count(name, case, native):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run_native(name, case)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for key, tensor in run_native(name, case).items():
                assert torch.equal(tensor, single[key]), (key, count)
    finally:
        torch.set_num_threads(threads)


def opchecks():
    """Arguments of every registered operator, by its name: layouts, types, what is wanted and what is left out."""
    mean, var = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    for layout, dtype, residual, running in pairwise(*[("nhwc", "nchw"), (FLOAT32, BFLOAT16), (False, True), (0, 1)]):
        tensors = bn_act.Case((2, 5, 4, 3), layout, dtype).inputs("relu6", residual=residual)
        x, weight, bias = (tensors[name].requires_grad_() for name in ("x", "weight", "bias"))
        extra = tensors["residual"].requires_grad_() if residual else None
        statistics = (tensors["running_mean"], tensors["running_var"]) if running else (None, None)
        yield "bn_act_fwd", (x, weight, bias, extra, *statistics, 1e-5, "relu6")
    for wants in ([True] * 3, [False] * 3, [True, False, True], [False, True, False]):
        yield (
            "bn_act_bwd",
            (x.detach(), x.detach(), weight.detach(), bias.detach(), mean, var, 1e-5, "tanh", True, *wants),
        )
    for stride, dilation, dtype, wants in [
        (1, 1, FLOAT32, (True, True)),
        (2, 2, BFLOAT16, (False, True)),
        (1, 2, FLOAT32, (True, False)),
        (2, 1, FLOAT32, (False, False)),
    ]:
        x, weight, grad = depthwise_conv2d.Case((2, 5, 6, 5), 3, stride, dilation, "nhwc", dtype).inputs().values()
        leaves = x.clone().requires_grad_(wants[0]), weight.clone().requires_grad_(wants[1])
        yield "depthwise_conv2d_fwd", (*leaves, stride, dilation)
        saved = x if wants[1] else None
        yield "depthwise_conv2d_bwd", (grad, saved, list(x.shape), weight, stride, dilation, *wants)
    flags = [True, False, True]
    for layout, dtype in (("nhwc", BFLOAT16), ("nchw", FLOAT32)):
        xs, gates, grad = mixed_bn.MixedCase((2, 6, 4, 3), "nxn", dtype=dtype).draw()
        if layout == "nchw":  # one channel is both
            xs, grad = [x[:, :1].contiguous() for x in xs], grad[:, :1].contiguous()
        leaves = [x.detach().requires_grad_() for x in xs], gates.clone().requires_grad_()
        yield "mixed_bn_fwd", (*leaves, flags, 1e-3)
        statistics = torch.ops.nasfast.mixed_bn_fwd(xs, gates, flags, 1e-3)[1]
        for wants in ([True] * 4, [False, True, False, False], [False, False, False, True]):
            yield "mixed_bn_bwd", (grad, xs, gates, statistics, flags, 1e-3, wants)
    for kind, stride, dtype in pairwise(pool_3x3.KINDS, (1, 2), (FLOAT32, BFLOAT16)):
        x, grad = pool_3x3.Case((2, 5, 6, 5), kind, stride, "nhwc", dtype).inputs().values()
        yield "pool_3x3_fwd", (x, kind, stride, False)
        yield "pool_3x3_fwd", (x.clone(memory_format=NHWC).requires_grad_(), kind, stride, True)
        index = torch.ops.nasfast.pool_3x3_fwd(x, kind, stride, True)[1]
        yield "pool_3x3_bwd", (grad, index, list(x.shape), kind, stride)
    scale = torch.rand(2, 5)
    for dtype, second in ((FLOAT32, True), (BFLOAT16, False)):
        x = torch.randn(2, 5, 3, 4).to(dtype).contiguous(memory_format=NHWC)
        yield "squeeze_excite_sums", (x, x if second else None)
        yield "squeeze_excite_scale", (x, scale, scale if second else None)


@pytest.mark.parametrize("name", ["bn_act", "depthwise_conv2d", "mixed_bn", "pool_3x3", "squeeze_excite"])
def test_opcheck(name, native):
    for operator, arguments in opchecks():
        if operator.startswith(name):
            torch.library.opcheck(getattr(torch.ops.nasfast, operator).default, arguments)


# ---- errors

X, ONES, ZEROS, W = torch.ones(2, 3, 4, 4), torch.ones(3), torch.zeros(3), torch.ones(3, 1, 3, 3)
SE = {
    "squeeze_weight": torch.ones(5, 3, 1, 1),
    "squeeze_bias": torch.ones(5),
    "excite_weight": torch.ones(3, 5, 1, 1),
    "excite_bias": torch.ones(3),
}
X4, W6, SIX = torch.ones(2, 4, 5, 5), torch.ones(6, 4, 3, 3), torch.ones(6)
UNIT = ops.Stage(ops.ConvBNParams(torch.ones(6, 4, 1, 1), SIX, SIX))
GOOD = {
    "bn_act": {"x": X, "weight": ONES, "bias": ZEROS},
    "conv_bn_act": {"x": X4, "conv_weight": W6, "bn_weight": SIX, "bn_bias": SIX},
    "conv_bn_act_chain": {"x": X4, "stages": [UNIT]},
    "depthwise_conv2d": {"x": X, "weight": W},
    "mixed_bn": {"xs": [X, X], "gates": torch.ones(2), "normalize": [True, False]},
    "pool_3x3": {"x": X, "kind": "max"},
    "squeeze_excite": {"x": X, **SE},
}
ACT = "act must be one of identity, relu, relu6, tanh, hswish, silu, got 'gelu'"
MAPS = [
    (ValueError, r"x must be 4-d \(N, C, H, W\), got shape \(3, 4, 4\)", {"x": X[0]}),
    (TypeError, "x must be float32, bfloat16.*got torch.int64", {"x": X.long()}),
]
WRONG = {
    "bn_act": [
        *MAPS,
        (TypeError, "bias must be a tensor, got NoneType", {"bias": None}),
        (ValueError, r"weight must have shape \(3,\), got \(2,\)", {"weight": ONES[:2]}),
        (TypeError, "bias must be torch.float32 .*got torch.bfloat16; convert it", {"bias": ZEROS.bfloat16()}),
        (ValueError, "weight must be on cpu like x, got meta", {"weight": ONES.to("meta")}),
        (ValueError, ACT, {"act": "gelu"}),
        (ValueError, "eps must be positive, got 0", {"eps": 0}),
        (ValueError, "running_var is None", {"running_mean": ZEROS}),
        (ValueError, "running_mean must have shape", {"running_mean": ZEROS[:1], "running_var": ONES}),
        (ValueError, "training=False normalises with running statistics, but", {"training": False}),
        (ValueError, "residual must have the shape of the result", {"residual": X[:1]}),
        (ValueError, "residual must be on cpu", {"residual": X.to("meta")}),
        (ValueError, "cannot take batch statistics of an empty batch", {"x": X[:0]}),
        (ValueError, "single value per channel.*variance is always 0", {"x": X[:1, :, :1, :1]}),
    ],
    "conv_bn_act": [
        (ValueError, r"conv_weight must be 4-d \(out, in / groups, k, k\)", {"conv_weight": W6[0]}),
        (ValueError, "with groups=1 takes 3 channels.*got an input of 4 channels", {"conv_weight": W6[:, :3]}),
        (ValueError, "takes 4 channels and gives a multiple of 4", {"groups": 4, "conv_weight": W6[:, :1]}),
        (ValueError, "conv_weight must be at least 1 in every dimension, got", {"conv_weight": W6[:0]}),
        (ValueError, "stride and groups must be at least 1.*got stride=0", {"stride": 0}),
        (TypeError, r"one integer each, for both directions, got stride=\(1, 1\)", {"stride": (1, 1)}),
        (TypeError, "one integer each, for both directions, got stride=1.5", {"stride": 1.5}),
        (ValueError, "3x3 kernel with padding=0 does not fit", {"x": X4[:, :, :2]}),
        (ValueError, "conv_weight must be on cpu like x, got meta", {"conv_weight": W6.to("meta")}),
        (ValueError, r"conv_bias must have shape \(6,\), got \(4,\)", {"conv_bias": SIX[:4]}),
        (TypeError, r"conv_bias must be torch.float32 \(the type of conv_weight\)", {"conv_bias": SIX.double()}),
        (ValueError, "conv_bias must be on cpu like conv_weight, got meta", {"conv_bias": SIX.to("meta")}),
        (ValueError, "bn_weight must have shape", {"bn_weight": SIX[:4]}),
        (ValueError, "act must be one of", {"act": "gelu"}),
        (ValueError, r"residual must have the shape of the result, \(2, 6, 3, 3\)", {"residual": X4}),
    ],
    "conv_bn_act_chain": [
        (ValueError, "needs at least one stage", {"stages": []}),
        (TypeError, r"stages\[0\]: must be a Stage, got tuple", {"stages": [tuple(UNIT)]}),
        (ValueError, r"stages\[1\]: conv_weight of shape.*takes 4 channels", {"stages": [UNIT, UNIT]}),
        (
            ValueError,
            r"stages\[0\]: running_mean must have shape \(6,\), got \(4,\)",
            {"stages": [UNIT._replace(params=ops.ConvBNParams(*UNIT.params[:3], SIX[:4], SIX))]},
        ),
        (
            ValueError,
            r"stages\[0\]: cannot take batch statistics of a single value",
            {"x": X4[:1, :, :2, :2], "stages": [UNIT._replace(stride=2)]},
        ),
        (
            TypeError,
            "conv_weight must have the type of x",
            {"stages": [UNIT._replace(params=UNIT.params._replace(conv_weight=torch.ones(6, 4, 1, 1).bfloat16()))]},
        ),
        (ValueError, "residual must have the shape of the result", {"residual": X4}),
        (ValueError, "splits an even number of channels", {"x": X4[:, :3], "shuffle": True}),
        (ValueError, "takes no residual", {"residual": X4, "shuffle": True}),
        (ValueError, "keep the shape", {"x": torch.ones(2, 8, 5, 5), "shuffle": True}),
        (RuntimeError, "backend 'cuda'.*cannot serve", {"backend": "cuda"}),
    ],
    "depthwise_conv2d": [
        *MAPS,
        (ValueError, "x must have channels and pixels, got shape", {"x": X[:, :, :0]}),
        (ValueError, r"weight must be one of \[\(3, 1, 3, 3\).*for this x, got \(2, 1, 3, 3\)", {"weight": W[:2]}),
        (TypeError, "weight must be torch.float32, got torch.float64", {"weight": W.double()}),
        (ValueError, "weight must be on cpu like x, got meta", {"weight": W.to("meta")}),
        (ValueError, "stride must be 1 or 2, got 3", {"stride": 3}),
        (ValueError, "dilation must be 1 or 2, got 0", {"dilation": 0}),
    ],
    "mixed_bn": [
        (TypeError, "xs must be a list of tensors, got one tensor", {"xs": X}),
        (ValueError, "needs at least one tensor, got none", {"xs": []}),
        (TypeError, r"xs\[1\] must be a tensor, got int", {"xs": [X, 3]}),
        (ValueError, r"xs\[0\] must be 4-d \(N, C, H, W\), got shape \(3, 4, 4\)", {"xs": [X[0], X[0]]}),
        (TypeError, r"xs\[0\] must be float32, bfloat16.*got torch.int64", {"xs": [X.long()] * 2}),
        (ValueError, r"xs\[1\] must have shape \(2, 3, 4, 4\), got \(1, 3", {"xs": [X, X[:1]]}),
        (TypeError, r"xs\[1\] must be torch.float32, got torch.bfloat16", {"xs": [X, X.bfloat16()]}),
        (ValueError, r"xs\[1\] must be on cpu like xs\[0\], got meta", {"xs": [X, X.to("meta")]}),
        (ValueError, "gates must be on cpu like", {"gates": torch.ones(2).to("meta")}),
        (ValueError, "normalize must be one flag per tensor, 2, got 1", {"normalize": [True]}),
        (ValueError, r"gates must have shape \(2,\), got \(3,\)", {"gates": torch.ones(3)}),
        (TypeError, "gates must be torch.float32, got torch.bfloat16; convert", {"gates": torch.ones(2).bfloat16()}),
        (ValueError, "eps must be positive, got 0", {"eps": 0}),
        (ValueError, "cannot take batch statistics of an empty batch", {"xs": [X[:0]] * 2}),
        (ValueError, "a single value per channel.*larger batch", {"xs": [X[:1, :, :1, :1]] * 2}),
    ],
    "pool_3x3": [
        *MAPS,
        (ValueError, "x must have channels and pixels, got shape", {"x": X[:, :, :, :0]}),
        (ValueError, "kind must be max or avg, got 'mean'", {"kind": "mean"}),
        (ValueError, "stride must be 1 or 2, got 0", {"stride": 0}),
    ],
    "squeeze_excite": [
        *MAPS,
        (ValueError, ACT, {"act": "gelu"}),
        (ValueError, "gate must be one of hsigmoid, sigmoid, got 'tanh'", {"gate": "tanh"}),
        (ValueError, r"squeeze_weight must have shape \(5, 3, 1, 1\)", {"squeeze_weight": torch.ones(5, 7, 1, 1)}),
        (ValueError, "squeeze_bias must have at least one element", {"squeeze_bias": ONES[:0]}),
        (TypeError, "excite_bias must be torch.float32 .one type for all four", {"excite_bias": ONES.half()}),
        (TypeError, "squeeze_weight must be a tensor, got NoneType", {"squeeze_bias": None, "squeeze_weight": None}),
    ],
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in WRONG.items() for row in rows], ids=str)
def test_wrong_arguments_say_what_is_wrong(name, row):
    error, message, change = row
    with pytest.raises(error, match=rf"{name}\b.*{message}"):
        getattr(ops, name)(**{**GOOD[name], **change})


def test_kernels_refuse_what_would_corrupt_memory(native):
    xs, gates, grad = mixed_bn.MixedCase((2, 6, 4, 3), "nn").draw()
    x, scale = xs[0], torch.ones(2, 6)
    forward, backward = torch.ops.nasfast.mixed_bn_fwd, torch.ops.nasfast.mixed_bn_bwd
    statistics = forward(xs, gates, [True, True], 1e-3)[1]
    for wrong in (
        lambda: forward([], gates[:0], [], 1e-3),
        lambda: forward([x.contiguous() for x in xs], gates, [True, True], 1e-3),
        lambda: forward([xs[0], xs[1][:1]], gates, [True, True], 1e-3),
        lambda: forward([xs[0], xs[1].bfloat16()], gates, [True, True], 1e-3),
        lambda: forward(xs, gates[:1], [True, True], 1e-3),
        lambda: forward(xs, gates.double(), [True, True], 1e-3),
        lambda: forward(xs, gates, [True], 1e-3),
        lambda: backward(grad.contiguous(), xs, gates, statistics, [True, True], 1e-3, [True] * 3),
        lambda: backward(grad, xs, gates, statistics[1:], [True, True], 1e-3, [True] * 3),
        lambda: backward(grad, xs, gates, statistics, [True, True], 1e-3, [True] * 2),
        lambda: torch.ops.nasfast.squeeze_excite_sums(x, x[:1]),
        lambda: torch.ops.nasfast.squeeze_excite_sums(x.contiguous(), None),
        lambda: torch.ops.nasfast.squeeze_excite_scale(x, scale, scale[:, :5]),
        lambda: torch.ops.nasfast.pool_3x3_fwd(x.requires_grad_(), "max", 1, False),
    ):
        with pytest.raises(RuntimeError, match="mixed_bn|squeeze_excite_s.*must|`keep` must be true"):
            wrong()


# ---- the references are the formulas


def test_bn_act_is_its_formula():
    for case, training in product((c for c in bn_act.CASES if c.dtype == FLOAT32), (True, False)):
        tensors = bn_act.widened(case.inputs("relu6", residual=True))

        def formula(x, weight, bias, residual, *, running_mean, running_var, act, training, momentum, eps):
            mean, var = running_mean, running_var
            if training:
                mean = x.mean((0, 2, 3))
                var = (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3))
                count = x.numel() / x.shape[1]
                with torch.no_grad():
                    running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
                    running_var.copy_((1 - momentum) * running_var + momentum * var * count / (count - 1))
            scaled = (x - mean.view(1, -1, 1, 1)) / (var + eps).sqrt().view(1, -1, 1, 1)
            return (scaled * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)).clamp(0, 6) + residual

        got = bn_act.run(reference.bn_act, tensors, act="relu6", training=training)
        want = bn_act.run(formula, tensors, act="relu6", training=training)
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-9, atol=1e-9, msg=name)


def test_mixed_bn_is_its_formula_and_has_second_derivatives():
    def formula(xs, gates, *, normalize, eps):
        y = 0
        for k, x in enumerate(xs):
            mean = x.mean((0, 2, 3), keepdim=True)
            var = (x - mean).square().mean((0, 2, 3), keepdim=True)
            y = y + gates[k] * ((x - mean) / (var + eps).sqrt() if normalize[k] else x)
        return y

    for case in (case for case in mixed_bn.CASES if case.dtype == FLOAT32):
        inputs = mixed_bn.widened(*case.draw())
        got = mixed_bn.run(reference.mixed_bn, *inputs, case.normalize)
        want = mixed_bn.run(formula, *inputs, case.normalize)
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-8, atol=1e-8, msg=name)
    xs = torch.randn(3, 2, 3, 2, 2, dtype=torch.float64).unbind()
    leaves = [t.clone().requires_grad_() for t in (*xs, torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64))]
    assert torch.autograd.gradgradcheck(
        lambda *tensors: reference.mixed_bn(tensors[:-1], tensors[-1], normalize=[True, True, False]), leaves
    )


def test_a_residual_of_another_type_promotes(backend):
    x, residual = torch.randn(2, 5, 4, 4).to(BFLOAT16), torch.randn(2, 5, 4, 4)
    y = ops.bn_act(x, torch.ones(5), torch.zeros(5), residual=residual, backend=backend)
    want = reference.bn_act(x.double(), torch.ones(5).double(), torch.zeros(5).double(), residual=residual.double())
    assert y.dtype == FLOAT32
    # the native kernel rounds its own result to bfloat16 before PyTorch adds
    assert (y - want).abs().max() <= 6 * 2**-8


# ---- hostile numbers


def test_an_outlier_in_the_first_pixel_does_not_spoil_the_variance(native):
    # the first pixel is the first pivot of the shifted sums
    x = torch.randn(2, 3, 64, 64)
    x[0, :, 0, 0] = 1e4
    for layout in ("nhwc", "nchw"):
        mean, var = torch.zeros(3), torch.zeros(3)
        running = {"running_mean": mean, "running_var": var, "momentum": 1.0}
        ops.bn_act(with_layout(x, layout), ONES, ZEROS, **running, backend="cpu")
        assert_close("running_var", var, x.double().var((0, 2, 3)))


def test_bfloat16_rounds_not_a_number_to_itself(native):
    running = {"running_mean": ZEROS, "running_var": ONES, "training": False}
    x = torch.full((1, 3, 4, 4), torch.nan).view(torch.int32).bitwise_or(0x7FFF).view(FLOAT32)
    assert ops.bn_act(x.to(BFLOAT16), ONES, ZEROS, act="identity", **running, backend="cpu").isnan().all()


@pytest.mark.parametrize("stride", [1, 2])
def test_infinite_and_nan_maxima_go_where_pytorch_sends_them(stride, native):
    pool_3x3.check_special_values(stride)


# ---- of one operator


def test_mixed_bn_gives_a_tensor_that_is_there_twice_both_gradients(backend):
    (x, other), _, grad = mixed_bn.MixedCase((2, 6, 5, 4), "nn").draw()
    gates = torch.tensor([0.5, -2.0, 3.0])

    def run(function, *tensors):
        x, other, gates, grad = (t.detach() for t in tensors)
        leaves = [t.requires_grad_() for t in (x, other, gates)]
        y = function([x, other, x], gates, normalize=[True, True, False])
        return [y, *torch.autograd.grad(y, leaves, grad)]

    want = run(reference.mixed_bn, *(t.double() for t in (x, other, gates, grad)))
    for i, tensor in enumerate(run(partial(ops.mixed_bn, backend=backend), x, other, gates, grad)):
        assert_close(str(i), tensor, want[i], TOLERANCES[FLOAT32], floor=10.0)


def test_mixed_bn_with_gradients_too_large_for_the_cache_is_the_same(native):
    """Results of 8 MiB and more are written past it."""
    case = mixed_bn.MixedCase((8, 16, 64, 64), "nnnnn")
    xs, gates, grad = case.draw()
    run = partial(mixed_bn.run, partial(ops.mixed_bn, backend="cpu"))
    many, one = run(xs, gates, grad, case.normalize), run(xs[2:3], gates[2:3], grad, [True])
    assert sum(x.nbytes for x in xs) > 8 << 20 > xs[0].nbytes
    assert torch.equal(many["dx2"], one["dx0"])


def test_results_of_images_are_channels_last(native):
    for layout in ("nchw", "nhwc", "strided"):
        x = with_layout(torch.randn(2, 3, 6, 7), layout)
        for y in (
            ops.depthwise_conv2d(x, W, backend="cpu"),
            ops.squeeze_excite(x, **SE, backend="cpu"),
            ops.pool_3x3(x, kind="max", backend="cpu"),
        ):
            assert y.is_contiguous(memory_format=NHWC)
