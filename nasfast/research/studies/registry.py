"""The list of studies, and the commands made from it: their flags, and what they do.

It names modules and functions as text, so that usage and help do not wait for torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from nasfast.cli.flags import Parser, take_tasks
from nasfast.settings import TaskSettings

HOME = "nasfast.research.studies"


@dataclass(frozen=True)
class Study:
    """One study: a command, or one kind of a command.

    Attributes:
        folder: folder in `nasfast/research/studies/`; also the name of the command.
        kind: the word behind the command; empty where the command is one study.
        text: its line in the help of the command.
        config: class in the folder's `config` module: its fields are the flags.
        run: function in the folder's `study` module: `run(config, out, task) -> StudyReport`.
        files: stem of the JSON file and the page.
        resumes: whether it continues from what it finds in its output directory.
        writes: what it writes besides its report, as the help says it.
        tasks: whether it has parts that may run in processes of their own; `run` then takes the keyword `tasks`.
    """

    folder: str
    kind: str
    text: str
    config: str
    run: str
    files: str
    resumes: bool = False
    writes: str = ""
    tasks: bool = False

    @property
    def name(self) -> str:
        """The command and its kind, such as `moments quick`."""
        return f"{self.folder} {self.kind}".strip()

    def load(self, attribute: str) -> Any:
        """Import what `config` or `run` names."""
        module = {"config": "config", "run": "study"}[attribute]
        return getattr(importlib.import_module(f"{HOME}.{self.folder}.{module}"), getattr(self, attribute))


# fmt: off
_MOMENTS = (
    Study("moments", "quick", "small synthetic experiments with pass marks, in about a minute",
          "QuickConfig", "quick", "moments", resumes=True),
    Study("moments", "figures", "figures 2 to 5 of the paper, beside its published arrays",
          "FiguresConfig", "figures", "moments", resumes=True),
    Study("moments", "module", "candidates and random paths of a search space, or any module",
          "ModuleConfig", "module", "moments"),
)
_ISOMETRY = (Study("isometry", "", "", "IsometryConfig", "run", "isometry"),)
_WIRING = (
    Study("wiring", "theorems", "theorems on local costs, checked on real networks",
          "TheoremsConfig", "theorems", "wiring-theorems"),
    Study("wiring", "p1", "growing: None leads first, then operations",
          "GrowthConfig", "growth", "wiring-p1", resumes=True, tasks=True),
    Study("wiring", "p2", "width preference, and a control for its cause",
          "WidthConfig", "width", "wiring-p2", resumes=True, tasks=True),
    Study("wiring", "p3", "collapse on two levels, and why",
          "CollapseConfig", "collapse", "wiring-p3", resumes=True, tasks=True),
    Study("wiring", "cost", "local costs at initialisation and trained",
          "CostConfig", "cost", "wiring-cost", resumes=True, tasks=True),
)
_FOUND = "space.yaml, and indicators.json (layers) or arch_nasi.json (cells)"
_NASI = (
    Study("nasi", "quick", "how well Q predicts accuracy, with marks", "NasiQuickConfig", "quick", "nasi-quick"),
    Study("nasi", "search", "any space, at initialisation", "NasiSearchConfig", "search", "nasi-search", writes=_FOUND),
    Study("nasi", "compare", "nas_bench_macro, ranked", "NasiCompareConfig", "compare", "nasi-compare", writes=_FOUND),
)
# fmt: on

COMMANDS: dict[str, tuple[Study, ...]] = {
    "isometry": _ISOMETRY,
    "moments": _MOMENTS,
    "wiring": _WIRING,
    "nasi": _NASI,
}
"""Name of a command -> its studies. Adding a study: a folder beside this file, and an entry here; a command needs
a line, too, in `nasfast.extensions`.
"""


def find(name: str) -> Study:
    """The study of a command and kind.

    Args:
        name: such as `isometry` or `moments quick`.

    Raises:
        KeyError: there is no such study.
    """
    for studies in COMMANDS.values():
        for study in studies:
            if study.name == name:
                return study
    raise KeyError(f"no study is called {name!r}; there are {', '.join(names())}")


def names() -> list[str]:
    """The names of all studies."""
    return [study.name for studies in COMMANDS.values() for study in studies]


def flags(parser: Parser, command: str) -> None:
    """Declare the flags of a command, or of each of its kinds."""
    kinds = {study.kind: study for study in COMMANDS[command]}
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


def _study_flags(parser: Parser, study: Study) -> None:
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

    study, out = find(command), given.pop("out", None)
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
