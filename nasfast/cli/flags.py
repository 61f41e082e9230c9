"""The flags of the commands: each function declares those of one kind of command and reads them.

The flags of a setting are the fields of its config. Nothing here imports torch, because help must not wait for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nasfast import extensions
from nasfast.cli.parser import Parser
from nasfast.config import ConfigError, flatten, load_yaml, local, nearest
from nasfast.indicators.rank import MIN_RESAMPLES
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.runtime.imports import import_modules
from nasfast.settings import CONFIG_FILE, RunConfig, TaskSettings

_RECIPES = Path(__file__).parents[1] / "recipes"


def _recipe(name: str) -> Path:
    """The file of a --config argument, which is a path or the name of a recipe of this package."""
    recipe = _RECIPES / f"{name}.yaml"
    if not Path(name).exists() and Path(name).suffix == "":
        names = [path.stem for path in _RECIPES.glob("*.yaml")]
        if name not in names:
            raise ConfigError(f"--config {name!r} is neither a file nor a recipe; {nearest(name, names)}")
        return recipe
    return Path(name)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Write the values of `changes` into `base`, into nested mappings too."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _run_config(parser: Parser, argv: Sequence[str], *, resumable: bool) -> tuple[RunConfig, dict[str, Any]]:
    """The config of a stage command, and the values of its other flags.

    Values come from RunConfig, then from the run directory's config.yaml if the command continues a run, then from the
    --config files in their order, then from flags; later ones replace earlier ones.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--out")
    early.add_argument("--config", action="append", default=[])
    early.add_argument("--resume", action="store_true")
    early.add_argument("-h", "--help", action="store_true")
    known, _ = early.parse_known_args(argv)
    # help needs no file; the check of a file that names a score would import torch
    files = [] if known.help else [_recipe(name) for name in known.config]
    out = known.out or next((o for f in reversed(files) if (o := local(load_yaml(f)).get("out"))), RunConfig.out)
    saved = Path(out) / CONFIG_FILE
    if (known.resume or parser.command not in ("run", "supernet")) and saved.exists() and not known.help:
        files.insert(0, saved)

    recipes = ", ".join(sorted(path.stem for path in _RECIPES.glob("*.yaml")))
    text = f"YAML file with any of the settings below, or a recipe ({recipes}); may be repeated, later files win"
    parser.add_argument("--config", action="append", metavar="FILE", help=text)
    if resumable:
        parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoints in --out")
    parser.add_settings(RunConfig)
    given: dict[str, Any] = {}
    for file in files:
        _merge(given, local(load_yaml(file)))
    try:
        checked = flatten(RunConfig.from_dict(given).to_dict())
    except ConfigError as error:
        if saved in files:
            RunConfig.load(saved)  # its error says more, where this file is at fault
        raise ConfigError(f"{', '.join(map(str, files))}: {error}") from error
    parser.set_defaults({key: checked[key] for key in flatten(given)})
    parsed = parser.parse_flags(argv).as_dict()
    settings = {field.name for field in dataclasses.fields(RunConfig)}
    others = {name: parsed.pop(name) for name in list(parsed) if name not in settings}
    return RunConfig.from_dict(parsed), others


def add_task_flags(parser: Parser, *, dry_run: bool = True, optional: str = "") -> None:
    """Add the flags that say where tasks run and for how long; `task_settings` reads them.

    Args:
        parser: gets the flags.
        dry_run: whether the command can print its tasks instead.
        optional: what these flags make a task of, each in a process of its own, where the command has tasks only if
            --executor, --workers or --attempts is given.
    """
    default = TaskSettings()
    makes = f"; this flag, --workers or --attempts makes a task of {optional}" if optional else ""
    parser.add_argument(
        "--executor",
        choices=("processes", "ray"),
        help=f"where tasks run: in processes of this machine (default), or on a Ray cluster{makes}",
    )
    parser.add_argument("--ray.address", metavar="HOST:PORT", help="with --executor ray: the cluster's head")
    text = "tasks at a time on this machine; 0 (default) takes as many as cores and memory allow"
    parser.add_argument("--workers", type=int, help=text)
    text = f"how often a failing task is tried; default: {default.attempts}"
    parser.add_argument("--attempts", type=int, help=text)
    continues = "--resume" if parser.command in ("run", "retrain") else "the same command"
    parser.add_argument("--max-hours", type=float, help=f"stop cleanly after this time; {continues} continues")
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="only print the tasks with their time and memory")


