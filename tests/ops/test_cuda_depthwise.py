"""The depthwise CUDA kernels against float64, on a GPU or emulated, where strips, segments and channels end."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from kernel_cases.chain import ChainCase, eager_autocast, exact_chain, relative_errors, run_chain
from kernel_cases.cuda import cuda_chain, emulated_only, needs_kernels, run_cuda, set_emulation

pytestmark = needs_kernels
# Roundings of y and of dy, and of the result. The activations are smooth, so nothing else differs from float64.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
KERNELS = list(product((3, 5, 7), (1, 2)))


@pytest.fixture(autouse=True)
def emulated(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    yield
    set_emulation()


def check(case: ChainCase, *, bound: float | None = None) -> None:
    drawn = case.draw_once()
    errors = relative_errors(run_cuda(drawn), exact_chain(drawn))
    assert all(error <= (bound or BOUND[case.dtype]) for error in errors.values()), errors


@pytest.mark.parametrize(
    "shape",
    [
        (3, 8, 1, 1),  # one pixel
        (2, 8, 3, 8),  # one column behind a strip: the halo of the strip before it is partly inside
        (2, 8, 9, 9),
        (1, 8, 2, 15),
        (2, 8, 14, 14),  # whole strips
        (1, 24, 13, 2),  # narrower than a strip
        (1, 168, 3, 5),  # several groups of channels, the last one smaller
    ],
    ids=str,
)
@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
def test_any_size_is_that_of_float64(kernel, stride, shape):
    dtype = torch.float16 if stride == 1 else torch.bfloat16
    check(ChainCase(shape, f"dw{kernel}s{stride}/identity", dtype=dtype))


@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
def test_the_batch_norm_before_is_read_and_differentiated(kernel, stride):
    """The second stage reads the first through its BatchNorm, and pads behind it."""
    case = ChainCase((2, 16, 10, 9), f"dw3/identity dw{kernel}s{stride}/identity", "none", dtype=torch.float16)
    check(case, bound=3e-3)


@pytest.mark.parametrize("act", ["relu", "relu6"])
@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
def test_activations_before_the_stencil(kernel, stride, act):
    """Only y: at a kink of an activation, rounding chooses the slope."""
    drawn = ChainCase((2, 16, 8, 15), f"dw3/{act} dw{kernel}s{stride}/{act}", dtype=torch.float16).draw_once()
    errors = relative_errors(run_cuda(drawn), exact_chain(drawn))
    assert errors["y"] <= 3e-3, errors


@pytest.mark.parametrize("residual", ["x", "tensor"])
def test_the_input_may_be_added(residual):
    check(ChainCase((2, 8, 7, 9), "dw5/identity", residual, dtype=torch.float16))


@pytest.mark.parametrize(
    "case", [ChainCase((50, 128, 9, 8), "dw3/identity"), ChainCase((2, 24, 40, 8), "dw7s2/identity")]
)
def test_many_blocks_share_a_channel(case):
    """With many multiprocessors rows are cut into segments, and sums of blocks are added in two levels."""
    set_emulation(132)
    case = replace(case, dtype=torch.bfloat16)
    drawn, results = case.draw_once(), []
    for order in ({}, {"backwards": True, "block_order": 5}):
        set_emulation(132, **order)
        results.append(run_cuda(drawn))
    errors = relative_errors(results[0], exact_chain(drawn))
    assert max(errors.values()) <= BOUND[case.dtype], errors
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


# ---- the stencil on tensor cores, on GPUs with as much shared memory as an H200

MATRICES = {"shared_memory": 227}


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (5, (2, 8, 1, 9)),  # one row
        (7, (2, 40, 14, 14)),  # several groups of channels, the last one smaller
        (5, (1, 8, 13, 16)),
        (7, (1, 8, 15, 17)),  # two panels of rows
        (5, (1, 16, 30, 27)),
        (7, (1, 8, 29, 33)),
        (5, (1, 8, 43, 56)),  # the widest
        (7, (1, 8, 3, 55)),  # fewer rows than the stencil
        (7, (3, 40, 7, 7)),  # two images are a panel, and the last one has a panel of its own
        (7, (2, 8, 5, 8)),
        (7, (2, 8, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_tensor_cores_take_any_size(kernel, shape, dtype):
    set_emulation(**MATRICES)
    check(ChainCase(shape, f"dw{kernel}/identity", dtype=dtype))


@pytest.mark.parametrize("kernel", [5, 7])
def test_tensor_cores_read_and_differentiate_the_batch_norm_before(kernel):
    set_emulation(**MATRICES)
    case = ChainCase((2, 16, 10, 19), f"dw3/identity dw{kernel}/identity", "none", dtype=torch.float16)
    check(case, bound=3e-3)


@pytest.mark.parametrize("act", ["relu", "relu6"])
@pytest.mark.parametrize("kernel", [5, 7])
def test_tensor_cores_with_activations_are_as_exact_as_eager_autocast(kernel, act):
    """Near a kink of an activation, roundings choose the slope of an element: see test_cuda_expansion.py."""
    set_emulation(**MATRICES)
    case = ChainCase((2, 16, 15, 18), f"pw32/{act} dw{kernel}/{act}", "none", dtype=torch.bfloat16)
    ours, theirs = [], []
    for attempt in range(8):
        drawn = case.draw_once(attempt)
        exact = exact_chain(drawn)
        ours.append(relative_errors(run_cuda(drawn), exact))
        theirs.append(relative_errors(run_chain(eager_autocast, drawn), exact))
    assert max(errors["y"] for errors in ours) <= 1e-2, ours
    best, eager = (min(sum(errors.values()) for errors in draws) for draws in (ours, theirs))
    assert best <= 1.1 * eager, (ours, theirs)


@pytest.mark.parametrize("residual", ["x", "tensor"])
def test_tensor_cores_add_the_input(residual):
    set_emulation(**MATRICES)
    check(ChainCase((2, 8, 7, 9), "dw5/identity", residual, dtype=torch.float16))


@pytest.mark.parametrize(
    ("multiprocessors", "kernel", "shape"),
    [(2, 5, (50, 8, 2, 9)), (132, 5, (50, 8, 2, 9)), (2, 7, (41, 8, 2, 4))],
)
def test_no_order_of_tensor_cores_changes_a_bit(multiprocessors, kernel, shape):
    """A block has one panel after the other or only one, and the sums of blocks are added in two levels."""
    case = ChainCase(shape, f"dw3/relu6 dw{kernel}/relu6", "none", dtype=torch.bfloat16)
    drawn, results = case.draw_once(), []
    for order in ({}, {"backwards": True, "block_order": 1}, {"block_order": 5}):
        set_emulation(multiprocessors, **order, **MATRICES)
        results.append(run_cuda(drawn))
    for other in results[1:]:
        assert all(torch.equal(tensor, results[0][name]) for name, tensor in other.items())
    errors = relative_errors(results[0], exact_chain(drawn))
    assert errors["y"] <= BOUND[case.dtype], errors


@emulated_only  # it reads allocations on the CPU
@pytest.mark.parametrize("tensor_cores", [False, True], ids=["threads", "tensor_cores"])
@pytest.mark.parametrize("units", ["dw3/relu6 dw3/identity", "pw16/relu6 dw5s2/relu6", "pw16/relu6 dw7/relu6"])
def test_a_gradient_that_nothing_reads_is_not_written(units, tensor_cores):
    """Where the input needs no gradient, the first stage needs only sums over its dz; the second one is depthwise."""
    set_emulation(**(MATRICES if tensor_cores else {}))
    drawn = ChainCase((2, 16, 14, 13), units, dtype=torch.bfloat16).draw_once()
    results, allocated = [], []
    for x_grad in (True, False):
        with torch.profiler.profile(profile_memory=True) as profile:
            results.append(run_cuda(drawn, x_grad=x_grad))
        allocated.append({event.cpu_memory_usage for event in profile.events() if event.name == "aten::new_empty"})
    want, got = results
    assert set(want) - set(got) == {"dx"}
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
    size = 2 * drawn.x.numel()  # that of the output of the first stage, too
    assert size in allocated[0] and size not in allocated[1]


@emulated_only
def test_tensor_cores_round_the_filter_to_the_type_of_the_tensors():
    """By this the kernels differ from those of threads: a weight of 1 + 2^-10 is 1 in bfloat16."""
    drawn = ChainCase((1, 8, 9, 9), "dw5/identity", "none", dtype=torch.bfloat16).draw_once()
    weight = drawn.stages[0].params.conv_weight
    rounded = torch.full_like(weight, 1.0, dtype=torch.float32)
    stages = [
        drawn.stages[0]._replace(params=drawn.stages[0].params._replace(conv_weight=w))
        for w in (rounded + 2**-10, rounded)
    ]
    for settings, same in ((MATRICES, True), ({}, False)):
        set_emulation(**settings)
        with torch.autocast("cpu", torch.bfloat16):
            got = [cuda_chain(drawn.x, [stage]) for stage in stages]
        assert torch.equal(*got) == same
