"""conv_bn_act, and chains of any convolutions with and without bias: what runs on PyTorch too."""

import math
from functools import partial

import pytest
import torch
from kernel_cases.case import with_layout
from kernel_cases.chain import ChainInputs, run_chain, widened_chain
from pairs import pairwise
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close

from nasfast import ops
from nasfast.ops import reference

# in, out, kernel, stride, groups of each convolution; the MBConv has an expansion that is computed again
CHAINS = {
    "pointwise": [(8, 12, 1, 1, 1)],
    "depthwise5s2": [(9, 9, 5, 2, 9)],
    "depthwise7": [(5, 5, 7, 1, 5)],
    "dense3s2": [(3, 10, 3, 2, 1)],
    "groups": [(16, 16, 3, 1, 2)],
    "mbconv": [(8, 32, 1, 1, 1), (32, 32, 3, 2, 32), (32, 12, 1, 1, 1)],
    "fused mbconv": [(12, 32, 3, 1, 1), (32, 12, 1, 1, 1)],
}
TOLERANCE = {torch.float32: FLOAT32_CHAIN, torch.bfloat16: BFLOAT16_CHAIN}


def draw(chain: str, layout: str, dtype: torch.dtype, *, biased: bool, training: bool) -> ChainInputs:
    stages = []
    for in_channels, out_channels, kernel, stride, groups in CHAINS[chain]:
        shape = (out_channels, in_channels // groups, kernel, kernel)
        params = ops.ConvBNParams(
            (torch.randn(shape) / math.prod(shape[1:]) ** 0.5).to(dtype),
            torch.rand(out_channels) + 0.5,
            torch.randn(out_channels),
            torch.randn(out_channels),
            torch.rand(out_channels) + 0.5,
            (0.5 * torch.randn(out_channels)).to(dtype) if biased else None,
        )
        # tanh has no kink at which the rounding of the convolution could choose another slope
        stages.append(ops.Stage(params, stride, kernel // 2, groups, "tanh", training, 0.3))
    step = math.prod(stage.stride for stage in stages)
    shape = (3, out_channels, 8 // step + 1, 6 // step + 1)
    x, residual = torch.randn(3, CHAINS[chain][0][0], 9, 7), torch.randn(shape)
    grad = torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype)
    return ChainInputs(with_layout(x.to(dtype), layout), stages, with_layout(residual.to(dtype), layout), False, grad)


@pytest.mark.parametrize(
    ("chain", "layout", "dtype", "biased", "training", "trains"),
    pairwise(list(CHAINS), ("nhwc", "nchw", "strided"), list(TOLERANCE), (True, False), (True, False), (True, False)),
    ids=str,
)
def test_matches_float64_reference(chain, layout, dtype, biased, training, trains, backend):
    """With batch statistics a bias moves nothing but the running mean, and its gradient is exactly zero."""
    inputs = draw(chain, layout, dtype, biased=biased, training=training)
    wide = widened_chain(inputs)
    weights = [[stage.params.conv_weight.requires_grad_(trains) for stage in each.stages] for each in (inputs, wide)]
    got = run_chain(partial(ops.conv_bn_act_chain, backend=backend), inputs)
    want = run_chain(reference.conv_bn_act_chain, wide)
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], TOLERANCE[dtype], floor=4.0 if name.startswith("d") else 0.0)
        if name.startswith("dbias") and training and backend != "reference":
            assert torch.equal(tensor, torch.zeros_like(tensor))
    for i, (weight, exact) in enumerate(zip(*weights, strict=True)):
        assert (weight.grad is not None) == trains
        if trains:
            assert_close(f"dweight{i}", weight.grad, exact.grad, TOLERANCE[dtype], floor=4.0)


@pytest.mark.parametrize("training", [True, False])
def test_conv_bn_act_is_a_chain_of_one_stage(training, backend):
    inputs = draw("depthwise5s2", "nhwc", torch.float32, biased=True, training=training)

    def conv_bn_act(x, stages, *, residual, shuffle):
        (stage,) = stages
        settings = stage._asdict()
        return ops.conv_bn_act(x, **settings.pop("params")._asdict(), **settings, residual=residual, backend=backend)

    got = run_chain(conv_bn_act, inputs)
    want = run_chain(partial(ops.conv_bn_act_chain, backend=backend), inputs)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_type_that_the_backend_lacks_is_left_to_the_reference(kernel, training):
    params = ops.ConvBNParams(torch.randn(16, 16, kernel, kernel), *torch.rand(4, 16).add(0.5).unbind())
    x, residual = torch.randn(2, 16, 5, 5), torch.randn(2, 16, 5, 5)
    stages = [ops.Stage(params, padding=kernel // 2, training=training)]
    want = reference.conv_bn_act_chain(x, stages, residual=residual)
    for grads in (False, True):
        with torch.autocast("cpu", torch.float16), torch.set_grad_enabled(grads):
            y, added = (ops.conv_bn_act_chain(x, stages, residual=r) for r in (None, residual))
        assert (y.dtype, added.dtype) == (torch.float16, torch.float32)
        torch.testing.assert_close(y + residual, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(added, want, rtol=2e-2, atol=2e-2)
