import zlib
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from cases import with_layout
from tolerances import assert_close

from nasfast import ops
from nasfast.ops import reference

KINDS = ("max", "avg")


@dataclass(frozen=True)
class Case:
    """One input: shape (N, C, H, W), kind, stride, memory layout, type."""

    shape: tuple[int, int, int, int]
    kind: str = "max"
    stride: int = 1
    layout: str = "nhwc"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{'x'.join(map(str, self.shape))}-{self.kind}-s{self.stride}-{self.layout}-{dtype}"

    def inputs(self):
        """x, of few values so that maxima are often tied, and the gradient of the result."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        x = torch.randint(-2, 3, self.shape, generator=generator)
        size = [(n - 1) // self.stride + 1 for n in self.shape[2:]]
        grad = torch.randn(*self.shape[:2], *size, generator=generator)
        return with_layout(x.to(self.dtype), self.layout), with_layout(grad.to(self.dtype), self.layout)


SHAPES = [
    (1, 1, 1, 1), (2, 5, 1, 4), (2, 5, 4, 1), (1, 17, 2, 2), (1, 1, 3, 2), (3, 6, 7, 9), (2, 16, 8, 8), (2, 64, 5, 6),
    (1, 17, 33, 31),
]  # fmt: skip
CASES = [Case(shape, kind, stride) for shape, kind, stride in product(SHAPES, KINDS, (1, 2))]
CASES += [
    Case((2, 6, 7, 8), kind, stride, layout, dtype)
    for kind, stride in product(KINDS, (1, 2))
    for layout, dtype in (("nchw", torch.float32), ("strided", torch.float32), ("nhwc", torch.bfloat16))
]
CASES += [Case((2, 64, 8, 9), kind, stride, "nhwc", torch.bfloat16) for kind, stride in product(KINDS, (1, 2))]


def run(function, case, x, grad, **settings):
    """Result and gradient of function on a copy of x."""
    leaf = x.detach().requires_grad_()
    y = function(leaf, kind=case.kind, stride=case.stride, **settings)
    return {"y": y.detach(), "dx": torch.autograd.grad(y, leaf, grad)[0]}


def check_case(case, backend):
    x, grad = case.inputs()
    got = run(ops.pool_3x3, case, x, grad, backend=backend)
    want = run(reference.pool_3x3, case, x.double(), grad.double())
    assert got["y"].dtype == got["dx"].dtype == case.dtype
    if case.kind == "max":
        assert torch.equal(got["y"].double(), want["y"])
    for name, tensor in got.items():
        # PyTorch adds up to nine gradients in bfloat16
        loose = 9 * 2**-8 if backend == "reference" and case.dtype == torch.bfloat16 else 0
        assert_close(name, tensor, want[name], (loose, loose) if loose else None, floor=float(grad.abs().max()))


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
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0])
    for weights in ([1.0, 0, 0, 0], [8.0, 1, 1, 4]):
        drawn = torch.multinomial(torch.tensor(weights), 2 * 17 * 9 * 7, replacement=True, generator=generator)
        x = with_layout(values[drawn].view(2, 17, 9, 7), "nhwc")
        case = Case((2, 17, 9, 7), "max", stride)
        grad = torch.randn(case.inputs()[1].shape, generator=generator)
        got = run(ops.pool_3x3, case, x, grad, backend="cpu")
        want = run(reference.pool_3x3, case, x, grad)
        torch.testing.assert_close(got["y"], want["y"], rtol=0, atol=0, equal_nan=True)
        assert_close("dx", got["dx"], want["dx"].double(), floor=float(grad.abs().max()))


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
