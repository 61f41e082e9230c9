"""Every family of CUDA kernels in the PTX interpreter, against float64; and faults that it has to see."""

import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from kernel_cases.chain import ChainCase, exact_chain, relative_errors, run_chain
from kernel_cases.chain_pairs import PAIRS, drawn_pair, run_both, run_two
from kernel_cases.cuda import emulated_only, needs_emulation, run_cuda

from nasfast import ops

pytest.importorskip("triton")
from ptx.chains import interpreted
from ptx.machine import Machine
from ptx.memory import Global
from ptx.parse import PtxError, parse
from ptx.translate import Translator

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    needs_emulation,
    emulated_only,
]
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
eager_chain = partial(ops.conv_bn_act_chain, backend="reference")


def errors_of(case, **gpu):
    """Errors of the kernels and of eager PyTorch, relative to float64, and what has run."""
    drawn = case.draw_once()
    with interpreted(**gpu) as run:
        results = run_cuda(drawn, x_grad=case.x_grad)
    exact = exact_chain(drawn, x_grad=case.x_grad)
    eager = run_chain(eager_chain, drawn, x_grad=case.x_grad)
    return relative_errors(results, exact), relative_errors(eager, exact), run


def check(case, **gpu):
    """Errors are at most a tenth larger than those of eager PyTorch, but for slopes at kinks; returns what has run."""
    errors, eager, run = errors_of(case, **gpu)
    kinks = 5e-2 if "relu" in case.units else 0
    for name, error in errors.items():
        assert error < max(1.1 * eager[name], 1e-3, 0 if name == "y" else kinks), (name, error, eager[name])
    return run


# Where a tensor has fewer channels than a block, its kernels read shared memory that nothing has written, and use
# nothing of it. So each family also has a case without that, in which such reads raise.
NARROW = {"may_be_new": True}
CASES = {
    "pointwise": (ChainCase((2, 64, 9, 8), "pw128/relu6 pw64/identity", "x", dtype=BFLOAT16), {}),
    "narrow pointwise": (ChainCase((2, 24, 9, 8), "pw72/relu6 pw136/relu pw24/identity", dtype=FLOAT16), NARROW),
    "depthwise": (ChainCase((1, 24, 13, 9), "dw3s2/identity dw5/identity", dtype=FLOAT16), {"shared_memory": 99}),
    "depthwise on tensor cores": (ChainCase((1, 64, 9, 9), "dw5/identity dw7/identity", dtype=BFLOAT16), {}),
    "two panels of rows": (ChainCase((1, 8, 15, 17), "dw7/identity", dtype=FLOAT16), NARROW),
    "stem": (ChainCase((2, 3, 9, 8), "dense64k3s2/relu6", dtype=BFLOAT16, x_grad=False), {}),
}


@pytest.mark.parametrize(("case", "gpu"), CASES.values(), ids=CASES)
def test_results_and_gradients_are_as_close_to_float64_as_those_of_eager_pytorch(case, gpu):
    run = check(case, **gpu)
    stages = {f"{kind}_{way}" for kind in ("pointwise", "depthwise", "dense") for way in ("forward", "backward")}
    kinds = {"pw": "pointwise", "dw": "depthwise", "dense": "dense"}
    used = {kinds[kind] for kind in re.findall(r"\b(pw|dw|dense)\d", case.units)}
    wanted = {f"{kind}_{way}" for kind in used for way in ("forward", "backward")} - {"dense_backward"}
    assert stages & set(run.stages) == wanted
    assert any("Matrices" in kernel for kernel in run.kernels) == (
        "dw" in case.units and gpu.get("shared_memory") != 99
    )


def test_a_chain_that_defers_its_last_batch_norm_to_the_next():
    first, second = drawn_pair(PAIRS[4], BFLOAT16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NASFAST_EMULATE_CUDA", "1")
        expected = run_both(first, second)
    with interpreted(may_be_new=True) as run:
        results, _ = run_two(first, second, defers=True)
    assert any("MakingSource" in kernel for kernel in run.kernels)
    for name, value in expected.items():
        # the bound of tests/ops/test_cuda_boundary.py
        size = max(float(v.double().norm()) for k, v in expected.items() if k[:5] == name[:5])
        assert float((results[name].double() - value.double()).norm()) <= 4 * 2**-9 * size, name


# ---- faults in the text of real kernels


def faulty(change):
    case, gpu = CASES["narrow pointwise"]
    return check(replace(case, units="pw72/relu6 pw24/identity"), **gpu, change=change)


def test_the_kernels_of_the_faults_are_right_without_them():
    faulty(lambda text: text)


def without_barrier(before):
    """Removes the barriers that stand in front of an instruction, with no other one between."""
    pattern = re.compile(rf"bar\.sync[^;]*;(?=(?:(?!bar\.sync|\.entry)[\s\S])*?{before})")
    return lambda text: pattern.sub("", text)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda text: text.replace("bar.warp.sync \t-1;", ""), "ld.shared"),
        (without_barrier("ldmatrix"), "ldmatrix"),
        (without_barrier("atom"), "ld.global.cg"),
    ],
    ids=["of a warp", "between slab and product", "between partial sums and counter"],
)
def test_a_kernel_without_a_barrier_has_a_race(change, where):
    with pytest.raises(PtxError, match=rf"{re.escape(where)}.*a race"):
        faulty(change)


