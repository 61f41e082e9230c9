"""The depthwise CUDA kernels against float64, where strips, segments and groups of channels end."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from kernel_cases.chain import ChainCase, exact_chain, relative_errors, run_chain

from nasfast import ops
from nasfast.ops import _native

pytestmark = pytest.mark.skipif(_native.why_no_emulation() is not None, reason=str(_native.why_no_emulation()))
cuda_chain = partial(ops.conv_bn_act_chain, backend="cuda")
# Roundings of y and of dy, and of the result. The activations are smooth, so nothing else differs from float64.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
KERNELS = list(product((3, 5, 7), (1, 2)))


@pytest.fixture(autouse=True)
def emulated(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    yield
    _native.extension.set_emulation()


def check(case: ChainCase, *, bound: float | None = None) -> None:
    drawn = case.draw_once()
    errors = relative_errors(run_chain(cuda_chain, drawn), exact_chain(drawn))
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
    errors = relative_errors(run_chain(cuda_chain, drawn), exact_chain(drawn))
    assert errors["y"] <= 3e-3, errors


@pytest.mark.parametrize("residual", ["x", "tensor"])
def test_the_input_may_be_added(residual):
    check(ChainCase((2, 8, 7, 9), "dw5/identity", residual, dtype=torch.float16))


@pytest.mark.parametrize(
    "case", [ChainCase((50, 128, 9, 8), "dw3/identity"), ChainCase((2, 24, 40, 8), "dw7s2/identity")]
)
def test_many_blocks_share_a_channel(case):
    """With many multiprocessors rows are cut into segments, and sums of blocks are added in two levels."""
    _native.extension.set_emulation(132)
    case = replace(case, dtype=torch.bfloat16)
    drawn, results = case.draw_once(), []
    for order in ({}, {"backwards": True, "block_order": 5}):
        _native.extension.set_emulation(132, **order)
        results.append(run_chain(cuda_chain, drawn))
    errors = relative_errors(results[0], exact_chain(drawn))
    assert max(errors.values()) <= BOUND[case.dtype], errors
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
