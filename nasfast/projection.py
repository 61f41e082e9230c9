"""What a step measured on one GPU would take on another, by the rooflines of both: projected, not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nasfast.config import ConfigError, nearest
from nasfast.floor import Conv, Machine, Trace, conv_floor
from nasfast.timing import TrainingStep


@dataclass(frozen=True)
class Card:
    """Published figures of a GPU: bytes per second, and FLOP per second of dense bf16 and of fp32 without tf32."""

    name: str
    bytes: float
    bf16: float
    fp32: float

    def machine(self, dtype: str) -> Machine:
        return Machine(self.bytes, self.bf16 if dtype == "bf16" else self.fp32, self.fp32)


CARDS = {
    "rtx3080": Card("NVIDIA GeForce RTX 3080", 760e9, 59.5e12, 29.8e12),
    "rtx3090": Card("NVIDIA GeForce RTX 3090", 936e9, 71e12, 35.6e12),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", 1008e9, 165.2e12, 82.6e12),
    "a100": Card("NVIDIA A100 80GB", 2039e9, 312e12, 19.5e12),
    "h100": Card("NVIDIA H100 SXM", 3350e9, 989e12, 67e12),
    "h200": Card("NVIDIA H200", 4800e9, 989e12, 67e12),
}
"""Figures of the manufacturer's data sheets (dense, tensor cores with fp32 sums for bf16, plain cores for fp32)."""


@dataclass(frozen=True)
class Pass:
    """One measured pass over a convolution.

    Attributes:
        name: of the kernel and layer.
        conv: what it computes.
        backward: its direction.
        ms: measured.
    """

    name: str
    conv: Conv
    backward: bool
    ms: float


@dataclass(frozen=True)
class ProjectedPass:
    """Floor and time of one pass here and there, in ms; fraction is floor_ms / ms of the card it was measured on."""

    name: str
    ms: float
    floor_ms: float
    fraction: float
    projected_ms: float


@dataclass(frozen=True)
class Projection:
    """Passes of a step, and what is left of it (launches, loss), which is taken over as it is."""

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


def get_card(name: str) -> Card:
    """A card by its key in CARDS.

    Raises:
        ConfigError: unknown card.
    """
    if name not in CARDS:
        raise ConfigError(f"unknown card {name!r}; {nearest(name, CARDS)}")
    return CARDS[name]


# the kernels of kernels/triton that are one convolution each, by direction
_KERNELS = {
    "pointwise_forward_kernel": False,
    "depthwise_forward_kernel": False,
    "pointwise_backward_kernel": True,
    "depthwise_backward_kernel": True,
}


def passes_of(kernels: Sequence[tuple[str, float]], found: Trace) -> list[Pass]:
    """The convolution passes among the kernels of one step.

    Args:
        kernels: name and ms, in the order they ran.
        found: the same network, traced; forward runs its convolutions in order and backward in reverse, perhaps without
            the first ones.

    Raises:
        ConfigError: the forward passes are not those of the trace, as with convolutions that are PyTorch's.
    """
    forward = [(name, ms) for name, ms in kernels if _KERNELS.get(name) is False]
    backward = [(name, ms) for name, ms in kernels if _KERNELS.get(name) is True]
    if len(forward) != len(found.convs) or len(backward) > len(found.convs):
        raise ConfigError(
            "a projection needs every convolution on the Triton kernels: "
            f"{len(forward)} of {len(found.convs)} ran there"
        )
    order = [*zip(forward, found.convs, strict=True), *zip(backward, reversed(found.convs), strict=False)]
    return [
        Pass(f"{name.removesuffix('_kernel')} {conv.x}->{conv.y}", conv, _KERNELS[name], ms)
        for (name, ms), conv in order
    ]


def kernels_of(step: TrainingStep) -> list[tuple[str, float]]:
    """Name and ms of every GPU kernel of one step, in the order they ran."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize(step.images.device)
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.device_time / 1e3) for e in events]


def project(passes: Sequence[Pass], step_ms: float, here: Machine, card: Card, dtype: str) -> Projection:
    """Scale measured passes to another card by the ratio of their floors.

    Args:
        passes: of one step; what they do not cover of step_ms keeps its time.
        step_ms: measured.
        here: ceilings of the GPU they were measured on.
        dtype: `fp32` or `bf16`.
    """
    item = 2 if dtype == "bf16" else 4
    there = card.machine(dtype)
    projected = []
    for p in passes:
        floor_ms = 1e3 * conv_floor(p.conv, here, item, backward=p.backward)
        # a pass can beat a floor that credits no cache
        fraction = min(1.0, floor_ms / p.ms)
        floor_there = 1e3 * conv_floor(p.conv, there, item, backward=p.backward)
        projected.append(ProjectedPass(p.name, p.ms, floor_ms, fraction, floor_there / fraction))
    return Projection(card, dtype, tuple(projected), max(0.0, step_ms - sum(p.ms for p in passes)))
