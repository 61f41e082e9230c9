"""The list of studies, and the commands made from it: their flags, and what they do.

It names modules and functions as text, so that usage and help do not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nasfast.cli.flags import Parser, take_tasks
from nasfast.extensions import load
from nasfast.settings import TaskSettings


@dataclass(frozen=True)
class Study:
    """One study: a command, or one kind of a command.

    Attributes:
        name: the command, and its kind where it has several, such as `moments quick`.
        text: its line in the help of the command.
        config: class in this package, `module:name`: its fields are the flags.
        run: function in this package: `run(config, out, task) -> StudyReport`.
        files: stem of the JSON file and the page.
        resumes: whether it continues from what it finds in its output directory.
        writes: what it writes besides its report, as the help says it.
        tasks: whether it has parts that may run in processes of their own; `run` then takes the keyword `tasks`.
    """

    name: str
    text: str
    config: str
    run: str
    files: str
    resumes: bool = False
    writes: str = ""
    tasks: bool = False

    def load(self, attribute: str) -> Any:
        """Import what `config` or `run` names."""
        return load(f"nasfast.research.studies.{getattr(self, attribute)}")


_NASI_FILES = "space.yaml, and indicators.json (layers) or arch_nasi.json (cells)"
# fmt: off
_ALL = (
    Study("nasi quick", "how well Q predicts accuracy, with marks",
          "nasi.config:NasiQuickConfig", "nasi.study:quick", "nasi-quick"),
    Study("nasi search", "any space, at initialisation",
          "nasi.config:NasiSearchConfig", "nasi.study:search", "nasi-search", writes=_NASI_FILES),
    Study("nasi compare", "nas_bench_macro, ranked",
          "nasi.config:NasiCompareConfig", "nasi.study:compare", "nasi-compare", writes=_NASI_FILES),
)
# fmt: on

STUDIES = {study.name: study for study in _ALL}
"""To add a study: a folder beside this file, and an entry here; a command also needs a line in `nasfast.extensions`."""


def find(name: str) -> Study:
    """The study of a command and kind, such as `isometry` or `moments quick`."""
    if name not in STUDIES:
        raise KeyError(f"no study is called {name!r}; there are {', '.join(STUDIES)}")
    return STUDIES[name]


def flags(parser: Parser, command: str) -> None:
    """Declare the flags of a command, or of each of its kinds."""
    if command in STUDIES:
        _study_flags(parser, STUDIES[command])
        return
    parser.usage = "%(prog)s KIND [FLAGS]"
    commands = parser.add_subcommands(dest="command", metavar="KIND")
    for name, study in STUDIES.items():
        if name.startswith(f"{command} "):
            subcommand = Parser(description=study.text)
            commands.add_subcommand(name.removeprefix(f"{command} "), subcommand, help=study.text)
            subcommand.prog = f"nasfast {name}"
            _study_flags(subcommand, study)


def _study_flags(parser: Parser, study: Study) -> None:
    parser.add_common()
    files = f", {study.writes}" if study.writes else ""
    resumes = "; a run that was stopped continues from what it has there" if study.resumes else ""
    text = f"also write {study.files}.json, the page {study.files}.html{files}{resumes}"
    parser.add_argument("--out", metavar="DIR", help=text)
    if study.tasks:
        parser.add_class_arguments(TaskSettings)
    parser.add_class_arguments(study.load("config"))


def run(command: str, values: dict[str, Any]) -> None:
    """Print the report of a command's study from the values of its flags, save it, and raise where a mark is missed."""
    # imported here, because they import torch, and help must not wait for that
    from nasfast.cli.stages import time_limit
    from nasfast.pipeline.run import check_one_process
    from nasfast.research.studies.run import run_study
    from nasfast.runtime.launcher import environment_size

    study, out = find(command), values.pop("out", None)
    tasks = take_tasks(values) if study.tasks else TaskSettings()
    cfg = study.load("config").from_dict(values)
    check_one_process(tasks.executor_settings, environment_size())
    with time_limit(tasks.max_hours):
        report = run_study(study.name, cfg, out=out, tasks=tasks.executor_settings)
    print(report)
    if out is not None:
        print("written:", ", ".join(map(str, (report.save(out), *report.files))))
    if report.missed:
        raise RuntimeError(f"{len(report.missed)} of {len(report.checks)} pass marks missed")
