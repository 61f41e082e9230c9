"""Settings that a run refuses before it trains or replaces a file. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from nasfast.config import ConfigError, difference
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.registry import check_score, gives_table, score_of
from nasfast.indicators.table import TABLE_FILE, IndicatorTable, TableError
from nasfast.pipeline.resolve import resolved
from nasfast.runtime.files import CheckpointError
from nasfast.search.limits import read_limits
from nasfast.settings import CONFIG_FILE, RunConfig, TaskSettings
from nasfast.spaces import SearchSpace, read_cost_table

if TYPE_CHECKING:
    from nasfast.supernet import Supernet

MACHINE_DATA = ("workers", "max_bad_files", "prefetch", "cache_dir")
"""Settings of `data` on which no result depends."""

_LATER = ("out", "device", "threads", "score", "search", "retrain", "recalibration_batches", "track")
_OF_SUPERNET = ("method", "supernet", "train")
"""Settings on which the files of a search without a supernet do not depend."""

_LATER_DATA = ("train", "val", "loader", *MACHINE_DATA)
"""Settings, and settings of `data`, that may change when a run resumes: they belong to later stages or the machine."""


def without_supernet(cfg: RunConfig) -> bool:
    """Whether a search with these settings needs no supernet: the score knows the space alone, and none was trained."""
    scoring = cfg.score
    if scoring.table is not None or any((cfg.run_dir / "checkpoints").glob("supernet-*")):
        return False
    with contextlib.suppress(FileNotFoundError, TableError):
        meta = IndicatorTable.load(cfg.run_dir / TABLE_FILE).meta
        if meta.get("score") == scoring.label:
            return "step" not in meta  # that of the checkpoint; nothing is imported to know it
    return score_of(scoring).untrained


def nothing_is_trained(cfg: RunConfig) -> bool:
    """Whether no training of the run directory has begun."""
    return not any((cfg.run_dir / name).exists() for name in ("checkpoints", "retrain"))


def check_settings(cfg: RunConfig, *, supernet: bool = True) -> None:
    """Refuse other settings than those in config.yaml of the run directory, before replacing any file.

    Settings of later stages and of the machine may differ. Of a run without a supernet, so may its training and method,
    and the images are those of the first network that was trained.
    """
    path = cfg.run_dir / CONFIG_FILE
    if not path.exists():
        return
    saved, given = resolved(RunConfig.load(path).replace(out=cfg.out)).to_dict(), cfg.to_dict()
    later = _LATER if supernet else (*_LATER, *_OF_SUPERNET)
    if not supernet and nothing_is_trained(cfg):
        later = (*later, "data")
    for form in (saved, given):
        for mapping, keys in ((form["data"], _LATER_DATA), (form, later)):
            for key in keys:
                mapping.pop(key)
    if saved != given:
        raise CheckpointError(
            f"{path} has other settings: {difference(saved, given)}; keep those of the run, or choose another --out"
        )


def check_one_process(tasks: TaskSettings | None, processes: int) -> None:
    """Refuse tasks in several processes, each of which would start all of them."""
    if tasks is not None and processes > 1:
        raise ConfigError(
            "tasks (--seeds, --executor, --workers and the like) train each network in one process, and there are "
            f"{processes} ranks, which would each start all tasks: leave tasks out, or run one process, without "
            "torchrun"
        )


def already_begun(cfg: RunConfig, what: str, check: Callable[[RunConfig], None]) -> FileExistsError:
    """The error for a run directory that has `what` already; `check` raises what `--resume` would refuse."""
    head = f"{cfg.run_dir} has {what} already"
    try:
        check(cfg)
    except CheckpointError as error:
        return FileExistsError(
            f"{head}: choose another --out, or add --resume, which takes the settings of the run, and leave out flags "
            f"that give others. {error}"
        )
    return FileExistsError(f"{head}: add --resume, or choose another --out")


def check_scoring(cfg: RunConfig, net: Supernet) -> None:
    """Refuse a score that the supernet cannot have, before hours of training."""
    score = score_of(cfg.score)
    check_score(score, net)
    if score.held_out and not cfg.holds_out:
        raise ConfigError(
            f"score {score.name!r} needs images that the supernet is not trained on: set supernet.hold_out=true"
        )


def check_search(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse settings that the search would refuse, and a bad table of scores, before hours of training."""
    score = cfg.score
    if score.table is not None:
        read_cost_table(score.table, space)
    if not gives_table(score) and cfg.search.method == "exact":
        raise ConfigError(
            f"search.method='exact' needs additive scores, and {score.name!r} scores whole paths: set "
            "search.method='evolution', or score.distill=true"
        )
    if cfg.search.refine is not None:
        if not gives_table(score):
            raise ConfigError(
                f"search.refine refines a table, and {score.name!r} scores whole paths: set score.distill=true, or "
                "search.refine=null"
            )
        read_accuracies(cfg.search.refine, space)
    read_limits(cfg.search, space).check(space)
