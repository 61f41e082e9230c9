"""Uniform widths, the simple answer that a search must beat."""

from __future__ import annotations

import math

from nasfast.search import Limits
from nasfast.shrink.find import Found, Place
from nasfast.spaces import Arch


def uniform_widths(found: Found, limits: Limits) -> Arch | None:
    """The architecture of about equal shares of all widths that uses most of the limits; None if none meets them.

    From the largest common share that meets them, single widths are raised in order, while they still do. No block is
    dropped.
    """

    def meets(arch: Arch) -> bool:
        return limits.admits(found.space.cost(arch), arch)

    steps = [_by_share(place) for place in found.places]
    most = max(map(len, steps))
    arch = None
    for share in range(1, most + 1):
        candidate = tuple(row[max(0, math.ceil(share / most * len(row)) - 1)] for row in steps)
        if meets(candidate):
            arch = candidate
    if arch is None:
        return None
    for i, row in enumerate(steps):
        place = row.index(arch[i])
        raised = (*arch[:i], row[min(place + 1, len(row) - 1)], *arch[i + 1 :])
        if meets(raised):
            arch = raised
    return arch


def _by_share(place: Place) -> list[int]:
    """The candidates of a choice whose widths have about equal shares, ascending."""
    counts = [len(widths) for widths in place.widths]
    most = max(counts, default=1)
    chosen: list[int] = []
    for step in range(1, most + 1):
        kept = tuple(widths[max(0, math.ceil(step / most * len(widths)) - 1)] for widths in place.widths)
        value = place.candidates.index(kept)
        if value not in chosen:
            chosen.append(value)
    return chosen
