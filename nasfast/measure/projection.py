"""Projection: the time of a measured step on another GPU, computed from the rooflines of both GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nasfast.config import ConfigError
from nasfast.measure.cards import Card
from nasfast.measure.floor import Machine, Trace, conv_floor


@dataclass(frozen=True)
class Pass:
    """One measured pass over a convolution.

    Attributes:
        name: names the kernel and the layer.
        floor: its least seconds as a function of a machine and the bytes of an element.
        ms: its measured ms.
    """

    name: str
    floor: Callable[[Machine, int], float]
    ms: float


@dataclass(frozen=True)
class ProjectedPass:
    """The floor and the time of one pass.

    Attributes:
        name: names the kernel and the layer.
        ms: measured ms.
        floor_ms: floor in ms on the card it was measured on.
        fraction: floor_ms / ms, at most 1.
        projected_ms: ms on the other card.
    """

    name: str
    ms: float
    floor_ms: float
    fraction: float
    projected_ms: float


@dataclass(frozen=True)
class Projection:
    """The passes of a step, and the rest of its time (launches, loss), which keeps its measured value."""

    card: Card
    dtype: str
    passes: tuple[ProjectedPass, ...]
    rest_ms: float

    @property
    def step_ms(self) -> float:
        return sum(p.projected_ms for p in self.passes) + self.rest_ms

    def __str__(self) -> str:
        worst = sorted(self.passes, key=lambda p: p.ms * (1 - p.fraction), reverse=True)[:5]
        lines = [
            f"PROJECTION, not measured: {self.card.name} ({self.card.bytes / 1e9:.0f} GB/s, "
            f"{self.card.bf16 / 1e12:.1f} bf16 and {self.card.fp32 / 1e12:.1f} fp32 TFLOP/s, published): "
            f"{self.step_ms:.2f} ms per step, {self.dtype}",
            "every convolution is taken to reach there the fraction of its roofline that it reached here",
            "furthest from it here: " + ", ".join(f"{p.name} {p.fraction:.2f} of {p.floor_ms:.3f} ms" for p in worst),
        ]
        return "\n".join(lines)


# the kernels of kernels/triton that read and write the tensors of convolutions
_FORWARD = ("pointwise_forward_kernel", "depthwise_forward_kernel")
_BACKWARD = ("pointwise_backward_kernel", "depthwise_backward_kernel")


def passes_of(kernels: Sequence[tuple[str, float]], traced: Trace) -> list[Pass]:
    """The convolution passes among the kernels of one step.

    Args:
        kernels: name and ms of each kernel, in the order they ran.
        traced: trace of the same network. Forward runs its convolutions in order, backward in reverse order, perhaps
            without the first ones.

    Raises:
        ConfigError: the passes do not match the trace, because PyTorch ran some of the convolutions.
    """
    forward = [(name, ms) for name, ms in kernels if name in _FORWARD]
    convs = traced.convs
    backward = [(name, ms) for name, ms in kernels if name in _BACKWARD]
    if len(forward) != len(convs) or len(backward) > len(convs):
        raise ConfigError(
            f"a projection needs every convolution on the Triton kernels, and {len(forward)} of {len(convs)} ran "
            "there: see `nasfast doctor` for the reason"
        )
    passes = [
        Pass(_label(name, conv.x, conv.y), partial(conv_floor, conv, backward=False), ms)
        for (name, ms), conv in zip(forward, convs, strict=True)
    ]
    for (name, ms), conv in zip(backward, reversed(convs), strict=False):
        passes.append(Pass(_label(name, conv.x, conv.y), partial(conv_floor, conv, backward=True), ms))
    return passes


def _label(kernel: str, x: int, y: int) -> str:
    return f"{kernel.removesuffix('_kernel')} {x}->{y}"


def kernels_of(step: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Name and ms of every kernel that the second of two calls runs on a GPU, in the order they ran."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize(device)
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.device_time / 1e3) for e in events]


def project(passes: Sequence[Pass], step_ms: float, here: Machine, card: Card, dtype: str) -> Projection:
    """Scale measured passes to another card by the ratio of their floors.

    Args:
        passes: the passes of one step; the rest of step_ms keeps its time.
        step_ms: measured ms of the step.
        here: ceilings of the GPU on which the passes were measured.
        card: the other card.
        dtype: `fp32` or `bf16`.
    """
    item = 2 if dtype == "bf16" else 4
    there = card.machine(dtype)
    projected = []
    for p in passes:
        floor_ms = 1e3 * p.floor(here, item)
        # a pass can be faster than its floor, which assumes no cache
        fraction = min(1.0, floor_ms / p.ms)
        floor_there = 1e3 * p.floor(there, item)
        projected.append(ProjectedPass(p.name, p.ms, floor_ms, fraction, floor_there / fraction))
    return Projection(card, dtype, tuple(projected), max(0.0, step_ms - sum(p.ms for p in passes)))
