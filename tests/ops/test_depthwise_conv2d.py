from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.depthwise_conv2d import CASES, Case, check_case, run
from kernel_cases.layout import with_layout
from tolerances import BFLOAT16_CHAIN, assert_close

from nasfast import ops
from nasfast.ops import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64_reference(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), list(product((3, 5, 7), (1, 2), (1, 2))), ids=lambda v: str(v)
)
def test_reference_matches_the_formula(kernel, stride, dilation):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    weight = torch.randn(3, 1, kernel, kernel, dtype=torch.float64)
    want = torch.zeros(2, 3, (5 - 1) // stride + 1, (4 - 1) // stride + 1, dtype=torch.float64)
    for h, w, i, j in product(range(want.shape[2]), range(want.shape[3]), range(kernel), range(kernel)):
        row, column = stride * h + dilation * (i - kernel // 2), stride * w + dilation * (j - kernel // 2)
        if 0 <= row < 5 and 0 <= column < 4:
            want[:, :, h, w] += weight[:, 0, i, j] * x[:, :, row, column]
    assert_close("y", reference.depthwise_conv2d(x, weight, stride=stride, dilation=dilation), want)


def test_reference_gradcheck():
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    for stride, dilation in product((1, 2), (1, 2)):
        assert torch.autograd.gradcheck(
            lambda x, w, s=stride, d=dilation: reference.depthwise_conv2d(x, w, stride=s, dilation=d), (x, weight)
        )


def test_native_result_is_channels_last(native):
    for layout in ("nchw", "nhwc", "strided"):
        x = with_layout(torch.randn(2, 5, 6, 7), layout)
        y = ops.depthwise_conv2d(x, torch.randn(5, 1, 3, 3), backend="cpu")
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("wanted", list(product([True, False], repeat=2)), ids=str)
def test_only_wanted_gradients_exist(wanted, backend):
    case = Case((2, 5, 6, 4), 5, 1, 2)
    x, weight, grad = case.inputs()
    want = run(reference.depthwise_conv2d, case, [t.double() for t in (x, weight, grad)])
    leaves = {"x": x.clone().requires_grad_(wanted[0]), "weight": weight.clone().requires_grad_(wanted[1])}
    y = ops.depthwise_conv2d(*leaves.values(), dilation=2, backend=backend)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.backward(grad)
    for (name, leaf), ask in zip(leaves.items(), wanted, strict=True):
        assert (leaf.grad is not None) == ask
        if ask:
            assert_close(f"d{name}", leaf.grad, want[f"d{name}"], floor=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saves_x_only_for_the_gradient_of_the_weight(dtype, native):
    x = torch.randn(2, 24, 8, 8).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(24, 1, 5, 5, requires_grad=True)

    def saved():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes), lambda t: t):
            ops.depthwise_conv2d(x, weight, backend="cpu")
        return sum(sizes)

    assert saved() == x.nbytes + weight.nbytes
    weight.requires_grad_(False)
    assert saved() == weight.nbytes
    with torch.no_grad():
        assert saved() == 0
    weight.requires_grad_(True)
    x.requires_grad_(False)
    assert saved() == x.nbytes + weight.nbytes


def test_opcheck(native):
    geometries = {(1, 1): torch.float32, (2, 1): torch.bfloat16, (1, 2): torch.float32, (2, 2): torch.bfloat16}
    for (stride, dilation), dtype in geometries.items():
        x, weight, grad = Case((2, 5, 6, 5), 3, stride, dilation, "nhwc", dtype).inputs()
        for wants in product([True, False], repeat=2) if stride == 1 and dilation == 2 else [(True, True)]:
            leaves = x.clone().requires_grad_(wants[0]), weight.clone().requires_grad_(wants[1])
            torch.library.opcheck(torch.ops.nasfast.depthwise_conv2d_fwd.default, (*leaves, stride, dilation))
            arguments = (grad, x if wants[1] else None, list(x.shape), weight, stride, dilation, *wants)
            torch.library.opcheck(torch.ops.nasfast.depthwise_conv2d_bwd.default, arguments)


def test_second_derivatives_are_refused_by_the_native_backend_only(backend):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y = ops.depthwise_conv2d(x, torch.randn(3, 1, 3, 3, requires_grad=True), backend=backend)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    if backend == "reference":
        assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="not implemented in the native depthwise_conv2d: use backend='refer"):
            torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize(
    "case", [Case((9, 16, 20, 20), 5), Case((3, 6, 40, 40), 3, 2), Case((70, 4, 9, 9), 5, 1, 2)], ids=str
)
def test_bitwise_equal_for_every_thread_count(case, native):
    inputs = case.inputs()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run(ops.depthwise_conv2d, case, inputs, backend="cpu")
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, tensor in run(ops.depthwise_conv2d, case, inputs, backend="cpu").items():
                assert torch.equal(tensor, single[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


def test_compiles_without_graph_break(native):
    def step(x, weight):
        return ops.depthwise_conv2d(x, weight, stride=2) * 2

    x, weight, grad = Case((2, 5, 6, 5), 3, 2).inputs()
    leaves = x.requires_grad_(), weight.requires_grad_()
    want = step(*leaves)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(want, leaves, grad), torch.autograd.grad(got, leaves, grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_autocast_checkpoint_and_inference(backend):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 5, 6, 4, requires_grad=True)
    weight = torch.randn(5, 1, 3, 3, requires_grad=True)

    def run(x):
        return ops.depthwise_conv2d(x, weight, dilation=2, backend=backend)

    want = torch.autograd.grad(run(x).square().sum(), (x, weight))
    got = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).square().sum(), (x, weight))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
        assert y.dtype == torch.bfloat16
        dx, dweight = torch.autograd.grad(y.float().square().sum(), (x, weight))
        assert dx.dtype == dweight.dtype == torch.float32
        for name, tensor, exact in (("y", y, run(x).double()), ("dx", dx, want[0]), ("dweight", dweight, want[1])):
            assert_close(name, tensor, exact.double(), BFLOAT16_CHAIN)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), run(x.detach()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_reference_serves_the_other_types(dtype):
    x = torch.randn(2, 5, 6, 4, dtype=dtype)
    weight = torch.randn(5, 1, 3, 3, dtype=dtype)
    y = ops.depthwise_conv2d(x, weight, stride=2)
    assert_close("y", y, F.conv2d(x.double(), weight.double(), None, 2, 1, 1, 5))


def test_empty_batch_is_empty(backend):
    assert ops.depthwise_conv2d(X[:0], W, stride=2, backend=backend).shape == (0, 3, 2, 2)


X, W = torch.ones(2, 3, 4, 4), torch.ones(3, 1, 3, 3)
WRONG = {
    "3-d x": (ValueError, r"depthwise_conv2d: x must be 4-d \(N, C, H, W\), got shape \(3, 4, 4\)", {"x": X[0]}),
    "int x": (TypeError, "x must be float32, bfloat16.*got torch.int64", {"x": X.long()}),
    "no pixels": (ValueError, "x must have channels and pixels, got shape", {"x": X[:, :, :0]}),
    "channels": (
        ValueError,
        r"weight must be one of \[\(3, 1, 3, 3\).*for this x, got \(2, 1, 3, 3\)",
        {"weight": W[:2]},
    ),
    "kernel": (ValueError, r"weight must be one of.*got \(3, 1, 2, 3\)", {"weight": W[:, :, :2]}),
    "weight type": (TypeError, "weight must be float32 or torch.float32.*got torch.float64", {"weight": W.double()}),
    "weight device": (ValueError, "weight must be on cpu like x, got meta", {"weight": W.to("meta")}),
    "stride": (ValueError, "stride must be 1 or 2, got 3", {"stride": 3}),
    "dilation": (ValueError, "dilation must be 1 or 2, got 0", {"dilation": 0}),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, change):
    with pytest.raises(error, match=message):
        ops.depthwise_conv2d(**{"x": X, "weight": W, **change})
