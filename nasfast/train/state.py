"""The state of a training stage: capture into a checkpoint, restore from one, and where a stage begins."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nasfast.config import difference
from nasfast.ops.precision import resolve_precision
from nasfast.runtime.distributed import World
from nasfast.runtime.files import checkpoint_state
from nasfast.settings import TrainConfig
from nasfast.spaces import Sampler
from nasfast.train.checkpoint import (
    SUFFIX,
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    decode,
    encode,
    storable,
)
from nasfast.train.config import TrainStage

_LOG = logging.getLogger(__name__)


@dataclass
class Sums:
    """Sums since the last log line; checkpoints have them so that a resumed run logs the same figures."""

    loss: float = 0.0
    correct: int = 0
    images: int = 0
    steps: int = 0

    def add(self, loss: float, correct: int, images: int) -> None:
        """Add the results of one step."""
        self.loss, self.correct = self.loss + loss, self.correct + correct
        self.images, self.steps = self.images + images, self.steps + 1


@dataclass
class Progress:
    """The position of a stage.

    Attributes:
        step: number of optimiser steps done.
        sums: sums since the last log line.
        best: largest validation top-1 so far; None before the first evaluation.
        evaluation_due: whether the evaluation after this step was interrupted.
        stale: number of evaluations since the best one.
    """

    step: int = 0
    sums: Sums = field(default_factory=Sums)
    best: float | None = None
    evaluation_due: bool = False
    stale: int = 0


@dataclass
class TrainState:
    """Everything that a stage changes, and what identifies the stage.

    Attributes:
        averaged: the moving average of the model's weights; None if there is none.
        fingerprint, settings: digest of what is trained, and what else the result depends on.
        loader_kind: the backend that decodes the images, None if unknown. All backends show the same windows up to
            rounding.
    """

    model: nn.Module
    optimizer: torch.optim.SGD
    sampler: Sampler | None
    averaged: AveragedModel | None
    _: KW_ONLY
    fingerprint: str
    settings: dict[str, Any]
    loader_kind: str | None

    @property
    def size(self) -> int:
        """Bytes of a checkpoint, up to a few thousand."""
        momenta = (p.nbytes for p in self.model.parameters() if p.requires_grad)
        states = [self.model.state_dict(), self.averaged.state_dict() if self.averaged else {}]
        return sum(t.nbytes for state in states for t in state.values()) + sum(momenta)

    def capture(self, progress: Progress) -> Checkpoint:
        """A checkpoint on the CPU: copies of what later steps change, and the weights that do not train uncopied."""
        fixed = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        tensors = {
            f"model.{name}": t.detach() if name in fixed else t.detach().clone()
            for name, t in self.model.state_dict().items()
        }
        for name, parameter in self.model.named_parameters():
            buffer = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum.{name}"] = buffer.clone()
        if self.averaged is not None:
            tensors |= {f"average.{name}": t.detach().clone() for name, t in self.averaged.state_dict().items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        state = {"fingerprint": self.fingerprint, "settings": self.settings, "loader": self.loader_kind}
        state |= asdict(progress)
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict()
        return Checkpoint(storable(tensors), state)

    def restore(self, checkpoint: Checkpoint) -> Progress:
        """Take over the state of a checkpoint."""
        state = checkpoint.state
        try:
            self.model.load_state_dict(checkpoint.part("model."))
            if self.averaged is not None:
                self.averaged.load_state_dict(checkpoint.part("average."))
            if self.sampler is not None:
                self.sampler.load_state_dict(state["sampler"])
            progress = Progress(**{field.name: state[field.name] for field in fields(Progress)})
            progress.sums = Sums(**state["sums"])
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"checkpoint does not fit this run: {error}") from error
        momentum = checkpoint.part("momentum.")
        for name, parameter in self.model.named_parameters():
            if name in momentum:
                # the parameter's memory layout keeps the arithmetic of a resumed run the same
                buffer = torch.empty_like(parameter).copy_(momentum[name])
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        torch.set_rng_state(checkpoint.tensors["rng.cpu"])
        if torch.cuda.is_available() and "rng.cuda" in checkpoint.tensors:
            torch.cuda.set_rng_state(checkpoint.tensors["rng.cuda"])
        return progress


def begin(state: TrainState, folder: CheckpointFolder, *, stage: TrainStage, world: World) -> Progress:
    """Where a stage begins: at the newest checkpoint of `folder` or at step 0; the same on every rank.

    Only rank 0 reads, because the others may be on machines that do not see its disk.

    Raises:
        CheckpointError: none of the checkpoints can be used, or this rank has other settings than rank 0.
        FileExistsError: there are checkpoints of another job than this torchrun job, and `resume` is off.
        RunDirectoryError: another process trains there, so `overwrite` deleted nothing.
    """
    if world.is_main:
        resume = stage.resume or world.has_begun(folder.stem)
        checkpoint = _newest(state, folder, stage, resume=resume)
        world.note_begun(folder.stem)
        progress = Progress() if checkpoint is None else state.restore(checkpoint)
        if world.size > 1:
            world.broadcast_bytes(encode(state.capture(progress)))
        return progress
    checkpoint = decode(world.broadcast_bytes(b""), "the state of rank 0")
    if changes := difference(checkpoint.state["settings"], state.settings):
        raise CheckpointError(
            f"rank {world.rank} has other settings than rank 0: {changes}; start all ranks with the same settings"
        )
    return state.restore(checkpoint)


def _newest(state: TrainState, folder: CheckpointFolder, stage: TrainStage, *, resume: bool) -> Checkpoint | None:
    """The newest checkpoint of a stage, if it is to continue from one."""
    if not resume:
        if stage.overwrite:
            folder.clear()
        check_new(folder, stage.name, state.settings, extends=stage.extends)
        return None
    latest = folder.latest(fingerprint=state.fingerprint)
    if latest is None:
        return None
    path, checkpoint = latest
    saved, step = checkpoint.state["settings"], checkpoint.state["step"]
    old, new = saved["train"]["epochs"], state.settings["train"]["epochs"]
    if stage.extends and new < old:
        raise CheckpointError(
            f"{path} belongs to a training of {old} epochs, now there are {new}: it can be extended, not shortened; "
            f"give at least {old}, or choose another run directory (--out, run_dir)"
        )
    if changes := _changes(saved, state.settings, extends=stage.extends):
        raise CheckpointError(
            f"{path} was written with other settings: {changes}; "
            f"keep those of the run, delete its checkpoints ({folder.prefix}-*{SUFFIX}) to train anew, or choose "
            "another run directory (--out, run_dir)"
        )
    if old != new:
        _LOG.info(
            "%s: extended from %d to %d epochs: from step %d on, the learning rate follows the cosine of %d epochs, "
            "and evaluations without a better accuracy are counted anew",
            *(stage.name, old, new, step, new),
        )
        checkpoint.state["stale"] = 0
    before, now = checkpoint.state.get("loader"), state.loader_kind
    if None not in (before, now) and before != now:
        _LOG.warning(
            "%s: until step %d the loader %r gave the images, now %r does: both show the same windows up to rounding "
            "('cache' draws windows of photographs on reduced images), so the result will not equal that of an "
            "unbroken run bit for bit",
            *(stage.name, step, before, now),
        )
    _LOG.info("%s: continues from %s", stage.name, path)
    return checkpoint


def _changes(saved: dict[str, Any], now: dict[str, Any], *, extends: bool) -> str:
    """In which settings a checkpoint differs from those of now, so that it cannot be continued; empty if it can."""
    if extends and saved["train"]["epochs"] < now["train"]["epochs"]:
        saved = {**saved, "train": {**saved["train"], "epochs": now["train"]["epochs"]}}
    return difference(saved, now)


def with_precision(cfg: TrainConfig, stage: TrainStage, device: str) -> TrainConfig:
    """The settings of a stage with the number type that `precision: auto` means.

    It is that of the checkpoints where the stage continues, and otherwise what `resolve_precision` says of the device.
    """
    name = cfg.precision
    if name == "auto" and stage.resume:
        for path in reversed(CheckpointFolder(Path(stage.run_dir) / "checkpoints", stage.file_prefix).paths()):
            with suppress(OSError, LookupError, TypeError, ValueError):  # a damaged one; one before it may be good
                name = checkpoint_state(path)["settings"]["train"]["precision"]
                break
    return cfg.replace(precision=resolve_precision(name, device))


def check_new(
    folder: CheckpointFolder, stage: str, settings: dict[str, Any], *, extends: bool, unknown: Sequence[str] = ()
) -> None:
    """Refuse to begin a stage that has checkpoints.

    Args:
        folder: the checkpoints of the stage.
        stage: its name.
        settings: what a checkpoint must match to be continued.
        extends: see `TrainStage`.
        unknown: names of settings that are not known yet, and are not compared.
    """
    if not (paths := folder.paths()):
        return
    try:
        saved = checkpoint_state(paths[-1])["settings"]
        changes = _changes({k: v for k, v in saved.items() if k not in unknown}, settings, extends=extends)
    except (OSError, LookupError, TypeError, ValueError):
        changes = ""  # it is damaged, and one before it may be continued
    advice = f" with other settings ({changes}):" if changes else ": continue them (--resume, resume=True),"
    raise FileExistsError(
        f"{folder.folder} holds checkpoints of {stage!r}{advice} delete them ({folder.prefix}-*{SUFFIX}; "
        "overwrite=True in Python), or choose another run directory (--out, run_dir)"
    )


def seed_other_rank(seed: int, rank: int, step: int, *, device: str) -> None:
    """Seed the generators of a rank other than 0 for one step, so that e.g. its dropout differs from rank 0's.

    Rank 0's generator continues from step to step and is in the checkpoints; the others need not be, because they
    depend only on the arguments.
    """
    # Random hashes a string to the same number in every process
    number = random.Random(f"{seed} {rank} {step}").getrandbits(63)
    # torch.manual_seed would also set the seed of every other kind of device
    torch.default_generator.manual_seed(number)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(number)
