"""What is said about depthwise stages without tensor cores is what the CUDA kernels do, and is said once."""

import logging

import pytest
import torch

from nasfast import ops
from nasfast.ops import _native, cuda_reasons, cuda_times
from nasfast.ops.plan import StageShape, make_plan
from nasfast.ops.reference import ConvBNParams, Stage


def on_tensor_cores(kernel: int, stride: int, size: tuple[int, int], shared_kb: int) -> bool:
    """Whether they run a stage on an emulated GPU: they round a float32 filter, and the stencils of threads do not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, *size, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(8, 1, kernel, kernel, generator=generator)
    results = []
    for rounded in (weight, weight.bfloat16().float()):
        params = ConvBNParams(rounded, torch.ones(8), torch.zeros(8))
        _native.extension.set_emulation(shared_memory=shared_kb)
        stage = Stage(params, stride, kernel // 2, 8, "identity")
        with torch.autocast("cpu", torch.bfloat16):
            results.append(ops.conv_bn_act_chain(x, [stage], backend="cuda"))
    return torch.equal(*results)


@pytest.mark.skipif(_native.why_no_emulation() is not None, reason=str(_native.why_no_emulation()))
@pytest.mark.parametrize("shared_kb", [99, 227])
@pytest.mark.parametrize(
    ("kernel", "stride", "size"),
    [
        (3, 1, (2, 14)),
        (5, 2, (2, 14)),
        (5, 1, (2, 8)),
        (5, 1, (2, 9)),
        (7, 1, (2, 56)),
        (7, 1, (2, 57)),
        (7, 1, (7, 8)),
        (7, 1, (8, 8)),
    ],
    ids=str,
)
def test_the_rule_is_that_of_the_kernels(kernel, stride, size, shared_kb, monkeypatch):
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    why = cuda_reasons.without_tensor_cores(kernel, stride, size, recomputed=False, shared_kb=shared_kb)
    try:
        assert on_tensor_cores(kernel, stride, size, shared_kb) == (why == ""), why
    finally:
        _native.extension.set_emulation()


def test_each_reason_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(cuda_reasons, "_logged", set())
    depthwise = [StageShape((8, 1, k, k), torch.float32, False, 1, k // 2, 8, "relu6") for k in (3, 5)]
    expand = StageShape((16, 8, 1, 1), torch.float32, False, 1, 0, 1, "relu6")
    wide = depthwise[1]._replace(weight=(16, 1, 5, 5), groups=16)
    caplog.set_level(logging.INFO, logger=cuda_reasons.__name__)
    for _ in range(2):
        cuda_reasons.log_stages(make_plan((2, 8, 14, 14), depthwise).numbers, 227)
        cuda_reasons.log_stages(make_plan((2, 8, 14, 14), [expand, wide], recompute=True).numbers, 227)
    assert caplog.messages == [
        "depthwise convolutions run without tensor cores: with kernel 3 it is slower by the model; the first is in "
        "depthwise 3x3 8-8, depthwise 5x5 8-8 on 392 pixels",
        "depthwise convolutions run without tensor cores: the kernel that computes an expansion again has no such "
        "stencil; the first is in pointwise 8-16, depthwise 5x5 16-16 on 392 pixels",
    ]


@pytest.mark.parametrize(("gpu", "shared_kb", "served"), [("H200", 227, 8), ("RTX 3080", 99, 0)])
def test_the_summary_counts_the_stages_of_a_step(gpu, shared_kb, served):
    first, *reasons = cuda_reasons.summary(gpu, shared_kb)
    count = len(cuda_times.TIMES[gpu])
    assert first == f"cuda runs {served} of the {count} depthwise stages of a mobilenet_v2 step on tensor cores"
    assert sum(int(line.split()[1].rstrip(":")) for line in reasons) == count - served
