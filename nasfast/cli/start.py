"""Carries out a command: first what it refuses, for which nobody should wait for torch, then the command itself."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nasfast import extensions
from nasfast.cli.flags import STAGES, FlagError, Parser, run_config, take_tasks, with_defaults
from nasfast.cli.limits import limits_line, refuse_limits
from nasfast.indicators.rank import MIN_RESAMPLES
from nasfast.indicators.registry import check_score_name
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.pipeline.run import check_one_process
from nasfast.runtime.launcher import environment_rank, environment_size
from nasfast.runtime.lock import check_free
from nasfast.search.limits import Limits
from nasfast.settings import SPACE_FILE, RunConfig, TaskSettings
from nasfast.spaces import get_space, named_space

_LOG = logging.getLogger(__name__)


def execute(command: str, values: dict[str, Any], parser: Parser, argv: Sequence[str]) -> None:
    """Carry out one command with what `nasfast.cli.flags.parse` gave for `argv`; the caller shows its errors."""
    if command in STAGES:
        tasks, seeds = take_tasks(values), values.get("seeds", 1)
        check_one_process(tasks.executor_settings if seeds == 1 else tasks, environment_size())
        cfg, options = run_config(command, values)
        refuse_limits(cfg, argv)
        _check_run(command, cfg, options)
        if command in ("run", "search"):
            _LOG.info("%s", limits_line(cfg, argv))
        if command in ("run", "supernet", "search") and "out" not in values and not options.get("dry_run"):
            _LOG.info("everything is written to %s, because --out gives no other folder", cfg.out)
        _load(command)(cfg, tasks, **options)
    elif command in extensions.COMMANDS or " " in command:
        extensions.load(extensions.COMMAND_RUN)(command, values)
    else:
        _check_flags(command, values, parser)
        _load(command)(values, parser)


def _load(command: str) -> Callable[..., None]:
    """What carries out a command; the two of `searching` need no torch, and `rank` needs scipy.stats."""
    module = {"search": "searching", "spaces": "searching", "rank": "ranking"}.get(command, "commands")
    return extensions.load(f"nasfast.cli.{module}").COMMANDS[command]


def _check_run(command: str, cfg: RunConfig, options: dict[str, Any]) -> None:
    """Refuse what needs no images: names, limits that choose nothing, missing folders, a directory in use."""
    if cfg.score.table is None:
        check_score_name(str(cfg.score.name))
    begins, has_space = command in ("run", "supernet"), (cfg.run_dir / SPACE_FILE).exists()
    if begins:
        cfg.data.check_paths()
    if begins or (command == "search" and not has_space):
        classes = cfg.data.classes if begins else options.get("num_classes")
        space = get_space(
            cfg.space.name, num_classes=classes, resolution=cfg.space.resolution, variant=cfg.space.variant
        )
        limits = Limits(cfg.search.max_macs, cfg.search.max_params, allow_identity=cfg.search.allow_identity)
        limits.check(space)
    if not environment_rank():
        check_free(cfg.run_dir, create=(begins and not options.get("dry_run")) or command == "search")


def _check_flags(command: str, values: dict[str, Any], parser: Parser) -> None:
    """Refuse flags that contradict each other, unknown spaces and missing run directories."""
    if command == "rank":
        _check_rank(with_defaults(values, parser), take_tasks(dict(values)))
    elif command == "latency":
        files = "out", "measured", "column"
        LatencyConfig.from_dict({name: value for name, value in values.items() if name not in files})
    elif command == "step":
        StepTimesConfig.from_dict({name: value for name, value in values.items() if name != "out"})
    if command in ("rank", "latency") and (name := values.get("space")) is not None:
        named_space(name)
    for folder in [*(values.get("runs") or ()), *([values["out"]] if values.get("out") else [])]:
        if command in ("export", "report", "rank") and not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is no directory: give the directory of a run (--out)")


def _check_rank(args: argparse.Namespace, tasks: TaskSettings) -> None:
    """Refuse flags of `rank` that contradict each other or need another one."""

    def has(*names: str) -> bool:
        return any(getattr(args, name) is not None for name in names)

    trains = has("train")
    if args.benchmark:
        names = ("table", "out", "predictor", "train", "space", "column", "epochs", "interval")
        if wrong := [f"--{name}" for name in names if has(name)]:
            raise FlagError(f"--benchmark takes no {' or '.join(wrong)}: SPACE=FILE:COLUMN names all tables")
        if not has("images"):
            raise FlagError("--benchmark needs --images, a folder of images for untrained networks")
    elif has("table") == trains:
        raise FlagError("give either --table FILE or --train N")
    if trains and (not has("out") or has("sample", "column", "seed")):
        raise FlagError("--train needs --out RUN, and takes neither --sample nor --column nor --seed")
    if has("epochs", "interval") and not trains:
        raise FlagError("--epochs and --interval need --train")
    if not trains and (tasks != TaskSettings() or args.dry_run):
        raise FlagError("--executor, --workers, --attempts, --max_hours and --dry_run are about --train N")
    if has("interval") and not 0 < args.interval < math.inf:
        raise FlagError(f"--interval must be positive and finite, got {args.interval}")
    if args.resamples < MIN_RESAMPLES:
        raise FlagError(f"--resamples must be at least {MIN_RESAMPLES}, got {args.resamples}; 1000 is usual")
    if has("out") + has("predictor") + has("images") != 1:
        raise FlagError("give one of --out RUN, --predictor FILE, and --images FOLDER")
    if has("sample") and not has("score", "images"):
        raise FlagError("--sample needs --score or --images")
    if has("score") and has("predictor"):
        raise FlagError("--score needs --out or --images: a file has its scores already")
    if has("cells", "channels", "batch") and not has("images"):
        raise FlagError("--cells, --channels and --batch need --images")
    if has("out") and has("space"):
        raise FlagError("--space needs --predictor or --images: --out has the space of the run")
    for name in ("sample", "cells", "channels", "batch", "epochs"):
        if has(name) and getattr(args, name) < 1:
            raise FlagError(f"--{name} must be at least 1, got {getattr(args, name)}")
