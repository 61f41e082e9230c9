"""Records which kernels run: those of Triton, calls that launch CUDA kernels, and what the profiler sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

# operators of csrc/library.cpp that launch CUDA kernels
CHAIN_OPERATORS = tuple(f"conv_bn_act_chain_gpu_{name}" for name in ("fwd", "make", "reduce", "bwd"))


@contextmanager
def noted_launches(*, run: bool = True) -> Iterator[list[str]]:
    """Within this context, record all launches of Triton kernels.

    Args:
        run: whether the kernels also run.

    Yields:
        the kernels of the launches so far, by name; always empty without Triton.
    """
    launches: list[str] = []
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
                launches.append(kernel.fn.__name__)
                return launch(*args, **kwargs) if run else None

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
