"""mixed_bn: the gated sum of normalised tensors, a node of a mixed cell; fake kernels and autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.autograd import check_device, only_reference_serves
from nasfast.ops.backends import resolve_backend
from nasfast.ops.registry import operators, register


def mixed_bn(
    xs: Sequence[Tensor],
    gates: Tensor,
    *,
    normalize: Sequence[bool],
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Normalise each channel of each tensor, or not, scale the tensors by their gates, and add them.

    y[n,c,h,w] = sum_k gates[k] * xhat_k[n,c,h,w]
    xhat_k[n,c,h,w] = (x_k[n,c,h,w] - mean_k[c]) / sqrt(var_k[c] + eps) where normalize[k], else x_k[n,c,h,w]

    mean and var (biased) are those of the batch: this is BatchNorm without parameters and running statistics. The
    gradient of gates[k] is <dL/dy, xhat_k>, the cost of one operation of a mixed edge; it is right for a gate of 0 too.
    For backward the native backends save only xs, gates, and two numbers per channel of each normalised tensor, and
    nothing if no gradient is needed. Only the reference has second derivatives.

    Args:
        xs: at least one, (N, C, H, W), all with the same shape, type and device; channels_last (others are copied);
            float32 or bfloat16, and float16 or float64 on the reference. A tensor may be in the list several times.
        gates: (len(xs),), float32 (float64 allowed with float64 xs); any value.
        normalize: one flag per tensor.
        eps: added to the variances, positive.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        (N, C, H, W), of the type of xs; channels_last from the native backends.

    Raises:
        TypeError, ValueError: an argument does not fit; with a flag set also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    xs, normalize = _check_mixed_bn(xs, gates, normalize, eps)
    name = resolve_backend("mixed_bn", xs[0], backend).name
    if name == "reference" or only_reference_serves(xs[0]):
        return reference.mixed_bn(xs, gates, normalize=normalize, eps=eps)
    xs = [x.contiguous(memory_format=torch.channels_last) for x in xs]
    y, _ = operators(name).mixed_bn_fwd(xs, gates.contiguous(), normalize, eps)
    return y


def _check_mixed_bn(
    xs: Sequence[Tensor], gates: Tensor, normalize: Sequence[bool], eps: float
) -> tuple[list[Tensor], list[bool]]:
    """Check the arguments of `nasfast.ops.mixed_bn`; returns its tensors and flags as lists."""
    op = "mixed_bn"
    xs, normalize = checks.list_of_tensors(op, "xs", xs), [bool(flag) for flag in normalize]
    if not xs:
        raise ValueError(f"{op}: needs at least one tensor, got none")
    first = xs[0]
    checks.check_input(op, first, "xs[0]")
    for i, x in enumerate(xs):
        checks.check_like(f"{op}: xs[{i}]", x, first, first.shape, (first.dtype,), "xs[0]")
    if len(normalize) != len(xs):
        raise ValueError(f"{op}: normalize must be one flag per tensor, {len(xs)}, got {len(normalize)}")
    checks.check_like(f"{op}: gates", gates, first, (len(xs),), checks.vector_types(first), "xs[0]")
    checks.check_eps(op, eps)
    if any(normalize):
        checks.check_statistics(op, tuple(first.shape), "normalize=False")
    return xs, normalize


def _fwd_fake(backend, xs, gates, normalize, eps):
    check_device(*xs, gates)
    return torch.empty_like(xs[0]), gates.new_empty(2 * sum(normalize) * xs[0].shape[1], dtype=torch.float64)


def _bwd_fake(grad, xs, gates, statistics, normalize, eps, wants):
    check_device(grad, *xs, gates, statistics)
    *want_xs, want_gates = wants
    dxs = [torch.empty_like(x) if want else x.new_empty(0) for x, want in zip(xs, want_xs, strict=True)]
    return dxs, gates.new_empty(len(xs) if want_gates else 0)


def _setup_context(ctx, inputs, output):
    xs, gates, ctx.normalize, ctx.eps = inputs
    _, statistics = output
    ctx.save_for_backward(gates, statistics, *xs)


def _backward(backward_operator, ctx, grad, wants):
    gates, statistics, *xs = ctx.saved_tensors
    want_xs, want_gates = wants[:2]
    grad = grad.contiguous(memory_format=torch.channels_last)
    return backward_operator(grad, xs, gates, statistics, ctx.normalize, ctx.eps, [*want_xs, want_gates])


register(
    "mixed_bn",
    forward_fake=_fwd_fake,
    backward_fake=_bwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)
