from itertools import product

import pytest
import torch
from kernel_cases.pool_3x3 import CASES, KINDS, Case, check_case, check_special_values, run
from tolerances import assert_close

from nasfast import ops
from nasfast.ops import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64_reference(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize(("kind", "stride"), list(product(KINDS, (1, 2))), ids=str)
def test_reference_matches_the_formula(kind, stride):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    y = reference.pool_3x3(x, kind=kind, stride=stride)
    for h, w in product(range(y.shape[2]), range(y.shape[3])):
        rows, columns = (slice(max(0, stride * i - 1), stride * i + 2) for i in (h, w))
        window = x[:, :, rows, columns].flatten(2)
        assert_close("y", y[:, :, h, w], window.amax(2) if kind == "max" else window.mean(2))


@pytest.mark.parametrize("stride", [1, 2])
def test_infinite_and_nan_go_where_pytorch_sends_them(stride, native):
    check_special_values(stride)


@pytest.mark.parametrize("kind", KINDS)
def test_saves_a_byte_per_maximum_and_nothing_for_means(kind, native):
    x = torch.randn(2, 24, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()

    def saved():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes), lambda t: t):
            ops.pool_3x3(x, kind=kind, backend="cpu")
        return sum(sizes)

    assert saved() == (x.numel() if kind == "max" else 0)
    with torch.no_grad():
        assert saved() == 0
    assert torch.ops.nasfast.pool_3x3_fwd(x.detach(), kind, 1, False)[1].numel() == 0


def test_a_gradient_without_the_index_is_refused(native):
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    with pytest.raises(RuntimeError, match="pool_3x3_fwd: a gradient is wanted, so `keep` must be true"):
        torch.ops.nasfast.pool_3x3_fwd(x, "max", 1, False)


def test_opcheck(native):
    for kind, stride, dtype in product(KINDS, (1, 2), (torch.float32, torch.bfloat16)):
        x, grad = Case((2, 5, 6, 5), kind, stride, "nhwc", dtype).inputs()
        torch.library.opcheck(torch.ops.nasfast.pool_3x3_fwd.default, (x, kind, stride, False))
        torch.library.opcheck(torch.ops.nasfast.pool_3x3_fwd.default, (x.requires_grad_(), kind, stride, True))
        _, index = torch.ops.nasfast.pool_3x3_fwd(x.detach(), kind, stride, True)
        arguments = (grad, index, list(x.shape), kind, stride)
        torch.library.opcheck(torch.ops.nasfast.pool_3x3_bwd.default, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused_by_the_native_backend_only(kind, backend):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y = ops.pool_3x3(x, kind=kind, backend=backend)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    if backend == "reference":
        assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="second derivatives are not implemented in the native pool_3x3: use"):
            torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize(("kind", "stride"), list(product(KINDS, (1, 2))), ids=str)
def test_bitwise_equal_for_every_thread_count(kind, stride, native):
    case = Case((9, 16, 20, 20), kind, stride)
    inputs = case.inputs()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run(ops.pool_3x3, case, *inputs, backend="cpu")
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, tensor in run(ops.pool_3x3, case, *inputs, backend="cpu").items():
                assert torch.equal(tensor, single[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_graph_break(kind, native):
    def step(x):
        return ops.pool_3x3(x, kind=kind, stride=2) * 2

    x, grad = Case((2, 5, 6, 5), kind, 2).inputs()
    want = step(x.requires_grad_())
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(want, x, grad), torch.autograd.grad(got, x, grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_checkpoint_and_inference(kind, backend):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 5, 6, 4, requires_grad=True)

    def run(x):
        return ops.pool_3x3(x, kind=kind, backend=backend)

    want = torch.autograd.grad(run(x).square().sum(), x)
    got = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.float32
        assert run(x.bfloat16()).dtype == torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(run(x), run(x.detach()), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "dtype"), list(product(KINDS, (torch.float16, torch.float64))), ids=str)
def test_reference_serves_the_other_types(kind, dtype):
    x = torch.randn(2, 5, 6, 4, dtype=dtype)
    assert_close("y", ops.pool_3x3(x, kind=kind), reference.pool_3x3(x.double(), kind=kind), floor=10.0)


def test_empty_batch_is_empty(backend):
    for kind in KINDS:
        assert ops.pool_3x3(X[:0], kind=kind, stride=2, backend=backend).shape == (0, 3, 2, 2)


X = torch.ones(2, 3, 4, 4)
WRONG = {
    "3-d x": (ValueError, r"pool_3x3: x must be 4-d \(N, C, H, W\), got shape \(3, 4, 4\)", {"x": X[0]}),
    "int x": (TypeError, "x must be float32, bfloat16.*got torch.int64", {"x": X.long()}),
    "no pixels": (ValueError, "x must have channels and pixels, got shape", {"x": X[:, :, :, :0]}),
    "kind": (ValueError, "kind must be max or avg, got 'mean'", {"kind": "mean"}),
    "stride": (ValueError, "stride must be 1 or 2, got 0", {"stride": 0}),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, change):
    with pytest.raises(error, match=message):
        ops.pool_3x3(**{"x": X, "kind": "max", **change})
