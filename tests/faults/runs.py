"""The small runs that the injector disturbs: inputs, settings, undisturbed results, and the comparison of results."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline import RunConfig
from nasfast.retrain import RetrainResult, load_model
from nasfast.runtime.files import read_metrics
from nasfast.search import load_candidates
from nasfast.spaces import SearchSpace
from nasfast.train.checkpoint import CheckpointError, load_checkpoint

from .processes import Run

IMAGES, BAD, MANY, NAMES = "images", "bad-images", "many-images", "bilder-größe"
"""Folders of images: readable ones, some unreadable, many, unusual names."""

_SETTINGS: dict[str, Any] = {
    "method": "dinas_paper",  # only its training and its retraining need images
    "space": {"name": "digits_mini", "resolution": 16},
    "data": {"train": IMAGES, "batch_size": 16, "workers": 0, "loader": "torchvision", "augment": "shift"},
    "threads": 1,
    "train": {"epochs": 3, "log_every": 5, "checkpoint_every": 4},
    "search": {"top_k": 2},
    "retrain": {"random_architectures": 1, "train": {"epochs": 2, "log_every": 5, "checkpoint_every": 4}},
}
_EVOLUTION = {
    "method": "evolution",
    "population": 8,
    "parents": 4,
    "crossovers": 3,
    "mutations": 3,
    "generations": 4,
    "top_k": 2,
}
_STAGES = ("supernet", "score", "search", "retrain", "report", "export")


@dataclass(frozen=True)
class Recipe:
    """One small run.

    Attributes:
        changes: changes to the settings, one mapping per section.
        stages: the commands in their order.
        base: recipe whose files from before the first of these stages are used.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    stages: tuple[str, ...] = _STAGES
    base: str | None = None


RECIPES = {
    "exact": Recipe(),
    # a table scores an architecture at once, so the search takes many of them, to last until it is killed
    "table": Recipe(
        {"search": {**_EVOLUTION, "population": 400, "crossovers": 150, "mutations": 150, "generations": 12}},
        ("search",),
        "exact",
    ),
    "accuracy": Recipe(
        {"method": "spos", "search": _EVOLUTION, "recalibration_batches": 2, "train": {"epochs": 1}},
        ("supernet", "search"),
    ),
    "bad images": Recipe({"data": {"train": BAD}}, ("supernet", "score", "search", "retrain")),
    "workers": Recipe({"data": {"workers": 2}}, ("supernet",)),
    "cache": Recipe(
        {"data": {"train": MANY, "loader": "cache", "batch_size": 256}, "train": {"epochs": 2, "checkpoint_every": 2}},
        ("supernet",),
    ),
    "names": Recipe({"data": {"train": NAMES}}),
}
"""Each is named after what distinguishes it."""


