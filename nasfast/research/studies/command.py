"""The commands of the studies: their flags, and what they do. No torch before a study runs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from nasfast.cli.flags import add_task_flags, take_hours, task_settings
from nasfast.cli.parser import Parser
from nasfast.config import ConfigBase, ConfigError, load_yaml
from nasfast.research.studies import registry
from nasfast.settings import TaskSettings

Config = TypeVar("Config", bound=ConfigBase)


def _study_config(parser: Parser, argv: Sequence[str], kind: type[Config]) -> tuple[Config, dict[str, Any]]:
    """The settings of a study, from defaults, then --config files, then flags; and the values of its other flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", action="append", default=[])
    files = early.parse_known_args(argv)[0].config
    parser.add_argument("--config", action="append", metavar="FILE", help="YAML file with any of the settings below")
    parser.add_settings(kind)
    given: dict[str, Any] = {}
    for file in files:
        given |= load_yaml(file)
    try:
        checked = kind.from_dict(given).to_dict()
    except ConfigError as error:
        raise ConfigError(f"{', '.join(files)}: {error}") from error
    parser.set_defaults({key: checked[key] for key in given})
    parsed = parser.parse_flags(argv).as_dict()
    parsed.pop("config")
    others = {name: parsed.pop(name) for name in set(parsed) - {field.name for field in dataclasses.fields(kind)}}
    return kind.from_dict(parsed), others


_StudyArguments = tuple[registry.Study, ConfigBase, str | None, TaskSettings | None, float | None]


def flags(parser: Parser, argv: Sequence[str]) -> _StudyArguments:
    """The study that a command, or the kind behind it, names, its settings, its directory, where its tasks run, and
    the hours after which it stops.
    """
    kinds = {study.kind: study for study in registry.COMMANDS[parser.command]}
    if "" in kinds:
        return _study_flags(parser, argv, kinds[""])
    kind, *rest = argv or [""]
    if kind in ("-h", "--help"):
        width = max(map(len, kinds))
        lines = "\n".join(f"  {name:{width}}  {study.text}" for name, study in kinds.items())
        print(
            f"usage: {parser.prog} KIND [FLAGS]\n\n{parser.description}\n\n{lines}\n\nflags: {parser.prog} KIND --help"
        )
        sys.exit(0)
    if kind not in kinds:
        raise ConfigError(f"expected one of {', '.join(kinds)} behind {parser.command}, got {kind!r}")
    return _study_flags(Parser(kinds[kind].name, kinds[kind].text), rest, kinds[kind])


def _study_flags(parser: Parser, argv: Sequence[str], study: registry.Study) -> _StudyArguments:
    more = f", {study.writes}" if study.writes else ""
    resumed = "; a run that was stopped continues from what it has there" if study.resumes else ""
    text = f"also write {study.files}.json, the page {study.files}.html{more}{resumed}"
    parser.add_argument("--out", metavar="DIR", help=text)
    if study.tasks:
        add_task_flags(parser, dry_run=False, optional="each search")
    cfg, others = _study_config(parser, argv, study.load("config"))
    out = others.pop("out")
    if not study.tasks:
        return study, cfg, out, None, None
    hours = take_hours(others)
    return study, cfg, out, task_settings(others)[0], hours


def run(
    study: registry.Study, cfg: ConfigBase, out: str | None, settings: TaskSettings | None, hours: float | None
) -> None:
    """Print a study's report, save it, and raise where a mark is missed."""
    # imported here, because they import torch, and help must not wait for that
    from nasfast.cli.commands import at_most
    from nasfast.research.studies.run import run_study
    from nasfast.runtime.launcher import environment_size
    from nasfast.stages.checks import check_one_process

    check_one_process(settings, environment_size())
    with at_most(hours):
        report = run_study(study.name, cfg, out=out, tasks=settings)
    print(report)
    if out is not None:
        print("written:", ", ".join(map(str, (report.save(out), *report.files))))
    if report.missed:
        raise RuntimeError(f"{len(report.missed)} of {len(report.checks)} pass marks missed")
