"""The operator behind the chains of nasfast.ops.conv, in C++ or on Triton: its call, plan, fake and autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nasfast.ops import destinations, reference
from nasfast.ops.autograd import check_device, refuse_second_derivatives
from nasfast.ops.reference import Stage
from nasfast.ops.registry import operators, register

# storage types of activations and weights, by backend
DTYPES = {
    "cpu": {torch.float32, torch.bfloat16},
    "triton": {torch.float32, torch.bfloat16, torch.float16},
}
# Input channels up to which an expansion is computed again wherever it is read instead of being written, kept and read:
# for each of its elements that costs 2 * Cin operations, against 16 bytes of float32 traffic and 4 of kept memory.
# Measured on two AVX-512 cores: 10 to 25 % faster up to 32 channels, even at 56, 15 % slower at 112.
MAX_RECOMPUTED_CHANNELS = 64
# Expansion factor from which that saves memory: the chain's input is kept in place of the expansion.
MIN_RECOMPUTED_EXPANSION = 2


def storage_dtype(x: Tensor) -> torch.dtype:
    """The type a convolution of x has: that of autocast where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def conv_bn_act(
    x: Tensor, stages: Sequence[Stage], *, residual: Tensor | None, shuffle: bool = False, backend: str
) -> Tensor:
    """Stages that the operator of the backend has, as one call of it."""
    strides = [stage.stride for stage in stages]
    if strides[0] > 1 and stages[0].params.conv_weight.shape[2] == 1:
        x = _Subsample.apply(x, strides[0])
        strides[0] = 1
    given = x
    x = x.to(storage_dtype(x)).contiguous(memory_format=torch.channels_last)
    add_input = residual is given and x.dtype == given.dtype
    # one storage type per kernel: a residual of another type is added by PyTorch, with its promotion rules
    fused = None
    if residual is not None and not add_input and residual.dtype == x.dtype:
        fused = residual.contiguous(memory_format=torch.channels_last)
    params = [stage.params for stage in stages]
    empty = x.new_empty(0, dtype=torch.float32)
    y, _, statistics = operators(backend).conv_bn_act_fwd(
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
        not shuffle and goes_in_one_pass([p.conv_weight for p in params], backend),
        shuffle,
        torch.is_grad_enabled() and any(t.requires_grad for p in params for t in (x, p.bn_weight, p.bn_bias)),
    )
    _update_running(stages, strides, statistics, x)
    return y if residual is None or add_input or fused is not None else y + residual


class _Subsample(torch.autograd.Function):
    """Every stride-th pixel of x, both ways. The gradient of slices would be contiguous zeros, twice."""

    @staticmethod
    def forward(ctx, x, stride):
        ctx.shape, ctx.stride = x.shape, stride
        return x[:, :, ::stride, ::stride].clone(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx, grad):
        dx = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last).zero_()
        dx[:, :, :: ctx.stride, :: ctx.stride] = grad
        return dx, None


def goes_in_one_pass(conv_weights: Sequence[Tensor], backend: str) -> bool:
    """The plan of a chain on the CPU: whether backward goes through an expansion and its depthwise stage at once.

    The chain's input is then kept, and the expansion's output computed again.
    """
    if backend != "cpu" or len(conv_weights) < 2:
        return False
    first, second = conv_weights[:2]
    hidden, channels, kernel, _ = first.shape
    is_expansion = kernel == 1 and second.shape[1] == 1 and second.shape[2] > 1
    return is_expansion and hidden >= MIN_RECOMPUTED_EXPANSION * channels and channels <= MAX_RECOMPUTED_CHANNELS


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


