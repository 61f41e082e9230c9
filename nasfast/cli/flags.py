"""The flags of the commands, and the settings that a command line gives: one parser (jsonargparse), read once.

The flags of a setting are the fields of its config. Nothing here imports torch, because help must not wait for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
from jsonargparse.typing import register_type

from nasfast import __version__, extensions
from nasfast.config import ConfigError, Number, describe_type, flatten, load_yaml, merge, nearest, suggestion, to_number
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.runtime.imports import import_modules
from nasfast.runtime.launcher import environment_rank
from nasfast.settings import CONFIG_FILE, LIMITS, RunConfig, SearchConfig, TaskSettings

register_type(Number, serializer=float, deserializer=to_number)
jsonargparse.set_parsing_settings(add_print_completion_argument=True)

RECIPES = Path(__file__).parents[1] / "recipes"


def config_file(name: str) -> Path:
    """The file that `--config` names: its path, or the name of a recipe of this package."""
    path, recipes = Path(name), {recipe.stem: recipe for recipe in RECIPES.glob("*.yaml")}
    # a folder of photos may well be called photos
    if not path.is_file() and name in recipes:
        return recipes[name]
    if not path.exists() and path.suffix == "":
        raise ConfigError(f"--config {name!r} is neither a file nor a recipe; {nearest(name, list(recipes))}")
    return path


class _ConfigFile(jsonargparse.ActionConfigFile):
    """`--config`: a file, or the name of a recipe of this package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        path = config_file(values)
        names = [flag.removeprefix("--") for flag in parser._option_string_actions]
        for name in flatten(load_yaml(path)):
            if name not in names:
                raise ConfigError(
                    f"{path}: there is no setting {name!r}{_near(name, names)}; `{parser.prog} --help` lists all"
                )
        super().__call__(parser, cfg, str(path), option_string)


class _WrongFlags(Exception):
    """What a parser has against a command line."""


def _default(action: argparse.Action) -> str:
    """The default of a flag for its help, if it is a text or a number."""
    plain = isinstance(action.default, (str, int, float)) and not isinstance(action.default, bool)
    return f" Default: {action.default}" if plain and action.default != argparse.SUPPRESS else ""


