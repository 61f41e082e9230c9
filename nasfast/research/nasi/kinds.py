"""What NASI does differently in each kind of space: the supernet it samples, the architecture it chooses, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.research.cells.config import Rule
from nasfast.research.cells.derive import derive
from nasfast.research.cells.space import CellSpace
from nasfast.research.nasi.cells import CellMixture
from nasfast.research.nasi.layers import LayerMixture
from nasfast.research.nasi.search import Mixture, NasiResult
from nasfast.research.nasi.table import METHOD, LogitTable, nasi_table
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace, SearchSpace, arch_to_json


def _layers(space: ArchSpace) -> SearchSpace:
    """The layer-wise space that every other kind is.

    Raises:
        TypeError: NASI has no implementation for this kind of space.
    """
    if not isinstance(space, SearchSpace):
        raise TypeError(f"NASI searches spaces of layers and of cells, got a {type(space).__name__}")
    return space


def mixture_of(space: ArchSpace, *, seed: int = 0) -> Mixture:
    """The untrained supernet of a space, as PyTorch initialises its modules."""
    return CellMixture(space, seed=seed) if isinstance(space, CellSpace) else LayerMixture(_layers(space), seed=seed)


def chosen_arch(space: ArchSpace, result: NasiResult, *, rule: Rule | None = None) -> Arch:
    """The architecture that a search prefers.

    Args:
        space: the space that was searched.
        result: the result of the search.
        rule: how the logits of cells become an architecture, see `cells.derive`; None takes `darts` for cells
            with two inputs, whose nodes keep two edges, and else `argmax`. Layers take the highest logits, and of equal
            ones the lower option.
    """
    if isinstance(space, CellSpace):
        return derive(space, result.logits, rule or ("darts" if space.cell.inputs == 2 else "argmax"))
    return nasi_table(_layers(space), result).argmax()


def table_of(space: ArchSpace, result: NasiResult) -> IndicatorTable | LogitTable:
    """The logits of a search as a table, whose `score` of an architecture is log p(arch) up to a constant."""
    if isinstance(space, CellSpace):
        return LogitTable(result.logits.flatten(0, 1))
    return nasi_table(_layers(space), result)


def write_answer(space: ArchSpace, result: NasiResult, arch: Arch, folder: Path, *, meta: dict[str, Any]) -> Path:
    """Write what a search found where the next stage looks for it, and return the file.

    In a layer-wise space that is `indicators.json` for `nasfast search`; in a space of cells it is `arch_nasi.json` for
    `nasfast retrain`.

    Args:
        space, result: the space, and the result of its search.
        arch: the architecture that the search prefers.
        folder: gets the file.
        meta: what a table says about its making.
    """
    if isinstance(space, CellSpace):
        path = folder / f"arch_{METHOD}.json"
        write_atomic(path, (arch_to_json(arch, space) + "\n").encode())
        return path
    path = folder / TABLE_FILE
    nasi_table(_layers(space), result, meta=meta).save(path)
    return path
