"""What a run is about: the space in its directory, and the limits of its settings. No torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from nasfast.config import ConfigError, load_yaml
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.registry import gives_table
from nasfast.search.limits import Limits, read_limits
from nasfast.settings import SPACE_FILE, RunConfig
from nasfast.spaces import ArchSpace, ModuleSpace, SearchSpace, get_space, read_cost_table, read_space, space_kind


@dataclass(frozen=True)
class Inputs:
    """What a stage is about; `read_inputs` reads it from the run directory.

    Attributes:
        space: the space, with the classes of the images.
        limits: those of the search in this space, with their tables.
    """

    space: SearchSpace
    limits: Limits

    @classmethod
    def of(cls, cfg: RunConfig, space: SearchSpace) -> Inputs:
        """With the limits of the settings; ConfigError where one of their tables cannot be used."""
        return cls(space, read_limits(cfg.search, space))

    @classmethod
    def checked(cls, cfg: RunConfig, space: SearchSpace) -> Inputs:
        """As `of`; settings with which the search would fail, and a bad table of scores, are refused."""
        inputs = cls.of(cfg, space)
        search, name = cfg.search, cfg.score.name
        if cfg.score.table is not None:
            read_cost_table(cfg.score.table, space)
        if not gives_table(cfg.score) and search.method == "exact":
            raise ConfigError(
                f"search.method='exact' needs additive scores, and {name!r} scores whole paths: set "
                "search.method='evolution', or score.distill=true"
            )
        if search.refine is not None:
            if not gives_table(cfg.score):
                raise ConfigError(
                    f"search.refine refines a table, and {name!r} scores whole paths: set score.distill=true, or "
                    "search.refine=null"
                )
            read_accuracies(search.refine, space)
        inputs.limits.check(space)
        return inputs


def read_inputs(cfg: RunConfig) -> Inputs:
    """The space in the run directory, and the limits of the settings; errors as in `read_layers`, `Inputs.checked`."""
    return Inputs.checked(cfg, read_layers(cfg.run_dir))


def read_layers(run_dir: Path) -> SearchSpace:
    """The space in the run directory.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it cannot be read, or is of another kind.
    """
    path = run_dir / SPACE_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast supernet --out {run_dir}` first")
    if _kind(path) is ModuleSpace:
        return get_space(str(path))  # which says why it is refused
    try:
        return SearchSpace.load(path)
    except ConfigError as error:
        remedy = f"`nasfast supernet --resume --out {run_dir}` writes it again"
        raise ConfigError(f"{error}: {remedy}") from error


def read_any_space(run_dir: Path) -> ArchSpace:
    """As `read_layers`, but the space may be that of a search of cells."""
    path = run_dir / SPACE_FILE
    kind = _kind(path)
    return read_layers(run_dir) if kind is None or kind.LAYERWISE else read_space(path)


def _kind(path: Path) -> type[ArchSpace] | None:
    """The kind of the space in a file; None where reading it says what is wrong with the file."""
    with contextlib.suppress(ConfigError):
        return space_kind(load_yaml(path))
    return None
