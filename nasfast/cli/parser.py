"""The parser of a command's flags: its errors, numbers with a suffix, and what it knows of its flags."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonargparse
import yaml

from nasfast.config import ConfigBase, ConfigError, dump_yaml, expand_suffix, flatten
from nasfast.settings import RunConfig


def _chosen(cfg: RunConfig) -> str:
    """What a run replaces null by, as YAML comments: the settings keep null, so that another method may choose."""
    given, resolved = flatten(cfg.to_dict()), flatten(cfg.resolved().to_dict())
    chosen = {key: value for key, value in resolved.items() if value != given[key]}
    if not chosen:
        return ""
    lines = ["null takes here:", *yaml.safe_dump(chosen, sort_keys=False).splitlines()]
    return "".join(f"# {line}\n" for line in lines)


class Parser(jsonargparse.ArgumentParser):
    """A command's argument parser, without abbreviations.

    Its error for an unknown flag names the nearest one, and its error for a wrong value says what is allowed, as the
    error for a config file does.
    """

    def __init__(self, command: str, description: str) -> None:
        # `nasfast.cli.flags.parse` takes this flag before a command's own are read
        every = "With every command: --import MODULE or --import FILE.py imports that first, e.g. your own block kinds."
        super().__init__(
            prog=f"nasfast {command}", description=description, epilog=every, default_env=False, allow_abbrev=False
        )
        self.command = command
        self.settings: type[ConfigBase] | None = None
        self.hints: dict[str, str] = {}  # by how an unknown flag begins
        text = "print all settings as YAML, which --config reads where a command has it, and end"
        self.add_argument("--print_config", action="store_true", help=text)

    def add_settings(self, kind: type[ConfigBase]) -> None:
        """Add a flag for each field of a config."""
        self.add_class_arguments(kind)
        self.settings = kind

    def parse_flags(self, argv: Sequence[str]) -> Any:
        """Parse flags; numbers of settings may have K, M or G behind them."""
        expanded: list[str] = []
        before = ""
        for text in argv:
            flag, equals, value = text.partition("=")
            if equals and self._takes_number(flag):
                text = flag + equals + expand_suffix(value)
            elif self._takes_number(before):
                text = expand_suffix(text)
            expanded.append(text)
            before = text
        # jsonargparse would take this flag for one of its own
        prints = "--print_config" in expanded
        parsed = self.parse_args([text for text in expanded if text != "--print_config"])
        parsed.pop("print_config")
        if prints:
            print(self._as_yaml(parsed.as_dict()), end="")
            sys.exit(0)
        return parsed

    def _as_yaml(self, given: dict[str, Any]) -> str:
        """The settings, checked, or for a command without settings its flags."""
        if self.settings is None:
            return dump_yaml(given)
        names = {field.name for field in dataclasses.fields(self.settings)}
        settings = self.settings.from_dict({name: value for name, value in given.items() if name in names})
        if not isinstance(settings, RunConfig):
            return settings.to_yaml()
        head, _, rest = settings.to_yaml().partition("\n")
        return f"{head}\n{_chosen(settings)}{rest}"

    def _takes_number(self, flag: str) -> bool:
        try:
            hint = None if self.settings is None else self.settings.annotation(flag.removeprefix("--"))
        except (KeyError, TypeError):
            return False
        return hint is float or float in typing.get_args(hint)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        wrong = re.search(r'Parser key "([\w.]+)":.* value: ([^\n]*)$', message, re.DOTALL)
        if wrong and self.settings is not None:
            try:
                self.settings.check_value(wrong[1], yaml.safe_load(wrong[2]))
            except ConfigError as error:
                message = str(error)
            except yaml.YAMLError:
                pass
        dump = re.search(r"Parser key \"([\w.]+)\":\s+Expected an? <class '(\w+)'>\. Got value: ([^\n]*)", message)
        if dump:
            expected = "true or false" if dump[2] == "bool" else dump[2]
            message = f"--{dump[1]}: expected {expected}, got {dump[3]!r}"
        group = re.search(r"Parser key \"([\w.]+)\":\s*Unable to load config", message)
        if group:
            message = f"--{group[1]} is a group of settings: give one of them, --{group[1]}.NAME"
        match = re.search(r"unrecognized arguments: --([\w.]+)", message, re.IGNORECASE)
        if match:
            flags = [s[2:] for action in self._actions for s in action.option_strings if s.startswith("--")]
            close = difflib.get_close_matches(match[1], flags, n=1, cutoff=0.5)
            hints = [hint for start, hint in self.hints.items() if match[1].startswith(start)]
            message += f"; {hints[0]}" if hints else f"; did you mean --{close[0]}?" if close else ""
        print(f"{self.prog}: {message}\nall flags: {self.prog} --help", file=sys.stderr)
        sys.exit(2)
