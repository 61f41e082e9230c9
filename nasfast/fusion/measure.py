"""Measures which chains run faster fused: for an example, and where the rule knows nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from nasfast.fusion.fold import Folded
from nasfast.fusion.stages import Way, plain_stages, result_dtype, run_stages
from nasfast.ops.autograd import has_saved_tensors_hooks
from nasfast.ops.reference import ConvBNParams, Stage

_ROUNDS = 5
# the largest ratio of times at which a chain runs fused: noise must not make a model slower
_GAIN = 0.97


# while `fuse` measures an example: for the convolutions of each chain, how it runs fastest
example: ContextVar[dict[tuple[nn.Conv2d, ...], Way] | None] = ContextVar("example", default=None)


def measure(model: nn.Module, arguments: Sequence[Any]) -> dict[tuple[nn.Conv2d, ...], Way]:
    """Run the model once, and every chain that it reaches several times, fused and on PyTorch.

    Buffers are restored. The chains keep what was measured.

    Args:
        model: a fused model.
        arguments: those of its forward.

    Returns:
        For the convolutions of each chain that was measured, how it runs fastest.
    """
    found: dict[tuple[nn.Conv2d, ...], Way] = {}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    token = example.set(found)
    try:
        with torch.random.fork_rng():
            model(*arguments)
    finally:
        example.reset(token)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return found


def faster(stages: Sequence[Stage], x: Tensor, way: Way) -> Way:
    """This way of running the stages on x, or PyTorch where that takes less time; nothing is changed."""
    # activation checkpointing counts and keeps what operators save, and must not see these runs; where hooks are
    # disabled nobody sees them
    hidden = saved_tensors_hooks(_as_it_is, _as_it_is) if has_saved_tensors_hooks() else nullcontext()
    with hidden, _disable_current_modes():
        return _faster(stages, x, way)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _faster(stages: Sequence[Stage], x: Tensor, way: Way) -> Way:
    x = x.detach().requires_grad_(x.requires_grad)
    stages = [_own(stage) for stage in stages]
    fused: Callable[[], Tensor] = partial(run_stages, x, stages, None)
    if way is Way.FOLDED:
        fused = partial(Folded(stages, result_dtype(x), x.shape, []).run, x, None)
    runs: list[Callable[[], Tensor]] = [fused, partial(plain_stages, x, stages)]
    params = [t for stage in stages for t in stage.params]
    leaves = [t for t in (x, *params) if t is not None and t.requires_grad]
    times: list[list[float]] = [[], []]
    for i_round in range(_ROUNDS + 1):
        for run, its_times in zip(runs, times, strict=True):
            seconds = _seconds(run, leaves, x.device)
            # the first round makes plans and primitives
            its_times += [seconds] if i_round else []
    ours, theirs = map(statistics.median, times)
    return way if ours < _GAIN * theirs else Way.PLAIN


def _seconds(run: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    y = run()
    if torch.is_grad_enabled() and leaves:
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    wait()
    return time.perf_counter() - start


def _own(stage: Stage) -> Stage:
    """The stage with tensors of its own, so that nothing of the model changes."""
    own = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in stage.params]
    return stage._replace(params=ConvBNParams(*own))  # type: ignore[arg-type]
