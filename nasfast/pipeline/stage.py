"""What all stages share: their lock, and the files that they read and write. No torch."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from nasfast.config import ConfigError, load_yaml
from nasfast.indicators.table import TableError
from nasfast.pipeline.resolve import resolved
from nasfast.runtime.arguments import check_type
from nasfast.runtime.files import write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.runtime.progress import duration
from nasfast.runtime.termination import Terminated
from nasfast.runtime.tracking import tracked
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig
from nasfast.spaces import ArchSpace, ModuleSpace, SearchSpace, get_space, read_space, space_kind

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
StageFunction = TypeVar("StageFunction", bound=Callable[..., Any])


def say(stage: str, started: float, text: str) -> None:
    """The line of a stage that has ended; `started` is its beginning by `time.monotonic`."""
    _LOG.info("%-8s  %s, %s", stage, text, duration(time.monotonic() - started))


def stage(*, create: bool, threads: bool = True) -> Callable[[StageFunction], StageFunction]:
    """What every stage does first: resolve its settings, use their threads, lock the run directory on the leading rank,
    and track. All that it calls takes resolved settings.

    The exception of a signal gets the name of its stage as `stage`.

    Args:
        create: whether to create the run directory; see `run_lock`.
        threads: whether to set the threads of torch, for which it is imported.
    """

    def decorate(function: StageFunction) -> StageFunction:
        @functools.wraps(function)
        def wrapped(cfg: RunConfig, **kwargs: Any) -> Any:
            check_type("cfg", cfg, RunConfig, advice="RunConfig.load(FILE) and RunConfig.from_dict(MAPPING) make one")
            cfg = resolved(cfg)
            if threads:
                from nasfast.runtime.device import use_threads

                use_threads(cfg.threads)
            world = kwargs.get("world")
            with run_lock(cfg.run_dir, create=create) if world is None or world.leads else nullcontext():
                with tracked(cfg.track, cfg.run_dir, cfg.to_dict()):
                    try:
                        return function(cfg, **kwargs)
                    except (Terminated, KeyboardInterrupt) as stopped:
                        # `run` calls other stages, and the innermost is named
                        vars(stopped).setdefault("stage", function.__name__.removesuffix("_best"))
                        raise

        return wrapped  # type: ignore[return-value]  # functools.wraps keeps the signature

    return decorate


def save_config(cfg: RunConfig) -> None:
    """Write the settings to config.yaml; a stage does so once it has used them, because they may be new."""
    write_atomic(cfg.run_dir / CONFIG_FILE, cfg.to_yaml().encode())


def scored_with(cfg: RunConfig) -> dict[str, Any]:
    """The settings of scores, which a result keeps, because config.yaml may get others later."""
    return {"score": cfg.score.to_dict(), "recalibration_batches": cfg.recalibration_batches}


def result_of(path: Path, load: Callable[[Path], Result], command: str) -> Result:
    """What a stage wrote to a file; the error for one that is missing or damaged names the command of the stage."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `{command}` first")
    try:
        return load(path)
    except (ConfigError, TableError) as error:
        raise type(error)(f"{error}: run `{command}` again") from error


def saved_space(cfg: RunConfig) -> SearchSpace:
    """The space in the run directory."""
    path = cfg.run_dir / SPACE_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast supernet --out {cfg.out}` first")
    if _saved_kind(cfg) is ModuleSpace:
        return get_space(str(path))  # which says why it is refused
    try:
        return SearchSpace.load(path)
    except ConfigError as error:
        raise ConfigError(f"{error}: `nasfast supernet --resume --out {cfg.out}` writes it again") from error


def saved_cell_space(cfg: RunConfig) -> ArchSpace | None:
    """The space of a run directory that a search of cells wrote; None for any other run directory."""
    kind = _saved_kind(cfg)
    return None if kind is None or kind.LAYERWISE else read_space(cfg.run_dir / SPACE_FILE)


def _saved_kind(cfg: RunConfig) -> type[ArchSpace] | None:
    """The kind of the space in the run directory; None where `saved_space` says why the file cannot be read."""
    try:
        return space_kind(load_yaml(cfg.run_dir / SPACE_FILE))
    except ConfigError:
        return None
