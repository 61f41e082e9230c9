"""What runs on a GPU where no backend is named: CUDA kernels or what PyTorch's modules run, and never a compiler.

The tensors are fake ones of CUDA, so the tests need no GPU.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast import ops
from nasfast.ops import reference
from nasfast.ops.reference import ConvBNParams, Stage

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