def task_settings(parsed: dict[str, Any]) -> tuple[TaskSettings | None, bool]:
    """Take the flags of `add_task_flags` out of parsed ones; also returns whether it is a dry run.

    Without any of them the settings are None, because a command may then have no tasks.

    Raises:
        ConfigError: a value cannot be used.
    """
    dry_run = parsed.pop("dry_run", False)
    flags = {name: parsed.pop(name) for name in ("executor", "workers", "attempts", "max_hours")}
    flags["ray_address"] = parsed.pop("ray")["address"]
    given = {name: value for name, value in flags.items() if value is not None}
    return TaskSettings.from_dict(given) if given else None, dry_run


def take_hours(parsed: dict[str, Any]) -> float | None:
    """Take --max-hours out of parsed flags, of a command that has more than tasks: after this time it stops itself.

    Raises:
        ConfigError: it is not positive.
    """
    hours, parsed["max_hours"] = parsed["max_hours"], None
    return None if hours is None else TaskSettings.from_dict({"max_hours": hours}).max_hours


def _resumable(parser: Parser, argv: Sequence[str]) -> tuple[RunConfig, bool]:
    cfg, others = _run_config(parser, argv, resumable=True)
    return cfg, others["resume"]


def _retrain(
    parser: Parser, argv: Sequence[str]
) -> tuple[RunConfig, bool, list[str], bool, TaskSettings | None, float | None]:
    """The settings, whether to resume, which architectures are named, whether to take the Pareto fronts, where, and
    the hours after which it stops.
    """
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help='retrain this architecture of the space, e.g. "1 0 2 1", and not those of the search; may be repeated',
    )
    parser.add_argument("--pareto", action="store_true", help="retrain all points of the Pareto fronts of the search")
    add_task_flags(parser, dry_run=False, optional="each training")
    cfg, others = _run_config(parser, argv, resumable=True)
    if others["arch"] and others["pareto"]:
        parser.error("--arch and --pareto both say what to retrain: give one of them")
    hours = take_hours(others)
    return cfg, others["resume"], others["arch"] or [], others["pareto"], task_settings(others)[0], hours


def _run(parser: Parser, argv: Sequence[str]) -> tuple[RunConfig, bool, int, TaskSettings | None, bool, float | None]:
    """The settings, whether to resume, the number of seeds (1 is a plain run), how and whether to run the tasks, and
    the hours after which a plain run stops, which has more than tasks.
    """
    parser.add_argument(
        "--seeds", type=int, default=1, help="repeat everything with this many seeds, and say whether they agree"
    )
    add_task_flags(parser, optional="each retraining of a run of one seed")
    cfg, others = _run_config(parser, argv, resumable=True)
    hours = take_hours(others) if others["seeds"] == 1 else None
    settings, dry_run = task_settings(others)
    return cfg, others["resume"], others["seeds"], settings, dry_run, hours


def _stage(parser: Parser, argv: Sequence[str]) -> tuple[RunConfig]:
    return (_run_config(parser, argv, resumable=False)[0],)


_SHORT = {
    "space": "space.name",
    "score": "score.name",
    "max_macs": "search.max_macs",
    "max_params": "search.max_params",
}
"""Short flags of a search, which may be the first command."""


def _search(parser: Parser, argv: Sequence[str]) -> tuple[RunConfig, int | None]:
    """The settings, and the classes of a search without a run."""
    short = ", ".join(f"--{name} for --{full}" for name, full in _SHORT.items())
    parser.add_argument(
        "--num_classes", type=int, metavar="N", help=f"classes, where a score begins a search without a run ({short})"
    )
    parts = [text.partition("=") for text in argv]
    whole = {f"--{name}": f"--{full}" for name, full in _SHORT.items()}
    cfg, others = _run_config(parser, [whole.get(a, a) + b + c for a, b, c in parts], resumable=False)
    return cfg, others["num_classes"]


