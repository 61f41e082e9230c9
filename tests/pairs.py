"""Few combinations of parameters in which each value of one still meets each value of every other."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every two values of two parameters meet, chosen greedily.

    A fault nearly always needs at most two of the parameters of an operator, and 360 combinations become 120.
    """
    combos = list(product(*(range(len(values)) for values in parameters)))
    pairs = list(combinations(range(len(parameters)), 2))
    missing = {(i, j, combo[i], combo[j]) for combo in combos for i, j in pairs}
    chosen = []
    while missing:
        best = max(combos, key=lambda combo: sum((i, j, combo[i], combo[j]) in missing for i, j in pairs))
        missing -= {(i, j, best[i], best[j]) for i, j in pairs}
        chosen.append(tuple(values[k] for values, k in zip(parameters, best, strict=True)))
    return chosen
