"""The training loop: supernet training and retraining share it.

A run killed at any moment and resumed continues from its last checkpoint and, on CPU, ends with the same bytes as an
unbroken one: model, optimiser, sampler, generator, data position and running sums are all in the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nasfast.config import ConfigBase, difference
from nasfast.engine import Engine, StepResult, make_engine
from nasfast.spaces import Sampler
from nasfast.train.batches import as_epochs
from nasfast.train.checkpoint import Checkpoint, CheckpointError, CheckpointFolder
from nasfast.train.evaluate import Evaluation
from nasfast.train.log import TrainLog
from nasfast.train.schedule import lr_at


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient is not finite any more; the last good checkpoint is kept."""


@dataclass(frozen=True)
class TrainConfig(ConfigBase):
    """One training stage: SGD with cosine learning rate.

    Attributes:
        epochs: passes over the training images.
        lr: peak learning rate; null takes 0.5 where only indicators train and 0.1 elsewhere.
        momentum: of SGD.
        nesterov: Nesterov momentum.
        weight_decay: of SGD; none on BatchNorm parameters and biases.
        warmup_epochs: linear warm-up, may be a fraction.
        label_smoothing: of the cross-entropy.
        clip_norm: largest gradient norm, 0 for no clipping.
        precision: `fp32`, or `bf16` autocast.
        engine: `eager`, `graphs` (CUDA graphs per candidate of a supernet), or `auto`: graphs where they can be had.
        log_every: optimiser steps between log lines.
        checkpoint_every: optimiser steps between checkpoints, 0 for one per epoch.
        keep_checkpoints: how many of the newest to keep; the one before the newest is the fallback.
        eval_every: epochs between evaluations where there is a validation loader; the last epoch always has one.
    """

    epochs: int = 10
    lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 4e-5
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.1
    clip_norm: float = 5.0
    precision: Literal["fp32", "bf16"] = "fp32"
    engine: Literal["auto", "eager", "graphs"] = "auto"
    log_every: int = 20
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    eval_every: int = 1

    def __post_init__(self) -> None:
        # written so that NaN fails too
        for name in ("epochs", "lr", "log_every", "keep_checkpoints", "eval_every"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("momentum", "weight_decay", "warmup_epochs", "clip_norm", "checkpoint_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")


@dataclass
class _Sums:
    """Sums since the last log line; part of the checkpoint so that a resumed run logs the same figures."""

    loss: float = 0.0
    correct: int = 0
    images: int = 0
    steps: int = 0


def make_optimizer(model: nn.Module, cfg: TrainConfig) -> torch.optim.SGD:
    """SGD over the parameters that train; weight decay only on tensors of two or more dimensions.

    Raises:
        ValueError: nothing trains.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("nothing to train: no parameter has requires_grad=True; see Supernet.freeze")
    decayed, plain = [p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=cfg.lr, momentum=cfg.momentum, nesterov=cfg.nesterov)


class _State:
    """What a checkpoint of a stage holds, both ways."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.SGD, sampler: Sampler | None, fingerprint: str) -> None:
        self.model, self.optimizer, self.sampler, self.fingerprint = model, optimizer, sampler, fingerprint

    def capture(self, step: int, sums: _Sums, settings: dict[str, Any]) -> Checkpoint:
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            buffer = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum.{name}"] = buffer
        tensors["rng.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        state = {"fingerprint": self.fingerprint, "step": step, "sums": vars(sums), "settings": settings}
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict()
        return Checkpoint(tensors, state)

    def restore(self, checkpoint: Checkpoint) -> tuple[int, _Sums]:
        try:
            self.model.load_state_dict(checkpoint.part("model."))
            if self.sampler is not None:
                self.sampler.load_state_dict(checkpoint.state["sampler"])
            step, sums = checkpoint.state["step"], _Sums(**checkpoint.state["sums"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint does not fit this run: {error}") from error
        momentum = checkpoint.part("momentum.")
        for name, parameter in self.model.named_parameters():
            if name in momentum:
                # the parameter's own layout, so that the resumed arithmetic is the same
                buffer = torch.empty_like(parameter).copy_(momentum[name])
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        torch.set_rng_state(checkpoint.tensors["rng.cpu"])
        if torch.cuda.is_available() and "rng.cuda" in checkpoint.tensors:
            torch.cuda.set_rng_state(checkpoint.tensors["rng.cuda"])
        return step, sums


def _step(
    engine: Engine,
    optimizer: torch.optim.SGD,
    x: Tensor,
    y: Tensor,
    paths: list[tuple[int, ...]] | None,
    cfg: TrainConfig,
) -> tuple[StepResult, Tensor]:
    """One optimiser step; the gradients of several paths add up (FairNAS, algorithm 1).

    Returns:
        loss and correct predictions, and the gradient norm before clipping.
    """
    result = engine.forward_backward(x, y, paths)
    used = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(used, cfg.clip_norm or math.inf)
    optimizer.step()
    return result, norm.to(result.loss.device)


class _Pending:
    """Results of steps as they are on the device: read together, because each read waits for the device."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, StepResult, Tensor]] = []

    def add(self, step: int, images: int, result: StepResult, norm: Tensor) -> None:
        self._steps.append((step, images, result, norm))

    def read(self) -> Iterator[tuple[int, int, float, int, float]]:
        """(step, images, loss, correct, gradient norm) of every step since the last call."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        values = torch.stack(
            [torch.stack((r.loss.double(), r.correct.double(), norm.double())) for *_, r, norm in steps]
        )
        for (step, images, *_), (loss, correct, norm) in zip(steps, values.tolist(), strict=True):
            yield step, images, loss, int(correct), norm


def train(
    model: nn.Module,
    loader: object,
    cfg: TrainConfig,
    *,
    stage: str,
    run_dir: str | Path,
    fingerprint: str,
    sampler: Sampler | None = None,
    evaluate: Callable[[nn.Module], Evaluation] | None = None,
    settings: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    resume: bool = False,
    device: str = "cpu",
) -> Path:
    """Train for `cfg.epochs` epochs and return the path of the final checkpoint.

    Args:
        model: called as `model(x, path)` with a sampler, else as `model(x)`; parameters with `requires_grad` train.
        loader: a `nasfast.data.Loader`, or any sized iterable of (images, labels).
        stage: name in metrics and of the checkpoints, e.g. `supernet` or `retrain/best`.
        run_dir: gets checkpoints/, metrics.jsonl and tensorboard/.
        fingerprint: of what is trained; a checkpoint with another is refused.
        sampler: paths of each step; its state is part of the checkpoint.
        evaluate: called every `cfg.eval_every` epochs, and after the last.
        settings: what else the result depends on, as JSON; a checkpoint with other settings is refused.
        prefix: of the checkpoint files; None makes it from `stage`.
        resume: continue from the newest good checkpoint in `run_dir`; otherwise older ones of the stage must not exist.
        device: where to train; the model is moved there in channels_last.

    Raises:
        TrainingDivergedError: loss or gradient not finite; the last good checkpoint is kept.
        CheckpointError: a checkpoint cannot be written, or none of the existing ones can be used.
        FileExistsError: checkpoints of this stage exist and `resume` is off.
    """
    loader, run_dir = as_epochs(loader), Path(run_dir)
    if cfg.lr is None:
        raise ValueError("train: cfg.lr is not set; train_supernet and retrain choose it when it is null")
    model.to(device=device, memory_format=torch.channels_last).train()
    optimizer = make_optimizer(model, cfg)
    state = _State(model, optimizer, sampler, fingerprint)
    folder = CheckpointFolder(run_dir / "checkpoints", prefix or stage.replace("/", "-"), keep=cfg.keep_checkpoints)
    # how a step is executed does not change what it computes
    trained = {name: value for name, value in cfg.to_dict().items() if name != "engine"}
    settings = {"stage": stage, "train": trained, "batches_per_epoch": len(loader), **(settings or {})}
    per_epoch, total = len(loader), cfg.epochs * len(loader)
    step, sums = 0, _Sums()
    if resume:
        found = folder.latest(fingerprint=fingerprint)
        if found is not None:
            path, checkpoint = found
            if checkpoint.state["settings"] != settings:
                raise CheckpointError(
                    f"{path} was written with other settings: {difference(checkpoint.state['settings'], settings)}; "
                    "resume with the config.yaml of the run"
                )
            step, sums = state.restore(checkpoint)
    elif folder.paths():
        raise FileExistsError(
            f"{folder.folder} holds checkpoints of {stage!r}: continue them (--resume, resume=True), delete them "
            f"({folder.prefix}-*.safetensors), or choose another run directory (--out, run_dir)"
        )

    engine, largest, pending = None, 0, _Pending()
    with TrainLog(run_dir, stage, step=step, total=total) as log:
        clock, seen = time.monotonic(), 0
        while step < total:
            epoch, start = divmod(step, per_epoch)
            for x, y in loader.epoch(epoch, start=start, device=device):
                lr = lr_at(step, total=total, peak=cfg.lr, warmup=round(cfg.warmup_epochs * per_epoch))
                for group in optimizer.param_groups:
                    group["lr"] = lr
                paths = None if sampler is None else sampler.step()
                if len(x) > largest:  # a resumed run may begin with the short batch that ends an epoch
                    largest = len(x)
                    engine = make_engine(
                        model, cfg.engine,
                        batch=tuple(x.shape), label_smoothing=cfg.label_smoothing, bf16=cfg.precision == "bf16",
                    )  # fmt: skip
                result, norm = _step(engine, optimizer, x, y, paths, cfg)
                step += 1
                pending.add(step, len(y) * (1 if paths is None else len(paths)), result, norm)
                epoch_ends = step % per_epoch == 0
                saves = step == total or (step % cfg.checkpoint_every == 0 if cfg.checkpoint_every else epoch_ends)
                # without a device to wait for, every step is looked at when it is made
                if x.device.type == "cpu" or step % cfg.log_every == 0 or epoch_ends or saves:
                    for at, images, loss, correct, length in pending.read():
                        if not (math.isfinite(loss) and math.isfinite(length)):
                            kept = folder.paths()[-1:] or ["none yet"]
                            raise TrainingDivergedError(
                                f"{stage}: loss {loss}, gradient norm {length} at step {at} of {total}; stopped. "
                                f"Last good checkpoint: {kept[0]}. Lower lr ({cfg.lr}) or clip_norm ({cfg.clip_norm})"
                            )
                        sums.loss, sums.correct = sums.loss + loss, sums.correct + correct
                        sums.images, sums.steps, seen = sums.images + images, sums.steps + 1, seen + images
                if step % cfg.log_every == 0 or epoch_ends:
                    now = time.monotonic()
                    log.write(
                        step, epoch=epoch, lr=lr, loss=sums.loss / sums.steps, top1=sums.correct / sums.images,
                        images_per_s=seen / max(now - clock, 1e-9),
                    )  # fmt: skip
                    sums, clock, seen = _Sums(), now, 0
                if evaluate and epoch_ends and ((epoch + 1) % cfg.eval_every == 0 or step == total):
                    result = evaluate(model)
                    log.write(step, eval_top1=result.top1, eval_top5=result.top5, eval_loss=result.loss)
                    clock = time.monotonic()
                if saves:
                    folder.save(step, state.capture(step, sums, settings))
            if step < total and step % per_epoch:
                raise RuntimeError(
                    f"loader has length {per_epoch} but epoch {epoch} ended after {step % per_epoch} batches"
                )
    return folder.paths()[-1]
