"""The parser (jsonargparse) of a command line, and the settings that this gives.

The flags of a setting are the fields of its config. Nothing here imports torch, because help must not wait for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jsonargparse
from jsonargparse.typing import register_type

from nasfast.config import ConfigError, Number, describe_type, flatten, load_yaml, merge, nearest, suggestion, to_number
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


class WrongFlags(Exception):
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

    has_all_settings = False  # those of a run, of which --help shows a few

    @property
    def subcommands(self) -> dict[str, Parser]:
        """The parsers of its commands, by name."""
        action: Any = self._subcommands_action
        return {} if action is None else action.choices

    def __init__(self, **options: Any) -> None:
        super().__init__(default_env=False, allow_abbrev=False, **{"usage": "%(prog)s [FLAGS]", **options})

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Of commands with all settings, a few flags and an example."""
        if not self.has_all_settings:
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
        example = _EXAMPLE.format(self.prog)
        return "\n".join(
            [f"usage: {self.prog} [FLAGS]", "", f"{self.description}. For example:", "", f"  {example}", "", *lines, ""]
        )

    def add_common(self) -> None:
        """Add the flags of every command."""
        recipes = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
        text = f"YAML file with any of the settings below, or a recipe ({recipes}); of files and flags, later ones win"
        self.add_argument("--config", action=_ConfigFile, metavar="FILE", help=text)
        self.add_argument("--help_all", action=_FullHelp, help="show all flags and end")
        text = "also show scores, architectures as numbers, and what trains by name"
        self.add_argument("--verbose", action="store_true", help=text)
        text = "import this first: a module, or FILE.py, which has e.g. block kinds of your own; may be repeated"
        self.add_argument("--import", action="append", metavar="MODULE", help=text)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise WrongFlags(message) from ex


def refuse(root: Parser, argv: Sequence[str], message: str) -> NoReturn:
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


SHORT = {
    "--space": "--space.name",
    "--score": "--score.name",
    "--max_macs": "--search.max_macs",
    "--max_params": "--search.max_params",
    "--max_latency_ms": "--search.max_latency_ms",
    "--latency_table": "--search.latency_table",
    "--tables": "--search.tables",
}
"""Short flags of the commands of a run."""

_FIRST = (
    "--out --data.train --data.val --config --space.name --space.resolution --search.max_macs --train.epochs "
    "--retrain.train.epochs --dry_run --resume --verbose --help_all"
).split()
"""The flags that `--help` of these commands shows, with an example."""

_EXAMPLE = "{} --config photos --out runs/mine --data.train images/train --search.max_macs 60M"


def is_verbose() -> bool:
    """Whether the command was given `--verbose`."""
    return logging.getLogger("nasfast").isEnabledFor(logging.DEBUG)


def long_flags(argv: Sequence[str]) -> list[str]:
    """The words of a command of a run with its short flags written out."""
    return [SHORT.get(flag, flag) + sign + value for flag, sign, value in (word.partition("=") for word in argv)]


class CommandLine(NamedTuple):
    """What a command line says.

    Attributes:
        command: the name of the command, with its kind where it has kinds (`moments quick`).
        values: what files and flags give, by nested names.
        parser: that of the command, which has the defaults.
        argv: the words, with short flags written out.
    """

    command: str
    values: dict[str, Any]
    parser: Parser
    argv: Sequence[str]


@dataclass(frozen=True)
class Command:
    """A command: its line in `nasfast --help`, what declares its flags, and what refuses and carries it out."""

    text: str
    flags: Callable[[Parser], None]
    call: Callable[[CommandLine], None]


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


def check_run_dirs(*folders: str | None) -> None:
    """Refuse what is no directory; None is left out."""
    for folder in folders:
        if folder and not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is no directory: give the directory of a run (--out)")


class FlagError(ValueError):
    """Flags contradict each other or need another one."""

    exit_status = 2
