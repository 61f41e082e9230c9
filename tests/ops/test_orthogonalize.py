"""orthogonalize on every backend, and the CUDA kernels emulated on the host under the same tests."""

import math
import zlib
from functools import partial
from typing import NamedTuple

import pytest
import scipy.stats
import torch
from kernel_cases.cuda import needs_emulation

import nasfast
from nasfast import ops
from nasfast.ops import _native, orthogonal, reference

# max |Q'Q - I| on native types; the reference computes float32 in float64 and casts
EXACTNESS = {torch.float32: 2e-6, torch.float64: 1e-12}
# max |Q - Q in float64|: rounding of the input's type, times the condition of the worst Gaussian matrix here
SAME_Q = {torch.float32: 2e-4, torch.float64: 1e-11}

# around the borders of panels (16), of tiles (64 columns), of what a warp does (32 columns in 24 KB) and of panels that
# fit into shared memory
SHAPES = [
    *((7, 7), (12, 5), (5, 12), (1, 1), (1, 4), (4, 1), (64, 1), (1, 100), (8, 8), (9, 8), (16, 16), (17, 17)),
    *((16, 40), (40, 15), (64, 48), (65, 65), (100, 33), (33, 100), (130, 129), (300, 257), (257, 400), (32, 64)),
    *((32, 33), (70, 32), (1700, 20)),
]
# batches, as depthwise filters come
BATCHES = [(130, 3, 3), (65, 5, 5), (40, 7, 7), (2, 3, 9, 20), (3, 2, 4), (3, 40, 24)]


