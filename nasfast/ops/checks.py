"""Argument checks of the public operators, once for all backends.

Every message names the operator, the argument, what is allowed and what was given, and the remedy where there is one.
Wrong types raise TypeError, wrong values and shapes ValueError.
"""

import math
import operator
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nasfast.ops.autograd import recorded, transformed
from nasfast.ops.plan import autocasts
from nasfast.ops.reference import ACTIVATIONS, GATES, Stage

_ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# weight, bias, running mean and running variance of a BatchNorm
_Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def check_bn_act(x: Tensor, norm: _Norm, residual: Tensor | None, *, act: str, training: bool, eps: float) -> None:
    """Check the arguments of `nasfast.ops.bn_act`."""
    op = "bn_act"
    _check_input(op, x)
    _check_settings(op, act, eps)
    _check_bn(op, "", x, x.shape[1], norm, training)
    _check_result(op, x, tuple(x.shape), residual, training)


def check_conv_bn_act(op: str, x: Tensor, stage: Stage, residual: Tensor | None) -> None:
    """Check the arguments of `nasfast.ops.conv_bn_act`."""
    _check_input(op, x)
    shape = _check_stage(op, x, tuple(x.shape), stage)
    _check_result(op, x, shape, residual, stage.training)


def check_chain(op: str, x: Tensor, stages: Sequence[Stage], residual: Tensor | None, shuffle: bool = False) -> None:
    """Check the arguments of `nasfast.ops.conv_bn_act_chain`: every stage and how they fit together."""
    if not stages:
        raise ValueError(f"{op}: needs at least one stage, got none")
    _check_input(op, x)
    shape = tuple(x.shape)
    if shuffle:
        if shape[1] % 2:
            raise ValueError(f"{op}: shuffle=True splits an even number of channels, got x of shape {shape}")
        if residual is not None:
            raise ValueError(f"{op}: shuffle=True takes no residual; add it to the result")
        shape = (shape[0], shape[1] // 2, *shape[2:])
    begin = shape
    for i_stage, stage in enumerate(stages):
        where = f"{op}, stages[{i_stage}]"
        if not isinstance(stage, Stage):
            raise TypeError(f"{where}: must be a Stage, got {type(stage).__name__}")
        shape = _check_stage(where, x, shape, stage)
        _check_result(where, x, shape, residual if i_stage == len(stages) - 1 else None, stage.training)
    if shuffle and shape != begin:
        raise ValueError(f"{op}: shuffle=True needs stages that keep the shape of their input, got {begin} -> {shape}")


def check_mixed_bn(
    xs: Sequence[Tensor], gates: Tensor, normalize: Sequence[bool], eps: float
) -> tuple[list[Tensor], list[bool]]:
    """Check the arguments of `nasfast.ops.mixed_bn`; returns its tensors and flags as lists."""
    op = "mixed_bn"
    xs, normalize = _list_of_tensors(op, "xs", xs), [bool(flag) for flag in normalize]
    if not xs:
        raise ValueError(f"{op}: needs at least one tensor, got none")
    first = xs[0]
    _check_input(op, first, "xs[0]")
    for i, x in enumerate(xs):
        _check_like(f"{op}: xs[{i}]", x, first, first.shape, (first.dtype,), "xs[0]")
    if len(normalize) != len(xs):
        raise ValueError(f"{op}: normalize must be one flag per tensor, {len(xs)}, got {len(normalize)}")
    _check_like(f"{op}: gates", gates, first, (len(xs),), _vector_types(first), "xs[0]")
    _check_eps(op, eps)
    if any(normalize):
        _check_statistics(op, tuple(first.shape), "normalize=False")
    return xs, normalize


def check_depthwise_conv2d(x: Tensor, weight: Tensor, *, stride: int, dilation: int) -> None:
    """Check the arguments of `nasfast.ops.depthwise_conv2d`."""
    op = "depthwise_conv2d"
    _check_map(op, x, stride)
    if dilation not in (1, 2):
        raise ValueError(f"{op}: dilation must be 1 or 2, got {dilation}")
    where = f"{op}: weight"
    _check_tensor(where, weight)
    shapes = [(x.shape[1], 1, k, k) for k in (3, 5, 7)]
    if tuple(weight.shape) not in shapes:
        raise ValueError(f"{where} must be one of {shapes} for this x, got {tuple(weight.shape)}")
    _check_like(where, weight, x, weight.shape, (torch.float32, x.dtype))


def check_pool_3x3(x: Tensor, *, kind: str, stride: int) -> None:
    """Check the arguments of `nasfast.ops.pool_3x3`."""
    op = "pool_3x3"
    _check_map(op, x, stride)
    if kind not in ("max", "avg"):
        raise ValueError(f"{op}: kind must be max or avg, got {kind!r}")


def _check_map(op: str, x: Tensor, stride: int) -> None:
    _check_input(op, x)
    if 0 in x.shape[1:]:
        raise ValueError(f"{op}: x must have channels and pixels, got shape {tuple(x.shape)}")
    if stride not in (1, 2):
        raise ValueError(f"{op}: stride must be 1 or 2, got {stride}")


def check_squeeze_excite(x: Tensor, weights: Sequence[Tensor], *, act: str, gate: str) -> None:
    """Check the arguments of `nasfast.ops.squeeze_excite`; weights are W1, b1, W2, b2."""
    op = "squeeze_excite"
    _check_map(op, x, 1)
    for name, value, allowed in (("act", act, ACTIVATIONS), ("gate", gate, GATES)):
        if value not in allowed:
            raise ValueError(f"{op}: {name} must be one of {', '.join(allowed)}, got {value!r}")
    names = ("squeeze_weight", "squeeze_bias", "excite_weight", "excite_bias")
    for name, tensor in zip(names, weights, strict=True):
        _check_tensor(f"{op}: {name}", tensor)
    channels, squeezed = x.shape[1], weights[1].numel()
    if squeezed == 0:
        raise ValueError(f"{op}: squeeze_bias must have at least one element, got none")
    shapes = ((squeezed, channels, 1, 1), (squeezed,), (channels, squeezed, 1, 1), (channels,))
    types: tuple[torch.dtype, ...] = (torch.float32, x.dtype)
    for name, tensor, shape in zip(names, weights, shapes, strict=True):
        _check_like(f"{op}: {name}", tensor, x, shape, types, why="one type for all four")
        types = (tensor.dtype,)


def check_matrices(op: str, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Check the entries of `nasfast.ops.orthogonalize`; returns them as a list."""
    matrices = _list_of_tensors(op, "matrices", matrices)
    total = 0
    for i_matrix, z in enumerate(matrices):
        where = f"{op}: matrices[{i_matrix}]"
        _check_matrix(where, z)
        _check_device(where, z, matrices[0], "matrices[0]")
        total += z.numel() * z.element_size()
        check_fits(where, z, total)
    filled = [z for z in matrices if z.numel()]
    # tracers and transforms cannot ask for values
    if not filled or filled[0].is_meta or recorded() or transformed():
        return matrices
    if not _probably_finite([z.detach() for z in filled]):
        for i_matrix, z in enumerate(matrices):
            if bad := z.numel() - int(z.isfinite().sum()):
                raise ValueError(
                    f"{op}: matrices[{i_matrix}] of shape {tuple(z.shape)} must be finite, "
                    f"got {bad} NaN or infinite elements"
                )
    return matrices


def check_qr(op: str, a: Tensor, mode: str = "reduced") -> None:
    """Check the arguments of `nasfast.ops.qr` and `nasfast.ops.geqrf`."""
    where = f"{op}: the matrix"
    _check_tensor(where, a)
    wide = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    if a.dtype not in wide and not (a.is_floating_point() and autocasts(a)):
        raise TypeError(f"{where} must be float32, float64 or complex, got {a.dtype}; convert it with .float()")
    _check_shape_of_matrix(where, a)
    if mode not in (modes := ("reduced", "complete", "r")):
        raise ValueError(f"{op}: mode must be one of {', '.join(modes)}, got {mode!r}")


def check_orthogonal_targets(
    op: str, tensors: Sequence[Tensor], names: Sequence[str] | None, gain: float, bytes_per_element: int
) -> tuple[list[Tensor], list[str]]:
    """Check the arguments of `nasfast.ops.orthogonalize_`; returns its tensors and names as lists.

    Args:
        bytes_per_element: memory that the operator needs for each element of a tensor.
    """
    tensors = _list_of_tensors(op, "tensors", tensors)
    names = [str(i) for i in range(len(tensors))] if names is None else list(names)
    if len(names) != len(tensors):
        raise ValueError(f"{op}: names must be one per tensor, {len(tensors)}, got {len(names)}")
    if not math.isfinite(gain):
        raise ValueError(f"{op}: gain must be finite, got {gain}")
    for i_tensor, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
        where = f"{op}: tensors[{i_tensor}] ({name!r})"
        _check_matrix(where, tensor)
        check_fits(where, tensor, bytes_per_element * tensor.numel())
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{where} has elements that share memory, as expand makes them: pass tensor.clone()")
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"{op}: names must differ, as they seed the tensors, got {twice!r} more than once")
    return tensors, names


def check_fits(where: str, tensor: Tensor, needed: int) -> None:
    """Refuse a tensor that does not fit into the memory of its device, before the system starts to kill processes.

    Args:
        where: operator and argument, for the message.
        needed: bytes.
    """
    if tensor.is_meta or torch.compiler.is_compiling():
        return
    if tensor.device.type == "cuda":
        total = torch.cuda.get_device_properties(tensor.device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        memory = f"{tensor.device} has {total / 1e9:.1f} GB"
        raise MemoryError(f"{where} of shape {tuple(tensor.shape)} needs {needed / 1e9:.1f} GB, and {memory}")


def _list_of_tensors(op: str, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    # a tensor is a sequence of its rows
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        value = "one tensor: pass [tensor]" if isinstance(tensors, Tensor) else type(tensors).__name__
        raise TypeError(f"{op}: {name} must be a list of tensors, got {value}")
    return list(tensors)


def _check_tensor(where: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(value).__name__}")


def _check_device(where: str, tensor: Tensor, like: Tensor, name: str = "x") -> None:
    if tensor.device != like.device:
        raise ValueError(f"{where} must be on {like.device} like {name}, got {tensor.device}")


def _check_like(
    where: str,
    tensor: Tensor,
    like: Tensor,
    shape: tuple[int, ...],
    dtypes: Sequence[torch.dtype],
    name: str = "x",
    *,
    why: str = "",
) -> None:
    """Check shape, type and device of a tensor that goes with another one, which messages call by this name.

    `why` says in messages where the type comes from.
    """
    _check_tensor(where, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{where} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
        why = f" ({why})" if why else ""
        raise TypeError(f"{where} must be {allowed}{why}, got {tensor.dtype}; convert it with .to({dtypes[0]})")
    _check_device(where, tensor, like, name)


def _vector_types(x: Tensor) -> tuple[torch.dtype, ...]:
    """Types of what has one number per channel or tensor: float32, and float64 beside float64."""
    return (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)


def _probably_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is NaN or infinite, from one read of all tensors. It may be False although all are finite."""
    if tensors[0].is_cuda:
        return bool(torch.nn.utils.get_total_norm(tensors, float("inf")).isfinite())
    # ten times as fast on a CPU as norms or isfinite; the sum of finite elements may overflow
    return bool(torch.stack([z.sum().double() for z in tensors]).isfinite().all())


def _check_matrix(where: str, z: Tensor) -> None:
    _check_tensor(where, z)
    if z.dtype not in _ACTIVATION_DTYPES:
        raise TypeError(
            f"{where} must be float32, float64, bfloat16 or float16, got {z.dtype}; convert it with .float()"
        )
    _check_shape_of_matrix(where, z)


def _check_shape_of_matrix(where: str, z: Tensor) -> None:
    if z.layout != torch.strided:
        raise TypeError(f"{where} must be dense, got {z.layout}; convert it with .to_dense()")
    if z.ndim < 2:
        raise ValueError(f"{where} must be (..., rows, columns), got shape {tuple(z.shape)}")


def _check_stage(op: str, x: Tensor, shape: tuple[int, ...], stage: Stage) -> tuple[int, ...]:
    """Check one stage against the shape of its input; return the shape of its result."""
    weight, bias = stage.params.conv_weight, stage.params.conv_bias
    _check_settings(op, stage.act, stage.eps)
    shape = _check_conv(op, x, shape, weight, stage)
    if bias is not None:
        _check_like(
            f"{op}: conv_bias",
            bias,
            weight,
            weight.shape[:1],
            (weight.dtype,),
            "conv_weight",
            why="the type of conv_weight",
        )
    _check_bn(op, "bn_", x, shape[1], stage.params[1:5], stage.training)
    return shape


def _check_input(op: str, x: Tensor, name: str = "x") -> None:
    _check_tensor(f"{op}: {name}", x)
    if x.ndim != 4:
        raise ValueError(f"{op}: {name} must be 4-d (N, C, H, W), got shape {tuple(x.shape)}")
    if x.dtype not in _ACTIVATION_DTYPES:
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}; convert it with {name}.float()"
        )


