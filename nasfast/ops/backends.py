"""Which backend runs an operator: one table, and a reason for every choice.

The choice follows, in this order: the `backend` argument, `with use_backend(name)`, the environment variable
NASFAST_BACKEND, and the first backend in the operator's row that can serve. A named backend that cannot serve raises
with its reason. `use_backend` and NASFAST_BACKEND name the backend of those operators that it has, and the choice for
others is automatic. The automatic choice falls back to the reference, which is PyTorch, and logs that once. It never
takes Triton, whose kernels are compiled while they are waited for.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast.ops import _native, _triton
from nasfast.ops.chain import limits
from nasfast.ops.chain.plan import STORAGE_DTYPES
from nasfast.ops.refusal import Refusal
from nasfast.ops.tensors import storage_dtype
from nasfast.runtime.once import log_once

BACKENDS = ("cpu", "triton", "cuda", "reference")

_logger = logging.getLogger(__name__)
# a plain global: torch.compile guards on it, and in torch 2.11 it cannot trace a ContextVar
_scoped_name: str | None = None
_native_missing = _native.why_missing()
_triton_missing = _triton.why_missing()
_no_emulation = _native.why_no_emulation()


@dataclass(frozen=True)
class Backend:
    """A backend of an operator.

    Attributes:
        name: one of BACKENDS.
        why_not: takes the input of the operator and says why the backend cannot serve it; empty if it can.
        serves: which calls it serves, where these are not all that `why_not` accepts.
        automatic: types of the devices for whose tensors it is chosen without being named; None for all devices.
    """

    name: str
    why_not: Callable[[Tensor], str]
    serves: str = ""
    automatic: tuple[str, ...] | None = None


class Row(NamedTuple):
    """One line of `explain`: an operator, a backend, whether it can serve, whether it is chosen, and why not.

    serves: see `Backend`.
    """

    op: str
    backend: str
    available: bool
    chosen: bool
    reason: str
    serves: str = ""


def _why_not_on_cpu(x: Tensor) -> str:
    return "" if x.device.type == "cpu" else f"serves CPU tensors, got one on {x.device}"


def _why_not_cpu(x: Tensor) -> str:
    if _native_missing is not None:
        return _native_missing
    if x.device.type == "cpu" and x.dtype not in (torch.float32, torch.bfloat16):
        return f"serves float32 and bfloat16, got {x.dtype}"
    return _why_not_on_cpu(x)


def _why_no_cuda_kernels(device: torch.device) -> str:
    """Why the CUDA kernels of the extension do not run on this GPU; empty if they do."""
    if torch.compiler.is_compiling():
        return ""  # a compiler cannot trace the extension's functions; a launch that fails says what is wrong
    return _why_no_cuda_kernels_once(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _why_no_cuda_kernels_once(index: int) -> str:
    assert _native.extension is not None  # or this would not be asked
    build = _native.extension.build_info()
    if not build.cuda_operators:
        return "not built with CUDA: put nvcc on PATH, install a torch with CUDA, and reinstall"
    info = _native.extension.cuda_device_info(index)
    if info.old_driver:
        major = build.cuda_version.partition(".")[0]
        return (
            f"the driver of this machine is older than CUDA {build.cuda_version}, which compiled the kernels: "
            f"reinstall with an nvcc older than {major}.0 on PATH, or update the driver"
        )
    if not info.kernels_run:
        return f"the compiled kernels do not run on cuda:{index}: {info.error}"
    if info.ptx_version != info.binary_version:
        _logger.info(
            "cuda:%d: the first call of each CUDA kernel waits for the driver, which compiles it for this GPU: "
            "reinstall with CUDAARCHS=native to have it compiled once",
            index,
        )
    return ""


def why_not_cuda_kernels(x: Tensor) -> str:
    """Why the CUDA kernels of the extension do not serve x; empty if they do."""
    if _native_missing is not None:
        return _native_missing
    if x.device.type != "cuda":
        return f"serves CUDA tensors, got one on {x.device}"
    return _why_no_cuda_kernels(x.device)


def emulates_cuda() -> bool:
    """Whether the CUDA kernels of chains serve CPU tensors, by their emulation, which is very slow: for tests."""
    return os.environ.get("NASFAST_EMULATE_CUDA") == "1"


def why_not_cuda_chain(x: Tensor) -> str:
    """Why the CUDA kernels of chains do not serve x; empty if they do."""
    if emulates_cuda() and x.device.type == "cpu":
        reason = _no_emulation
    else:
        reason = why_not_cuda_kernels(x) or _why_not_ampere(x)
    if not reason and (dtype := storage_dtype(x)) not in STORAGE_DTYPES["cuda"]:
        return f"computes in bfloat16 and float16, here it would be {dtype}; use autocast"
    return reason or ""


def _why_not_ampere(x: Tensor) -> str:
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 0):
        return f"needs compute capability 8.0 (Ampere) or newer, {x.device} has {capability[0]}.{capability[1]}"
    return ""


def _why_not_triton(x: Tensor) -> str:
    if _triton_missing is not None:
        return _triton_missing
    device_type = "cpu" if _triton.interpreted() else "cuda"
    if x.device.type != device_type:
        how = "under TRITON_INTERPRET=1 " if device_type == "cpu" else ""
        return f"{how}serves {device_type.upper()} tensors, got one on {x.device}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"serves float32, bfloat16 and float16, got {x.dtype}"
    return _why_not_ampere(x) if device_type == "cuda" else ""


_CPU = Backend("cpu", _why_not_cpu, automatic=("cpu",))
_TRITON = Backend("triton", _why_not_triton, "calls that name it, around PyTorch's convolutions", automatic=())
_REFERENCE = Backend("reference", lambda x: "")
# the emulation of the CUDA kernels on CPU tensors is too slow to be chosen automatically
_CHAINS = (_CPU, Backend("cuda", why_not_cuda_chain, limits.SERVES, automatic=("cuda",)), _TRITON, _REFERENCE)
_HOUSEHOLDER = (
    Backend("cpu", _why_not_on_cpu, automatic=("cpu",)),
    Backend("cuda", why_not_cuda_kernels, automatic=("cuda",)),
    _REFERENCE,
)
# the backends of each operator in order of preference; the reference is last because it serves everything
_TABLE: dict[str, tuple[Backend, ...]] = {
    "bn_act": (_CPU, _TRITON, _REFERENCE),
    "conv_bn_act": _CHAINS,
    "conv_bn_act_chain": _CHAINS,
    "mixed_bn": (_CPU, _REFERENCE),
    "orthogonalize": _HOUSEHOLDER,
    "qr": _HOUSEHOLDER,
    "geqrf": _HOUSEHOLDER,
    "depthwise_conv2d": (_CPU, _REFERENCE),
    "pool_3x3": (_CPU, _REFERENCE),
    "squeeze_excite": (_CPU, _REFERENCE),
}


def resolve_backend(
    op: str,
    x: Tensor,
    requested: str | None = None,
    refusal: Callable[[str], Refusal | None] | None = None,
    *,
    strict: bool = True,
) -> Backend:
    """Choose the backend of one call.

    Args:
        op: operator name, a row of the table.
        x: the operator's input; only its device and dtype are read.
        requested: a name from BACKENDS, or None to ask the context, the environment and the device in this order.
        refusal: takes the name of a backend, and says why it cannot serve the other arguments; None if it can, or
            without this function.
        strict: whether a named backend that cannot serve raises. Otherwise it is skipped: a call inside a function of
            another purpose is not what whoever named it meant.

    Raises:
        RuntimeError: a named backend cannot serve this call; the message says why. See `Refusal` for the difference
            between a name for this call and one for all operators.
    """
    name, source = requested, "backend"
    if name is None:
        name, source = _scoped_name, "use_backend"
    if name is None:
        name, source = os.environ.get("NASFAST_BACKEND") or None, "NASFAST_BACKEND"

    row = _TABLE[op]
    if name is not None:
        _check_name(name, source)
        names = [backend.name for backend in row]
        if name in names:
            named = row[names.index(name)]
            why_not = _refuse(named, x, refusal)
            if why_not is None:
                return named
        else:
            choices = ", ".join(names)
            why_not = Refusal(f"this version has no {name} kernel for {op}; choose from {choices}", has_operator=False)
        if strict and (why_not.has_operator or source == "backend"):
            raise RuntimeError(f"{op}: backend {name!r} (from {source}) cannot serve: {why_not.reason}")
    skipped: list[str] = []
    for backend in row:
        if backend.automatic is not None and x.device.type not in backend.automatic:
            continue
        why_not = _refuse(backend, x, refusal)
        if why_not is None:
            if skipped and not torch.compiler.is_compiling():
                _log_skipped(op, x, backend.name, skipped)
            return backend
        skipped.append(f"{backend.name}: {why_not.reason}")
    raise AssertionError(f"{op} has no reference backend")


def _refuse(backend: Backend, x: Tensor, refusal: Callable[[str], Refusal | None] | None) -> Refusal | None:
    reason = backend.why_not(x)
    if reason:
        return Refusal(reason)
    return refusal(backend.name) if refusal is not None else None


def _check_name(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {name!r}; valid names are {', '.join(BACKENDS)}")


def _log_skipped(op: str, x: Tensor, chosen: str, skipped: list[str]) -> None:
    """Log, once each, why faster backends do not run an operator, and on a GPU how to get the kernels it lacks."""
    if x.device.type == "cuda" and (missing := why_not_cuda_kernels(x)):
        message = f"nasfast has no kernels for {x.device}, so its operators run on PyTorch: {missing}"
        log_once(_logger, logging.WARNING, message)
    else:
        log_once(_logger, logging.INFO, f"{op} runs on the {chosen} backend ({'; '.join(skipped)})")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of every operator called inside the block, in any thread, without a backend argument.

    The backend of operators that it does not have is chosen automatically.

    Raises:
        ValueError: unknown name, on entry.
    """
    global _scoped_name
    _check_name(name, "use_backend")
    outer, _scoped_name = _scoped_name, name
    try:
        yield
    finally:
        _scoped_name = outer


def explain(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Row]:
    """For every operator and backend, whether it can serve tensors of this device and type, and which one is chosen.

    The choice follows `use_backend` and NASFAST_BACKEND as in a call. Where such a call raises, no backend is chosen,
    and the reason of the named backend says why.
    """
    probe = torch.empty(0, device=device, dtype=dtype)
    rows = []
    for op, backends in _TABLE.items():
        try:
            chosen = resolve_backend(op, probe).name
        except RuntimeError:
            chosen = None
        by_name = {backend.name: backend for backend in backends}
        for name in BACKENDS:
            backend = by_name.get(name)
            reason = backend.why_not(probe) if backend else f"this version has no {name} kernel for {op}"
            rows.append(Row(op, name, not reason, name == chosen, reason, backend.serves if backend else ""))
    return rows
