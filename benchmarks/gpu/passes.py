"""The passes over convolutions among the kernels of one step, matched with the network's convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nasfast.config import ConfigError
from nasfast.measure.floor import Machine, Trace, conv_floor

# the kernels of kernels/triton that read and write the tensors of convolutions
_FORWARD = ("pointwise_forward_kernel", "depthwise_forward_kernel")
_BACKWARD = ("pointwise_backward_kernel", "depthwise_backward_kernel")


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
    backward = [(name, ms) for name, ms in kernels if name in _BACKWARD]
    convs = traced.convs
    if len(forward) != len(convs) or len(backward) > len(convs):
        raise ConfigError(
            f"every convolution must run on the Triton kernels, and {len(forward)} of {len(convs)} did: "
            "see `nasfast doctor` for the reason"
        )
    pairs = [(kernel, conv, False) for kernel, conv in zip(forward, convs, strict=True)]
    pairs += [(kernel, conv, True) for kernel, conv in zip(backward, reversed(convs), strict=False)]
    return [
        Pass(f"{name.removesuffix('_kernel')} {conv.x}->{conv.y}", partial(conv_floor, conv, backward=back), ms)
        for (name, ms), conv, back in pairs
    ]


def kernels_of(step: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Name and ms of every kernel that the second of two calls runs on a GPU, in the order they ran."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize(device)
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.device_time / 1e3) for e in events]
