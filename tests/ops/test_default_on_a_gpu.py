"""What runs on a GPU where no backend is named: CUDA kernels or what PyTorch's modules run, and never a compiler.

The tensors are fake ones of CUDA, so the tests need no GPU.
"""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast import ops
from nasfast.ops import reference
from nasfast.ops.reference import ConvBNParams, Stage

EVERY_OPERATOR = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
import nasfast.engine, nasfast.supernet
# as torch.compiler does, whose decorators import it; `fuse` needs TorchDynamo, which imports Triton, too
assert "triton" not in sys.modules
import nasfast.fusion
from nasfast.ops import ConvBNParams, Stage, bn_act, conv_bn_act_chain, mixed_bn

def nhwc(*shape, dtype=torch.float32):
    return torch.ones(shape, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)

with FakeTensorMode(allow_non_fake_inputs=True):
    for dtype in (torch.float32, torch.bfloat16):
        affine = torch.ones(16, device="cuda", requires_grad=True)
        x, kernels = nhwc(2, 16, 6, 6, dtype=dtype), ((16, 16, 1, 1), (16, 1, 3, 3), (16, 16, 3, 3))
        params = [ConvBNParams(nhwc(*shape, dtype=dtype), affine, affine) for shape in kernels]
        stages = [Stage(p, 1, p.conv_weight.shape[2] // 2, 16 // p.conv_weight.shape[1], "silu") for p in params]
        conv_bn_act_chain(x, stages, residual=x)
        bn_act(x, affine, affine)
        mixed_bn([x, x], affine[:2], normalize=[True, False])
# fake tensors import Triton themselves
print(*[name for name in ("nasfast.ops.triton",) if name in sys.modules])
"""


def test_triton_is_not_imported_and_who_lacks_kernels_learns_it_once():
    ran = subprocess.run([sys.executable, "-c", EVERY_OPERATOR], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr[-3000:]
    if not torch.cuda.is_available():
        said = [line for line in ran.stderr.splitlines() if line.startswith("nasfast has no kernels for cuda:0")]
        assert len(said) == 1, ran.stderr


WITHOUT_KERNEL = ("detach", "empty", "promote_types", "sym_size", "sym_stride", "is_contiguous")


class Operators(TorchDispatchMode):
    """Notes the operators of PyTorch that launch kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten" and func.overloadpacket.__name__ not in WITHOUT_KERNEL:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_the_reference_runs_on_a_gpu_what_pytorchs_modules_run(dtype, training):
    with FakeTensorMode():
        conv = nn.Conv2d(8, 16, 3, padding=1, bias=False, device="cuda", dtype=dtype)
        bn = nn.BatchNorm2d(16, device="cuda")
        bn.train(training).num_batches_tracked = None
        params = ConvBNParams(conv.weight, bn.weight, bn.bias, bn.running_mean, bn.running_var)
        stage = Stage(params, padding=1, act="relu", training=training)
        x = torch.ones(2, 8, 6, 6, device="cuda", dtype=dtype)
        with Operators() as eager:
            want = nn.functional.relu(bn(conv(x)))
        with Operators() as ours:
            got = reference.conv_bn_act_chain(x, [stage])
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert ours.names == eager.names


@pytest.mark.parametrize("op", ["bn_act", "conv_bn_act", "conv_bn_act_chain", "mixed_bn"])
def test_triton_serves_only_where_it_is_named(op, monkeypatch):
    monkeypatch.delenv("NASFAST_BACKEND", raising=False)
    with FakeTensorMode():
        assert ops.resolve_backend(op, torch.ones(1, device="cuda")).name == "reference"
