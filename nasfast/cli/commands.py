"""The list of commands, and what a command line says."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from nasfast import __version__, extensions
from nasfast.cli import machine, results, shrinking, stages
from nasfast.cli.flags import SHORT, Command, CommandLine, Parser, WrongFlags, long_flags, refuse
from nasfast.runtime.imports import import_modules
from nasfast.runtime.launcher import environment_rank

COMMANDS: dict[str, Command] = {**stages.COMMANDS, **shrinking.COMMANDS, **results.COMMANDS, **machine.COMMANDS}
"""The commands of the core, by name."""


def execute(line: CommandLine) -> None:
    """Carry out a command; the caller shows its errors."""
    if line.command in COMMANDS:
        COMMANDS[line.command].call(line)
    else:
        extensions.load(extensions.COMMAND_RUN)(line.command, line.values)


def parse(argv: Sequence[str]) -> CommandLine:
    """The command that `argv` names, and its flags; imports the modules of --import.

    It ends the process after printing help, settings or completions (status 0) and where a flag is wrong (status 2).
    """
    command = argv[0] if argv else ""
    root = _parser(command)
    if command in stages.COMMANDS:
        argv = long_flags(argv)
    # defaults are only for the eye: a stage that continues a run takes the saved settings in their place
    prints = any(word.startswith("--print_config") for word in argv)
    try:
        values = root.parse_args(list(argv) or ["--help"], defaults=prints).as_dict()
    except WrongFlags as error:
        refuse(root, argv, str(error))
    path, leaf = [], root
    while values.get("command"):
        path.append(values["command"])
        leaf, values = leaf.subcommands[path[-1]], values[path[-1]]
    if values.pop("verbose", False) and not environment_rank():
        logging.getLogger("nasfast").setLevel(logging.DEBUG)
    import_modules(values.pop("import", None) or ())
    values.pop("config", None)
    return CommandLine(" ".join(path), values, leaf, argv)


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
    names = {**{name: command.text for name, command in COMMANDS.items()}, **extensions.COMMANDS}
    for name, text in names.items():
        parser = Parser(description=text)
        commands.add_subcommand(name, parser, help=text)
        parser.prog, parser.has_all_settings = f"nasfast {name}", name in stages.COMMANDS
        if name != command and not command.startswith("--print_completion"):
            continue
        if name in extensions.COMMANDS:
            extensions.load(extensions.COMMAND_FLAGS)(parser, name)
            continue
        parser.add_common()
        COMMANDS[name].flags(parser)
        for short in set(SHORT) & set(parser._option_string_actions) if parser.has_all_settings else ():
            action = parser._option_string_actions[short]
            action.help, action.metavar = f"short for {SHORT[short]}", "NAME"  # `parse` writes it out
    return root
