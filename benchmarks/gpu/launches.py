"""Records which kernels run: calls that launch CUDA kernels, and what the profiler sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

# operators of csrc/library.cpp that launch CUDA kernels
CHAIN_OPERATORS = tuple(f"conv_bn_act_chain_gpu_{name}" for name in ("fwd", "apply", "reduce", "bwd"))


@contextmanager
def count_chain_calls() -> Iterator[Counter[str]]:
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


def profile_kernels(step: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Name and ms of every kernel that the second of two calls runs on a GPU, in the order they ran.

    On a CPU, of every operator.
    """
    kind, clock = torch.profiler.ProfilerActivity, torch.autograd.DeviceType
    activity, where = (kind.CUDA, clock.CUDA) if device.type == "cuda" else (kind.CPU, clock.CPU)
    step()
    with torch.profiler.profile(activities=[activity]) as recorded:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = [e for e in recorded.events() if e.device_type == where]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us() / 1e3) for e in events]
