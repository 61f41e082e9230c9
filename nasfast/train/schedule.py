"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math


def lr_at(step: int, *, total: int, peak: float, warmup: int = 0, end: float = 0.0) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to `end` at `total`.

    Args:
        step: index of the step that follows, from 0.
        total: number of steps.
        peak: learning rate after the warm-up.
        warmup: number of warm-up steps.
        end: learning rate at the end.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