def _export(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace]:
    parser.add_argument("--out", required=True, help="run directory")
    parser.add_argument("--name", help="which retrained network: best (default), best-2, ..., random, random-2, ...")
    parser.add_argument("--arch", metavar="ARCH", help='instead of --name: the network of this architecture, "1 0 2 1"')
    parser.add_argument("--pareto", action="store_true", help="instead of --name: all retrained points of the fronts")
    parser.add_argument("--onnx", type=bool, default=True, help="also write model.onnx, checked with onnxruntime")
    args = parser.parse_flags(argv)
    if (args.name is not None) + (args.arch is not None) + args.pareto > 1:
        parser.error("--name, --arch and --pareto each say what to export: give one of them")
    return (args,)


def _rank(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, TaskSettings | None, bool]:
    parser.add_argument("--table", help="trained accuracies, at least 10: JSON or CSV (arch,accuracy)")
    parser.add_argument("--column", help="which accuracy, where the table has several per architecture")
    parser.add_argument("--out", help="run directory: ranks its indicators.json and writes rank.json for the report")
    parser.add_argument("--predictor", help="instead of --out: an indicators.json, or scores as JSON or CSV")
    parser.add_argument("--images", help="instead of --out, with --score: folder of images for untrained networks")
    parser.add_argument("--score", help="ranks this score of every architecture; A+B-C ranks a sum of ranks")
    parser.add_argument("--sample", type=int, help="with --score: only this many random architectures")
    parser.add_argument("--space", help="space without --out: a name or a YAML file; default: nas_bench_macro")
    parser.add_argument("--batch", type=int, help="with --images: images of the batch that is scored; default: 64")
    parser.add_argument("--cells", type=int, help="with --images: cells of a network of cells; default: the space's")
    parser.add_argument("--channels", type=int, help="with --images: channels of its first cell; default: the space's")
    parser.add_argument("--save", metavar="FILE", help="also write the report as JSON to this file")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples of the intervals")
    text = "seed of bootstrap and --sample, and of weights with --images; default: 0. --train takes the run's"
    parser.add_argument("--seed", type=int, help=text)
    parser.add_argument(
        "--train",
        type=int,
        metavar="N",
        help="instead of --table, with --out: trains until N architectures have an accuracy (RUN/accuracies.json), and "
        "ranks all scores, or that of --score; trainings of earlier calls count, and those that were stopped continue",
    )
    text = "with --train: epochs of each training, the same in all calls; its recipe is short and not that of retrain"
    parser.add_argument("--epochs", type=int, help=text)
    text = "with --train: half width of the interval of tau for which the number of architectures is estimated"
    parser.add_argument("--interval", type=float, help=f"{text}; default: 0.1")
    add_task_flags(parser)
    text = "--train takes the images of the run, and has a short recipe of its own, of which --epochs sets the epochs"
    parser.hints = {"retrain.": text, "data.": text}
    parsed = parser.parse_flags(argv).as_dict()
    settings, dry_run = task_settings(parsed)
    args = argparse.Namespace(**parsed)
    if (args.table is None) == (args.train is None):
        parser.error("give either --table FILE or --train N")
    if args.train is not None:
        if args.out is None or any(v is not None for v in (args.sample, args.column, args.seed)):
            parser.error("--train needs --out RUN, and takes neither --sample nor --column nor --seed")
    if args.epochs is not None and (args.train is None or args.epochs < 1):
        parser.error("--epochs needs --train, and must be at least 1")
    if args.train is None and (settings is not None or dry_run):
        parser.error("--executor, --workers, --attempts, --max-hours and --dry-run are about --train N")
    if args.interval is not None and (args.train is None or not 0 < args.interval < math.inf):
        parser.error("--interval needs --train, and must be positive and finite")
    if args.resamples < MIN_RESAMPLES:
        parser.error(f"--resamples must be at least {MIN_RESAMPLES}, got {args.resamples}; 1000 is usual")
    _check_predictor(parser, args)
    for name, default in (("space", "nas_bench_macro"), ("batch", 64), ("seed", 0), ("interval", 0.1)):
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args, settings, dry_run


