"""Measures which chains of a fused model run faster fused, for one example."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.fusion import execute
from nasfast.fusion.chain import ChainStage
from nasfast.fusion.execute import Executor, Way
from nasfast.fusion.fold import Folded
from nasfast.ops.reference import ConvBNParams

_ROUNDS = 5
# the largest ratio of times at which a chain runs fused: noise must not make a model slower
GAIN = 0.97


def measure(model: nn.Module, example: Sequence[Any]) -> dict[Executor, tuple[Way, float]]:
    """Run the model once, and every chain that it reaches several times, fused and on PyTorch.

    Buffers are restored. The chains keep what was measured.

    Args:
        model: a fused model.
        example: arguments of its forward.

    Returns:
        For each chain that was measured, how it ran fused, and that time divided by PyTorch's.
    """
    ratios: dict[Executor, tuple[Way, float]] = {}

    def decide(executor: Executor, stages: list[ChainStage], x: Tensor, way: Way) -> Way:
        ratios[executor] = way, _ratio(stages, x, way)
        return way if ratios[executor][1] < GAIN else Way.PLAIN

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    token = execute.measuring.set(decide)
    try:
        with torch.random.fork_rng():
            model(*example)
    finally:
        execute.measuring.reset(token)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return ratios


def _ratio(stages: Sequence[ChainStage], x: Tensor, way: Way) -> float:
    x = x.detach().requires_grad_(x.requires_grad)
    stages = [_own(stage) for stage in stages]
    fused: Callable[[], Tensor] = partial(execute.run_stages, x, stages, None)
    if way is Way.FOLDED:
        fused = partial(Folded(stages, execute.result_dtype(x), x.shape).run, x, None)
    runs: list[Callable[[], Tensor]] = [fused, partial(execute.plain_stages, x, stages)]
    params = [t for stage in stages for t in stage.stage.params]
    leaves = [t for t in (x, *params) if t is not None and t.requires_grad]
    times: list[list[float]] = [[], []]
    for i_round in range(_ROUNDS + 1):
        for run, its_times in zip(runs, times, strict=True):
            seconds = _seconds(run, leaves, x.device)
            # the first round makes plans and primitives
            its_times += [seconds] if i_round else []
    ours, theirs = map(statistics.median, times)
    return ours / theirs


def _seconds(run: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    y = run()
    if torch.is_grad_enabled() and leaves:
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    wait()
    return time.perf_counter() - start


def _own(stage: ChainStage) -> ChainStage:
    """The stage with tensors of its own, so that nothing of the model changes."""
    params = stage.stage.params
    own = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in params]
    return stage._replace(stage=stage.stage._replace(params=ConvBNParams(*own)))  # type: ignore[arg-type]
