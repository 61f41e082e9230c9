"""The training loop: supernet training and retraining share it.

A run killed at any moment and resumed continues from its last checkpoint and, on CPU, ends with the same bytes as an
unbroken one: model, optimiser, sampler, generator, data position and running sums are all in the checkpoint. SIGTERM
makes one of its own: after the step that follows, or on a GPU at the next of every `log_every` looks at the results.

Several ranks make the same steps, each with its share of every batch; see `nasfast.train.exchange`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nasfast.config import ConfigBase
from nasfast.engine import Engine, make_engine
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.lock import run_lock
from nasfast.runtime.termination import Terminated, noticed
from nasfast.spaces import Sampler
from nasfast.train.batches import as_epochs
from nasfast.train.checkpoint import CheckpointFolder, CheckpointWriter
from nasfast.train.evaluate import Evaluation
from nasfast.train.exchange import Exchange, FlatExchange, Outcome, OverlappedExchange
from nasfast.train.log import TrainLog
from nasfast.train.schedule import lr_at
from nasfast.train.state import Sums, TrainState, begin, seed_other_rank


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient is not finite any more; the last good checkpoint is kept."""


@dataclass(frozen=True)
class TrainConfig(ConfigBase):
    """One training stage: SGD with cosine learning rate.

    Attributes:
        epochs: passes over the training images.
        lr: peak learning rate; null takes 0.5 where only indicators train and 0.1 elsewhere.
        lr_end: learning rate that the cosine ends at.
        momentum: of SGD.
        nesterov: Nesterov momentum.
        weight_decay: of SGD; none on BatchNorm parameters and biases.
        warmup_epochs: linear warm-up, may be a fraction.
        label_smoothing: of the cross-entropy.
        clip_norm: largest gradient norm, 0 for no clipping.
        precision: `fp32`, or `bf16` autocast.
        engine: `eager`, `graphs` (CUDA graphs per candidate of a supernet), or `auto`: graphs where they can be had.
        log_every: optimiser steps between log lines.
        checkpoint_every: optimiser steps between checkpoints, 0 for one per epoch; evaluations come with one besides.
        keep_checkpoints: how many of the newest to keep, and besides them the one of the best validation top-1; the
            one before the newest is the fallback.
        eval_every: epochs between evaluations where there is a validation loader; the last epoch always has one.
    """

    epochs: int = 10
    lr: float | None = None
    lr_end: float = 0.0
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
        for name in ("lr_end", "momentum", "weight_decay", "warmup_epochs", "clip_norm", "checkpoint_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")


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


def _step(
    engine: Engine,
    exchange: Exchange,
    optimizer: torch.optim.SGD,
    x: Tensor,
    y: Tensor,
    paths: list[tuple[int, ...]] | None,
    cfg: TrainConfig,
    *,
    stop: bool,
) -> tuple[Outcome, Tensor]:
    """One optimiser step; the gradients of several paths add up (FairNAS, algorithm 1).

    Returns:
        what it gave, over all ranks, and the gradient norm before clipping.
    """
    outcome = exchange.step(x, lambda: engine.forward_backward(x, y, paths), stop=stop)
    used = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(used, cfg.clip_norm or math.inf)
    optimizer.step()
    return outcome, norm.to(outcome.result.loss.device)


