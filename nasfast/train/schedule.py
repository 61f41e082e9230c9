"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math


def lr_at(step: int, *, total: int, peak: float, warmup: int = 0, end: float = 0.0) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to `end` at `total`.

    Args:
        step: 0-based index of the step about to be taken.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
