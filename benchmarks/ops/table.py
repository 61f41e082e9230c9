"""The table: all cases of all operators."""

from __future__ import annotations

from benchmarks.ops import chains, layers, orthogonal
from benchmarks.ops.cases import SIZES, Case


def table(size: str) -> list[Case]:
    """The cases of a size, a key of SIZES, in the order in which they run."""
    how = SIZES[size]
    cases = [case for module in (layers, chains, orthogonal) for case in module.cases(how)]
    if how.one_per_family:
        # a later entry of a dictionary replaces an earlier one
        cases = list({(case.op, case.family): case for case in reversed(cases)}.values())[::-1]
    return cases
