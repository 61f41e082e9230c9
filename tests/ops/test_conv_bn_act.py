import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.chain import Drawn, run_chain, widened_chain
from kernel_cases.layout import with_layout
from pairs import pairwise
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close

from nasfast import ops
from nasfast.ops import reference

# in, out, kernel, stride, groups
CONVS = {
    "pointwise": (8, 12, 1, 1, 1),
    "depthwise3": (8, 8, 3, 1, 8),
    "depthwise5s2": (9, 9, 5, 2, 9),
    "depthwise7": (5, 5, 7, 1, 5),
    "dense3s2": (3, 10, 3, 2, 1),
}
CHAINS = {torch.float32: FLOAT32_CHAIN, torch.bfloat16: BFLOAT16_CHAIN}
# chains whose convolutions have a bias; the second has an expansion that is computed again, the third is a fused MBConv
BIASED = {
    "pointwise": [(8, 12, 1, 1, 1)],
    "mbconv": [(8, 32, 1, 1, 1), (32, 32, 3, 2, 32), (32, 12, 1, 1, 1)],
    "fused mbconv": [(12, 32, 3, 1, 1), (32, 12, 1, 1, 1)],
    "groups": [(16, 16, 3, 1, 2)],
}


def make(conv, *, layout="nhwc", dtype=torch.float32):
    in_channels, out_channels, kernel, stride, groups = conv
    padding = kernel // 2
    tensors = {
        "x": with_layout(torch.randn(3, in_channels, 9, 7), layout).to(dtype),
        "conv_weight": (torch.randn(out_channels, in_channels // groups, kernel, kernel) / kernel).to(dtype),
        "bn_weight": torch.rand(out_channels) + 0.5,
        "bn_bias": torch.randn(out_channels),
        "running_mean": torch.randn(out_channels),
        "running_var": torch.rand(out_channels) + 0.5,
    }
    shape = F.conv2d(tensors["x"], tensors["conv_weight"], None, stride, padding, 1, groups).shape
    tensors["residual"] = torch.randn(shape).to(dtype)
    tensors["grad"] = torch.randn(shape).to(dtype)
    return tensors, {"stride": stride, "padding": padding, "groups": groups}


def formula(x, conv_weight, bn_weight, bn_bias, *, stride=1, padding, groups=1, **settings):
    y = F.conv2d(x, conv_weight, None, stride, padding, 1, groups)
    return reference.bn_act(y, bn_weight, bn_bias, **settings)


def run(function, tensors, geometry, *, frozen, training, act):
    names = ("x", "conv_weight", "bn_weight", "bn_bias", "residual")
    leaves = {name: tensors[name].detach().requires_grad_(not (frozen and name == "conv_weight")) for name in names}
    running = {name: tensors[name].clone() for name in ("running_mean", "running_var")}
    y = function(**leaves, **running, **geometry, training=training, act=act)
    y.backward(tensors["grad"])
    assert (leaves["conv_weight"].grad is None) == frozen
    return {"y": y, **running, **{f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


@pytest.mark.parametrize(
    ("conv", "layout", "dtype", "frozen", "training"),
    pairwise(list(CONVS), ("nhwc", "nchw", "strided"), list(CHAINS), (True, False), (True, False)),
    ids=str,
)
def test_matches_float64_reference(conv, layout, dtype, frozen, training, backend):
    tensors, geometry = make(CONVS[conv], layout=layout, dtype=dtype)
    # tanh has no kink at which the rounding of the convolution could choose another slope
    settings = {"frozen": frozen, "training": training, "act": "tanh"}
    got = run(lambda **kw: ops.conv_bn_act(**kw, backend=backend), tensors, geometry, **settings)
    widened = {name: tensor.double() for name, tensor in tensors.items()}
    want = run(formula, widened, geometry, **settings)
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], CHAINS[dtype], floor=4.0 if name.startswith("d") else 0.0)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", CHAINS, ids=str)
@pytest.mark.parametrize("convs", BIASED.values(), ids=BIASED)
def test_biases_of_convolutions(convs, dtype, training, backend):
    """With batch statistics a bias moves nothing but the running mean, and its gradient is exactly zero."""
    stages, channels = [], convs[0][0]
    for in_channels, out_channels, kernel, stride, groups in convs:
        shape = (out_channels, in_channels // groups, kernel, kernel)
        params = ops.ConvBNParams(
            (torch.randn(shape) / shape[1] ** 0.5).to(dtype),
            torch.rand(out_channels) + 0.5,
            torch.randn(out_channels),
            torch.randn(out_channels),
            torch.rand(out_channels) + 0.5,
            (0.5 * torch.randn(out_channels)).to(dtype),
        )
        stages.append(ops.Stage(params, stride, kernel // 2, groups, "tanh", training, 0.3))
    step = math.prod(stage.stride for stage in stages)
    x, shape = torch.randn(3, channels, 9, 7).to(dtype), (3, out_channels, 8 // step + 1, 6 // step + 1)
    grad = torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype)
    drawn = Drawn(x, stages, None, False, grad)
    got = run_chain(partial(ops.conv_bn_act_chain, backend=backend), drawn)
    want = run_chain(reference.conv_bn_act_chain, widened_chain(drawn))
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], CHAINS[dtype], floor=4.0 if name.startswith("d") else 0.0)
        if name.startswith("dbias") and training and backend != "reference":
            assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_type_that_the_backend_lacks_is_left_to_the_reference(kernel):
    x, weight = torch.randn(2, 16, 5, 5), torch.randn(16, 16, kernel, kernel)
    with torch.autocast("cpu", torch.float16):
        y = ops.conv_bn_act(x, weight, torch.ones(16), torch.zeros(16), padding=kernel // 2)
    want = formula(x, weight, torch.ones(16), torch.zeros(16), padding=kernel // 2)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)
