import pytest
import torch
from kernel_cases.squeeze_excite import CASES, Case, check_case

from nasfast import ops
from nasfast.ops import modules

CASE = Case((2, 6, 4, 5))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64_reference(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize("gate", ["hsigmoid", "sigmoid"])
def test_computes_what_the_module_computes(gate, backend):
    module = modules.SqueezeExcitation(12, 4, act="silu", gate=gate)
    squeeze, excite = module.squeeze.conv, module.excite.conv
    x = torch.randn(2, 12, 5, 5)
    weights = squeeze.weight, squeeze.bias, excite.weight, excite.bias
    got = ops.squeeze_excite(x, *weights, act="silu", gate=gate, backend=backend)
    torch.testing.assert_close(got, module(x))


def test_frozen_weights_get_no_gradient_and_x_may_want_none(native):
    x, *weights, grad = CASE.inputs()
    y = ops.squeeze_excite(x.requires_grad_(), *weights, backend="cpu")
    (dx,) = torch.autograd.grad(y, x, grad)
    assert dx.is_contiguous(memory_format=torch.channels_last)
    weights[2].requires_grad_()
    y = ops.squeeze_excite(x.detach(), *weights, backend="cpu")
    y.backward(grad)
    assert weights[2].grad is not None


def test_second_derivatives_are_refused(native):
    x, *weights, _ = CASE.inputs()
    y = ops.squeeze_excite(x.requires_grad_(), *weights, backend="cpu")
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="squeeze_excite: second derivatives are not implemented"):
        dx.sum().backward()


def test_opcheck(native):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 5, 3, 4).to(dtype).contiguous(memory_format=torch.channels_last)
        for y in (None, x):
            torch.library.opcheck(torch.ops.nasfast.squeeze_excite_sums.default, (x, y))
        scale = torch.rand(2, 5)
        for shift in (None, scale):
            torch.library.opcheck(torch.ops.nasfast.squeeze_excite_scale.default, (x, scale, shift))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"act": "gelu"}, ValueError, "act must be one of identity, relu, relu6, tanh, hswish, silu, got 'gelu'"),
        ({"gate": "tanh"}, ValueError, "gate must be one of hsigmoid, sigmoid, got 'tanh'"),
        ({"squeeze_weight": torch.ones(5, 7, 1, 1)}, ValueError, r"squeeze_weight must have shape \(5, 6, 1, 1\)"),
        ({"excite_bias": torch.ones(5)}, ValueError, r"excite_bias must have shape \(6,\), got \(5,\)"),
        ({"excite_bias": torch.ones(6).half()}, TypeError, "excite_bias must be float32 or torch.float32, one type"),
        ({"squeeze_bias": None, "squeeze_weight": None}, TypeError, "squeeze_weight must be a tensor, got NoneType"),
        ({"excite_bias": None}, TypeError, "excite_bias must be a tensor, got NoneType"),
        ({"x": torch.ones(2, 6, 4)}, ValueError, "x must be 4-d"),
    ],
    ids=str,
)
def test_refuses_what_does_not_fit(change, error, message):
    names = ("x", "squeeze_weight", "squeeze_bias", "excite_weight", "excite_bias")
    arguments = dict(zip(names, CASE.inputs(), strict=False))
    with pytest.raises(error, match=f"squeeze_excite: {message}"):
        ops.squeeze_excite(**{**arguments, **change})


def test_kernels_refuse_what_would_corrupt_memory(native):
    x = torch.randn(2, 5, 3, 4).contiguous(memory_format=torch.channels_last)
    sums, scale = torch.ops.nasfast.squeeze_excite_sums, torch.ops.nasfast.squeeze_excite_scale
    with pytest.raises(RuntimeError, match="squeeze_excite_sums: y must have the shape and type of x"):
        sums(x, x[:1])
    with pytest.raises(RuntimeError, match="squeeze_excite_sums: x must be 4-d and channels_last"):
        sums(x.contiguous(), None)
    with pytest.raises(RuntimeError, match=r"squeeze_excite_scale: shift must be contiguous float32 of shape \(N, C\)"):
        scale(x, torch.ones(2, 5), torch.ones(2, 6))