def make_inputs(work: Path) -> None:
    """Make the image folders in `work`."""
    _write_images(work / IMAGES, "abcd", 40)
    _write_images(work / MANY, "abcd", 700)
    _write_images(work / NAMES, ("a", "größe", "z", "猫"), 40)
    bad = work / BAD
    shutil.copytree(work / IMAGES, bad)
    for number, path in enumerate(sorted(bad.glob("*/*.png"))[3::23]):
        data = path.read_bytes()
        # truncated, empty, filled with zeros, or a folder of that name
        if number % 4 == 3:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes([data[: len(data) // 2], b"", b"\x00" * len(data)][number % 4])


def _write_images(root: Path, classes: Any, count: int) -> None:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            pixels[..., label % 3] //= 2
            Image.fromarray(pixels).save(root / name / f"{number:04d}.png")


class Reference:
    """An undisturbed run of a recipe. Each stage runs when it is first needed, and its run directory is then copied.

    Args:
        name: name of the recipe.
        work: folder with the image folders; settings and copies are written there.
        base: the reference of the recipe's base.

    Attributes:
        stages: stages of the recipe.
        seconds: time of each stage that has run.
    """

    def __init__(self, name: str, work: Path, base: Reference | None) -> None:
        recipe = RECIPES[name]
        self.name, self.stages, self.seconds = name, recipe.stages, {}
        self._base, self._folder = base, work / "references" / name
        self._folder.mkdir(parents=True)
        self._settings = self._folder / "settings.yaml"
        self._settings.write_text(yaml.safe_dump(_merged(_SETTINGS, recipe.changes, work)), encoding="utf-8")

    def make(self, stage: str, start: Callable[[list[str], Path], Run]) -> None:
        """Run this stage and the earlier ones, unless they have run; `run` stands for all stages up to the report.

        Raises:
            RuntimeError: a stage failed.
        """
        out, last = self._folder / "run", self.stages.index("report" if stage == "run" else stage)
        if self._base and not self.seconds:
            self._base.make(self._first, start)
            shutil.copytree(self._base.after(self._first), out)
        for name in self.stages[: last + 1]:
            if name in self.seconds:
                continue
            started = time.monotonic()
            run = start(self.argv(name, out, caches=self._folder / "cache"), self._folder / f"{name}.log")
            if run.wait() != 0:
                raise RuntimeError(f"the undisturbed {name} of {self.name!r} failed: {run.output()[-2000:]}")
            self.seconds[name] = time.monotonic() - started
            shutil.copytree(out, self.after(name))
        self.seconds["run"] = sum(self.seconds[name] for name in self.stages if name in self.seconds)

    @property
    def _first(self) -> str:
        """The stage of the base that comes before the first stage of this recipe."""
        return self._base.stages[self._base.stages.index(self.stages[0]) - 1]

    def argv(self, stage: str, out: Path, *, caches: Path, resume: bool = False, settings: bool = True) -> list[str]:
        """The command line of a stage.

        Args:
            caches: folder of image caches.
            resume: add --resume, if the stage has it.
            settings: add --config with the file of settings, if the stage has it.
        """
        argv = [stage, "--out", os.fspath(out)]
        if stage in ("report", "export"):
            return argv
        argv += ["--config", os.fspath(self._settings)] if settings else []
        argv += ["--data.cache_dir", os.fspath(caches)] if self.name == "cache" else []
        return argv + (["--resume"] if resume and stage in ("supernet", "retrain", "run") else [])

    def after(self, stage: str) -> Path:
        """The run directory after a stage."""
        return self._folder / f"after {'report' if stage == 'run' else stage}"

    def before(self, stage: str) -> Path | None:
        """The run directory before a stage; None before the first one."""
        if stage in ("run", self.stages[0]):
            return self._base.after(self._first) if self._base else None
        return self.after(self.stages[self.stages.index(stage) - 1])


def _merged(base: dict[str, Any], changes: dict[str, Any], work: Path) -> dict[str, Any]:
    """`base` with `changes` to each section, and with the full path of the image folder."""
    form = dict(base)
    for key, value in changes.items():
        form[key] = {**form.get(key, {}), **value} if isinstance(value, dict) else value
    form["data"] = {**form["data"], "train": os.fspath(work / form["data"]["train"])}
    return form


def contents(folder: Path) -> dict[str, Any]:
    """What two runs with the same settings must have in common: every file, without times and directory names.

    The names and contents of TensorBoard's events depend on the time, so these are left out.
    """
    result: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or name in (".lock", "environment.json") or name.startswith("tensorboard/"):
            continue
        if name == "metrics.jsonl":
            result[name] = [{k: v for k, v in line.items() if k != "images_per_s"} for line in read_metrics(folder)]
        elif name.endswith("result.json"):
            result[name] = {**json.loads(path.read_bytes()), "seconds": None}
        elif name == "config.yaml":
            form = yaml.safe_load(path.read_bytes())
            result[name] = {**form, "out": None, "data": {**form["data"], "cache_dir": None}}
        elif name == "report.html":  # the page contains speeds and the name of the directory
            text = path.read_text(encoding="utf-8")
            result[name] = (text.count("<img"), text.count("Not run yet"), text.rstrip().endswith("</html>"))
        else:
            result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


_READERS: dict[str, Callable[[Path], object]] = {
    "config.yaml": RunConfig.load,
    "space.yaml": SearchSpace.load,
    "indicators.json": IndicatorTable.load,
    "archs.json": load_candidates,
    "result.json": RetrainResult.load,
    "model.safetensors": lambda path: load_model(path.parent),
}


def damaged_files(folder: Path) -> list[str]:
    """Files of a run directory that the package cannot read. An incomplete last line of history.jsonl is allowed."""
    problems = []
    for path in sorted(folder.rglob("*")):
        reader = load_checkpoint if path.parent.name == "checkpoints" else _READERS.get(path.name)
        if reader is None or path.name.endswith(".tmp") or path.is_dir():
            continue
        if path.name == "model.safetensors" and not (path.parent / "result.json").exists():
            continue  # retraining writes result.json after the model, so this stage is not done
        try:
            reader(path)
        except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
            problems.append(f"{path.relative_to(folder)}: {error}")
    for path in folder.glob("history.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                json.loads(line)
            except ValueError:
                problems.append(f"{path.name}: {line!r}")
    return problems


def newest_checkpoints(folder: Path, *, read: bool) -> dict[str, int]:
    """The step of the newest checkpoint of each stage.

    Args:
        read: ignore checkpoints that cannot be read.
    """
    newest: dict[str, int] = {}
    for path, stage, step in _numbered_checkpoints(folder):
        if read:
            try:
                load_checkpoint(path)
            except CheckpointError:
                continue
        newest[stage] = step
    return newest


def older_checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints that are not the newest of their stage."""
    newest = newest_checkpoints(folder, read=False)
    return [
        str(path.relative_to(folder)) for path, stage, step in _numbered_checkpoints(folder) if step < newest[stage]
    ]


def _numbered_checkpoints(folder: Path) -> list[tuple[Path, str, int]]:
    """Path, stage and step of each checkpoint, older ones first."""
    paths = sorted((folder / "checkpoints").glob(f"*-{'[0-9]' * 8}.safetensors"))
    return [(path, path.stem.rpartition("-")[0], int(path.stem.rpartition("-")[2])) for path in paths]
