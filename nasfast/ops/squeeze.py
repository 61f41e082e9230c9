"""squeeze_excite: channels times factors that depend on the means of all channels; fake kernels and autograd.

The kernels are the two passes over pixels in either direction. What is between them has one number per image and
channel, and runs on PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import _native, checks, reference  # noqa: F401  # the extension defines the operators
from nasfast.ops.autograd import check_device, once_per_gradient, only_reference_serves, refuse_second_derivatives
from nasfast.ops.backends import resolve_backend

HAS_KERNELS = hasattr(torch.ops.nasfast, "squeeze_excite_sums")
"""False without the extension."""
# the fewest elements in float32 for which the operator is faster than PyTorch
_MIN_ELEMENTS = 2**17


def squeeze_excite(
    x: Tensor,
    squeeze_weight: Tensor,
    squeeze_bias: Tensor,
    excite_weight: Tensor,
    excite_bias: Tensor,
    *,
    act: str = "relu",
    gate: str = "hsigmoid",
    backend: str | None = None,
) -> Tensor:
    """x times gate(W2 act(W1 mean(x) + b1) + b2), one factor per image and channel (Hu et al. 2018).

    The native backend reads x twice and writes the result once. Its backward reads x once and the gradient twice, and
    writes dx once. The means are float32, and so are the factors for weights in float32, also under autocast. For
    backward it keeps x, the weights, and three vectors per image. Only the reference has second derivatives.

    Args:
        x: (N, C, H, W), channels_last (other strides are copied); float32 or bfloat16, and float16 or float64 on the
            reference.
        squeeze_weight, squeeze_bias: W1 (S, C, 1, 1) and b1 (S,), all four of one type: float32 or that of x.
        excite_weight, excite_bias: W2 (C, S, 1, 1) and b2 (C,).
        act: identity, relu, relu6, tanh, hswish or silu.
        gate: hsigmoid or sigmoid.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        (N, C, H, W) of the type of x, channels_last on the native backend.

    Raises:
        TypeError, ValueError: an argument does not fit.
        RuntimeError: the named backend cannot serve.
    """
    weights = squeeze_weight, squeeze_bias, excite_weight, excite_bias
    _check_squeeze_excite(x, weights, act=act, gate=gate)
    if resolve_backend("squeeze_excite", x, backend).name == "reference" or only_reference_serves(x):
        return reference.squeeze_excite(x, *weights, act=act, gate=gate)
    x = x.contiguous(memory_format=torch.channels_last)
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return _SqueezeExcite.apply(x, *weights, act, gate)
    return _SqueezeExcite.apply(x, *weights, act, gate)


def _check_squeeze_excite(x: Tensor, weights: Sequence[Tensor], *, act: str, gate: str) -> None:
    """Check the arguments of `nasfast.ops.squeeze_excite`; weights are W1, b1, W2, b2."""
    op = "squeeze_excite"
    checks.check_map(op, x, 1)
    for name, value, allowed in (("act", act, reference.ACTIVATIONS), ("gate", gate, reference.GATES)):
        if value not in allowed:
            raise ValueError(f"{op}: {name} must be one of {', '.join(allowed)}, got {value!r}")
    names = ("squeeze_weight", "squeeze_bias", "excite_weight", "excite_bias")
    for name, tensor in zip(names, weights, strict=True):
        checks.check_tensor(f"{op}: {name}", tensor)
    channels, squeezed = x.shape[1], weights[1].numel()
    if squeezed == 0:
        raise ValueError(f"{op}: squeeze_bias must have at least one element, got none")
    shapes = ((squeezed, channels, 1, 1), (squeezed,), (channels, squeezed, 1, 1), (channels,))
    types: tuple[torch.dtype, ...] = (torch.float32, x.dtype)
    for name, tensor, shape in zip(names, weights, shapes, strict=True):
        checks.check_like(f"{op}: {name}", tensor, x, shape, types, why="one type for all four")
        types = (tensor.dtype,)


def is_faster(x: Tensor, *, trains: bool) -> bool:
    """Whether `squeeze_excite` is expected to be faster than PyTorch's operators; only its CPU kernels ever are.

    In bfloat16 they are: PyTorch copies x to float32 for its mean. In float32 with frozen weights and a gradient of x,
    they take 0.3 to 0.8 of PyTorch's time from `_MIN_ELEMENTS` on, and up to 1.4 below, where the time is that of the
    calls. In networks all of whose weights train, and without gradients, float32 gains nothing. Measured on an AMD EPYC
    (Zen 4), batch 8, 16 to 960 channels, 5 x 5 to 80 x 80 pixels.

    Args:
        x: the input.
        trains: whether a weight or bias trains.
    """
    if not HAS_KERNELS or not x.is_cpu or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if x.dtype == torch.float32:
        if trains or not (torch.is_grad_enabled() and x.requires_grad) or x.numel() < _MIN_ELEMENTS:
            return False
    elif x.dtype != torch.bfloat16:
        return False
    return resolve_backend("squeeze_excite", x).name == "cpu"


class _SqueezeExcite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, squeeze_weight, squeeze_bias, excite_weight, excite_bias, act, gate):
        mean = torch.ops.nasfast.squeeze_excite_sums(x, None).div_(x.shape[2] * x.shape[3]).to(squeeze_weight.dtype)
        squeezed = F.linear(mean, squeeze_weight.flatten(1), squeeze_bias)
        excited = F.linear(reference.ACTIVATIONS[act](squeezed), excite_weight.flatten(1), excite_bias)
        ctx.save_for_backward(x, squeeze_weight, excite_weight, mean, squeezed, excited)
        ctx.act, ctx.gate = reference.ACTIVATIONS[act], reference.GATES[gate]
        return torch.ops.nasfast.squeeze_excite_scale(x, ctx.gate(excited).float(), None)

    @staticmethod
    @once_per_gradient
    def backward(ctx, grad):
        x, squeeze_weight, excite_weight, mean, squeezed, excited = ctx.saved_tensors
        wants_x, wants_squeeze, _, wants_excite, *_ = wants = ctx.needs_input_grad
        dx = dsqueeze_weight = dexcite_weight = None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            grad = grad.contiguous(memory_format=torch.channels_last)
            dfactor = torch.ops.nasfast.squeeze_excite_sums(grad, x).to(excited.dtype)
            dexcited = _through(ctx.gate, excited, dfactor)
            if wants_excite:
                dexcite_weight = (dexcited.T @ ctx.act(squeezed)).view_as(excite_weight)
            dsqueezed = _through(ctx.act, squeezed, dexcited @ excite_weight.flatten(1))
            if wants_squeeze:
                dsqueeze_weight = (dsqueezed.T @ mean).view_as(squeeze_weight)
            if wants_x:
                shift = (dsqueezed @ squeeze_weight.flatten(1)).float().div_(x.shape[2] * x.shape[3])
                dx = torch.ops.nasfast.squeeze_excite_scale(grad, ctx.gate(excited).float(), shift)
            dsqueeze_bias = dsqueezed.sum(0) if wants[2] else None
            dexcite_bias = dexcited.sum(0) if wants[4] else None
        gradients = dx, dsqueeze_weight, dsqueeze_bias, dexcite_weight, dexcite_bias
        if torch.is_grad_enabled():  # only under create_graph
            gradients = refuse_second_derivatives("squeeze_excite", grad, *gradients)
        return *gradients, None, None


def _through(function: Callable[[Tensor], Tensor], z: Tensor, grad: Tensor) -> Tensor:
    """The gradient of z from that of function(z), element by element."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, grad)[0]


if HAS_KERNELS:

    @torch.library.register_fake("nasfast::squeeze_excite_sums")
    def _sums_fake(x, y):
        check_device(x, y)
        return x.new_empty(x.shape[:2], dtype=torch.float32)

    @torch.library.register_fake("nasfast::squeeze_excite_scale")
    def _scale_fake(x, scale, shift):
        check_device(x, scale, shift)
        return torch.empty_like(x, memory_format=torch.channels_last)
