"""Chains of convolution, BatchNorm and activation; conv_bn_act and inverted_residual are such chains."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import _native, checks, reference
from nasfast.ops.backends import resolve_backend
from nasfast.ops.bn import bn_act
from nasfast.ops.reference import ConvBNParams, Stage

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
# Products per output of a dense convolution that is multiplied as gathered patches (a stem's 3 x 3 x 3): gathering copies
# every input kernel^2 times, which only a short row of patches makes up for. Beyond it PyTorch's convolution runs.
_MAX_PATCH = 64
# Input channels up to which an expansion is computed again wherever it is read instead of being written, kept and read: for
# each element that costs 2 * Cin operations three times over, against 16 bytes of float32 traffic and as much kept memory.
_MAX_RECOMPUTED_CHANNELS = 64

def conv_bn_act(
    x: Tensor,
    conv_weight: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    residual: Tensor | None = None,
    act: str = "relu6",
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Convolve without bias, normalise, activate, and add the residual.

    out = act(bn(conv2d(x, conv_weight; stride, padding, groups))) + residual, bn as in `nasfast.ops.bn_act`.

    Only the gradients asked for are computed: none for a frozen convolution weight.

    Args:
        x: (N, Cin, H, W); types and layouts as in `nasfast.ops.bn_act`.
        conv_weight: (Cout, Cin / groups, k, k), of the type of x (autocast may convert both).
        bn_weight, bn_bias, running_mean, running_var: (Cout,), float32.
        stride, padding, groups: of the convolution, one number for both directions.
        residual: (N, Cout, Ho, Wo), added after the activation.
        act, training, momentum, eps, backend: as in `nasfast.ops.bn_act`.

    Returns:
        (N, Cout, Ho, Wo).

    Raises:
        TypeError, ValueError: an argument does not fit; in training also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    params = ConvBNParams(conv_weight, bn_weight, bn_bias, running_mean, running_var)
    stage = Stage(params, stride, padding, groups, act, training, momentum, eps)
    checks.check_conv_bn_act("conv_bn_act", x, stage, residual)
    return _run("conv_bn_act", x, [stage], residual, backend)


def inverted_residual(
    x: Tensor,
    expand: ConvBNParams | None,
    depthwise: ConvBNParams,
    project: ConvBNParams,
    *,
    stride: int = 1,
    act: str = "relu6",
    residual: bool = False,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Run the MobileNetV2 block: pointwise expansion, depthwise k x k, linear projection, each with BatchNorm.

    a1 = act(bn1(W1 x)) (or x without expand);  a2 = act(bn2(dw(a1; stride, k // 2)));  out = bn3(W3 a2) (+ x)

    Args:
        x: (N, Cin, H, W); types and layouts as in `nasfast.ops.bn_act`.
        expand: conv_weight (hidden, Cin, 1, 1), or None for hidden = Cin.
        depthwise: conv_weight (hidden, 1, k, k), k odd.
        project: conv_weight (Cout, hidden, 1, 1).
        stride: of the depthwise convolution.
        residual: add x; needs stride 1 and Cin == Cout.
        act, training, momentum, eps, backend: as in `nasfast.ops.bn_act`, for all three BatchNorms.

    Returns:
        (N, Cout, ceil(H / stride), ceil(W / stride)).

    Raises:
        TypeError, ValueError: an argument does not fit; in training also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    checks.check_inverted_residual(
        x, expand, depthwise, project, stride=stride, act=act, residual=residual, training=training, eps=eps
    )
    stages = reference.block_stages(
        expand, depthwise, project, stride=stride, act=act, training=training, momentum=momentum, eps=eps
    )
    return _run("inverted_residual", x, stages, x if residual else None, backend)


def conv_bn_act_chain(
    x: Tensor, stages: Sequence[Stage], *, residual: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Run conv_bn_act stages one after another, and add the residual to the result of the last.

    The native backend normalises and activates the result of each stage while the next one reads it, so that every
    convolution's output is written once, and nothing else between the stages is.

    Args:
        x: (N, C, H, W), the input of the first stage; types and layouts as in `nasfast.ops.bn_act`.
        stages: at least one; each says its parameters, stride, padding, groups, act, training, momentum and eps.
        residual: of the shape of the result, added after the last activation.
        backend: as in `nasfast.ops.bn_act`.

    Returns:
        The result of the last stage.

    Raises:
        TypeError, ValueError: an argument does not fit; the message says which stage.
        RuntimeError: the named backend cannot serve.
    """
    checks.check_chain("conv_bn_act_chain", x, stages, residual)
    return _run("conv_bn_act_chain", x, stages, residual, backend)