def gaussian(shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(zlib.crc32(str(shape).encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def tall(z: torch.Tensor) -> torch.Tensor:
    return z if z.shape[-2] >= z.shape[-1] else z.mT


def departure(q: torch.Tensor) -> float:
    """max |Q'Q - I| of columns or rows, in float64."""
    q = tall(q.double())
    return (q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)).abs().max().item()


# One of each way to draw and to orthogonalise: fewer than 16 numbers, a last block of 16 that is not whole; by
# reflectors and by Cholesky, tall and wide.
DRAWN = [
    *((1, 1), (1, 5), (5, 3), (4, 4), (1, 16), (17, 1)),
    *((40, 27), (56, 96), (192, 32), (32, 193), (336, 112), (128, 768), (512, 150), (0, 4)),
]


# shapes of the 6^20 supernet, one of each size class
SUPERNET = [(24, 40), (144, 24), (56, 336), (336, 112), (128, 768), (768, 256), (256, 1536), (1728, 432), (2592, 432)]


def emulated(matrices: list[torch.Tensor], backwards: bool = False) -> list[torch.Tensor]:
    return orthogonal.in_blocks(matrices, partial(torch.ops.nasfast.householder_emulated, backwards=backwards))


class Runner(NamedTuple):
    """What orthogonalises, and where."""

    backend: str
    device: str

    def __call__(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.backend == "emulated":
            return emulated(matrices) if matrices else []
        return ops.orthogonalize(matrices, backend=self.backend)


@pytest.fixture(
    params=[
        "reference",
        "cpu",
        pytest.param("emulated", marks=needs_emulation),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def runner(request):
    if request.param != "cuda":
        return Runner(request.param, "cpu")
    device = request.getfixturevalue("gpu")
    if _native.extension is None or not _native.extension.build_info().cuda_operators:
        pytest.skip("the extension was built without CUDA")
    return Runner(request.param, device)


@pytest.mark.parametrize("dtype", EXACTNESS)
def test_columns_are_orthonormal_and_q_is_that_of_qr(runner, dtype):
    matrices = [gaussian(shape, dtype, runner.device) for shape in SHAPES + BATCHES]
    exact = reference.orthogonalize([z.double() for z in matrices])
    for z, q, want in zip(matrices, runner(matrices), exact, strict=True):
        assert q.shape == z.shape and q.dtype == dtype and q.device == z.device and q.is_contiguous()
        assert departure(q) <= EXACTNESS[dtype], z.shape
        # not Q itself: a square Gaussian matrix may be badly conditioned
        r = tall(q.double()).mT @ tall(z.double())
        bound = 20 * torch.finfo(dtype).eps * z.double().norm(dim=(-2, -1), keepdim=True)
        assert (r.tril(-1).abs() <= bound).all(), z.shape
        assert (r.diagonal(dim1=-2, dim2=-1) > -bound.squeeze(-1)).all(), z.shape
        if tall(z).shape[-2] > tall(z).shape[-1] + 2:
            assert (q.double() - want).abs().max() <= SAME_Q[dtype], z.shape


def test_shapes_of_the_supernet_in_float32(runner):
    matrices = [gaussian(shape, device=runner.device) for shape in SUPERNET]
    for z, q in zip(matrices, runner(matrices), strict=True):
        assert departure(q) <= EXACTNESS[torch.float32], z.shape
        raw, r = torch.linalg.qr(tall(z))
        want = raw * r.diagonal().sign()
        assert (tall(q) - want).abs().max() <= 2e-5, z.shape


@needs_emulation
def test_threads_of_an_emulated_block_may_run_in_any_order():
    matrices = [gaussian(shape) for shape in SHAPES + BATCHES]
    # columns of which the elimination leaves little, so that they are scaled again after every third column
    matrices += [z.triu() + 1e-25 * z.tril(-1) for z in matrices if z.ndim == 2]
    for z in matrices[-len(SHAPES) :]:
        z[:, ::3] *= 1e-30
    assert all(map(torch.equal, emulated(matrices), emulated(matrices, backwards=True)))


def test_what_lies_beside_a_matrix_does_not_change_it(runner):
    matrices = [gaussian(shape, device=runner.device) for shape in SHAPES + BATCHES]
    together = runner(matrices)
    for i, z in enumerate(matrices):
        assert torch.equal(runner([z])[0], together[i]), z.shape
    for q, again in zip(reversed(together), runner(matrices[::-1]), strict=True):
        assert torch.equal(q, again)
    # filters of a batch, one by one
    batch = gaussian((70, 5, 5), device=runner.device)
    for q, again in zip(runner([batch])[0], runner(list(batch)), strict=True):
        assert (q - again).abs().max() <= 1e-6


def test_strides_do_not_matter_and_the_input_stays(runner):
    for shape in ((6, 40, 24), (6, 3, 3), (100, 70)):
        z = gaussian(shape, device=runner.device)
        sliced = torch.full((*shape[:-1], 2 * shape[-1]), math.nan, device=runner.device)[..., ::2]
        sliced.copy_(z)
        transposed = z.mT.contiguous().mT
        expected = runner([z])[0]
        copy = z.clone()
        for q in runner([sliced, transposed, z]):
            assert torch.equal(q, expected)
        assert torch.equal(z, copy)


def test_empty_and_single(runner):
    single = runner([torch.tensor([[x]], device=runner.device) for x in (-3.0, 2.0, 0.0)])
    assert [m.item() for m in single] == [-1, 1, 1]
    empty = [torch.ones(shape, device=runner.device) for shape in ((0, 3), (4, 0), (0, 3, 3), (2, 0, 70))]
    assert [q.shape for q in runner(empty)] == [z.shape for z in empty]
    assert runner([]) == []


@pytest.mark.parametrize("dtype", EXACTNESS)
def test_zero_rank_deficient_and_steep_input_is_completed(runner, dtype):
    low_rank = gaussian((60, 3), dtype, runner.device) @ gaussian((3, 40), dtype, runner.device)
    equal = gaussian((30, 1), dtype, runner.device).repeat(1, 20)
    late = gaussian((50, 33), dtype, runner.device)
    late[:, 5] = 0
    late[:, 17] = 0
    deficient = [low_rank, equal, equal.mT, late, torch.ones(5, 3, 3, dtype=dtype, device=runner.device)]
    # of a warp, of many panels, and of a panel that does not fit into shared memory
    for rows, columns in ((20, 12), (300, 280), (1700, 20)):
        factors = gaussian((rows, 5), dtype, runner.device), gaussian((5, columns), dtype, runner.device)
        steep = 10.0 ** torch.linspace(-6, 6, columns, dtype=dtype, device=runner.device)
        deficient += [torch.matmul(*factors), gaussian((rows, columns), dtype, runner.device) * steep]
    for z, q in zip(deficient, runner(deficient), strict=True):
        assert departure(q) <= EXACTNESS[dtype], z.shape
    for shape in ((3, 3), (20, 6), (6, 20), (90, 70), (4, 5, 5)):
        (q,) = runner([torch.zeros(shape, dtype=dtype, device=runner.device)])
        assert torch.equal(q, torch.eye(*shape[-2:], dtype=dtype, device=runner.device).expand(shape))


def near_one(z: torch.Tensor, largest: float) -> torch.Tensor:
    """z / 2^k in float64, exactly, for a z as large as `largest`; in two steps, as 2^k may not be a number itself."""
    exponent = math.frexp(largest)[1]
    return z.double() * 2.0 ** (-exponent // 2) * 2.0 ** (-exponent - (-exponent // 2))


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        *((torch.float32, x) for x in (2.0**-138, 1e-38, 1e-30, 1e18, 1e37, torch.finfo(torch.float32).max)),
        *((torch.float64, x) for x in (2.0**-1040, 1e-308, 1e-160, 1e160, torch.finfo(torch.float64).max)),
    ],
)
def test_extreme_scales(runner, dtype, largest):
    for shape in ((3, 3), (40, 20), (30, 70)):
        z = gaussian(shape, torch.float64, runner.device)
        scaled = (z / z.abs().max() * largest).to(dtype)
        (q,), (want,) = runner([scaled]), reference.orthogonalize([near_one(scaled, largest)])
        assert departure(q) <= EXACTNESS[dtype], shape
        assert (q - want).abs().max() <= SAME_Q[dtype], shape
        # columns apart from each other by as much
        scaled_apart = tall(scaled).clone()
        scaled_apart[:, 1::2] = tall(z)[:, 1::2]
        equal = tall(z).clone()
        equal[:, ::2] = near_one(tall(scaled)[:, ::2], largest)
        (q,), (want,) = runner([scaled_apart]), reference.orthogonalize([equal.to(dtype).double()])
        assert departure(q) <= EXACTNESS[dtype], shape
        assert (q - want).abs().max() <= SAME_Q[dtype], shape


# powers of ten of what is left of a column when its larger elements are eliminated: around the roots of the smallest
# numbers, where squares underflow, and below the smallest normal numbers
REMAINDERS = {torch.float32: [*range(15, 41), 42, 44], torch.float64: [*range(140, 170), *range(300, 321, 4), 323]}


@pytest.mark.parametrize("dtype", EXACTNESS)
def test_small_diagonals(runner, dtype):
    for shape in ((2, 2), (5, 5), (20, 20), (40, 30), (1700, 20)):  # the last does not stay in shared memory
        signs = torch.where(torch.arange(shape[1]) % 3 == 1, -1.0, 1.0).to(runner.device, dtype)
        want = torch.eye(*shape, device=runner.device, dtype=dtype) * signs
        for exponent in REMAINDERS[dtype]:
            z = torch.ones(shape, device=runner.device, dtype=dtype).triu()
            z.diagonal()[1:] = signs[1:] * 10.0**-exponent
            (q,) = runner([z])
            assert departure(q) <= EXACTNESS[dtype], (shape, exponent)
            assert (q - want).abs().max() <= EXACTNESS[dtype], (shape, exponent)


@pytest.mark.parametrize("dtype", EXACTNESS)
def test_small_remainders(runner, dtype):
    for shape in ((3, 3), (8, 4), (20, 20), (40, 30), (30, 40)):
        rest = tall(gaussian(shape, dtype, runner.device))
        for exponent in REMAINDERS[dtype]:
            z = torch.zeros(rest.shape[0] + 1, rest.shape[1] + 1, device=runner.device, dtype=dtype)
            z[0] = 1
            z[1:, 1:] = rest * 10.0**-exponent
            (q,) = runner([z])
            assert departure(q) <= EXACTNESS[dtype], (shape, exponent)
            # with numbers left that are not all rounded to the smallest one
            if exponent < -math.log10(torch.finfo(dtype).tiny) - 8 and rest.shape[0] > rest.shape[1] + 2:
                (want,) = reference.orthogonalize([rest])
                assert (q[1:, 1:] - want).abs().max() <= SAME_Q[dtype], (shape, exponent)


def test_halves_are_cast_at_the_end(runner):
    if runner.backend == "emulated":
        pytest.skip("takes what the operator takes")
    for dtype, bound in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        z = gaussian((40, 20), dtype, runner.device)
        (q,) = runner([z])
        assert q.dtype == dtype
        assert (q.double() - reference.orthogonalize([z.double()])[0]).abs().max() <= bound
    mixed = [gaussian((9, 9), dtype, runner.device) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    assert [q.dtype for q in runner(mixed)] == [torch.float64, torch.bfloat16, torch.float32]


def haar_statistics(qs):
    """(sample, mean of the Haar law) of 4 x 4 matrices."""
    n = qs.shape[-1]
    first, trace = qs[:, 0, 0], qs.diagonal(dim1=1, dim2=2).sum(1)
    return {
        "first": (first, 0.0),
        "square": (first**2, 1 / n),
        "fourth": (first**4, 3 / (n * (n + 2))),
        "trace": (trace, 0.0),
        "trace squared": (trace**2, 1.0),
        "trace of square": ((qs @ qs).diagonal(dim1=1, dim2=2).sum(1), 1.0),
        "determinant": ((torch.linalg.det(qs) > 0).double(), 0.5),
    }


def deviations(qs):
    """How many standard errors each statistic is from its mean."""
    return {
        name: abs(sample.mean() - mean).item() / max(sample.std().item(), 1e-12) * len(sample) ** 0.5
        for name, (sample, mean) in haar_statistics(qs).items()
    }


def test_law_is_haar(runner):
    count, n = 4_000 if runner.backend == "emulated" else 20_000, 4
    (qs,) = runner([torch.randn(count, n, n, dtype=torch.float64).to(runner.device)])
    assert max(deviations(qs.cpu()).values()) <= 4
    # squared entries are Beta(1/2, (n-1)/2): Kolmogorov's distance, which is above 2.1 / sqrt(count) once in 3000 times
    squares = qs[:, 0, 0].square().cpu().numpy()
    assert scipy.stats.kstest(squares, scipy.stats.beta(0.5, (n - 1) / 2).cdf).statistic <= 2.1 / count**0.5


def test_uncorrected_qr_fails_the_haar_tests():
    result = deviations(torch.linalg.qr(torch.randn(20_000, 4, 4, dtype=torch.float64))[0])
    assert result["first"] > 4 and result["determinant"] > 4


def test_threads_do_not_change_the_result():
    matrices = [gaussian(shape) for shape in SHAPES + BATCHES]
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        filled = nasfast.orthogonalize_([torch.empty(shape) for shape in DRAWN if len(shape) == 2], seed=1)
        results.append(ops.orthogonalize(matrices, backend="cpu") + filled)
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_capture_in_a_cuda_graph_is_refused(native, gpu):
    if not native.build_info().cuda_operators:
        pytest.skip("the extension was built without CUDA")
    z = gaussian((5, 3), device=gpu)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="cannot be captured in a CUDA"):
        ops.orthogonalize([z], backend="cuda")


def test_bad_input_is_named(runner):
    if runner.backend == "emulated":
        pytest.skip("checks are those of the public function")
    device = runner.device
    good = torch.ones(2, 2, device=device)
    for bad, error, message in (
        (torch.ones(2, device=device), ValueError, r"matrices\[1\] must be \(..., rows, columns\), got shape \(2,\)"),
        (torch.ones(2, 2, dtype=torch.int64, device=device), TypeError, r"matrices\[1\] must be float32.*torch.int64"),
        (torch.ones(2, 2, device="meta"), ValueError, r"matrices\[1\] must be on (cpu|cuda:0) like"),
        ("x", TypeError, r"matrices\[1\] must be a tensor, got str"),
        (torch.tensor([[1.0, math.nan]], device=device), ValueError, r"matrices\[1\] of shape \(1, 2\).* got 1 NaN"),
        (torch.full((3, 2), math.inf, device=device), ValueError, r"matrices\[1\].* got 6 NaN or infinite elements"),
        (torch.ones(1, 1, device=device).expand(10**7, 10**7), MemoryError, r"matrices\[1\] of shape \(10000000, 1"),
    ):
        with pytest.raises(error, match="orthogonalize: " + message):
            ops.orthogonalize([good, bad], backend=runner.backend)


def test_a_gradient_of_a_native_backend_is_refused():
    z = gaussian((4, 3)).requires_grad_()
    with pytest.raises(RuntimeError, match="the cpu backend has no gradient.*backend='reference'"):
        ops.orthogonalize([z])
    with torch.no_grad():
        assert not ops.orthogonalize([z])[0].requires_grad
    ops.orthogonalize([z], backend="reference")[0].sum().backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("dtype", EXACTNESS)
@pytest.mark.parametrize("shape", DRAWN)
def test_drawn_matrices_are_the_factors_of_what_the_generator_of_the_name_draws(shape, dtype):
    (q,) = ops.orthogonalize_([torch.empty(shape, dtype=dtype)], seed=-3, names=["a"], gain=-2.3)
    z = torch.randn(shape, generator=orthogonal.tensor_generator("a", -3), dtype=torch.float64)
    if z.numel():
        (want,) = reference.orthogonalize([z])
        assert departure(q / -2.3) <= EXACTNESS[dtype]
        assert (q / -2.3 - want).abs().max() <= SAME_Q[dtype] * torch.linalg.cond(z)


def emulated_draw(z: torch.Tensor, seed: int, *, backwards: bool) -> None:
    torch.ops.nasfast.gaussians_emulated([z], [seed], backwards)


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda z, seed: torch.ops.nasfast.gaussian_(z, seed), id="cpu"),
        *(
            pytest.param(
                partial(emulated_draw, backwards=backwards), marks=needs_emulation, id=f"backwards={backwards}"
            )
            for backwards in (False, True)
        ),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 5, 15, 16, 17, 47, 48, 311, 312, 313, 623, 624, 625, 1249, 5000])
def test_gaussians_are_those_of_torch(native, draw, count):
    for seed in (0, -3, 2**40 + 7):
        want = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for dtype, bound in ((torch.float64, 5e-15), (torch.float32, 5e-7)):
            z = torch.full((count,), math.nan, dtype=dtype)
            draw(z, seed)
            assert (z - want).abs().max() <= bound, seed


def test_without_the_extension_the_same_is_drawn(native, monkeypatch):
    shapes = [(40, 27), (3, 3), (192, 32)]
    matrices = ops.orthogonalize_([torch.empty(shape) for shape in shapes])
    monkeypatch.setattr(_native, "extension", None)
    for q, again in zip(matrices, ops.orthogonalize_([torch.empty(shape) for shape in shapes]), strict=True):
        assert (q - again).abs().max() <= SAME_Q[torch.float32]


def test_gaussians_refuse_what_would_corrupt_memory(native):
    for z, message in (
        (torch.empty(4, 4).t()[1:], "must be contiguous"),
        (torch.empty(4).half(), "must be float32 or"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nasfast.gaussian_(z, 0)


@needs_emulation
def test_the_kernels_refuse_what_would_corrupt_memory():
    z, large = torch.ones(2, 20, 9), torch.ones(1, 1).expand(2**30, 1)
    for arguments, message in (
        (([z], [], [], [1.0]), "as many q and scales as z"),
        (([z], [z], [], []), "as many q and scales as z"),
        (([z, z], [z, z], [z], [1.0, 1.0]), "as many v, or none"),
        (([z], [z.double()], [], [1.0]), "z, q and v 0 must be batches of one shape"),
        (([z], [z[0]], [], [1.0]), "z, q and v 0 must be batches of one shape"),
        (([z], [z[:, :8]], [], [1.0]), "z, q and v 0 must be batches of one shape"),
        (([z], [z], [z[:1]], [1.0]), "z, q and v 0 must be batches of one shape"),
        (([z, z[0, 0]], [z, z[0, 0]], [], [1.0, 1.0]), "z, q and v 1 must be batches of one shape"),
        (([large], [large], [], [1.0]), "batch 0 is too large"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nasfast.householder_emulated(*arguments, False)
    for arguments, message in (
        (([z], []), "as many seeds as tensors"),
        (([z.mT], [1]), "tensor 0 must be contiguous"),
        (([z, z.half()], [1, 2]), "tensor 1 must be contiguous, float32 or float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nasfast.gaussians_emulated(*arguments, False)


def test_drawn_matrices_of_the_supernet_are_orthogonal():
    # the largest matrix, and 300 with as few rows as Cholesky may have for their columns
    shapes = [(1000, 1728), *[(69, 4)] * 100, *[(127, 24)] * 100, *[(209, 64)] * 100]
    for dtype in EXACTNESS:
        for q in nasfast.orthogonalize_([torch.empty(shape, dtype=dtype) for shape in shapes], seed=5):
            assert departure(q) <= EXACTNESS[dtype], q.shape


def test_autograd_sees_that_a_tensor_was_filled():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    loss = weight.square().sum()
    nasfast.orthogonalize_([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_of_tensors_that_share_memory_the_last_one_counts():
    # the first one has less work, so the operator would do it last
    weight, alone = torch.empty(64, 64), torch.empty(64, 64)
    nasfast.orthogonalize_([weight.view(32, 128), weight], names=["first", "last"])
    assert torch.equal(weight, *nasfast.orthogonalize_([alone], names=["last"]))


def targets():
    shapes = [(16, 3, 3, 3), (8, 16, 1, 1), (24, 8), (5, 1, 7, 7), (1, 6), (9, 1), (0, 4), (40, 33)]
    tensors = [torch.empty(shape) for shape in shapes]
    tensors[1] = tensors[1].contiguous(memory_format=torch.channels_last)
    tensors[2] = torch.nn.Parameter(tensors[2])
    tensors[3] = tensors[3].double()
    tensors[7] = torch.empty(33, 40).t()
    return tensors


def test_filling_in_place(monkeypatch):
    tensors = targets()
    passed = list(tensors)
    returned = nasfast.orthogonalize_(tensors, seed=3, gain=2.0)
    assert all(a is b for a, b in zip(returned, passed, strict=True))
    for tensor in tensors:
        if tensor.numel():
            assert departure(tensor.detach().flatten(1) / 2) <= EXACTNESS[tensor.dtype]
    assert tensors[2].requires_grad and tensors[2].is_leaf
    # the names and the seed decide, and neither order nor grouping or the other tensors; the type only by rounding
    names = [str(i) for i in range(len(tensors))]
    monkeypatch.setattr(orthogonal, "_GROUP_ELEMENTS", 100)
    reversed_tensors = targets()[::-1]
    ops.orthogonalize_(reversed_tensors, seed=3, gain=2.0, names=names[::-1])
    assert all(map(torch.equal, tensors, reversed_tensors[::-1]))
    (alone,) = ops.orthogonalize_([torch.empty(40, 33, dtype=torch.float64)], seed=3, gain=2.0, names=["7"])
    assert (alone - tensors[7]).abs().max() <= 2 * SAME_Q[torch.float32]
    (changed,) = ops.orthogonalize_([torch.empty(40, 33)], seed=4, gain=2.0, names=["7"])
    assert not torch.equal(changed, tensors[7])
    assert ops.orthogonalize_([]) == []


@needs_emulation
@pytest.mark.parametrize("elements", [1 << 25, 100])
def test_a_gpu_fills_with_what_a_cpu_fills(monkeypatch, elements):
    monkeypatch.setattr(orthogonal, "_GROUP_ELEMENTS", elements)
    on_cpu, emulated = (
        [*targets(), torch.empty(70, 48, dtype=torch.bfloat16), torch.empty(3, 7, 40, 33, dtype=torch.float64)]
        for _ in range(2)
    )

    def filled(tensors):
        batch = tensors[-1]
        shapes = [x.shape if x is batch else (x.shape[0], math.prod(x.shape[1:])) for x in tensors]
        return [orthogonal.Target(str(i), x, shapes[i], 1.5 - i) for i, x in enumerate(tensors)]

    versions = [x._version for x in emulated]
    orthogonal.fill_orthogonal(filled(on_cpu), 3)
    orthogonal.fill_together(
        filled(emulated),
        3,
        partial(torch.ops.nasfast.gaussians_emulated, backwards=False),
        partial(torch.ops.nasfast.householder_emulated, backwards=False),
    )
    assert all(x._version > before for x, before in zip(emulated, versions, strict=True))
    for i, (x, want) in enumerate(zip(emulated, on_cpu, strict=True)):
        bound = 2e-2 if x.dtype == torch.bfloat16 else SAME_Q[x.dtype]
        assert not x.numel() or (x - want).abs().max() <= abs(1.5 - i) * bound, i


def test_bad_targets_are_named(monkeypatch):
    good = torch.empty(2, 2)
    for bad, error, message in (
        (torch.empty(2), ValueError, r"must be \(..., rows, columns\), got shape \(2,\)"),
        (torch.empty(2, 2, dtype=torch.int32), TypeError, "must be float32.*got torch.int32"),
        (
            torch.empty(1, 1).expand(10**7, 10**7),
            MemoryError,
            r"of shape \(10000000, 10000000\) needs 2400000.0 GB, and",
        ),
    ):
        with pytest.raises(error, match=r"orthogonalize_: tensors\[1\] \('stem'\) " + message):
            ops.orthogonalize_([good, bad], names=["a", "stem"])
    with pytest.raises(ValueError, match="names must be one per tensor, 1, got 2"):
        ops.orthogonalize_([good], names=["a", "b"])
    with pytest.raises(ValueError, match="names must differ.*'a' more than once"):
        ops.orthogonalize_([good, good], names=["a", "a"])
    with pytest.raises(ValueError, match=r"tensors\[0\].*share memory, as expand makes them"):
        ops.orthogonalize_([torch.empty(1, 3).expand(4, 3)])
    with pytest.raises(ValueError, match="gain must be finite, got nan"):
        ops.orthogonalize_([good], gain=float("nan"))
    with pytest.raises(TypeError, match=r"tensors\[0\].*must be dense, got torch.sparse_coo"):
        ops.orthogonalize_([good.to_sparse()])
    for function in (ops.orthogonalize, ops.orthogonalize_):
        with pytest.raises(TypeError, match=r"must be a list of tensors, got one tensor: pass \[tensor\]"):
            function(torch.empty(3, 2, 2))
        with pytest.raises(TypeError, match="must be a list of tensors, got Linear"):
            function(torch.nn.Linear(2, 2))
