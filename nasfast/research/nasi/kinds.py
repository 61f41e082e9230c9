"""What NASI does differently in each kind of space: the supernet it samples, the architecture it chooses, its files.

Each function here has one implementation per kind of space; a new kind registers its own.
"""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import Any

from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.research.cells.config import Rule
from nasfast.research.cells.derive import derive
from nasfast.research.cells.space import CellSpace
from nasfast.research.nasi.cells import CellMixture
from nasfast.research.nasi.layers import LayerMixture
from nasfast.research.nasi.search import Mixture, NasiResult
from nasfast.research.nasi.table import METHOD, LogitTable, layer_arch, nasi_table
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace, SearchSpace, arch_to_json


@singledispatch
def mixture_of(space: ArchSpace, *, seed: int = 0) -> Mixture:
    """The untrained supernet of a space, as PyTorch initialises its modules.

    Raises:
        TypeError: NASI has no implementation for this kind of space.
    """
    raise TypeError(f"NASI has no supernet for a {type(space).__name__}")


@mixture_of.register
def _(space: CellSpace, *, seed: int = 0) -> CellMixture:
    return CellMixture(space, seed=seed)


@mixture_of.register
def _(space: SearchSpace, *, seed: int = 0) -> LayerMixture:
    return LayerMixture(space, seed=seed)


@singledispatch
def chosen_arch(space: ArchSpace, result: NasiResult, *, rule: Rule | None = None) -> Arch:
    """The architecture that a search prefers.

    Args:
        space: the space that was searched.
        result: the result of the search.
        rule: how the logits of cells become an architecture, see `cells.derive`; None takes `darts` for cells
            with two inputs, whose nodes keep two edges, and else `argmax`. Layers take the highest logits.

    Raises:
        TypeError: NASI has no implementation for this kind of space.
    """
    raise TypeError(f"NASI finds no architecture of a {type(space).__name__}")


@chosen_arch.register
def _(space: CellSpace, result: NasiResult, *, rule: Rule | None = None) -> Arch:
    return derive(space, result.logits, rule or ("darts" if space.cell.inputs == 2 else "argmax"))


@chosen_arch.register
def _(space: SearchSpace, result: NasiResult, *, rule: Rule | None = None) -> Arch:
    return layer_arch(space, result)


@singledispatch
def table_of(space: ArchSpace, result: NasiResult) -> IndicatorTable | LogitTable:
    """The logits of a search as a table, whose `score` of an architecture is log p(arch) up to a constant.

    Raises:
        TypeError: NASI has no implementation for this kind of space.
    """
    raise TypeError(f"NASI makes no table of a {type(space).__name__}")


@table_of.register
def _(space: CellSpace, result: NasiResult) -> LogitTable:
    return LogitTable(result.logits.flatten(0, 1))


@table_of.register
def _(space: SearchSpace, result: NasiResult) -> IndicatorTable:
    return nasi_table(space, result)


@singledispatch
def write_answer(space: ArchSpace, result: NasiResult, arch: Arch, folder: Path, *, meta: dict[str, Any]) -> Path:
    """Write what a search found where the next stage looks for it, and return the file.

    In a layer-wise space that is `indicators.json` for `nasfast search`; in a space of cells it is `arch_nasi.json` for
    `nasfast retrain`.

    Args:
        space, result: the space, and the result of its search.
        arch: the architecture that the search prefers.
        folder: gets the file.
        meta: what a table says about its making.

    Raises:
        TypeError: NASI has no implementation for this kind of space.
    """
    raise TypeError(f"NASI writes no file of a {type(space).__name__}")


@write_answer.register
def _(space: CellSpace, result: NasiResult, arch: Arch, folder: Path, *, meta: dict[str, Any]) -> Path:
    path = folder / f"arch_{METHOD}.json"
    write_atomic(path, (arch_to_json(arch, space) + "\n").encode())
    return path


@write_answer.register
def _(space: SearchSpace, result: NasiResult, arch: Arch, folder: Path, *, meta: dict[str, Any]) -> Path:
    path = folder / TABLE_FILE
    nasi_table(space, result, meta=meta).save(path)
    return path
