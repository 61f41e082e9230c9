"""Records which kernels run: those of Triton in the order of their launches, and calls of operators with CUDA kernels."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

# operators of csrc/library.cpp that launch CUDA kernels
CHAIN_OPERATORS = tuple(f"conv_bn_act_chain_gpu_{name}" for name in ("fwd", "make", "reduce", "bwd"))


class Launch(NamedTuple):
    """One launch.

    Attributes:
        kernel: name of the kernel.
        grid: number of programs in each dimension.
        arguments: (name, value) of every integer, boolean and string, with tile sizes and launch options.
        ms: time of the call; only under the interpreter is this the kernel's own time.
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[tuple[str, Any], ...]
    ms: float


@contextmanager
def noted_launches(*, run: bool = True) -> Iterator[list[Launch]]:
    """Within this context, record all launches of Triton kernels.

    Args:
        run: whether the kernels also run.

    Yields:
        the launches so far; always empty without Triton.
    """
    launches: list[Launch] = []
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield launches
        return

    def noting(original: Any) -> Any:
        def launcher(kernel: Any, grid: Any) -> Any:
            launch = original(kernel, grid)

            def noted(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = launch(*args, **kwargs) if run else None
                ms = 1e3 * (time.perf_counter() - start)
                values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
                plain = tuple((name, value) for name, value in values.items() if isinstance(value, int | str))
                launches.append(Launch(kernel.fn.__name__, (*grid, 1, 1)[:3], plain, ms))
                return result

            return noted

        return launcher

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(patch.object(kind, "__getitem__", noting(kind.__getitem__)))
        yield launches


@contextmanager
def noted_chains() -> Iterator[Counter[str]]:
    """Within this context, count the calls of operators that launch CUDA kernels of chains, or their emulation.

    Yields:
        calls so far by name, such as conv_bn_act_chain_gpu_fwd; none without the extension.
    """
    calls: Counter[str] = Counter()
    namespace = torch.ops.nasfast

    def noting(name: str, operator: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = operator(*args, **kwargs)
            calls[name] += 1
            return result

        return noted

    with ExitStack() as stack:
        for name in CHAIN_OPERATORS:
            if hasattr(namespace, name):
                stack.enter_context(patch.object(namespace, name, noting(name, getattr(namespace, name))))
        yield calls


def kernels_of(step: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Name and ms of every kernel that the second of two calls runs on a GPU, in the order they ran."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize(device)
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.device_time / 1e3) for e in events]
