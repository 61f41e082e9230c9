"""The CUDA kernels of chains against float64: on the GPU where there is one, else in their emulation on CPU tensors."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases.chain import ChainCase, exact_chain, relative_errors, run_chain

from nasfast import ops
from nasfast.ops import _native

pytestmark = pytest.mark.skipif(_native.why_no_chain_kernels() is not None, reason=str(_native.why_no_chain_kernels()))
cuda_chain = partial(ops.conv_bn_act_chain, backend="cuda")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")


CASES = [
    ChainCase((2, 16, 5, 7), "pw24/relu6"),
    ChainCase((2, 16, 5, 7), "dw3s2/relu"),
    ChainCase((2, 16, 9, 7), "pw48/relu6 dw5/relu6 pw16/identity", "x"),
    ChainCase((3, 8, 9, 7), "pw48/relu6 dw7s2/relu6 pw24/identity", "tensor"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_within_two_percent(case, dtype):
    case = replace(case, dtype=dtype)
    drawn = case.draw_once()
    errors = relative_errors(run_chain(cuda_chain, drawn), exact_chain(drawn))
    assert max(errors.values()) < 5e-2, errors
    assert errors["y"] < 1e-2, errors
