"""NASWOT: how well the ReLUs of an untrained network distinguish the images of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.layers import working_copy

_RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
_CLIPPED = (torch.ops.aten.hardtanh.default, torch.ops.aten.hardtanh_.default)
_LIMITS = (-1.0, 1.0)


class _Codes(TorchDispatchMode):
    """Counts, for every pair of images, the units of all ReLUs that are in the same linear region.

    It intercepts operators, so a functional ReLU counts like a module.
    """

    def __init__(self, images: int) -> None:
        super().__init__()
        self.agreements = torch.zeros(images, images, dtype=torch.float64)
        self.units = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _RELU:
            self._count(args[0] > 0)
        elif func in _CLIPPED:
            low, high = args[1:] + _LIMITS[len(args) - 1 :]
            self._count(args[0] <= low, (args[0] > low) & (args[0] < high), args[0] >= high)
        return func(*args, **(kwargs or {}))

    def _count(self, *regions: Tensor) -> None:
        """Count the units of one ReLU by masks of its regions; a single mask also stands for its complement."""
        masks = regions if len(regions) > 1 else (regions[0], ~regions[0])
        for mask in masks:
            code = mask.flatten(1).float()
            # sums of fewer than 2^24 ones are exact in float32
            self.agreements += (code @ code.T).double().cpu()
        self.units += masks[0].flatten(1).shape[1]


def naswot(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """log |det K|, where K_ij is the number of ReLU units that are in the same linear region for images i and j.

    Mellor et al., Neural Architecture Search without Training (ICML 2021, arXiv 2006.04647), equations 1 and 2: K_ij is
    the number of units minus the Hamming distance of the images' binary codes. A ReLU has two regions, off and on. A
    ReLU6 (any hardtanh) has three: below, within and above its limits; a binary code would count the last two as one.
    Norms use the batch's statistics. The paper compares networks on one batch of 128 images.

    Args:
        module: images -> logits; its ReLUs may be modules or functions, but not inside fused operators.
        images: (N, C, H, W), on the module's device, N at least 2.
        labels: not used.

    Raises:
        ScoreError: there are fewer than two images, no ReLU ran, or K is singular because two images have the same
            code.
    """
    if len(images) < 2:
        raise ScoreError(f"naswot compares images, and got {len(images)}: give at least 2")
    copied = working_copy(module)
    codes = _Codes(len(images))
    with torch.no_grad(), codes:
        copied(images)
    if not codes.units:
        raise ScoreError(
            f"no ReLU or ReLU6 ran in this {type(module).__name__}, and NASWOT counts their linear regions. A network "
            "with another activation has no such score; one built with fused=True must be built without"
        )
    sign, value = torch.linalg.slogdet(codes.agreements)
    if sign <= 0 or not value.isfinite():
        raise ScoreError(
            f"the kernel of {len(images)} images and {codes.units:,} ReLU units is singular: images are equal, or no "
            "ReLU of the network distinguishes them; give different images"
        )
    return value.item()
