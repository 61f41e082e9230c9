"""Carries out a command: first what it refuses, for which nobody should wait for torch, then the command itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nasfast import extensions
from nasfast.cli.flags import STAGES, FlagError, Parser, run_config, take_tasks, with_defaults
from nasfast.indicators.rank import MIN_RESAMPLES
from nasfast.indicators.registry import check_score_name
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.pipeline.run import check_one_process
from nasfast.runtime.launcher import environment_rank, environment_size
from nasfast.runtime.lock import run_lock
from nasfast.search.limits import check_range
from nasfast.settings import SPACE_FILE, RunConfig, TaskSettings
from nasfast.spaces import get_space, named_space


def execute(command: str, given: dict[str, Any], parser: Parser) -> None:
    """Carry out one command with what `nasfast.cli.flags.parse` gave; the caller shows its errors."""
    if command in STAGES:
        tasks, seeds = take_tasks(given), given.get("seeds", 1)
        check_one_process(tasks.executor_settings if seeds == 1 else tasks, environment_size())
        cfg, others = run_config(command, given)
        _check_run(command, cfg, others)
        _function(command)(cfg, tasks, **others)
    elif command in extensions.COMMANDS or " " in command:
        extensions.load(extensions.COMMAND_RUN)(command, given)
    else:
        _check_other(command, given, parser)
        _function(command)(given, parser)


def _function(command: str) -> Callable[..., None]:
    """What carries out a command; only the two of `searching` need no torch."""
    searching = command in ("search", "spaces")
    functions = extensions.load("nasfast.cli.searching" if searching else "nasfast.cli.commands")
    return functions.COMMANDS[command]


def _check_run(command: str, cfg: RunConfig, others: dict[str, Any]) -> None:
    """Refuse what needs no images: names, limits that choose nothing, missing folders, a directory in use."""
    if cfg.score.table is None:
        check_score_name(str(cfg.score.name))
    begins, saved = command in ("run", "supernet"), (cfg.run_dir / SPACE_FILE).exists()
    if begins:
        cfg.data.check_paths()
    if begins or (command == "search" and not saved):
        classes = cfg.data.classes if begins else others.get("num_classes")
        space = get_space(
            cfg.space.name, num_classes=classes, resolution=cfg.space.resolution, variant=cfg.space.variant
        )
        check_range(cfg.search, space)
    if not environment_rank():
        with run_lock(cfg.run_dir, create=(begins and not others.get("dry_run")) or command == "search"):
            pass


def _check_other(command: str, given: dict[str, Any], parser: Parser) -> None:
    """Refuse flags that contradict each other, unknown spaces and missing run directories."""
    if command == "rank":
        args = with_defaults(given, parser)
        if args.images is not None and args.score is None:
            args.score = "that of the space"
        if not args.benchmark:
            _check_rank(args, take_tasks(dict(given)))
    elif command == "latency":
        others = "out", "measured", "column"
        LatencyConfig.from_dict({name: value for name, value in given.items() if name not in others})
    elif command == "step":
        StepTimesConfig.from_dict({name: value for name, value in given.items() if name != "out"})
    if command in ("rank", "latency") and (name := given.get("space")) is not None:
        named_space(name)
    for folder in [*(given.get("runs") or ()), *([given["out"]] if given.get("out") else [])]:
        if command in ("export", "report", "rank") and not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is no directory: give the directory of a run (--out)")


def _check_rank(args: argparse.Namespace, tasks: TaskSettings) -> None:
    """Refuse flags of `rank` that contradict each other or need another one."""

    def given(*names: str) -> bool:
        return any(getattr(args, name) is not None for name in names)

    trains, above_zero = given("train"), ("sample", "cells", "channels", "batch", "epochs")
    for wrong, text in (
        (given("table") == trains, "give either --table FILE or --train N"),
        (
            trains and (not given("out") or given("sample", "column", "seed")),
            "--train needs --out RUN, and takes neither --sample nor --column nor --seed",
        ),
        (given("epochs", "interval") and not trains, "--epochs and --interval need --train"),
        (
            not trains and (tasks != TaskSettings() or args.dry_run),
            "--executor, --workers, --attempts, --max_hours and --dry_run are about --train N",
        ),
        (
            given("interval") and not 0 < (args.interval or 0) < math.inf,
            f"--interval must be positive and finite, got {args.interval}",
        ),
        (
            args.resamples < MIN_RESAMPLES,
            f"--resamples must be at least {MIN_RESAMPLES}, got {args.resamples}; 1000 is usual",
        ),
        (
            given("out") + given("predictor") + given("images") != 1,
            "give one of --out RUN, --predictor FILE, and --images FOLDER with --score NAME",
        ),
        (not given("score") and given("images", "sample"), "--images and --sample need --score"),
        (
            given("score") and given("predictor"),
            "--score needs --out or --images: a file has its scores already",
        ),
        (not given("images") and given("cells", "channels", "batch"), "--cells, --channels and --batch need --images"),
        (
            given("out") and given("space"),
            "--space needs --predictor or --images: --out has the space of the run",
        ),
        *(
            (given(name) and getattr(args, name) < 1, f"--{name} must be at least 1, got {getattr(args, name)}")
            for name in above_zero
        ),
    ):
        if wrong:
            raise FlagError(text)
