"""Pointwise stages of the CUDA kernels: every kind of tile against float64 and eager PyTorch, and in any order."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases.chain import ChainCase, exact_chain, relative_errors, run_chain
from kernel_cases.cuda import PLACE, needs_kernels, run_cuda, set_emulation

from nasfast import ops

pytestmark = needs_kernels
eager_chain = partial(ops.conv_bn_act_chain, backend="reference")


@pytest.fixture
def emulation(monkeypatch):
    """Sets the emulated GPU; it is the default one again after the test."""
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    yield set_emulation
    set_emulation()


# Narrow and wide stages in turn, so that both directions have tiles of every kind: depths of 8 to 1536 with and without
# a rest of 8 behind multiples of 16 and of a slab, several groups of columns, weights kept and streamed, rows that end
# within a tile.
CASES = [
    ChainCase((1, 8, 1, 3), "pw8/relu pw16/identity"),
    ChainCase((3, 24, 13, 13), "pw72/relu6 pw24/identity", "x"),
    ChainCase((2, 32, 7, 9), "pw192/relu6 pw32/identity", "x"),
    ChainCase((5, 40, 11, 3), "pw168/relu pw40/relu", "tensor"),
    ChainCase((2, 56, 7, 7), "pw336/relu6 pw56/identity", "x"),
    ChainCase((1, 112, 5, 13), "pw672/relu6 pw112/identity", "x"),
    ChainCase((2, 128, 3, 9), "pw264/identity pw200/relu6"),
    ChainCase((1, 256, 7, 7), "pw1536/relu6 pw256/identity"),
    ChainCase((1, 16, 40, 41), "pw136/relu6 pw24/identity"),
    ChainCase((1, 40, 25, 40), "pw24/relu6 pw40/identity", "x"),
    # the most channels that a plan may have: backward has just enough shared memory
    ChainCase((1, 8, 2, 3), "pw3136/relu6 pw8/identity", "x"),
]
SMALL = ChainCase((2, 24, 9, 8), "pw72/relu6 pw136/relu pw24/identity", "x", dtype=torch.bfloat16)


def assert_same(results, expected):
    for name, value in expected.items():
        assert torch.equal(results[name], value), name


def compare(case):
    """Check that every error is at most that of eager PyTorch, with a tenth for another order of sums.

    An element at the kink of its activation may get the other slope by the rounding of its convolution, in eager
    PyTorch too but not always the same one. One such element moves a gradient by some percent.
    """
    drawn = case.draw_once()
    exact = exact_chain(drawn)
    errors = relative_errors(run_cuda(drawn), exact)
    eager = relative_errors(run_chain(eager_chain, drawn), exact)
    kinks = 5e-2 if "relu" in case.units else 0
    for name, error in errors.items():
        assert error < max(1.1 * eager[name], 1e-3, 0 if name == "y" else kinks), (name, error, eager[name])


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_as_close_to_float64_as_those_of_eager_pytorch(case, dtype, identity, emulation):
    units = re.sub(r"relu6?", "identity", case.units) if identity else case.units
    compare(replace(case, units=units, dtype=dtype))


@pytest.mark.parametrize("multiprocessors", [1, 7])
def test_a_result_does_not_depend_on_the_order_of_threads_and_blocks(multiprocessors, emulation):
    drawn = SMALL.draw_once()
    emulation(multiprocessors)
    expected = run_cuda(drawn)
    for backwards, order in [(True, 0), (False, 1), (True, 29)]:
        emulation(multiprocessors, backwards, order)
        assert_same(run_cuda(drawn), expected)


def test_many_blocks_are_added_on_two_levels(emulation):
    emulation(200)
    compare(ChainCase((1, 16, 61, 60), "pw24/relu6 pw8/identity", dtype=torch.bfloat16))
    compare(ChainCase((1, 16, 61, 60), "pw24/identity pw8/identity", dtype=torch.bfloat16))


def test_backward_with_wide_tiles_and_deep_slabs(emulation):
    """64 x 128 results and slabs of 128 need more shared memory than the emulated GPU has by default."""
    emulation(2, shared_memory=227)
    compare(ChainCase((2, 104, 7, 7), "pw264/identity pw16/identity", dtype=torch.float16))


def test_weights_may_be_float32(emulation):
    drawn = SMALL.draw_once()
    wide = [s._replace(params=s.params._replace(conv_weight=s.params.conv_weight.float())) for s in drawn.stages]
    with torch.autocast(PLACE, torch.bfloat16):
        results = run_cuda(drawn._replace(stages=wide))
    assert_same(results, run_cuda(drawn))


@pytest.mark.parametrize("units", ["pw24/relu pw16/relu", "pw24/relu6 pw16/relu6", "pw24/identity pw16/identity"])
def test_nan_reaches_the_result_and_the_gradient(units, emulation):
    drawn = ChainCase((2, 16, 5, 7), units, dtype=torch.bfloat16).draw_once()
    drawn.x[1, 3, 2, 4] = torch.nan
    results = run_cuda(drawn)
    assert results["y"].isnan().all()
    assert results["dx"].isnan().any()