def _run(op: str, x: Tensor, stages: Sequence[Stage], residual: Tensor | None, backend: str | None) -> Tensor:
    if resolve_backend(op, x, backend).name == "reference":
        return reference.conv_bn_act_chain(x, stages, residual=residual)
    i_stage = 0
    while i_stage < len(stages):
        end = i_stage
        while end < len(stages) and _is_native(x, stages, i_stage, end):
            end += 1
        run = _native_chain if end > i_stage else _vendor
        end = max(end, i_stage + 1)
        added = residual if end == len(stages) else None
        x = run(x, stages[i_stage:end], added)
        i_stage = end
    return x


def _is_native(x: Tensor, stages: Sequence[Stage], begin: int, i_stage: int) -> bool:
    """Whether the native operator has stages[i_stage] in a chain that begins with stages[begin] on x."""
    stage = stages[i_stage]
    weight = stage.params.conv_weight
    if weight.requires_grad and torch.is_grad_enabled():
        return False
    if autocast_dtype(x) not in _NATIVE_DTYPES or weight.dtype not in _NATIVE_DTYPES:
        return False
    out_channels, per_group, kernel, kernel_width = weight.shape
    if kernel != kernel_width or kernel % 2 == 0 or stage.padding != kernel // 2:
        return False
    if stage.groups == 1 and kernel == 1:
        # a strided one is a chain's first, on the pixels it keeps
        return stage.stride == 1 or i_stage == begin
    if stage.groups == out_channels and per_group == 1 and kernel in (3, 5, 7) and stage.stride in (1, 2):
        return i_stage > begin or stage.groups == x.shape[1]
    needs_input_grad = x.requires_grad and torch.is_grad_enabled()
    return stage.groups == 1 and i_stage == begin and not needs_input_grad and weight[0].numel() <= _MAX_PATCH


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type a convolution of x has: that of autocast where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _native_chain(x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
    """Stages that the native operator has, as one call of it."""
    strides = [stage.stride for stage in stages]
    if strides[0] > 1 and stages[0].params.conv_weight.shape[2] == 1:
        x = x[:, :, :: strides[0], :: strides[0]]
        strides[0] = 1
    given = x
    x = x.to(autocast_dtype(x)).contiguous(memory_format=torch.channels_last)
    add_input = residual is given and x.dtype == given.dtype
    # one storage type per kernel: a residual of another type is added by PyTorch, with its promotion rules
    fused = None
    if residual is not None and not add_input and residual.dtype == x.dtype:
        fused = residual.contiguous(memory_format=torch.channels_last)
    params = [stage.params for stage in stages]
    empty = x.new_empty(0, dtype=torch.float32)
    y, _, statistics = torch.ops.nasfast.conv_bn_act_fwd(
        x,
        [p.conv_weight.contiguous() for p in params],
        [p.bn_weight.contiguous() for p in params],
        [p.bn_bias.contiguous() for p in params],
        [empty if stage.training else stage.params.running_mean.contiguous() for stage in stages],
        [empty if stage.training else stage.params.running_var.contiguous() for stage in stages],
        fused,
        strides,
        ",".join(stage.act for stage in stages),
        [stage.eps for stage in stages],
        add_input,
        recomputes_expansion(x, params[0].conv_weight, params[1].conv_weight) if len(params) > 1 else False,
    )
    _update_running(stages, strides, statistics, x)
    return y if residual is None or add_input or fused is not None else y + residual


def recomputes_expansion(x: Tensor, first: Tensor, second: Tensor) -> bool:
    """The plan of a chain whose first two convolutions have these weights: whether the output of the first is not kept."""
    expands = first.shape[2] == 1 and second.shape[1] == 1 and second.shape[2] > 1
    return expands and first.shape[1] <= _MAX_RECOMPUTED_CHANNELS


def _update_running(stages: Sequence[Stage], strides: Sequence[int], statistics: Tensor, x: Tensor) -> None:
    count = x.shape[0]
    height, width = x.shape[2:]
    at = 0
    for stage, stride in zip(stages, strides, strict=True):
        params = stage.params
        channels = params.bn_weight.shape[0]
        height, width = (height - 1) // stride + 1, (width - 1) // stride + 1
        if stage.training and params.running_mean is not None:
            mean, var = statistics[at : at + 2 * channels].view(2, channels)
            reference.update_running(
                params.running_mean, params.running_var, mean, var, count * height * width, stage.momentum
            )
        at += 2 * channels


def _vendor(x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
    """One stage by PyTorch's convolution and `bn_act`."""
    (stage,) = stages
    params = stage.params
    y = F.conv2d(x, params.conv_weight, None, stage.stride, stage.padding, 1, stage.groups)
    return bn_act(
        y, params.bn_weight, params.bn_bias,
        running_mean=params.running_mean, running_var=params.running_var, residual=residual,
        act=stage.act, training=stage.training, momentum=stage.momentum, eps=stage.eps,
    )  # fmt: skip


def _fwd_fake(
    x, conv_weights, bn_weights, bn_biases, running_means, running_vars, residual, strides, acts, eps, add_input, recompute
):
    batch, _, height, width = x.shape
    saved = 0
    for i_stage, (weight, stride) in enumerate(zip(conv_weights, strides, strict=True)):
        height, width = (height - 1) // stride + 1, (width - 1) // stride + 1
        if i_stage > 0 or not recompute:
            saved += (batch * height * width * weight.shape[0] + 63) // 64 * 64
    y = torch.empty(
        (batch, conv_weights[-1].shape[0], height, width),
        dtype=x.dtype, device=x.device, memory_format=torch.channels_last,
    )  # fmt: skip
    statistics = x.new_empty(sum(2 * w.shape[0] for w in conv_weights), dtype=torch.float64)
    return y, x.new_empty(saved), statistics


def _bwd_fake(
    grad, x, shape, saved, statistics, conv_weights, bn_weights, bn_biases,
    batch_statistics, strides, acts, eps, add_input, recompute, wants,
):  # fmt: skip
    dx = torch.empty(shape, dtype=saved.dtype, device=saved.device).contiguous(memory_format=torch.channels_last)
    dweights = [w.new_empty(w.shape[0] if want else 0) for w, want in zip(bn_weights, wants[1::2], strict=True)]
    dbiases = [b.new_empty(b.shape[0] if want else 0) for b, want in zip(bn_biases, wants[2::2], strict=True)]
    return dx if wants[0] else saved.new_empty(0), dweights, dbiases


def _setup_context(ctx, inputs, output):
    x, conv_weights, bn_weights, bn_biases, running_means, _, _, strides, acts, eps, add_input, recompute = inputs
    _, saved, statistics = output
    # flat here: x, then the tensors of each list
    n = len(conv_weights)
    needs = ctx.needs_input_grad
    if any(needs[1 : n + 1]):
        raise RuntimeError(
            "conv_bn_act_fwd: a convolution weight requires grad, but this operator has no weight gradients: freeze it "
            "with requires_grad_(False), or call nasfast.ops.conv_bn_act, which then uses PyTorch's convolution"
        )
    ctx.mark_non_differentiable(saved, statistics)
    ctx.set_materialize_grads(False)
    ctx.shape = list(x.shape)
    ctx.settings = [m.numel() == 0 for m in running_means], strides, acts, eps, add_input, recompute
    if needs[0] or any(needs[n + 1 : 3 * n + 1]):
        kept = (x,) if recompute else ()
        ctx.n_stages = n
        ctx.save_for_backward(saved, statistics, *conv_weights, *bn_weights, *bn_biases, *kept)


def _backward(ctx, grad, grad_saved, grad_statistics):
    want_x, _, want_weights, want_biases, _, _, want_residual = ctx.needs_input_grad[:7]
    nothing = [None] * len(want_weights)
    dx, dweights, dbiases = None, nothing, nothing
    if grad is not None and (want_x or any(want_weights) or any(want_biases)):
        saved, statistics, *tensors = ctx.saved_tensors
        n = ctx.n_stages
        wants = [want_x, *(want for pair in zip(want_weights, want_biases, strict=True) for want in pair)]
        dx, dweights, dbiases = torch.ops.nasfast.conv_bn_act_bwd(
            grad.contiguous(memory_format=torch.channels_last),
            tensors[3 * n] if len(tensors) > 3 * n else None,
            ctx.shape, saved, statistics, tensors[:n], tensors[n : 2 * n], tensors[2 * n : 3 * n], *ctx.settings, wants,
        )  # fmt: skip
        dweights = [d if want else None for d, want in zip(dweights, want_weights, strict=True)]
        dbiases = [d if want else None for d, want in zip(dbiases, want_biases, strict=True)]
    return (
        dx if want_x else None, nothing, dweights, dbiases, nothing, nothing, grad if want_residual else None,
        None, None, None, None, None,
    )  # fmt: skip


if _native.extension is not None:
    torch.library.register_fake("nasfast::conv_bn_act_fwd", _fwd_fake)
    torch.library.register_fake("nasfast::conv_bn_act_bwd", _bwd_fake)
    torch.library.register_autograd("nasfast::conv_bn_act_fwd", _backward, setup_context=_setup_context)