class _Pending:
    """Results of steps as they are on the device: read together, because each read waits for the device."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Outcome, Tensor]] = []

    def add(self, step: int, outcome: Outcome, norm: Tensor) -> None:
        self._steps.append((step, outcome, norm))

    def read(self) -> Iterator[tuple[int, float, int, int, float, bool]]:
        """(step, loss, correct, images, gradient norm, stop) of every step since the last call."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        rows = [
            torch.stack([torch.as_tensor(v, dtype=torch.float64, device=norm.device) for v in (*result, *counts, norm)])
            for _, (result, *counts), norm in steps
        ]
        for (step, *_), (loss, correct, images, stop, norm) in zip(steps, torch.stack(rows).tolist(), strict=True):
            yield step, loss, int(correct), int(images), norm, stop > 0


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
    world: World = SINGLE,
    engine: Callable[[torch.optim.SGD], Engine] | None = None,
    quiet: bool = False,
) -> Path:
    """Train for `cfg.epochs` epochs and return the path of the final checkpoint.

    Args:
        model: called as `model(x, path)` with a sampler, else as `model(x)`; parameters with `requires_grad` train.
        loader: a `nasfast.data.Loader`, or any sized iterable of (images, labels); with several ranks its batches are
            this rank's shares.
        stage: name in metrics and of the checkpoints, e.g. `supernet` or `retrain/best`.
        run_dir: gets checkpoints/, metrics.jsonl and tensorboard/, from rank 0 alone.
        fingerprint: of what is trained; a checkpoint with another is refused.
        sampler: paths of each step; its state is part of the checkpoint.
        evaluate: called every `cfg.eval_every` epochs, and after the last; on every rank, and must give all of them the
            same.
        settings: what else the result depends on, as JSON; a checkpoint with other settings is refused.
        prefix: of the checkpoint files; None makes it from `stage`.
        resume: continue from the newest good checkpoint in `run_dir`; otherwise older ones of the stage must not exist,
            but for those of this torchrun job, which continues them when it starts its processes again.
        device: where to train; the model is moved there in channels_last.
        world: the ranks that train together; every one begins with the model, sampler and position of rank 0.
        engine: makes what executes the steps, from the optimiser; None takes `cfg.engine`. What such a step changes
            besides the parameters that train must be buffers of the model, so that checkpoints have it.
        quiet: show nothing on the screen.

    Raises:
        TrainingDivergedError: loss or gradient not finite; the last good checkpoint is kept.
        CheckpointError: a checkpoint cannot be written, there is no room for them, or none of the existing ones can be
            used.
        RunDirectoryError: another process writes to `run_dir`, or nothing can be written there.
        FileExistsError: checkpoints of this stage exist and `resume` is off.
        Terminated: SIGTERM came; a checkpoint of the last step is saved.
        RankError: another rank is gone.
    """
    loader, run_dir = as_epochs(loader), Path(run_dir)
    if cfg.lr is None:
        raise ValueError("train: cfg.lr is not set; train_supernet and retrain choose it when it is null")
    model.to(device=device, memory_format=torch.channels_last).train()
    optimizer = make_optimizer(model, cfg)
    # how a step is executed does not change what it computes
    trained = {name: value for name, value in cfg.to_dict().items() if name != "engine"}
    settings = {"stage": stage, "train": trained, "batches_per_epoch": len(loader), **(settings or {})}
    state = TrainState(
        model, optimizer, sampler, fingerprint=fingerprint, settings=settings, loader_kind=getattr(loader, "kind", None)
    )
    folder = CheckpointFolder(run_dir / "checkpoints", prefix or stage.replace("/", "-"), keep=cfg.keep_checkpoints)
    per_epoch, total = len(loader), cfg.epochs * len(loader)
    at = begin(state, folder, stage=stage, resume=resume, world=world)
    seed = torch.initial_seed()
    exchange = (OverlappedExchange if sampler is None and world.size > 1 else FlatExchange)(model, world)

    with ExitStack() as stack:
        stop = stack.enter_context(noticed())  # first, so that SIGTERM waits for the last checkpoint
        log = writer = None
        if world.is_main:
            if world.leads:
                stack.enter_context(run_lock(run_dir))
            if at.step < total:
                folder.check_room(state.size, evaluates=evaluate is not None)
            log = stack.enter_context(
                TrainLog(run_dir, stage, step=at.step, total=total, shown=world.leads and not quiet)
            )
            writer = stack.enter_context(CheckpointWriter(folder))

        def conclude(*, evaluates: bool, stopped: bool) -> None:
            """Evaluate, save, and stop if SIGTERM came; that does not wait for an evaluation, which is due then."""
            at.evaluation_due, better = evaluates, False
            if evaluates and not stopped:
                try:
                    with stop.at_once():
                        world.send(model.buffers())  # running statistics are rank 0's
                        found = evaluate(model)
                    at.evaluation_due, better = False, at.best is None or found.top1 > at.best
                    if better:
                        at.best = found.top1
                    if log:
                        log.write(at.step, eval_top1=found.top1, eval_top5=found.top5, eval_loss=found.loss)
                except Terminated:
                    stopped = True
            if writer:
                writer.save(at.step, state.capture(at), best=better)
            if stopped:
                if writer:
                    writer.wait()
                saved = f"{folder.path(at.step)} is saved, --resume continues"
                raise Terminated(f"{stage}: terminated at step {at.step} of {total}; {saved}")

        if at.evaluation_due:
            conclude(evaluates=True, stopped=False)
        runner, largest, pending, stopped = engine(optimizer) if engine else None, 0, _Pending(), False
        clock, seen = time.monotonic(), 0
        while at.step < total:
            epoch, start = divmod(at.step, per_epoch)
            for x, y in loader.epoch(epoch, start=start, device=device):
                lr = lr_at(
                    at.step, total=total, peak=cfg.lr, warmup=round(cfg.warmup_epochs * per_epoch), end=cfg.lr_end
                )
                for group in optimizer.param_groups:
                    group["lr"] = lr
                paths = None if sampler is None else sampler.step()
                if len(x) > largest:  # a resumed run may begin with the short batch that ends an epoch
                    largest = len(x)
                    runner = (
                        runner
                        if engine
                        else make_engine(
                            exchange.module,
                            cfg.engine,
                            batch=tuple(x.shape),
                            label_smoothing=cfg.label_smoothing,
                            bf16=cfg.precision == "bf16",
                        )
                    )
                if world.rank:
                    seed_other_rank(seed, world.rank, at.step, device=device)
                outcome, norm = _step(runner, exchange, optimizer, x, y, paths, cfg, stop=stop.requested)
                at.step += 1
                pending.add(at.step, outcome, norm)
                epoch_ends, ends = at.step % per_epoch == 0, at.step == total
                evaluates = evaluate is not None and epoch_ends and (ends or (epoch + 1) % cfg.eval_every == 0)
                due = at.step % cfg.checkpoint_every == 0 if cfg.checkpoint_every else epoch_ends
                saves = evaluates or due or ends
                # without a device to wait for, every step is looked at when it is made
                if x.device.type == "cpu" or at.step % cfg.log_every == 0 or epoch_ends or saves:
                    for step, loss, correct, images, length, asked in pending.read():
                        if not (math.isfinite(loss) and math.isfinite(length)):
                            if writer:
                                writer.wait()
                            kept = folder.paths()[-1:] or ["none yet"]
                            raise TrainingDivergedError(
                                f"{stage}: loss {loss}, gradient norm {length} at step {step} of {total}; stopped. "
                                f"Last good checkpoint: {kept[0]}. Lower lr ({cfg.lr}) or clip_norm ({cfg.clip_norm})"
                            )
                        images *= 1 if paths is None else len(paths)
                        at.sums.add(loss, correct, images)
                        seen, stopped = seen + images, stopped or asked
                if at.step % cfg.log_every == 0 or epoch_ends:
                    now = time.monotonic()
                    if log:
                        log.write(
                            at.step,
                            epoch=epoch,
                            lr=lr,
                            loss=at.sums.loss / at.sums.steps,
                            top1=at.sums.correct / at.sums.images,
                            images_per_s=seen / max(now - clock, 1e-9),
                        )
                    at.sums, clock, seen = Sums(), now, 0
                if saves or stopped:
                    conclude(evaluates=evaluates, stopped=stopped)
                    clock = time.monotonic() if evaluates else clock
            if at.step < total and at.step % per_epoch:
                raise RuntimeError(
                    f"loader has length {per_epoch} but epoch {epoch} ended after {at.step % per_epoch} batches"
                )
    return folder.path(total)