def _check_settings(op: str, act: str, eps: float) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    _check_eps(op, eps)


def _check_eps(op: str, eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"{op}: eps must be positive, got {eps}")


def _check_conv(op: str, x: Tensor, shape: tuple[int, ...], weight: Tensor, stage: Stage) -> tuple[int, ...]:
    """Check the convolution of a tensor of this shape on the device of x; return the shape of its result."""
    _check_tensor(f"{op}: conv_weight", weight)
    if weight.ndim != 4:
        raise ValueError(f"{op}: conv_weight must be 4-d (out, in / groups, k, k), got shape {tuple(weight.shape)}")
    stride, padding, groups = stage.stride, stage.padding, stage.groups
    try:
        stride, padding, groups = operator.index(stride), operator.index(padding), operator.index(groups)
    except TypeError as error:
        raise TypeError(
            f"{op}: stride, padding and groups must be one integer each, for both directions, "
            f"got stride={stride!r}, padding={padding!r}, groups={groups!r}"
        ) from error
    if stride < 1 or padding < 0 or groups < 1:
        raise ValueError(
            f"{op}: stride and groups must be at least 1 and padding at least 0, "
            f"got stride={stride}, padding={padding}, groups={groups}"
        )
    out_channels, per_group, *kernel = weight.shape
    if weight.numel() < 1:
        raise ValueError(f"{op}: conv_weight must be at least 1 in every dimension, got shape {tuple(weight.shape)}")
    if per_group * groups != shape[1] or out_channels % groups:
        raise ValueError(
            f"{op}: conv_weight of shape {tuple(weight.shape)} with groups={groups} takes {per_group * groups} "
            f"channels and gives a multiple of {groups}, got an input of {shape[1]} channels"
        )
    if weight.dtype != x.dtype and not autocasts(x):
        raise TypeError(
            f"{op}: conv_weight must have the type of x, {x.dtype}, got {weight.dtype}; convert one, or use autocast"
        )
    _check_device(f"{op}: conv_weight", weight, x)
    height, width = ((size + 2 * padding - k) // stride + 1 for size, k in zip(shape[2:], kernel, strict=True))
    if height < 1 or width < 1:
        raise ValueError(
            f"{op}: a {kernel[0]}x{kernel[1]} kernel with padding={padding} does not fit into an input of shape {shape}"
        )
    return shape[0], out_channels, height, width


def _check_bn(op: str, prefix: str, x: Tensor, channels: int, norm: _Norm, training: bool) -> None:
    weight, bias, running_mean, running_var = norm
    vectors = {f"{prefix}weight": weight, f"{prefix}bias": bias}
    if (running_mean is None) != (running_var is None):
        missing = "running_mean" if running_mean is None else "running_var"
        raise ValueError(f"{op}: running_mean and running_var come together, but {missing} is None")
    if running_mean is not None and running_var is not None:
        vectors |= {"running_mean": running_mean, "running_var": running_var}
    elif not training:
        raise ValueError(
            f"{op}: training=False normalises with running statistics, but running_mean and running_var are None; "
            "pass both, or use training=True for batch statistics"
        )
    for name, vector in vectors.items():
        why = "parameters and statistics of BatchNorm stay in it"
        _check_like(f"{op}: {name}", vector, x, (channels,), _vector_types(x), why=why)


def _check_result(op: str, x: Tensor, shape: tuple[int, ...], residual: Tensor | None, training: bool) -> None:
    """Check the shape of the residual, and in training that this shape has batch statistics."""
    if residual is not None:
        if tuple(residual.shape) != shape:
            raise ValueError(f"{op}: residual must have the shape of the result, {shape}, got {tuple(residual.shape)}")
        _check_device(f"{op}: residual", residual, x)
    if training:
        _check_statistics(op, shape, "training=False with running statistics")


def _check_statistics(op: str, shape: tuple[int, ...], remedy: str) -> None:
    """Check that a batch of this shape has a variance."""
    count = shape[0] * shape[2] * shape[3]
    if count <= 1:
        what = "a single value per channel" if count else "an empty batch"
        why = ": its variance is always 0" if count else ""
        raise ValueError(
            f"{op}: cannot take batch statistics of {what} (shape {shape}){why}; use a larger batch, or {remedy}"
        )
