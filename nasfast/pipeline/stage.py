"""What every stage of a run does: threads, lock, trackers, its line on the screen, and config.yaml."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from nasfast.config import portable
from nasfast.runtime.arguments import check_type
from nasfast.runtime.device import use_threads
from nasfast.runtime.distributed import SINGLE
from nasfast.runtime.files import write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.runtime.progress import duration
from nasfast.runtime.termination import Terminated
from nasfast.runtime.tracking import tracked
from nasfast.settings import CONFIG_FILE, RunConfig

_LOG = logging.getLogger(__name__)
StageFunction = TypeVar("StageFunction", bound=Callable[..., Any])


def say(stage: str, started: float, text: str) -> None:
    """The line of a stage that has ended; `started` is its beginning by `time.monotonic`."""
    _LOG.info("%-8s  %s, %s", stage, text, duration(time.monotonic() - started))


def stage(*, create: bool) -> Callable[[StageFunction], StageFunction]:
    """What every stage does first: resolve its settings, use their threads, lock the run directory on the leading rank,
    and track. All that it calls takes resolved settings.

    The exception of a signal gets the name of its stage as `stage`.

    Args:
        create: whether to create the run directory; see `run_lock`.
    """

    def decorate(function: StageFunction) -> StageFunction:
        @functools.wraps(function)
        def wrapped(cfg: RunConfig, **kwargs: Any) -> Any:
            check_type("cfg", cfg, RunConfig, advice="RunConfig.load(FILE) and RunConfig.from_dict(MAPPING) make one")
            cfg = cfg.resolved()
            use_threads(cfg.threads)
            leads = kwargs.get("world", SINGLE).leads
            with run_lock(cfg.run_dir, create=create) if leads else nullcontext():
                with tracked(cfg.track, cfg.run_dir, portable(cfg.to_dict())):
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
    score = cfg.score.to_dict()
    return portable({"score": score, "recalibration_batches": cfg.recalibration_batches})
