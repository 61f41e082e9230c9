"""The Triton kernels against float64: on the GPU where there is one, else under Triton's interpreter on CPU tensors."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from devices import DEVICE, on_device
from kernel_cases.bn_act import ACTS, CASES, Case, check_case, run
from kernel_cases.case import saved_by
from kernel_cases.chain import ChainCase, converted_chain, run_chain
from kernel_cases.chain import check as check_chain
from tolerances import assert_close

from nasfast import ops
from nasfast.ops import _triton, backends
from nasfast.ops.registry import operators

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(_triton.why_missing() is not None, reason=str(_triton.why_missing())),
]
bn_act = partial(ops.bn_act, backend="triton")
# Pixels around those of one tile of 32 rows: for 24 channels a row is 8 pixels.
SIZES = [
    *(Case((1, channels, 1, pixels)) for channels, pixels in product((1, 24), (31, 33, 256, 257))),
    *(Case((1, 12, 1, pixels)) for pixels in (32, 255, 264)),
    Case((1, 200, 1, 33)),
]
# the interpreter takes seconds for more elements; several tiles for each program have a test of their own
OTHERS = [case for case in CASES if DEVICE == "cuda" or math.prod(case.shape) < 10**4]
TYPES = [Case((2, 24, 5, 7), dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.fixture(autouse=True)
def rounded_bfloat16(monkeypatch):
    """As of Triton 3.9 the interpreter cuts digits off where a GPU rounds to bfloat16."""
    if DEVICE == "cuda":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = data.view(np.uint32)
            nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(data), (bits >> 16) | 0x40, nearest).astype(np.uint16)
        return convert(data, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def few_programs(monkeypatch):
    from nasfast.ops import triton

    monkeypatch.setattr(triton, "_PROGRAMS", 2)


@pytest.mark.parametrize(
    ("case", "training"),
    [*((case, True) for case in SIZES), *((case, i % 2 == 0) for i, case in enumerate(OTHERS + TYPES))],
    ids=str,
)
def test_every_size_layout_and_type_matches_float64(case, training):
    check_case(case, "relu6", True, training, "triton")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("case", TYPES, ids=str)
def test_every_activation_matches_float64(case, act):
    check_case(case, act, case.dtype != torch.float16, True, "triton")


def test_programs_of_several_tiles_match_float64(few_programs):
    for case in (Case((2, 24, 17, 35)), Case((3, 5, 21, 23)), Case((2, 160, 9, 9), mean=1e4)):
        check_case(case, "relu", True, True, "triton")


CHAINS = [
    ChainCase((2, 8, 6, 6), "pw24/relu6 dw3s2/silu pw12/identity"),
    ChainCase((2, 8, 6, 6), "dense8k3/hswish pw8/identity", "x"),
    ChainCase((2, 8, 5, 5), "pw4/relu dw3/identity", shuffle=True, x_grad=False),
]


@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_chains_are_pytorchs_convolutions_with_its_passes(case, monkeypatch):
    # PyTorch's convolutions would round float32 inputs
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    chain = partial(ops.conv_bn_act_chain, backend="triton")

    def run_here(inputs, *, x_grad=True):
        got = run_chain(chain, converted_chain(on_device, inputs), x_grad=x_grad)
        return {name: tensor.cpu() for name, tensor in got.items()}

    check_chain(case, *case.draw(), run_here)


def test_nan_and_infinity_go_where_pytorchs_go():
    x = torch.randn(2, 4, 3, 3)
    x[0, 0, 1, 1], x[1, 1, 0, 0], x[0, 2, 0, 0] = torch.nan, torch.inf, -torch.inf
    arguments = {"x": x, "weight": torch.ones(4), "bias": torch.zeros(4), "grad": torch.ones_like(x)}
    arguments |= {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    for training, act in ((True, "relu"), (False, "relu6"), (False, "hswish"), (False, "silu"), (False, "tanh")):
        on_gpu = {name: on_device(tensor) for name, tensor in arguments.items()}
        y = run(bn_act, on_gpu, act=act, training=training)["y"].cpu()
        want = run(ops.reference.bn_act, arguments, act=act, training=training)["y"]
        assert_close(f"{act}, {training}", torch.nan_to_num(y, 1.5), torch.nan_to_num(want, 1.5).double())


def test_two_runs_are_equal_bit_for_bit(few_programs):
    tensors = Case((2, 24, 17, 35)).inputs("silu", residual=True)
    first, second = (
        run(bn_act, {n: on_device(t) for n, t in tensors.items()}, act="silu", training=True) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_is_wanted_is_computed_and_kept():
    x, weight, bias = (on_device(torch.randn(shape)) for shape in ((2, 8, 5, 5), 8, 8))
    saved, _ = saved_by(lambda: bn_act(x, weight, bias))
    assert saved == []
    want = torch.autograd.grad(bn_act(x, weight.requires_grad_(), bias.requires_grad_()).square().sum(), [weight, bias])
    for i, leaf in enumerate((weight, bias)):
        (other := (bias, weight)[i]).requires_grad_(False)
        (got,) = torch.autograd.grad(bn_act(x, weight, bias).square().sum(), [leaf])
        assert torch.equal(got, want[i])
        other.requires_grad_()


def test_operators_pass_opcheck():
    x, gamma, beta = (on_device(torch.randn(shape)) for shape in ((2, 5, 4, 4), 5, 5))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.library.opcheck(operators("triton").bn_act_fwd.default, (x, gamma, beta, None, None, None, 1e-5, "relu6"))


def test_tensors_it_cannot_serve_are_refused_with_the_reason():
    x = torch.ones(1, 2, 3, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="'triton'.*serves float32, bfloat16 and float16, got torch.float64"):
        ops.resolve_backend("bn_act", x.double(), "triton")
    with pytest.raises(RuntimeError, match="'triton'.*serves CPU tensors, got one on meta|serves CUDA tensors"):
        ops.resolve_backend("bn_act", x.to("meta"), "triton")
    with pytest.raises(RuntimeError, match="no triton kernel for mixed_bn; choose from cpu, reference"):
        ops.resolve_backend("mixed_bn", x, "triton")
    assert backends.explain(DEVICE)


def test_a_compiler_is_needed_on_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _triton.why_missing() is None
    monkeypatch.setenv("PATH", "")
    assert "put one on PATH, or its path in CC" in _triton.why_missing()
