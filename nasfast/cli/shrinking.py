"""The command `shrink`: its flags, what it refuses, and what it does."""

from __future__ import annotations

import logging
from pathlib import Path

from nasfast.cli.flags import Command, CommandLine, Parser, take_tasks
from nasfast.cli.stages import time_limit
from nasfast.config import ConfigError
from nasfast.display import text_table
from nasfast.pipeline.shrinking.run import ShrinkConfig, settings_of
from nasfast.runtime.launcher import environment_size
from nasfast.runtime.lock import check_free
from nasfast.settings import STABILITY_FILE, TaskSettings

_LOG = logging.getLogger(__name__)


def shrink_flags(parser: Parser) -> None:
    text = "go on in --out: what is finished is kept; the limits may be others"
    parser.add_argument("--resume", action="store_true", help=text)
    text = "only print what is searched, and the time and memory of each stage"
    parser.add_argument("--dry_run", action="store_true", help=text)
    text = "repeat everything with this many seeds, in folders of their own, and write means with their spread"
    parser.add_argument("--seeds", type=int, default=1, help=text)
    parser.add_class_arguments(TaskSettings)
    parser.add_class_arguments(ShrinkConfig)


def shrink(line: CommandLine) -> None:
    """A smaller network from a pretrained one, for one seed or several; or only the plan."""
    if environment_size() > 1:
        raise ConfigError(
            "nasfast shrink works in one process: run it without torchrun; --seeds N --workers M runs several at a time"
        )
    values = dict(line.values)
    tasks, seeds = take_tasks(values), values.pop("seeds", 1)
    resume, dry_run = values.pop("resume", False), values.pop("dry_run", False)
    if seeds == 1 and tasks.executor_settings is not None:
        raise ConfigError("--workers, --executor and --attempts are for the tasks of --seeds N: leave them out")
    cfg = settings_of(values, resume=resume)
    cfg.check_begins()
    check_free(cfg.out, create=not dry_run)
    if "out" not in values and not dry_run:
        _LOG.info("everything is written to %s, because --out gives no other folder", cfg.out)
    if seeds != 1:
        _shrink_seeds(cfg, seeds, tasks, resume=resume, dry_run=dry_run)
    elif dry_run:
        from nasfast.pipeline.shrinking.plan import plan_shrink  # imports torch

        print(plan_shrink(cfg, settings=tasks))
    else:
        with time_limit(tasks.max_hours):
            _shrink_once(cfg, resume=resume)


def _shrink_seeds(cfg: ShrinkConfig, seeds: int, tasks: TaskSettings, *, resume: bool, dry_run: bool) -> None:
    from nasfast.pipeline.shrinking.plan import plan_shrink  # imports torch, as below
    from nasfast.pipeline.shrinking.seeds import shared_settings, shrink_seeds
    from nasfast.report.shrinking_seeds import shrink_rows, shrink_sentences

    if dry_run:
        shared, settings = shared_settings(cfg, seeds, tasks)
        print(plan_shrink(shared, seeds, settings))
        return
    page = shrink_seeds(cfg, seeds, tasks, resume=resume)
    print("\n".join([*text_table(shrink_rows(cfg.out)), *shrink_sentences(cfg.out)]))
    print(f"report: {page}")


def _shrink_once(cfg: ShrinkConfig, *, resume: bool) -> None:
    from nasfast.pipeline.shrinking.stages import shrink_network  # imports torch

    if (Path(cfg.out) / STABILITY_FILE).exists() or (Path(cfg.out) / "seed-0").exists():
        raise FileExistsError(f"{cfg.out} has a run of --seeds: add --seeds N, or choose another --out")
    result = shrink_network(cfg, resume=resume)
    records = result.records()
    print("\n".join(text_table([list(records[0]), *([str(v) for v in row.values()] for row in records)])))
    print("\n".join([result.headline, *result.verdicts]))
    print(f"report: {result.report}")
    for file in result.files:
        print(f"written: {file}")


COMMANDS = {
    "shrink": Command("a smaller network from a pretrained one, your images and a limit", shrink_flags, shrink),
}
