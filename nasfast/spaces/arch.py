"""An architecture is plain data: a tuple of ints, one per layer of its search space."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nasfast.spaces.cost import Cost, Operator

Arch = tuple[int, ...]
"""One choice index per searchable layer; `SKIP` where the layer is its identity (layer-indicator) path."""

SKIP = -1


class ArchSpace(Protocol):
    """What architectures belong to: a `SearchSpace`, or a `nasfast.cells.CellSpace`."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def operators(self) -> tuple[dict[int, Operator], ...]: ...

    def check(self, arch: Iterable[int]) -> Arch: ...

    def parse(self, text: str) -> Arch: ...

    def cost(self, arch: Iterable[int]) -> Cost: ...


class ArchError(ValueError):
    """An architecture that does not belong to the space; the text names the layer, the value and the legal ones."""


def arch_to_json(arch: Arch, space: ArchSpace) -> str:
    """JSON form of an architecture: `{"space": name, "fingerprint": ..., "arch": [...]}`."""
    return json.dumps(
        {"space": space.name, "fingerprint": space.fingerprint, "arch": list(space.check(arch))}, indent=1
    )


def arch_from_json(text: str, space: ArchSpace) -> Arch:
    """Inverse of `arch_to_json`.

    Raises:
        ArchError: not that JSON form, written for another space, or not an architecture of `space`.
    """
    try:
        form = json.loads(text)
        arch, fingerprint = parse_arch(form["arch"]), form["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArchError(f'not an arch.json: expected {{"space", "fingerprint", "arch"}}, got {text[:80]!r}') from error
    if fingerprint != space.fingerprint:
        raise ArchError(
            f"architecture was written for space {form.get('space')!r} ({fingerprint}), "
            f"this is {space.name!r} ({space.fingerprint}): load the space it was saved with"
        )
    return space.check(arch)


def load_arch(path: str | Path, space: ArchSpace) -> Arch:
    """Read an `arch.json`.

    Raises:
        ArchError: see `arch_from_json`; the file is named.
    """
    try:
        return arch_from_json(Path(path).read_text(encoding="utf-8"), space)
    except ValueError as error:  # of bytes that are no text, too
        raise ArchError(f"{path}: {error}") from error


def parse_arch(form: str | Iterable[int]) -> Arch:
    """Tuple from any written form: `"3 -1 0"`, `"3,-1,0"`, a string of digits like `"01220122"`, or a sequence of ints.

    Raises:
        ArchError: something in it is not an integer.
    """
    if isinstance(form, str):
        text = form.replace(",", " ").split()
        form = list(text[0]) if len(text) == 1 and text[0].isdigit() else text
    try:
        # int() alone would cut 0.9 down to 0
        return tuple(int(v) if isinstance(v, str) else operator.index(v) for v in form)
    except (TypeError, ValueError) as error:
        raise ArchError(f"architecture must be integers such as '3 -1 0', got {form!r}") from error


def format_arch(arch: Arch) -> str:
    """Text form, `"3 -1 0"`; `parse_arch` reads it back."""
    return " ".join(map(str, arch))