def _check_predictor(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse flags of `rank` that contradict each other or need another one."""
    if sum(value is not None for value in (args.out, args.predictor, args.images)) != 1:
        parser.error("give one of --out RUN, --predictor FILE, and --images FOLDER with --score NAME")
    if args.score is None and (args.images is not None or args.sample is not None):
        parser.error("--images and --sample need --score")
    if args.score is not None and args.predictor is not None:
        parser.error("--score needs --out or --images: a file has its scores already")
    if args.images is None and any(v is not None for v in (args.cells, args.channels, args.batch)):
        parser.error("--cells, --channels and --batch need --images")
    if args.out is not None and args.space is not None:
        parser.error("--space needs --predictor or --images: --out has the space of the run")
    for name in ("sample", "cells", "channels", "batch"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")


def _report(parser: Parser, argv: Sequence[str]) -> tuple[list[Path], Path]:
    """The run directories, and the page of a comparison."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories; two or more are compared on one page")
    parser.add_argument("--out", help="instead of RUN: one run directory")
    text = "with several runs: the page that compares them; default: comparison.html"
    parser.add_argument("--page", metavar="FILE", help=text)
    args = parser.parse_flags(argv)
    runs = [Path(run) for run in [*args.runs, *([] if args.out is None else [args.out])]]
    if not runs or (args.out is not None and args.runs):
        parser.error("give one run directory (--out RUN) or the names of several to compare: nasfast report A B")
    if args.page is not None and len(runs) == 1:
        parser.error("--page is about several runs: the page of one run is report.html in its directory")
    return runs, Path(args.page or "comparison.html")


def _latency(parser: Parser, argv: Sequence[str]) -> tuple[LatencyConfig, str]:
    text = "the table, as JSON; one of another space, device, runtime, dtype, threads or batch is not replaced"
    parser.add_argument("--out", metavar="FILE", default="latency.json", help=text)
    parser.add_settings(LatencyConfig)
    settings = parser.parse_flags(argv).as_dict()
    out = settings.pop("out")
    return LatencyConfig(**settings), out


def _step(parser: Parser, argv: Sequence[str]) -> tuple[StepTimesConfig, str | None]:
    parser.add_argument("--out", metavar="FILE", help="also write the rows as JSON, with machine, versions and ISA")
    parser.add_settings(StepTimesConfig)
    settings = parser.parse_flags(argv).as_dict()
    out = settings.pop("out")
    return StepTimesConfig(**settings), out


def _no_flags(parser: Parser, argv: Sequence[str]) -> tuple[()]:
    parser.parse_flags(argv)
    return ()


_FLAGS: dict[str, Callable[[Parser, Sequence[str]], tuple[Any, ...]]] = {
    "run": _run,
    "supernet": _resumable,
    "score": _stage,
    "search": _search,
    "retrain": _retrain,
    "export": _export,
    "rank": _rank,
    "report": _report,
    "latency": _latency,
    "step": _step,
    "doctor": _no_flags,
}


def parse(command: str, description: str, argv: Sequence[str]) -> tuple[Any, ...]:
    """What the flags of a command say: the arguments of its function in `nasfast.cli.commands`.

    It ends the process after printing help (status 0) and where a flag is wrong (status 2).

    Args:
        command: `run`, `supernet`, ...
        description: first text of its help.
        argv: its flags.

    Raises:
        ConfigError: a setting cannot be used; the text says which.
        ValueError: a module of --import cannot be imported.
    """
    early = argparse.ArgumentParser(prog=f"nasfast {command}", add_help=False, allow_abbrev=False)
    early.add_argument("--import", action="append", default=[], dest="modules")
    known, rest = early.parse_known_args(argv)
    import_modules(known.modules)  # before any file is read that names what they define
    read = extensions.load(extensions.COMMAND_FLAGS) if command in extensions.COMMANDS else _FLAGS[command]
    return read(Parser(command, description), rest)
