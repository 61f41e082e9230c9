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
from nasfast.settings import check_common, check_device
from nasfast.spaces import named_space


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
class SpaceConfig(StudyConfig):
    """Studies of a search space.

    Attributes:
        space: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file; it is
            measured at 64 pixels at most.
    """

    space: str = "mobilenet_v2"


@dataclass(frozen=True)
class FiguresConfig(StudyConfig):
    """The published experiments on moments.

    Attributes:
        images: folder with one sub-folder per class, such as CIFAR-10's training images; null takes synthetic inputs.
        reference: folder of the published summaries (`vanilla_fc.npz` and so on) to compare with and draw.
        kernel: kernel size: 0 for fully connected layers, 3 for the paper's convolutions (hours on a CPU).
        padding: `periodic`, `zero`, `reflective`, or `shifted`, that of the paper's code: periodic, with the whole
            border on one side.
        batch: number of samples in figures 3 to 5.
        networks: number of networks in figures 3 to 5.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

    images: str | None = None
    reference: str | None = None
    kernel: Literal[0, 3] = 0
    padding: Literal["periodic", "shifted", "zero", "reflective"] = "shifted"
    batch: int = 64
    networks: int = 10
    device: str = "cpu"

    def _check_values(self) -> None:
        check_device(self.device)
        check_common(self.threads, self.seed, batch=self.batch, networks=self.networks)
        if self.reference is not None and not Path(self.reference).is_dir():
            raise ValueError(f"reference must be a folder of .npz files, got {self.reference!r}")


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


CELL_SPACES = ("darts", "nas_bench_201", "choice_blocks")


@dataclass(frozen=True)
class NasiSearchConfig(StudyConfig):
    """A search with NASI; `nasfast.research.nasi.search` has the settings of the method.

    Attributes:
        space: `darts`, `nas_bench_201`, `choice_blocks` (as NAS-Bench-1Shot1's first), `nas_bench_macro`,
            `mobilenet_v2`, `mobilenet_v3`, `shufflenet_v2`, `digits_mini`, or the path of a YAML file.
        images: folder with one sub-folder per class, augmented as for training; null takes synthetic images.
        resolution: height and width of the images; null takes the space's, and 64 for mobilenet_v2, mobilenet_v3 and
            shufflenet_v2.
        batch: number of images for each architecture; null takes 64 for built-in cells, else 16.
        cells: number of cells of darts, nas_bench_201 and choice_blocks; null takes the space's.
        channels: number of channels of their first cell; null takes the space's.
        steps: T, the number of sampled architectures.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

    space: str = "nas_bench_201"
    images: str | None = None
    resolution: int | None = None
    batch: int | None = None
    cells: int | None = None
    channels: int | None = None
    steps: int = 100
    device: str = "cpu"

    def _check_values(self) -> None:
        check_device(self.device)
        names = ("resolution", "batch", "cells", "channels")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        check_common(self.threads, self.seed, steps=self.steps, **sizes)
        named_space(self.space)  # raises where it is neither built in nor a readable file
        if self.batch == 1:
            raise ValueError("batch must be at least 2 (BatchNorm needs more than one image), got 1")
        for name in ("cells", "channels"):
            if name in sizes and self.space not in CELL_SPACES:
                raise ValueError(f"{name} belongs to {', '.join(CELL_SPACES)}, not to {self.space}")


class Study(NamedTuple):
    """A study: its line in the help, the class of its flags, and its function `module:name` in this package.

    The function takes the flags and a `Notebook`, in which it reports.
    """

    text: str
    config: type[StudyConfig]
    run: str


STUDIES = {
    "isometry": Study("", SpaceConfig, "isometry:study"),
    "moments quick": Study("small synthetic experiments with pass marks", StudyConfig, "moments:quick"),
    "moments figures": Study("figures 2 to 5 of the paper, beside its arrays", FiguresConfig, "moments:figures"),
    "moments paths": Study("candidates and random paths of a search space", SpaceConfig, "moments_paths:paths"),
    "wiring theorems": Study("theorems on local costs, checked on real networks", StudyConfig, "theorems:theorems"),
    "wiring p1": Study("growing: None leads first, then operations", PatternConfig, "wiring:growing"),
    "wiring p2": Study("width preference, and a control for its cause", PatternConfig, "wiring_width:width"),
    "wiring p3": Study("collapse on two levels, and why", PatternConfig, "wiring_collapse:collapse"),
    "wiring cost": Study("local costs at initialisation and trained", WiringConfig, "wiring_cost:cost"),
    "nasi quick": Study("how well Q predicts accuracy, with marks", StudyConfig, "nasi:quick"),
    "nasi search": Study("any space, at initialisation", NasiSearchConfig, "nasi_search:run"),
}
"""Command, and its kind where it has several -> the study."""


def flags(parser: Parser, command: str) -> None:
    """Declare the flags of a command, or of each of its kinds."""
    if command in STUDIES:
        _study_flags(parser, STUDIES[command])
        return
    parser.usage = "%(prog)s KIND [FLAGS]"
    kinds = parser.add_subcommands(dest="command", metavar="KIND")
    for name, study in STUDIES.items():
        if name.startswith(f"{command} "):
            kind = Parser(description=study.text)
            kinds.add_subcommand(name.removeprefix(f"{command} "), kind, help=study.text)
            kind.prog = f"nasfast {name}"
            _study_flags(kind, study)


def _study_flags(parser: Parser, study: Study) -> None:
    parser.add_common()
    text = (
        "also write a JSON file, a page and what is found there; searches and networks that are there are not repeated"
    )
    parser.add_argument("--out", metavar="DIR", help=text)
    parser.add_class_arguments(study.config)


def run(command: str, values: dict[str, Any]) -> None:
    """Carry out the study of a command with the values of its flags; RuntimeError if it misses a pass mark."""
    # imported here, because they import torch, and help must not wait for that
    from nasfast.measure.timing import measuring
    from nasfast.research.studies.notebook import Notebook

    study, out = STUDIES[command], values.pop("out", None)
    cfg = study.config.from_dict(values)
    notes = Notebook(command.replace(" ", "-"), cfg, None if out is None else Path(out))
    with measuring(cfg.threads):
        load(f"nasfast.research.studies.{study.run}")(cfg, notes)
        notes.close()
