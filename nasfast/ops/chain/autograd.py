"""The registered operator that runs a planned chain in C++ or in CUDA: call, fake kernels and autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nasfast.ops import _native, reference
from nasfast.ops.autograd import check_device, save_checkpoint_sentinel
from nasfast.ops.chain import cuda  # noqa: F401  # it defines the operator of the CUDA kernels
from nasfast.ops.chain.plan import ChainPlan, read_plan
from nasfast.ops.nhwc import subsample
from nasfast.ops.reference import Stage
from nasfast.ops.registry import operators, register
from nasfast.ops.tensors import storage_dtype

# the backward that reads gradients of any distance between pixels
_CPU_BACKWARD = operators("cpu").conv_bn_act_chain_bwd if _native.extension is not None else None


def run_chain(x: Tensor, stages: Sequence[Stage], plan: ChainPlan, *, residual: Tensor | None, backend: str) -> Tensor:
    """Run all of these stages as one call of the backend's operator.

    Args:
        x: (N, C, H, W).
        stages: the stages of the plan.
        plan: what `plan_chain` gives for this backend, x and stages.
        residual: a tensor of the shape of the result, added after the last activation.
        backend: cpu or cuda.
    """
    if plan.subsample > 1:
        x = subsample(x, plan.subsample)
    input_dtype, is_residual = x.dtype, residual is x
    x = x.to(storage_dtype(x)).contiguous(memory_format=torch.channels_last)
    add_input = is_residual and x.dtype == input_dtype
    # A kernel has one storage type. PyTorch adds a residual of another type, with its promotion rules.
    fused = None
    if residual is not None and not add_input and residual.dtype == x.dtype:
        fused = residual.contiguous(memory_format=torch.channels_last)
    params = [stage.params for stage in stages]
    running = [(None, None) if s.training else (s.params.running_mean, s.params.running_var) for s in stages]
    empty = x.new_empty(0, dtype=torch.float32)
    y, _, statistics = operators(backend).conv_bn_act_chain_fwd(
        x=x,
        conv_weights=[p.conv_weight.contiguous() for p in params],
        bn_weights=[p.bn_weight.contiguous() for p in params],
        bn_biases=[p.bn_bias.contiguous() for p in params],
        running_means=[empty if mean is None else mean.contiguous() for mean, _ in running],
        running_vars=[empty if var is None else var.contiguous() for _, var in running],
        residual=fused,
        plan=plan.numbers,
        eps=[stage.eps for stage in stages],
        add_input=add_input,
        keep=torch.is_grad_enabled() and any(t.requires_grad for p in params for t in (x, p.bn_weight, p.bn_bias)),
    )
    update_running(stages, plan, statistics)
    save_checkpoint_sentinel(y)
    return y if residual is None or add_input or fused is not None else y + residual


def update_running(stages: Sequence[Stage], plan: ChainPlan, statistics: Tensor) -> None:
    """Move the running statistics of stages in training mode towards those of the batch, which a forward wrote."""
    if not any([stage.training and stage.params.running_mean is not None for stage in stages]):
        return
    statistics = statistics.float()  # once for all stages: calls of PyTorch take as long as a small chain does
    for stage, planned in zip(stages, plan.stages, strict=True):
        params, at, channels = stage.params, planned.statistics_at, planned.out_channels
        if stage.training and params.running_mean is not None:
            mean, var = (statistics.narrow(0, begin, channels) for begin in (at, at + channels))
            reference.update_running(params.running_mean, params.running_var, mean, var, planned.rows, stage.momentum)


# ---- fake kernels and autograd; the arguments are those of csrc/library.cpp


def _fwd_fake(
    backend, x, conv_weights, bn_weights, bn_biases, running_means, running_vars, residual, plan, eps, add_input, keep
):
    check_device(x, *conv_weights, *bn_weights, *bn_biases, *running_means, *running_vars, residual)
    plan = read_plan(map(int, plan))
    y = torch.empty(plan.out_shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    statistics = x.new_empty(plan.statistics_elements(backend), dtype=torch.float64)
    return y, x.new_empty(plan.saved_size if keep else 0), statistics


def _bwd_fake(
    grad, x, saved, statistics, conv_weights, bn_weights, bn_biases, batch_statistics, plan, eps, add_input, wants
):
    check_device(grad, x, saved, statistics, *conv_weights, *bn_weights, *bn_biases)
    return read_plan(map(int, plan)).empty_gradients(saved, bn_weights, bn_biases, wants)


def _setup_context(ctx, inputs, output):
    x, conv_weights, bn_weights, bn_biases, running_means, _, _, plan, eps, add_input, keep = inputs
    _, saved, statistics = output
    # one flat list: x, then the tensors of each list
    n = len(conv_weights)
    needs = ctx.needs_input_grad
    if any(needs[1 : n + 1]):
        raise RuntimeError(
            "conv_bn_act_chain_fwd: a convolution weight requires grad, but this operator has no weight gradients: "
            "freeze it with requires_grad_(False), or call nasfast.ops.conv_bn_act_chain, which then uses PyTorch's "
            "convolution"
        )
    batch_statistics = [m.numel() == 0 for m in running_means]
    ctx.settings = dict(batch_statistics=batch_statistics, plan=plan, eps=eps, add_input=add_input)
    if needs[0] or any(needs[n + 1 : 3 * n + 1]):
        if not keep:
            raise RuntimeError("conv_bn_act_chain_fwd: a gradient is wanted, so `keep` must be true")
        recomputed_from = (x,) if read_plan(plan).recompute else ()
        ctx.save_for_backward(saved, statistics, *conv_weights, *bn_weights, *bn_biases, *recomputed_from)


def _channels_last(grad: Tensor, *, wide: bool) -> Tensor:
    """The gradient in channels_last; as it is, if `wide` allows a range of the channels of such a tensor."""
    if wide:
        _, channels, height, width = grad.shape
        ld = grad.stride(3)
        if ld >= channels and grad.stride() == (height * width * ld, 1, width * ld, ld):
            return grad
    return grad.contiguous(memory_format=torch.channels_last)


def _backward(backward_operator, ctx, grad, wants):
    want_x, _, want_weights, want_biases = wants[:4]
    n = len(want_weights)
    dx, dweights, dbiases, nothing = None, [None] * n, [None] * n, [None] * n
    if want_x or any(want_weights) or any(want_biases):
        saved, statistics, *tensors = ctx.saved_tensors
        dx, dweights, dbiases = backward_operator(
            grad=_channels_last(grad, wide=backward_operator is _CPU_BACKWARD and not ctx.settings["add_input"]),
            x=tensors[3 * n] if len(tensors) > 3 * n else None,
            saved=saved,
            statistics=statistics,
            conv_weights=tensors[:n],
            bn_weights=tensors[n : 2 * n],
            bn_biases=tensors[2 * n : 3 * n],
            **ctx.settings,
            wants=[want_x, *(want for pair in zip(want_weights, want_biases, strict=True) for want in pair)],
        )
    return dx, nothing, dweights, dbiases, nothing, nothing, grad


register(
    "conv_bn_act_chain",
    forward_fake=_fwd_fake,
    backward_fake=_bwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)