def test_a_kernel_that_does_not_wait_for_those_in_front_reads_too_early():
    with pytest.raises(PtxError, match="has not waited for those in front, and reads"):
        faulty(lambda text: text.replace("griddepcontrol.wait;", ""))


@pytest.mark.parametrize(
    "pattern, order",
    [
        (r"(ldmatrix\S*) \{(\S+?),(\S+?),(\S+?),(\S+?)\}", r"\1 {\2,\4,\3,\5}"),
        (r"(cvt\.rn\.relu\.f16x2\.f32) (%r\d+), (%f\d+), (%f\d+)", r"\1 \2, \4, \3"),
        (r"(mma\S*) (\{[^}]*\}), \{(\S+?),(\S+?),(\S+?),(\S+?)\}", r"\1 \2, {\3,\5,\4,\6}"),
    ],
    ids=["ldmatrix", "cvt", "mma"],
)
def test_operands_in_another_order_give_other_results(pattern, order):
    changes = []

    def changed(text):
        result, count = re.subn(pattern, order, text)
        changes.append(count)
        return result

    with pytest.raises(AssertionError):
        faulty(changed)
    assert sum(changes) > 0


# ---- faults in a kernel written by hand

HEAD = """
.version 9.0
.target sm_90
.address_size 64
.shared .align 16 .b8 memory[512];

.visible .entry kernel(
	.param .align 8 .b8 kernel_param_0[8]
)
{
	.reg .pred %p<4>;
	.reg .b32 %r<10>;
	.reg .b64 %rd<4>;
	ld.param.u64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	shl.b32 %r2, %r1, 2;
	mov.u32 %r3, memory;
	add.s32 %r4, %r3, %r2;
	xor.b32 %r5, %r1, DISTANCE;
	shl.b32 %r6, %r5, 2;
	add.s32 %r7, %r3, %r6;
	mov.u32 %r9, %ctaid.x;
	mad.lo.s32 %r9, %r9, 64, %r1;
	mul.wide.u32 %rd2, %r9, 4;
	add.s64 %rd3, %rd1, %rd2;
"""
TAIL = """
	st.global.u32 [%rd3], %r8;
	ret;
}
"""
SWAP = "st.shared.u32 [%r4], %r1;\nbar.sync 0;\nld.shared.u32 %r8, [%r7];"


def run_by_hand(body, *, distance=1, out=None):
    text = (HEAD + body + TAIL).replace("DISTANCE", str(distance))
    out = np.zeros(128, np.uint32) if out is None else out
    memory = Global([(out.ctypes.data, out.ctypes.data + out.nbytes)])
    (kernel,) = parse(text).values()
    Machine(Translator(kernel), (2, 1), 64, 0, out.ctypes.data.to_bytes(8, "little"), memory).run()
    return out[:64]


@pytest.mark.parametrize("distance", [1, 32])
def test_threads_exchange_numbers_behind_a_barrier(distance):
    assert (run_by_hand(SWAP, distance=distance) == np.arange(64) ^ distance).all()


def test_a_barrier_of_warps_orders_lanes_and_not_warps():
    body = SWAP.replace("bar.sync 0", "bar.warp.sync -1")
    assert (run_by_hand(body) == np.arange(64) ^ 1).all()
    with pytest.raises(
        PtxError, match=r"line 28: ld\.shared\.u32 .* a race: thread 0 reads what thread 32 has written"
    ):
        run_by_hand(body, distance=32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (SWAP.replace("bar.sync 0;", ""), "reads what thread . has written, and no barrier"),
        (SWAP + "\nst.shared.u32 [%r4], %r8;", "writes what thread . reads, and no barrier"),
        ("st.shared.u32 [%r3], %r1;\nbar.sync 0;\nld.shared.u32 %r8, [%r3];", "read that several threads have written"),
        ("ld.shared.u32 %r8, [%r7];", "read that nothing has written"),
        (
            "cp.async.cg.shared.global [%r3], [%rd1], 16, 16;\ncp.async.commit_group;\nld.shared.u32 %r8, [%r3];",
            "a copy that has not arrived|a copy goes to where",
        ),
        ("ld.shared.u32 %r8, [%r7+512];", "behind the 512 bytes"),
        ("ld.global.u32 %r8, [%rd3+508];", "outside of every tensor"),
        ("ld.global.u32 %r8, [%rd3+2];", "no multiple of 4"),
        ("mov.u32 %r8, 0;\nst.global.u32 [%rd1], %r1;", "two threads write the same global memory"),
        (
            SWAP + "\nst.global.u32 [%rd3], %r1;\nbar.sync 0;\nld.global.u32 %r9, [%rd1];",
            "another has written in this launch",
        ),
        ("ld.global.u32 %r8, [%rd1];", "writes to global memory that another reads"),
        ("setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $end;\nbar.sync 0;\n$end:\nmov.u32 %r8, 0;", "not all threads"),
        ("setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $end;\nbar.warp.sync -1;\n$end:\nmov.u32 %r8, 0;", "not all lanes"),
        ("popc.b32 %r8, %r1;", "line 26: the interpreter does not know: popc"),
    ],
)
def test_faults_raise(body, message):
    with pytest.raises(PtxError, match=message):
        run_by_hand(body)
