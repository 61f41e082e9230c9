"""The commands of a run: `run`, `supernet`, `score`, `search` and `retrain`.

Of each its flags, what it refuses, and what it does. Help must wait neither for torch nor for numpy, and what a command
refuses not for torch, so functions import what needs them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nasfast.cli.flags import SHORT, Command, CommandLine, FlagError, Parser, run_config, take_tasks
from nasfast.cli.limits import limits_line, refuse_limits
from nasfast.config import ConfigError
from nasfast.indicators.registry import check_score_name
from nasfast.indicators.table import TABLE_FILE
from nasfast.runtime.launcher import environment_rank, environment_size
from nasfast.runtime.lock import check_free
from nasfast.runtime.termination import Terminated, stopped_at
from nasfast.settings import SPACE_FILE, STABILITY_FILE, RunConfig, TaskSettings

if TYPE_CHECKING:
    from nasfast.pipeline.run import Run

_LOG = logging.getLogger(__name__)

# what several of them do


def read_settings(line: CommandLine) -> tuple[RunConfig, TaskSettings, dict[str, Any]]:
    """The settings of a run and of its tasks, and the values of the other flags."""
    from nasfast.pipeline.run import check_one_process

    tasks, seeds = take_tasks(line.values), line.values.get("seeds", 1)
    check_one_process(tasks.executor_settings if seeds == 1 else tasks, environment_size())
    cfg, options = run_config(line.command, line.values)
    if cfg.score.table is None:
        check_score_name(str(cfg.score.name))
    return cfg, tasks, options


def say_where(cfg: RunConfig, line: CommandLine) -> None:
    """Say where everything is written, where no flag says it."""
    if "out" not in line.values and not line.values.get("dry_run"):
        _LOG.info("everything is written to %s, because --out gives no other folder", cfg.out)


def check_limits(cfg: RunConfig, classes: int | None) -> None:
    """Refuse limits that no architecture meets in the space of the settings with so many classes, None for its own."""
    from nasfast.search.limits import Limits

    limits = Limits(cfg.search.max_macs, cfg.search.max_params, allow_identity=cfg.search.allow_identity)
    limits.check(cfg.space.get(classes))


def check_begins(cfg: RunConfig, *, create: bool = True) -> None:
    """Refuse what a run cannot begin with: missing folders, limits that cannot be met, a directory in use."""
    cfg.data.check_paths()
    check_limits(cfg, cfg.data.classes)
    check_directory(cfg, create=create)


def check_directory(cfg: RunConfig, *, create: bool = False) -> None:
    """Refuse a directory in use, in the process that locks it."""
    if not environment_rank():
        check_free(cfg.run_dir, create=create)


@contextlib.contextmanager
def time_limit(hours: float | None) -> Iterator[None]:
    """Stop what runs within the block after this time, as SIGTERM does."""
    if hours is not None and environment_size() > 1:
        raise ConfigError(
            "--max_hours stops one process, and torchrun would start its ranks again: leave it out, and stop torchrun "
            "by SIGTERM"
        )
    deadline = None if hours is None else time.monotonic() + 3600 * hours
    try:
        with stopped_at(deadline):
            yield
    except Terminated as stopped:
        if deadline is not None and time.monotonic() >= deadline:
            # the reason may also name an error
            stopped.reason = stopped.reason.replace(Terminated().reason, f"--max_hours {hours:g} is over")
        raise


@contextlib.contextmanager
def _open_run(cfg: RunConfig, tasks: TaskSettings, *, begins: bool) -> Iterator[Run]:
    """The run of a command, in each of the processes that torchrun started, until the time of the command is over."""
    from nasfast.pipeline.run import Run
    from nasfast.runtime.distributed import start  # imports torch

    with time_limit(tasks.max_hours), start(cfg.torch_device) as world:
        with Run.open(cfg, begins=begins, world=world, tasks=tasks.executor_settings) as run:
            yield run


# the commands


def run_flags(parser: Parser) -> None:
    parser.add_argument(
        "--seeds", type=int, default=1, help="repeat everything with this many seeds, and say whether they agree"
    )
    parser.add_argument("--dry_run", action="store_true", help="only print the stages with their time and memory")
    parser.add_class_arguments(TaskSettings)
    supernet_flags(parser)


def run(line: CommandLine) -> None:
    """Every stage, for one seed or several; or only the plan."""
    cfg, tasks, options = read_settings(line)
    seeds, dry_run, resume = options.get("seeds", 1), options.get("dry_run", False), options.get("resume", False)
    check_begins(cfg, create=not dry_run)
    _LOG.info("%s", limits_line(cfg, line.argv))
    say_where(cfg, line)
    if seeds != 1:
        _run_seeds(cfg, seeds, tasks, resume=resume, dry_run=dry_run)
        return
    if dry_run:
        if environment_size() > 1:
            raise ConfigError("--dry_run times the steps of one process: run it without torchrun")
        from nasfast.pipeline.estimate import plan_run  # imports torch

        print(plan_run(cfg, tasks.executor_settings, max_hours=tasks.max_hours))
        return
    from nasfast.cli.output import show_retrained
    from nasfast.pipeline.estimate import warn_of_memory  # imports torch
    from nasfast.pipeline.stages import every_stage

    if not resume and environment_size() == 1:
        warn_of_memory(cfg, tasks.executor_settings)
    with _open_run(cfg, tasks, begins=True) as run:
        if run.world.is_main and ((run.dir / STABILITY_FILE).exists() or (run.dir / "seed-0").exists()):
            raise FileExistsError(f"{run.dir} has a run of --seeds: add --seeds N, or choose another --out")
        result = every_stage(run, resume=resume)
        if run.world.is_main:
            show_retrained(cfg.out, result.retrained)
            print(f"report: {result.report}")


def _run_seeds(cfg: RunConfig, seeds: int, tasks: TaskSettings, *, resume: bool, dry_run: bool) -> None:
    from nasfast.pipeline.seeds import plan_seeds, run_seeds  # imports matplotlib, as below
    from nasfast.report.seeds import sentences

    if dry_run:
        print(plan_seeds(cfg, seeds, tasks))
        return
    page = run_seeds(cfg, seeds, tasks, resume=resume)
    print("\n".join(sentences(cfg.run_dir)))
    print(f"report: {page}")


def supernet_flags(parser: Parser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoints in --out")
    parser.add_class_arguments(RunConfig)


def supernet(line: CommandLine) -> None:
    """Train the supernet."""
    cfg, tasks, options = read_settings(line)
    check_begins(cfg)
    say_where(cfg, line)
    from nasfast.pipeline import stages  # imports torch

    with _open_run(cfg, tasks, begins=True) as run:
        final = stages.supernet(run, resume=options.get("resume", False))
        if run.world.is_main:
            print(f"checkpoint: {final}")


def score_flags(parser: Parser) -> None:
    parser.add_class_arguments(RunConfig)


def score(line: CommandLine) -> None:
    """Score the candidates."""
    cfg, _, _ = read_settings(line)
    check_directory(cfg)
    from nasfast.pipeline import stages  # imports torch
    from nasfast.pipeline.run import Run

    with Run.open(cfg) as run:
        if stages.score(run) is not None:
            print(f"written: {run.dir / TABLE_FILE}")


def search_flags(parser: Parser) -> None:
    short = ", ".join(f"{name} for {full}" for name, full in SHORT.items())
    text = f"classes, where a score of the space alone begins a search without a run ({short})"
    parser.add_argument("--num_classes", type=int, metavar="N", help=text)
    text = "keep the limits in config.yaml of --out beside those given here, which otherwise stand alone"
    parser.add_argument("--add_limits", action="store_true", help=text)
    parser.add_class_arguments(RunConfig)


def search(line: CommandLine) -> None:
    """Search, first computing the table of a score that needs no training; a saved table needs no torch."""
    cfg, _, options = read_settings(line)
    num_classes = options.get("num_classes")
    if not (cfg.run_dir / SPACE_FILE).exists():
        check_limits(cfg, num_classes)
    check_directory(cfg, create=True)
    _LOG.info("%s", limits_line(cfg, line.argv))
    say_where(cfg, line)
    from nasfast.cli.output import show_candidates
    from nasfast.pipeline import searching
    from nasfast.pipeline.run import Run

    begins = Run.look(cfg).needs_no_supernet
    if num_classes is not None and not begins:
        raise ConfigError(
            f"--num_classes is for a search without a run, and {cfg.run_dir} has one, or the score needs one"
        )
    with Run.open(cfg, begins=begins, threads=False) as run:
        if begins:
            searching.score_untrained(run, num_classes=num_classes)
        show_candidates(cfg.out, searching.search(run))


def retrain_flags(parser: Parser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help='retrain this architecture of the space, e.g. "1 0 2 1", and not those of the search; may be repeated',
    )
    parser.add_argument("--pareto", action="store_true", help="retrain all points of the Pareto fronts of the search")
    parser.add_class_arguments(TaskSettings)
    supernet_flags(parser)


def retrain(line: CommandLine) -> None:
    """Train the chosen architectures as plain networks."""
    cfg, tasks, options = read_settings(line)
    refuse_limits(cfg, line.argv)
    check_directory(cfg)
    archs, pareto = options.get("arch", ()), options.get("pareto", False)
    if archs and pareto:
        raise FlagError("--arch and --pareto both say what to retrain: give one of them")
    from nasfast.cli.output import show_retrained
    from nasfast.pipeline.networks import retrain_best  # imports torch

    with _open_run(cfg, tasks, begins=False) as run:
        results = retrain_best(run, archs=archs, pareto=pareto, resume=options.get("resume", False))
        if run.world.is_main:
            show_retrained(cfg.out, results)


COMMANDS = {
    "run": Command("everything: train a supernet, score, search, retrain, report", run_flags, run),
    "supernet": Command("train the supernet", supernet_flags, supernet),
    "score": Command("score the candidates of the trained supernet into indicators.json", score_flags, score),
    "search": Command("best architectures under MACs and parameter limits into archs.json", search_flags, search),
    "retrain": Command("train the chosen architectures as plain networks", retrain_flags, retrain),
}
