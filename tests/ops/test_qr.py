"""qr and geqrf against the contract of torch.linalg.qr and torch.geqrf, and the CUDA path with the emulated kernel."""

from functools import partial

import pytest
import torch
from kernel_cases.cuda import needs_emulation
from torch.fx.experimental.proxy_tensor import make_fx

from nasfast import ops
from nasfast.ops import householder

SHAPES = [
    *((1, 1), (1, 4), (4, 1), (7, 4), (4, 7), (70, 33), (33, 70), (40, 40), (129, 17)),
    *((5, 7, 4), (5, 4, 7), (3, 2, 9, 9), (30, 3, 3), (6, 40, 40)),
    *((0, 3), (3, 0), (0, 4, 4), (2, 0, 3)),
]
MODES = ("reduced", "complete", "r")
emulated = partial(torch.ops.nasfast.householder_emulated, backwards=False)


def cases(shape, dtype):
    """A Gaussian matrix, and ones that are badly conditioned, of low rank, zero, and not contiguous."""
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    steep = z * 10.0 ** torch.linspace(-6, 6, shape[-1], dtype=dtype)
    return [z, steep, z[..., :1].expand(shape), torch.zeros(shape, dtype=dtype), z.mT.contiguous().mT]


BACKENDS = [
    *("reference", "cpu"),
    pytest.param("emulated", marks=needs_emulation),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def runner(request):
    """qr and geqrf of matrices on the CPU, with results there."""
    if request.param == "cuda":
        device = request.getfixturevalue("gpu")
        return (
            lambda a, mode: householder.QR(*(x.cpu() for x in ops.qr(a.to(device), mode, backend="cuda"))),
            lambda a: householder.Geqrf(*(x.cpu() for x in ops.geqrf(a.to(device), backend="cuda"))),
        )
    if request.param == "emulated":
        return (
            lambda a, mode: householder.qr_of_reflectors(a, mode, emulated),
            lambda a: householder.geqrf_of_reflectors(a, emulated),
        )
    return partial(ops.qr, backend=request.param), partial(ops.geqrf, backend=request.param)


def check_product(q, r, a):
    """A = Q R column by column, and Q is orthonormal, to 20 n eps."""
    bound = 20 * max(a.shape[-2:]) * torch.finfo(a.dtype).eps
    q, r, a = q.double(), r.double(), a.double()
    assert (q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max() <= bound
    assert ((q @ r - a).norm(dim=-2) <= bound * a.norm(dim=-2)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contract_of_qr(runner, shape, dtype):
    for a in cases(shape, dtype):
        for mode in MODES:
            want, got = torch.linalg.qr(a, mode), runner[0](a, mode)
            assert [x.shape for x in got] == [x.shape for x in want] and {x.dtype for x in got} == {dtype}
            assert torch.equal(got.R, got.R.triu())
            if mode != "r" and a.numel():
                check_product(got.Q, got.R, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contract_of_geqrf(runner, shape, dtype):
    rank = min(shape[-2:])
    for a in cases(shape, dtype):
        want, got = torch.geqrf(a), runner[1](a)
        assert [x.shape for x in got] == [x.shape for x in want] and {x.dtype for x in got} == {dtype}
        if a.numel():
            q = torch.linalg.householder_product(got.a[..., :rank], got.tau)
            check_product(q, got.a[..., :rank, :].triu(), a)


def test_threads_do_not_change_the_result():
    a = torch.randn(3, 3, 140, 130, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append((*ops.qr(a, backend="cpu"), *ops.geqrf(a, backend="cpu")))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_gradients_are_those_of_pytorch():
    a = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.qr, a)
    _, tangent = torch.func.jvp(lambda x: ops.qr(x).R, (a.detach(),), (torch.ones_like(a),))
    assert tangent.isfinite().all() and tangent.any()
    assert not ops.qr(a.detach()).Q.requires_grad
    with torch.no_grad():
        assert not ops.qr(a, backend="cpu").Q.requires_grad
    with pytest.raises(RuntimeError, match="qr: backend 'cpu'.*has no gradient: pass a detached tensor"):
        ops.qr(a, backend="cpu")


def test_transforms_and_second_derivatives():
    a = torch.randn(6, 150, 140, dtype=torch.float64)
    assert all(map(torch.equal, torch.func.vmap(ops.qr)(a), torch.linalg.qr(a)))
    assert all(map(torch.equal, torch.func.vmap(ops.geqrf)(a), torch.geqrf(a)))
    assert torch.autograd.gradgradcheck(ops.qr, torch.randn(4, 3, dtype=torch.float64, requires_grad=True))


def trace(function, a):
    return torch.jit.trace(function, a, check_trace=False)


# parts of the batch run on other threads, which tracers do not see
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", [pytest.param("compile", marks=pytest.mark.slow), "make_fx", "jit.trace"])
@pytest.mark.parametrize(
    "function",
    [lambda x: tuple(ops.qr(x)), lambda x: tuple(ops.orthogonalize([x[0], x[1]]))],
    ids=["qr", "orthogonalize"],
)
def test_tracers_see_all_that_is_computed(how, function):
    example, a = torch.randn(2, 6, 150, 140)
    if how == "compile":
        traced = torch.compile(function, backend="aot_eager", fullgraph=True)
    else:
        traced = {"make_fx": lambda *arguments: make_fx(arguments[0])(arguments[1]), "jit.trace": trace}[how](
            function, example
        )
    for got, want in zip(traced(a), function(a), strict=True):
        assert torch.allclose(got, want, atol=1e-4)


def test_complex_numbers_and_autocast():
    a = torch.randn(3, 6, 4, dtype=torch.complex128)
    for got, want in zip((*ops.qr(a), *ops.geqrf(a)), (*torch.linalg.qr(a), *torch.geqrf(a)), strict=True):
        assert torch.equal(got, want)
    half = torch.randn(7, 5).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        factors = ops.qr(half)
        assert ops.qr(torch.randn(7, 5)).Q.dtype == torch.float32
    assert all(map(torch.equal, factors, torch.linalg.qr(half.float())))
    with pytest.raises(RuntimeError, match="cannot serve: serves float32 and float64, got torch.complex128"):
        ops.qr(a, backend="cpu")


def test_bad_input_is_named():
    good = torch.ones(2, 2)
    for bad, error, message in (
        ("x", TypeError, "the matrix must be a tensor, got str"),
        (torch.ones(2), ValueError, r"the matrix must be \(..., rows, columns\), got shape \(2,\)"),
        (torch.ones(2, 2).half(), TypeError, "the matrix must be float32, float64 or complex, got torch.float16"),
        (torch.ones(2, 2).to_sparse(), TypeError, "the matrix must be dense"),
    ):
        for function in (ops.qr, ops.geqrf):
            with pytest.raises(error, match=f"{function.__name__}: {message}"):
                function(bad)
    with pytest.raises(ValueError, match="mode must be one of reduced, complete, r, got 'full'"):
        ops.qr(good, "full")
