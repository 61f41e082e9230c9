"""What the argument checks of several public operators share; each operator's file has its own.

Every message names the operator, the argument, what is allowed and what was given, and the remedy where there is one.
Wrong types raise TypeError, wrong values and shapes ValueError.
"""

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nasfast.ops.reference import ACTIVATIONS

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# weight, bias, running mean and running variance of a BatchNorm
Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def check_map(op: str, x: Tensor, stride: int) -> None:
    check_input(op, x)
    if 0 in x.shape[1:]:
        raise ValueError(f"{op}: x must have channels and pixels, got shape {tuple(x.shape)}")
    if stride not in (1, 2):
        raise ValueError(f"{op}: stride must be 1 or 2, got {stride}")


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


def list_of_tensors(op: str, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    # a tensor is a sequence of its rows
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        value = "one tensor: pass [tensor]" if isinstance(tensors, Tensor) else type(tensors).__name__
        raise TypeError(f"{op}: {name} must be a list of tensors, got {value}")
    return list(tensors)


def check_tensor(where: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(value).__name__}")


def check_device(where: str, tensor: Tensor, like: Tensor, name: str = "x") -> None:
    if tensor.device != like.device:
        raise ValueError(f"{where} must be on {like.device} like {name}, got {tensor.device}")


def check_like(
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
    check_tensor(where, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{where} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
        why = f" ({why})" if why else ""
        raise TypeError(f"{where} must be {allowed}{why}, got {tensor.dtype}; convert it with .to({dtypes[0]})")
    check_device(where, tensor, like, name)


def vector_types(x: Tensor) -> tuple[torch.dtype, ...]:
    """Types of what has one number per channel or tensor: float32, and float64 beside float64."""
    return (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)


def check_shape_of_matrix(where: str, z: Tensor) -> None:
    if z.layout != torch.strided:
        raise TypeError(f"{where} must be dense, got {z.layout}; convert it with .to_dense()")
    if z.ndim < 2:
        raise ValueError(f"{where} must be (..., rows, columns), got shape {tuple(z.shape)}")


def check_input(op: str, x: Tensor, name: str = "x") -> None:
    check_tensor(f"{op}: {name}", x)
    if x.ndim != 4:
        raise ValueError(f"{op}: {name} must be 4-d (N, C, H, W), got shape {tuple(x.shape)}")
    if x.dtype not in FLOAT_TYPES:
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}; convert it with {name}.float()"
        )


def check_settings(op: str, act: str, eps: float) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    check_eps(op, eps)


def check_eps(op: str, eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"{op}: eps must be positive, got {eps}")


def check_bn(op: str, prefix: str, x: Tensor, channels: int, norm: Norm, training: bool) -> None:
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
        check_like(f"{op}: {name}", vector, x, (channels,), vector_types(x), why=why)


def check_result(op: str, x: Tensor, shape: tuple[int, ...], residual: Tensor | None, training: bool) -> None:
    """Check the shape of the residual, and in training that this shape has batch statistics."""
    if residual is not None:
        if tuple(residual.shape) != shape:
            raise ValueError(f"{op}: residual must have the shape of the result, {shape}, got {tuple(residual.shape)}")
        check_device(f"{op}: residual", residual, x)
    if training:
        check_statistics(op, shape, "training=False with running statistics")


def check_statistics(op: str, shape: tuple[int, ...], remedy: str) -> None:
    """Check that a batch of this shape has a variance."""
    count = shape[0] * shape[2] * shape[3]
    if count <= 1:
        what = "a single value per channel" if count else "an empty batch"
        why = ": its variance is always 0" if count else ""
        raise ValueError(
            f"{op}: cannot take batch statistics of {what} (shape {shape}){why}; use a larger batch, or {remedy}"
        )
