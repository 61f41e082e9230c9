"""The result of a search, and `archs.json`, the file that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nasfast.config import ConfigBase, ConfigError
from nasfast.display import Tabular
from nasfast.runtime.files import seal, unseal, write_atomic
from nasfast.search.limits import Limits
from nasfast.settings import SearchConfig
from nasfast.spaces import Arch, LayerSpace, format_arch

ARCHS_FILE = "archs.json"
"""Name of the result of a search in a run directory."""

_FORMAT = "nasfast.archs/1"


@dataclass(frozen=True)
class Candidate(ConfigBase):
    """One architecture of a search's result.

    Attributes:
        arch: one value per layer.
        score: its score, which the search maximised.
        macs: MACs per image of the standalone network.
        params: number of parameters of the standalone network.
        optimal: whether it is proven that no architecture within the limits scores higher, except the candidates before
            it.
        bound: proven upper bound of the scores of all architectures within the limits except the candidates before it;
            None if nothing is proven (evolution).
        gap: `bound - score`.
        status: how the search ended; for an exact search, the solver's message.
        values: its cost by each table of the search, such as its latency in ms.
    """

    arch: Arch
    score: float
    macs: int
    params: int
    optimal: bool = False
    bound: float | None = None
    gap: float | None = None
    status: str = ""
    values: tuple[float, ...] = ()


class Candidates(Tabular, list[Candidate]):
    """The result of a search, best first: a list that is shown as a table."""

    @property
    def caption(self) -> str:
        return f"{len(self)} architectures, best first"

    def records(self) -> list[dict[str, Any]]:
        """One row per architecture; costs by tables are called `value 1`, `value 2`, ..."""
        return [_record(c, [f"value {i + 1}" for i in range(len(c.values))]) for c in self]


def _record(candidate: Candidate, costs: Sequence[str]) -> dict[str, Any]:
    """A candidate as a row; `costs` names its `values`."""
    return {
        "arch": format_arch(candidate.arch),
        "score": candidate.score,
        "macs": candidate.macs,
        "params": candidate.params,
        **dict(zip(costs, candidate.values, strict=False)),
        "optimal": candidate.optimal,
    }


@dataclass(frozen=True)
class ParetoPoint(ConfigBase):
    """A non-dominated architecture: no other has at most its cost and a higher score. Its fields are `Candidate`'s."""

    arch: Arch
    score: float
    macs: int
    params: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class TableLimit(ConfigBase):
    """A table of costs that a search had, and the front of score against it.

    Attributes:
        quantity, unit, about: as in the table.
        maximum: largest cost that was allowed; None for no limit.
        pareto: the Pareto front of score against this cost, smallest first; empty if it was not computed.
    """

    quantity: str
    unit: str
    about: str
    maximum: float | None
    pareto: tuple[ParetoPoint, ...] = ()


@dataclass(frozen=True, repr=False)
class SearchResult(Tabular, ConfigBase):
    """The content of `archs.json`.

    Attributes:
        space: name of the space.
        fingerprint: fingerprint of the space; a file of another space is refused.
        max_macs, max_params: the limits of the search; None for none.
        candidates: the best architectures, best first.
        pareto: the Pareto front of score against MACs, fewest MACs first; empty if it was not computed.
        tables: the tables of costs that the search had; `values` of an architecture has their order.
        settings: settings of the search; None if they were not given.
        scored_with: settings of the score, where the search computed the scores of whole paths itself. Where it
            searched a table, `settings` in the table's `meta` has them.
        format: version of the file's format.
    """

    space: str
    fingerprint: str
    max_macs: float | None
    max_params: float | None
    candidates: tuple[Candidate, ...]
    pareto: tuple[ParetoPoint, ...] = ()
    tables: tuple[TableLimit, ...] = ()
    settings: SearchConfig | None = None
    scored_with: Any = None
    format: str = _FORMAT

    @property
    def caption(self) -> str:
        return (
            f"{len(self.candidates)} architectures of {self.space}, best first; {len(self.pareto)} on the Pareto front"
        )

    @property
    def points(self) -> tuple[Candidate | ParetoPoint, ...]:
        """What the search found: the candidates, then the points of the fronts, some of which may be candidates too."""
        return (*self.candidates, *self.pareto, *(point for table in self.tables for point in table.pareto))

    def records(self) -> list[dict[str, Any]]:
        """One row per candidate, with its cost by each table."""
        return [_record(c, [f"{t.quantity} ({t.unit})" for t in self.tables]) for c in self.candidates]

    def _check_values(self) -> None:
        if self.format != _FORMAT:
            raise ValueError(f"archs.json has format {self.format!r}, this version reads {_FORMAT!r}: search again")


def save_candidates(
    path: str | Path,
    space: LayerSpace,
    candidates: Sequence[Candidate],
    *,
    limits: Limits = Limits(),
    pareto: Sequence[ParetoPoint] = (),
    table_fronts: Sequence[Sequence[ParetoPoint]] = (),
    settings: SearchConfig | None = None,
    scored_with: Mapping[str, Any] | None = None,
) -> None:
    """Write `archs.json`; an older one is replaced atomically.

    Args:
        space, candidates, limits, pareto, settings, scored_with: see `SearchResult`.
        table_fronts: for each table of the limits its Pareto front; none by default.
    """
    tables = tuple(
        TableLimit(table.quantity, table.unit, table.about, maximum, tuple(front))
        for (table, maximum), front in zip(limits.tables, table_fronts or [()] * len(limits.tables), strict=True)
    )
    result = SearchResult(
        space.name,
        space.fingerprint,
        limits.max_macs,
        limits.max_params,
        tuple(candidates),
        tuple(pareto),
        tables,
        settings,
        scored_with,
    )
    write_atomic(Path(path), seal(result.to_dict()).encode())


def load_candidates(path: str | Path, space: LayerSpace | None = None) -> SearchResult:
    """Read `archs.json`.

    Args:
        space: if given, the space the file must belong to.

    Raises:
        ConfigError: the file cannot be read, is damaged or is of another kind, or was written for another space; the
            text names the file.
    """
    try:
        data = unseal(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} has no result of a search: {error}") from error
    try:
        result = SearchResult.from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if space is not None and result.fingerprint != space.fingerprint:
        raise ConfigError(
            f"{path} was written for space {result.space!r} ({result.fingerprint}), this is {space.name!r} "
            f"({space.fingerprint}): load the space of the search"
        )
    return result
