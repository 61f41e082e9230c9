"""The commands of the studies: their flags, and how a study is carried out.

A study has few flags; what else it takes are constants at the top of its file. Nothing here imports torch at once,
because help must not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nasfast.cli.flags import Parser
from nasfast.config import ConfigBase
from nasfast.extensions import load
from nasfast.research.studies import registry
from nasfast.settings import check_common, check_device


@dataclass(frozen=True)
class StudyConfig(ConfigBase):
    """What every study takes.

    Attributes:
        seed: seed of weights, inputs and whatever else is random.
        threads: CPU threads, 0 for torch's choice; figures of short trainings depend on it by rounding.
    """

    seed: int = 0
    threads: int = 0

    def _check_values(self) -> None:
        check_common(self.threads, self.seed)


@dataclass(frozen=True)
class WiringConfig(StudyConfig):
    """Searches of cells.

    Attributes:
        seeds: number of searches; their seeds begin with `seed`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

    seeds: int = 3
    device: str = "cpu"

    def _check_values(self) -> None:
        check_device(self.device)
        check_common(self.threads, self.seed, seeds=self.seeds)


@dataclass(frozen=True)
class PatternConfig(WiringConfig):
    """Searches that learn an architecture.

    Attributes:
        method: estimator of the architecture's gradient; the pass marks belong to `dsnas`.
    """

    method: Literal["darts", "snas", "dsnas", "proxyless"] = "dsnas"


class Study(NamedTuple):
    """A study: its line in the help, the class of its flags, and its function `module:name` in this package.

    The function takes the flags and a `Notebook`, in which it reports.
    """

    text: str
    config: type[StudyConfig]
    run: str


STUDIES = {
    "wiring theorems": Study("theorems on local costs, checked on real networks", StudyConfig, "theorems:theorems"),
    "wiring p1": Study("growing: None leads first, then operations", PatternConfig, "wiring:growing"),
    "wiring p2": Study("width preference, and a control for its cause", PatternConfig, "wiring_width:width"),
    "wiring p3": Study("collapse on two levels, and why", PatternConfig, "wiring_collapse:collapse"),
    "wiring cost": Study("local costs at initialisation and trained", WiringConfig, "wiring_cost:cost"),
}
"""Command, and its kind where it has several -> the study."""


def flags(parser: Parser, command: str) -> None:
    """Declare the flags of a command, or of each of its kinds."""
    if command in STUDIES:
        _study_flags(parser, STUDIES[command])
        return
    if command in registry.STUDIES:
        registry.flags(parser, command)
        return
    parser.usage = "%(prog)s KIND [FLAGS]"
    kinds = parser.add_subcommands(dest="command", metavar="KIND")
    everything: dict[str, Any] = {**STUDIES, **registry.STUDIES}
    for name, study in everything.items():
        if name.startswith(f"{command} "):
            kind = Parser(description=study.text)
            kinds.add_subcommand(name.removeprefix(f"{command} "), kind, help=study.text)
            kind.prog = f"nasfast {name}"
            _study_flags(kind, study) if isinstance(study, Study) else registry._study_flags(kind, study)


def _study_flags(parser: Parser, study: Study) -> None:
    parser.add_common()
    text = "also write a JSON file and a page there; a study that searches or samples continues from what it has there"
    parser.add_argument("--out", metavar="DIR", help=text)
    parser.add_class_arguments(study.config)


def run(command: str, values: dict[str, Any]) -> None:
    """Carry out the study of a command with the values of its flags; RuntimeError if it misses a pass mark."""
    if command in registry.STUDIES:
        registry.run(command, values)
        return
    # imported here, because they import torch, and help must not wait for that
    from nasfast.measure.timing import measuring
    from nasfast.research.studies.notebook import Notebook

    study, out = STUDIES[command], values.pop("out", None)
    cfg = study.config.from_dict(values)
    notes = Notebook(command.replace(" ", "-"), cfg, None if out is None else Path(out))
    with measuring(cfg.threads):
        load(f"nasfast.research.studies.{study.run}")(cfg, notes)
        notes.close()