class _FullHelp(argparse._HelpAction):
    """`--help_all`: all flags, of which `--help` shows a few for commands with all settings."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(jsonargparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


class Parser(jsonargparse.ArgumentParser):
    """jsonargparse's parser; its errors are for `parse`, which knows the whole command line."""

    @property
    def subcommands(self) -> dict[str, Parser]:
        """The parsers of its commands, by name."""
        action: Any = self._subcommands_action
        return {} if action is None else action.choices

    def __init__(self, **options: Any) -> None:
        super().__init__(default_env=False, allow_abbrev=False, **{"usage": "%(prog)s [FLAGS]", **options})

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Of commands with all settings, a few flags and an example."""
        command = self.prog.removeprefix("nasfast ")  # `nasi search` is another one than `search`
        if command not in STAGES:
            return super().format_help(*args, **kwargs)
        rows = [
            [flag, " ".join((action.help or "").replace("%%", "%").split()) + _default(action)]
            for flag in _FIRST
            if (action := self._option_string_actions.get(flag)) is not None
        ]
        width = max(len(flag) for flag, _ in rows) + 2
        lines = [
            textwrap.fill(text, 118, initial_indent=flag.ljust(width), subsequent_indent=" " * width)
            for flag, text in rows
        ]
        example = _EXAMPLE.format(command)
        return "\n".join(
            [f"usage: {self.prog} [FLAGS]", "", f"{self.description}. For example:", "", f"  {example}", "", *lines, ""]
        )

    def add_common(self) -> None:
        """Add the flags of every command."""
        recipes = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
        text = f"YAML file with any of the settings below, or a recipe ({recipes}); of files and flags, later ones win"
        self.add_argument("--config", action=_ConfigFile, metavar="FILE", help=text)
        text = "import this first: a module, or FILE.py, which has e.g. block kinds of your own; may be repeated"
        self.add_argument("--help_all", action=_FullHelp, help="show all flags and end")
        text = "also show scores, architectures as numbers, and what trains by name"
        self.add_argument("--verbose", action="store_true", help=text)
        self.add_argument("--import", action="append", metavar="MODULE", help=text)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise _WrongFlags(message) from ex


def _refuse(root: Parser, argv: Sequence[str], message: str) -> NoReturn:
    """Say briefly what is wrong with a command line, with the nearest flag or command, and end the process."""
    parser = root
    for word in argv:
        if word.startswith("-") or not parser.subcommands:
            break
        if word not in parser.subcommands:
            message += _near(word, parser.subcommands)
            break
        parser = parser.subcommands[word]
    for flag in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if flag not in parser._option_string_actions:
            message += _near(flag, parser._option_string_actions)
    if "--print_completion" in message:
        message += "; those of shells need shtab: pip install 'nasfast[completion]'"
    if match := re.search(r'Parser key "([\w.]+)"|argument --([\w.]+): expected one argument', message):
        message = _wrong_value(parser, argv, match[1] or match[2]) or message
    text = " ".join(message.split())
    everything = "--help_all" if "--help_all" in parser._option_string_actions else "--help"
    print(f"{parser.prog}: {text}\nall flags: {parser.prog} {everything}", file=sys.stderr)
    sys.exit(2)


def _wrong_value(parser: Parser, argv: Sequence[str], key: str) -> str | None:
    """What a flag got and what it takes, in one sentence; None where it is not on the command line."""
    text = None
    for word, after in zip(argv, [*argv[1:], "--"], strict=True):
        flag, sign, value = word.partition("=")
        if flag == f"--{key}":
            text = value if sign else "nothing" if after.startswith("--") else after
    hint = getattr(parser._option_string_actions.get(f"--{key}"), "_typehint", None)
    if text is None or hint is None:
        return None
    words = [word for option in (hint, *typing.get_args(hint)) for word in typing.get_args(option)]
    near = _near(text, [word for word in words if isinstance(word, str)])
    return f"--{key} takes {describe_type(hint)}, got {'nothing' if text == 'nothing' else repr(text)}{near}"


def _near(word: str, valid: Iterable[str]) -> str:
    close = suggestion(word, valid)
    return f"; {close}" if close else ""


def _run_flags(parser: Parser) -> None:
    parser.add_argument(
        "--seeds", type=int, default=1, help="repeat everything with this many seeds, and say whether they agree"
    )
    parser.add_argument("--dry_run", action="store_true", help="only print the stages with their time and memory")
    parser.add_class_arguments(TaskSettings)
    _supernet_flags(parser)


def _supernet_flags(parser: Parser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoints in --out")
    parser.add_class_arguments(RunConfig)


def _score_flags(parser: Parser) -> None:
    parser.add_class_arguments(RunConfig)


_SHORT = {
    "--space": "--space.name",
    "--score": "--score.name",
    "--max_macs": "--search.max_macs",
    "--max_params": "--search.max_params",
    "--max_latency_ms": "--search.max_latency_ms",
    "--latency_table": "--search.latency_table",
    "--tables": "--search.tables",
}
"""Short flags of the commands in `STAGES`."""

STAGES = ("run", "supernet", "score", "search", "retrain")
"""The commands that take a RunConfig."""

_FIRST = (
    "--out --data.train --data.val --config --space.name --space.resolution --search.max_macs --train.epochs "
    "--retrain.train.epochs --dry_run --resume --verbose --help_all"
).split()
"""The flags that `--help` of these commands shows, with an example."""

_EXAMPLE = "nasfast {} --config photos --out runs/mine --data.train images/train --search.max_macs 60M"


def _search_flags(parser: Parser) -> None:
    short = ", ".join(f"{name} for {full}" for name, full in _SHORT.items())
    text = f"classes, where a score of the space alone begins a search without a run ({short})"
    parser.add_argument("--num_classes", type=int, metavar="N", help=text)
    text = "keep the limits in config.yaml of --out beside those given here, which otherwise stand alone"
    parser.add_argument("--add_limits", action="store_true", help=text)
    parser.add_class_arguments(RunConfig)


def _retrain_flags(parser: Parser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help='retrain this architecture of the space, e.g. "1 0 2 1", and not those of the search; may be repeated',
    )
    parser.add_argument("--pareto", action="store_true", help="retrain all points of the Pareto fronts of the search")
    parser.add_class_arguments(TaskSettings)
    _supernet_flags(parser)


def _export_flags(parser: Parser) -> None:
    parser.add_argument("--out", required=True, help="run directory")
    parser.add_argument("--name", help="which retrained network: best (default), best-2, ..., random, random-2, ...")
    parser.add_argument("--arch", metavar="ARCH", help='instead of --name: the network of this architecture, "1 0 2 1"')
    parser.add_argument("--pareto", action="store_true", help="instead of --name: all retrained points of the fronts")
    text = "also write model.onnx, checked with onnxruntime; default: where the extra onnx is installed"
    parser.add_argument("--onnx", type=bool, help=text)


def _rank_flags(parser: Parser) -> None:
    parser.add_argument("--table", help="trained accuracies, at least 10: JSON or CSV (arch,accuracy)")
    parser.add_argument("--column", help="which accuracy, where the table has several per architecture")
    parser.add_argument("--out", help="run directory: ranks its indicators.json and writes rank.json for the report")
    parser.add_argument("--predictor", help="instead of --out: an indicators.json, or scores as JSON or CSV")
    parser.add_argument("--images", help="instead of --out: folder of images for untrained networks")
    parser.add_argument(
        "--score", help="ranks this score of every architecture, or a sum A+B-C; default with --images: the space's"
    )
    parser.add_argument("--sample", type=int, help="with --score or --images: only this many random architectures")
    parser.add_argument("--space", help="space without --out: a name or a YAML file; default: nas_bench_macro")
    parser.add_argument("--batch", type=int, help="with --images: images of the batch that is scored; default: 64")
    parser.add_argument("--cells", type=int, help="with --images: cells of a network of cells; default: the space's")
    parser.add_argument("--channels", type=int, help="with --images: channels of its first cell; default: the space's")
    text = "with --images, instead of --table: tables of accuracies as SPACE=FILE or SPACE=FILE:COLUMN; ranks each by "
    text += "counts, by the scores of --score (separated by commas), and by what few trainings teach"
    parser.add_argument("--benchmark", nargs="+", metavar="SPACE=FILE", help=text)
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
    parser.add_argument("--dry_run", action="store_true", help="with --train: only print how long the trainings take")
    parser.add_class_arguments(TaskSettings)


def _report_flags(parser: Parser) -> None:
    parser.usage = "%(prog)s [RUN ...] [FLAGS]"
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories; two or more are compared on one page")
    parser.add_argument("--out", help="instead of RUN: one run directory")
    text = "with several runs: the page that compares them; default: comparison.html"
    parser.add_argument("--page", metavar="FILE", help=text)


def _latency_flags(parser: Parser) -> None:
    text = "the table, as JSON; one of another space, device, runtime, dtype, threads or batch is not replaced"
    parser.add_argument("--out", metavar="FILE", default="latency.json", help=text)
    text = "latencies in ms of whole architectures on another device, JSON or CSV (arch,latency): fits a table to them"
    parser.add_argument("--measured", metavar="FILE", help=text)
    parser.add_argument("--column", help="which latency, where --measured has several per architecture")
    parser.add_class_arguments(LatencyConfig)


def _spaces_flags(parser: Parser) -> None:
    parser.add_argument("--resolution", type=int, help="height and width of the images in pixels; default: the space's")
    parser.add_argument("--num_classes", type=int, help="outputs of the classifier; default: the space's")


def _step_flags(parser: Parser) -> None:
    parser.add_argument("--out", metavar="FILE", help="also write the rows as JSON, with machine, versions and ISA")
    parser.add_class_arguments(StepTimesConfig)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "run": ("everything: train a supernet, score, search, retrain, report", _run_flags),
    "supernet": ("train the supernet", _supernet_flags),
    "score": ("score the candidates of the trained supernet into indicators.json", _score_flags),
    "search": ("best architectures under MACs and parameter limits into archs.json", _search_flags),
    "retrain": ("train the chosen architectures as plain networks", _retrain_flags),
    "export": ("files of a retrained network, ONNX included", _export_flags),
    "rank": ("rank correlation of a predictor with trained accuracies, beside trivial baselines", _rank_flags),
    "report": ("write report.html of a run directory, or one page that compares several", _report_flags),
    "latency": ("latency of every candidate on this machine, as a table for --search.max_latency_ms", _latency_flags),
    "step": (
        "times of a training step: the rows of the paper's Table 2 on this machine, beside the published figures",
        _step_flags,
    ),
    "spaces": ("the built-in search spaces, with their ranges of MACs and parameters", _spaces_flags),
    "doctor": ("versions, CPU and GPU, and which backend every operator uses and why", lambda parser: None),
}
"""Name of a command -> its line in `nasfast --help`, and the function that declares its flags."""


def parse(argv: Sequence[str]) -> tuple[str, dict[str, Any], Parser]:
    """The command that `argv` names, and its flags; imports the modules of --import.

    It ends the process after printing help, settings or completions (status 0) and where a flag is wrong (status 2).

    Returns:
        Name of the command, with its kind where it has kinds (`moments quick`); the values that files and flags give,
        by nested names; and its parser, which has the defaults.
    """
    command = argv[0] if argv else ""
    root = _parser(command)
    if command in STAGES:
        argv = long_flags(argv)
    # defaults are only for the eye: a stage that continues a run takes the saved settings in their place
    prints = any(word.startswith("--print_config") for word in argv)
    try:
        values = root.parse_args(list(argv) or ["--help"], defaults=prints).as_dict()
    except _WrongFlags as error:
        _refuse(root, argv, str(error))
    path, leaf = [], root
    while values.get("command"):
        path.append(values["command"])
        leaf, values = leaf.subcommands[path[-1]], values[path[-1]]
    if values.pop("verbose", False) and not environment_rank():
        logging.getLogger("nasfast").setLevel(logging.DEBUG)
    import_modules(values.pop("import", None) or ())
    values.pop("config", None)
    return " ".join(path), values, leaf


def is_verbose() -> bool:
    """Whether the command was given `--verbose`."""
    return logging.getLogger("nasfast").isEnabledFor(logging.DEBUG)


def long_flags(argv: Sequence[str]) -> list[str]:
    """The words of a command of `STAGES` with its short flags written out."""
    return [_SHORT.get(flag, flag) + sign + value for flag, sign, value in (word.partition("=") for word in argv)]


@functools.cache  # a tenth of a second, where one process runs several commands
def _parser(command: str) -> Parser:
    """The parser of all commands, with the flags of this one; completion needs those of all."""
    root = Parser(
        prog="nasfast",
        usage="nasfast COMMAND [FLAGS]",
        description="Neural architecture search on weight-frozen supernets.",
    )
    root.add_argument("--version", action="version", version=f"nasfast {__version__}")
    commands = root.add_subcommands(dest="command", metavar="COMMAND")
    names = {**{name: text for name, (text, _) in COMMANDS.items()}, **extensions.COMMANDS}
    for name, text in names.items():
        parser = Parser(description=text)
        commands.add_subcommand(name, parser, help=text)
        parser.prog = f"nasfast {name}"
        if name != command and not command.startswith("--print_completion"):
            continue
        if name in extensions.COMMANDS:
            extensions.load(extensions.COMMAND_FLAGS)(parser, name)
            continue
        parser.add_common()
        COMMANDS[name][1](parser)
        for short in set(_SHORT) & set(parser._option_string_actions) if name in STAGES else ():
            action = parser._option_string_actions[short]
            action.help, action.metavar = f"short for {_SHORT[short]}", "NAME"  # `parse` writes it out
    return root


def run_config(command: str, values: dict[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """The resolved settings of a stage, and the values of its other flags.

    Settings come from RunConfig, then from the run directory's config.yaml if the command continues a run, then from
    `values`. A search with limits of its own has none of config.yaml unless `add_limits` is given.
    """
    names = {field.name for field in dataclasses.fields(RunConfig)}
    options = {name: value for name, value in values.items() if name not in names}
    adds_limits = options.pop("add_limits", False)
    path = Path(values.get("out", RunConfig.out)) / CONFIG_FILE
    saved: dict[str, Any] = {}
    if (options.get("resume") or command not in ("run", "supernet")) and path.exists():
        saved = load_yaml(path)
        before, score = saved.get("score", {}), values.get("score", {}).get("name")
        if score not in (None, before.get("name")):  # what was resolved for the score of the run is not for this one
            saved["score"] = {**before, "distill": None, "structure": None}
    try:
        if command == "search" and not adds_limits and _has_limits(values.get("search", {})):
            saved["search"] = SearchConfig.from_dict(saved.get("search", {})).unlimited.to_dict()
        cfg = RunConfig.from_dict(merge(saved, {name: value for name, value in values.items() if name in names}))
    except ConfigError as error:
        raise ConfigError(f"{error} (with {path})" if saved else str(error)) from error
    return cfg.resolved(), options


def _has_limits(search: Mapping[str, Any]) -> bool:
    """Whether settings of a search, as a command line gives them, have a limit."""
    tables = search.get("tables") or ()
    return any(search.get(name) is not None for name in LIMITS) or any("<=" in str(table) for table in tables)


def take_tasks(values: dict[str, Any]) -> TaskSettings:
    """Take the flags of tasks out of `values`."""
    names = [field.name for field in dataclasses.fields(TaskSettings)]
    return TaskSettings.from_dict({name: values.pop(name) for name in names if name in values})


def with_defaults(values: dict[str, Any], parser: Parser) -> argparse.Namespace:
    """The values of flags, with the defaults of those that were left out."""
    return argparse.Namespace(**parser.get_defaults().as_dict() | values)


class FlagError(ValueError):
    """Flags contradict each other or need another one."""

    exit_status = 2
