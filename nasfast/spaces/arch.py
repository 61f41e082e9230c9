"""An architecture is plain data: a tuple of integers, one per choice of its search space."""

from __future__ import annotations

import operator
from collections.abc import Iterable

Arch = tuple[int, ...]
"""One value per choice: per layer of a layer-wise space, per edge of a space of cells.

A value is the index of a candidate, or `SKIP` where a layer takes its identity (layer-indicator) path.
"""

SKIP = -1


class ArchError(ValueError):
    """An architecture that does not belong to the space; the text names the choice, the value and the legal ones."""


def parse_arch(form: str | Iterable[int]) -> Arch:
    """Tuple from any written form: a sequence of ints, or a text.

    A text is `"3 -1 0"`, `"3,-1,0"`, either of them in brackets or parentheses, `"3_-1_0"` as in names of files, or
    `"01220122"`.

    Raises:
        ArchError: something in it is not an integer.
    """
    values: Iterable[int | str] = form
    if isinstance(form, str):
        # int() alone would read 1_0 as 10
        text = form.strip().strip("[]()").replace(",", " ").replace("_", " ").split()
        values = list(text[0]) if len(text) == 1 and text[0].isdigit() else text
    try:
        # int() alone would cut 0.9 down to 0
        return tuple(int(v) if isinstance(v, str) else operator.index(v) for v in values)
    except (TypeError, ValueError) as error:
        raise ArchError(f"architecture must be integers such as '3 -1 0', got {values!r}") from error


def format_arch(arch: Arch) -> str:
    """Text form, `"3 -1 0"`; `parse_arch` reads it back."""
    return " ".join(map(str, arch))


def arch_file_text(arch: Arch) -> str:
    """Text form for names of files, `"3_-1_0"`; `parse_arch` reads it back."""
    return "_".join(map(str, arch))