def _fwd_fake(
    backend, x, conv_weights, bn_weights, bn_biases, running_means, running_vars, residual,
    strides, acts, eps, add_input, one_pass, shuffle, keep,
):  # fmt: skip
    check_device(x, *conv_weights, *bn_weights, *bn_biases, *running_means, *running_vars, residual)
    batch, _, height, width = x.shape
    saved = 0
    for i_stage, (weight, stride) in enumerate(zip(conv_weights, strides, strict=True)):
        height, width = (height - 1) // stride + 1, (width - 1) // stride + 1
        if keep and not (i_stage == 0 and one_pass):
            saved += (batch * height * width * weight.shape[0] + 63) // 64 * 64
    channels = conv_weights[-1].shape[0] * (2 if shuffle else 1)
    y = torch.empty(
        (batch, channels, height, width),
        dtype=x.dtype, device=x.device, memory_format=torch.channels_last,
    )  # fmt: skip
    count = sum(w.shape[0] for w in conv_weights)
    # on Triton the coefficients of forward, (3, C) in float32, follow
    size = 2 * count if backend == "cpu" else 2 * count + (3 * count + 1) // 2
    statistics = x.new_empty(size, dtype=torch.float64)
    return y, x.new_empty(saved), statistics


def _bwd_fake(
    grad, x, shape, saved, statistics, conv_weights, bn_weights, bn_biases,
    batch_statistics, strides, acts, eps, add_input, one_pass, shuffle, wants,
):  # fmt: skip
    check_device(grad, x, saved, statistics, *conv_weights, *bn_weights, *bn_biases)
    dx = torch.empty(shape, dtype=saved.dtype, device=saved.device, memory_format=torch.channels_last)
    dweights = [w.new_empty(w.shape[0] if want else 0) for w, want in zip(bn_weights, wants[1::2], strict=True)]
    dbiases = [b.new_empty(b.shape[0] if want else 0) for b, want in zip(bn_biases, wants[2::2], strict=True)]
    return dx if wants[0] else saved.new_empty(0), dweights, dbiases


def _setup_context(ctx, inputs, output):
    x, conv_weights, bn_weights, bn_biases, running_means, _, _, *settings, keep = inputs
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
    ctx.offer = destinations.current()
    ctx.shape = list(x.shape)
    ctx.settings = [m.numel() == 0 for m in running_means], *settings
    one_pass = settings[-2]
    if needs[0] or any(needs[n + 1 : 3 * n + 1]):
        if not keep:
            raise RuntimeError("conv_bn_act_fwd: a gradient is wanted, so `keep` must be true")
        kept = (x,) if one_pass else ()
        ctx.n_stages = n
        ctx.save_for_backward(saved, statistics, *conv_weights, *bn_weights, *bn_biases, *kept)


def _backward(backward_operator, ctx, grad, grad_saved, grad_statistics):
    want_x, _, want_weights, want_biases, _, _, want_residual = ctx.needs_input_grad[:7]
    nothing = [None] * len(want_weights)
    dx, dweights, dbiases = None, nothing, nothing
    if grad is not None and (want_x or any(want_weights) or any(want_biases)):
        saved, statistics, *tensors = ctx.saved_tensors
        n = ctx.n_stages
        wants = [want_x, *(want for pair in zip(want_weights, want_biases, strict=True) for want in pair)]
        with destinations.offered(ctx.offer):
            dx, dweights, dbiases = backward_operator(
                grad.contiguous(memory_format=torch.channels_last), tensors[3 * n] if len(tensors) > 3 * n else None,
                ctx.shape, saved, statistics, tensors[:n], tensors[n : 2 * n], tensors[2 * n : 3 * n],
                *ctx.settings, wants,
            )  # fmt: skip
        dx = dx if want_x else None
        dweights = [d if want else None for d, want in zip(dweights, want_weights, strict=True)]
        dbiases = [d if want else None for d, want in zip(dbiases, want_biases, strict=True)]
        if torch.is_grad_enabled():  # only under create_graph
            dx, *affine = refuse_second_derivatives("conv_bn_act", dx, *dweights, *dbiases)
            dweights, dbiases = affine[:n], affine[n:]
    return (
        dx, nothing, dweights, dbiases, nothing, nothing, grad if want_residual else None,
        None, None, None, None, None, None, None,
    )  # fmt: skip


register(
    "conv_bn_act",
    forward_fake=_fwd_fake,
    backward_fake=_bwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)
