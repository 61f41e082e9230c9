"""The commands of the studies: their flags, and what they do. No torch before a study runs."""

from __future__ import annotations

from typing import Any

from nasfast.cli.flags import Parser, take_tasks
from nasfast.research.studies import registry
from nasfast.settings import TaskSettings


def flags(parser: Parser, command: str) -> None:
    """Declare the flags of a command, or of each of its kinds."""
    kinds = {study.kind: study for study in registry.COMMANDS[command]}
    if "" in kinds:
        _study_flags(parser, kinds[""])
        return
    parser.usage = "%(prog)s KIND [FLAGS]"
    commands = parser.add_subcommands(dest="command", metavar="KIND")
    for kind, study in kinds.items():
        of_kind = Parser(description=study.text)
        commands.add_subcommand(kind, of_kind, help=study.text)
        of_kind.prog = f"nasfast {study.name}"
        _study_flags(of_kind, study)


def _study_flags(parser: Parser, study: registry.Study) -> None:
    parser.add_common()
    more = f", {study.writes}" if study.writes else ""
    resumed = "; a run that was stopped continues from what it has there" if study.resumes else ""
    text = f"also write {study.files}.json, the page {study.files}.html{more}{resumed}"
    parser.add_argument("--out", metavar="DIR", help=text)
    if study.tasks:
        parser.add_class_arguments(TaskSettings)
    parser.add_class_arguments(study.load("config"))


def run(command: str, given: dict[str, Any]) -> None:
    """Print a study's report, save it, and raise where a mark is missed.

    Args:
        command: the command with its kind.
        given: the values of its flags.
    """
    # imported here, because they import torch, and help must not wait for that
    from nasfast.cli.commands import at_most, split_hours
    from nasfast.pipeline.check import check_one_process
    from nasfast.research.studies.run import run_study
    from nasfast.runtime.launcher import environment_size

    study, out = registry.find(command), given.pop("out", None)
    tasks, hours = split_hours(take_tasks(given) if study.tasks else None)
    cfg = study.load("config").from_dict(given)
    check_one_process(tasks, environment_size())
    with at_most(hours):
        report = run_study(study.name, cfg, out=out, tasks=tasks)
    print(report)
    if out is not None:
        print("written:", ", ".join(map(str, (report.save(out), *report.files))))
    if report.missed:
        raise RuntimeError(f"{len(report.missed)} of {len(report.checks)} pass marks missed")
