"""The training loop, which supernet training, the search of cells and retraining share.

A run that is killed at any moment and resumed continues from its last checkpoint. On the CPU it ends with the same
bytes as an unbroken run, because the model, optimiser, sampler, generator, data position and running sums are all in
the checkpoint. SIGTERM makes one more checkpoint: after the next step, or on a GPU when the results are read next,
which happens at least every `log_every` steps.

Several ranks make the same steps, each with its share of every batch; see `nasfast.train.exchange`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nasfast.engine import Engine, make_engine
from nasfast.runtime.device import torch_device
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.lock import run_lock
from nasfast.runtime.termination import Terminated, noticed
from nasfast.settings import TrainConfig
from nasfast.spaces import Sampler
from nasfast.train.batches import EpochLoader, to_learn_from
from nasfast.train.checkpoint import SUFFIX, CheckpointError, CheckpointFolder, CheckpointWriter, load_checkpoint
from nasfast.train.config import TrainExtras, TrainStage
from nasfast.train.evaluate import Evaluation
from nasfast.train.exchange import Exchange, FlatExchange, Outcome, OverlappedExchange
from nasfast.train.log import TrainLog
from nasfast.train.schedule import lr_at
from nasfast.train.sgd import ClippedSGD
from nasfast.train.state import Sums, TrainState, begin, seed_other_rank

_LOG = logging.getLogger(__name__)


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient is no longer finite; the last good checkpoint is kept."""


def make_optimizer(model: nn.Module, cfg: TrainConfig) -> ClippedSGD:
    """SGD over the parameters that train; weight decay applies only to tensors of two or more dimensions.

    Raises:
        ValueError: no parameter trains.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("nothing to train: no parameter has requires_grad=True; see Supernet.freeze")
    decayed, plain = [p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return ClippedSGD([g for g in groups if g["params"]], lr=cfg.peak_lr, momentum=cfg.momentum, nesterov=cfg.nesterov)


def _step(
    engine: Engine,
    exchange: Exchange,
    optimizer: ClippedSGD,
    x: Tensor,
    y: Tensor,
    paths: list[tuple[int, ...]] | None,
    cfg: TrainConfig,
    *,
    stop: bool,
) -> tuple[Outcome, Tensor]:
    """One optimiser step; the gradients of several paths add up (FairNAS, algorithm 1).

    Returns:
        the step's outcome over all ranks, and the gradient norm before clipping.
    """
    outcome = exchange.step(x, lambda: engine.forward_backward(x, y, paths), stop=stop)
    norm = optimizer.clipped_step(cfg.clip_norm)
    return outcome, norm.to(outcome.result.loss.device)


class _Pending:
    """Results of steps that are still on the device; they are read together, because each read waits for the device."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Outcome, Tensor]] = []

    def add(self, step: int, outcome: Outcome, norm: Tensor) -> None:
        """Keep the results of one step."""
        self._steps.append((step, outcome, norm))

    def read(self) -> Iterator[tuple[int, float, int, int, float, bool]]:
        """Yield (step, loss, correct, images, gradient norm, stop) of every step since the last call."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        rows = [
            torch.stack([torch.as_tensor(v, dtype=torch.float64, device=norm.device) for v in (*result, *counts, norm)])
            for _, (result, *counts), norm in steps
        ]
        for (step, *_), (loss, correct, images, stop, norm) in zip(steps, torch.stack(rows).tolist(), strict=True):
            yield step, loss, int(correct), int(images), norm, stop > 0


class _Loop:
    """The state of one call of `train`; see there for the arguments.

    Attributes:
        folder: the checkpoints of the stage.
        total: optimiser steps of the stage, if it does not stop early.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: EpochLoader,
        cfg: TrainConfig,
        stage: TrainStage,
        *,
        sampler: Sampler | None,
        evaluate: Callable[[nn.Module], Evaluation] | None,
        engine: Callable[[torch.optim.SGD], Engine] | None,
        extras: TrainExtras,
        device: str,
        world: World,
    ) -> None:
        self._model, self._loader, self._cfg, self._stage = model, loader, cfg, stage
        self._sampler, self._evaluate, self._make_engine = sampler, evaluate, engine
        self._extras, self._device, self._world = extras, device, world
        self._optimizer = make_optimizer(model, cfg)
        self._per_epoch, self.total = len(loader), cfg.epochs * len(loader)
        self._averaged: AveragedModel | None = None
        if extras.ema is not None:
            average = get_ema_multi_avg_fn(extras.ema)
            self._averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        self._state = TrainState(
            model,
            self._optimizer,
            sampler,
            fingerprint=stage.fingerprint,
            settings={"stage": stage.name, "train": cfg.of_result, "batches_per_epoch": len(loader), **stage.settings},
            loader_kind=getattr(loader, "kind", None),
            averaged=self._averaged,
        )
        folder = Path(stage.run_dir) / "checkpoints"
        self.folder = CheckpointFolder(folder, stage.file_prefix, keep=cfg.keep_checkpoints)
        self._at = begin(self._state, self.folder, stage=stage, world=world)
        self._seed = torch.initial_seed()
        self._exchange = (OverlappedExchange if sampler is None and world.size > 1 else FlatExchange)(model, world)
        self._log: TrainLog | None = None
        self._writer: CheckpointWriter | None = None
        self._runner: Engine | None = None
        self._largest, self._pending, self._stopped = 0, _Pending(), False

    def run(self) -> Path:
        """Make the steps that are left, and return the path of the last checkpoint."""
        with ExitStack() as stack:
            self._stop = stack.enter_context(noticed())  # first, so that SIGTERM waits for the last checkpoint
            if self._world.is_main:
                self._open_files(stack)
            if self._at.evaluation_due:
                self._conclude(evaluates=True)
            if self._make_engine:
                self._runner = self._make_engine(self._optimizer)
            self._clock, self._seen = time.monotonic(), 0
            while self._at.step < self.total and not self._exhausted:
                self._run_epoch()
        if self._exhausted and self._at.step < self.total:
            _LOG.info(
                "%s: stopped after %d of %d epochs, because %d evaluations were not better than the best top-1, %.2f%%",
                self._stage.name,
                self._at.step // self._per_epoch,
                self._cfg.epochs,
                self._at.stale,
                100 * (self._at.best or 0.0),
            )
        self._take_result()
        return self.folder.path(self._at.step)

    @property
    def _exhausted(self) -> bool:
        """Whether the training ends early."""
        return self._extras.patience is not None and self._at.stale >= self._extras.patience

    @property
    def _judged(self) -> nn.Module:
        """The network that is evaluated: the average of the weights where there is one."""
        return self._model if self._averaged is None else self._averaged.module

    def _take_result(self) -> None:
        """Give the model the weights that count: those of the best evaluation with patience, else the average.

        Raises:
            CheckpointError: the best checkpoint cannot be read.
        """
        if self._extras.patience is not None and self._evaluate is not None:
            if self._world.is_main:
                try:
                    best = load_checkpoint(self.folder.best)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{error}; it has the network that early stopping keeps: delete "
                        f"{self.folder.stem}-*{SUFFIX} and train again"
                    ) from error
                self._model.load_state_dict(best.part("model." if self._averaged is None else "average.module."))
            self._world.send(self._model.state_dict().values())
        elif self._averaged is not None:
            self._model.load_state_dict(self._averaged.module.state_dict())

    def _open_files(self, stack: ExitStack) -> None:
        """Lock the run directory, check that checkpoints fit on the disk, and open log and checkpoint writer."""
        stage, at = self._stage, self._at
        if self._world.leads:
            stack.enter_context(run_lock(stage.run_dir))
        if at.step < self.total:
            self.folder.check_room(self._state.size, evaluates=self._evaluate is not None)
        shown = self._world.leads and not stage.quiet
        self._log = stack.enter_context(
            TrainLog(Path(stage.run_dir), stage.name, step=at.step, total=self.total, shown=shown)
        )
        self._writer = stack.enter_context(CheckpointWriter(self.folder))

    def _run_epoch(self) -> None:
        """Make the steps from the current one to the end of its epoch."""
        epoch, start = divmod(self._at.step, self._per_epoch)
        for x, y in self._loader.epoch(epoch, start=start, device=self._device):
            self._run_step(x, y, epoch)
        if self._at.step < self.total and (done := self._at.step % self._per_epoch):
            raise RuntimeError(f"loader has length {self._per_epoch} but epoch {epoch} ended after {done} batches")

    def _run_step(self, x: Tensor, y: Tensor, epoch: int) -> None:
        """Make one step, and read, log, evaluate and save what is due after it."""
        at, cfg = self._at, self._cfg
        lr = self._set_lr()
        paths = None if self._sampler is None else self._sampler.step()
        runner = self._runner_of(x)
        if self._world.rank:
            seed_other_rank(self._seed, self._world.rank, at.step, device=self._device)
        if self._extras.mix is not None:
            x, y = self._extras.mix(x, y)
            x = x.contiguous(memory_format=torch.channels_last)
        outcome, norm = _step(runner, self._exchange, self._optimizer, x, y, paths, cfg, stop=self._stop.requested)
        if self._averaged is not None:
            self._averaged.update_parameters(self._model)
        at.step += 1
        self._pending.add(at.step, outcome, norm)
        epoch_ends, ends = at.step % self._per_epoch == 0, at.step == self.total
        evaluates = self._evaluate is not None and epoch_ends and (ends or (epoch + 1) % cfg.eval_every == 0)
        due = at.step % cfg.checkpoint_every == 0 if cfg.checkpoint_every else epoch_ends
        saves, logs = evaluates or due or ends, at.step % cfg.log_every == 0 or epoch_ends
        # reading waits for a GPU, so it is done rarely there; on the CPU every step is read at once
        if x.device.type == "cpu" or logs or saves:
            self._read(1 if paths is None else len(paths))
        if logs:
            self._write_log(epoch, lr)
        if saves or self._stopped:
            self._conclude(evaluates=evaluates)
            self._clock = time.monotonic() if evaluates else self._clock

    def _runner_of(self, x: Tensor) -> Engine:
        """What executes a step of these images."""
        # a resumed run may begin with the short batch that ends an epoch, so the engine is made for the largest
        if self._runner is None or (self._make_engine is None and len(x) > self._largest):
            self._largest = len(x)
            self._runner = make_engine(
                self._exchange.module,
                self._cfg.engine,
                batch=tuple(x.shape),
                label_smoothing=self._cfg.label_smoothing,
                bf16=self._cfg.precision == "bf16",
            )
        return self._runner

    def _set_lr(self) -> float:
        """Give the optimiser the learning rate of the next step, and return it."""
        cfg, warmup = self._cfg, round(self._cfg.warmup_epochs * self._per_epoch)
        lr = lr_at(self._at.step, total=self.total, peak=cfg.peak_lr, warmup=warmup, end=cfg.lr_end)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _read(self, paths: int) -> None:
        """Read the results of the steps since the last read; `paths` is the number of paths of a step.

        Raises:
            TrainingDivergedError: a loss or a gradient norm is not finite.
        """
        for step, loss, correct, images, norm, asked in self._pending.read():
            if not (math.isfinite(loss) and math.isfinite(norm)):
                if self._writer:
                    self._writer.wait()
                saved, cfg = self.folder.paths(), self._cfg
                kept = saved[-1] if saved else "none yet"
                raise TrainingDivergedError(
                    f"{self._stage.name}: loss {loss}, gradient norm {norm} at step {step} of {self.total}; stopped. "
                    f"Last good checkpoint: {kept}. Lower lr ({cfg.lr}) or clip_norm ({cfg.clip_norm})"
                )
            self._at.sums.add(loss, correct, images * paths)
            self._seen += images * paths
            self._stopped |= asked

    def _write_log(self, epoch: int, lr: float) -> None:
        """Write the means since the last log line."""
        at, now = self._at, time.monotonic()
        if self._log:
            self._log.write(
                at.step,
                epoch=epoch,
                lr=lr,
                loss=at.sums.loss / at.sums.steps,
                top1=at.sums.correct / at.sums.images,
                images_per_s=self._seen / max(now - self._clock, 1e-9),
            )
        at.sums, self._clock, self._seen = Sums(), now, 0

    def _conclude(self, *, evaluates: bool) -> None:
        """Evaluate and save, then end the training if SIGTERM came.

        SIGTERM does not wait for an evaluation; the checkpoint then says that the evaluation is due.

        Raises:
            Terminated: SIGTERM came.
        """
        at, better = self._at, False
        at.evaluation_due = evaluates
        if self._evaluate is not None and evaluates and not self._stopped:
            try:
                with self._stop.at_once():
                    self._world.send(self._judged.buffers())  # the running statistics of rank 0 count
                    result = self._evaluate(self._judged)
                at.evaluation_due, better = False, at.best is None or result.top1 > at.best
                at.stale = 0 if better else at.stale + 1
                if better:
                    at.best = result.top1
                if self._log:
                    self._log.write(at.step, eval_top1=result.top1, eval_top5=result.top5, eval_loss=result.loss)
            except Terminated:
                self._stopped = True
        if self._writer:
            self._writer.save(at.step, self._state.capture(at), best=better)
        if self._stopped:
            if self._writer:
                self._writer.wait()
            raise Terminated(
                f"{self._stage.name}: step {at.step} of {self.total} is saved in {self.folder.path(at.step)}"
            )


def train(
    model: nn.Module,
    loader: object,
    cfg: TrainConfig,
    stage: TrainStage,
    *,
    sampler: Sampler | None = None,
    evaluate: Callable[[nn.Module], Evaluation] | None = None,
    engine: Callable[[torch.optim.SGD], Engine] | None = None,
    extras: TrainExtras = TrainExtras(),
    device: str = "cpu",
    world: World = SINGLE,
) -> Path:
    """Train for `cfg.epochs` epochs and return the path of the final checkpoint.

    With `stage.extends`, a training with checkpoints of fewer epochs continues from the newest one with more. From that
    step on, the learning rate is that of the cosine over all epochs, so after a finished training it rises again from
    `cfg.lr_end`: to a quarter of its range between `lr_end` and `lr` after 20 epochs of 30.

    Args:
        model: called as `model(x, path)` with a sampler, otherwise as `model(x)`; parameters with `requires_grad`
            train.
        loader: a `nasfast.data.Loader`, or any sized iterable of (images, labels), floating (N, C, H, W) and integers
            (N,). With several ranks, each loader gives its rank's shares of the batches.
        cfg: settings of the optimiser, the engine, the log and the checkpoints; `lr` must be given.
        stage: the name of the stage, its files, and what a checkpoint must match.
        sampler: gives the paths of each step; its state is part of the checkpoint.
        evaluate: called every `cfg.eval_every` epochs and after the last one, on every rank; it must return the same on
            all ranks.
        engine: takes the optimiser and returns what executes the steps; None takes `cfg.engine`. Whatever a step of it
            changes besides the parameters that train must be a buffer of the model, so that checkpoints have it.
        extras: an average of the weights, early stopping, and what changes batches.
        device: where to train; the model is moved there in channels_last. `auto` takes the GPU if torch sees one.
        world: the ranks that train together; each begins with the model, sampler and position of rank 0.

    Raises:
        ValueError: `cfg.lr` is None, no parameter trains, or the loader has no batch or wrong ones.
        TypeError: the loader or its batches are of another type.
        ConfigError: `device` is a GPU, and torch sees none.
        TrainingDivergedError: the loss or a gradient is not finite; the last good checkpoint is kept.
        CheckpointError: a checkpoint cannot be written, there is no room for them, or none of the existing ones can be
            used.
        RunDirectoryError: another process writes to the run directory, or nothing can be written there.
        FileExistsError: the stage has checkpoints and `stage.resume` is off.
        Terminated: SIGTERM came; a checkpoint of the last step is saved.
        RankError: another rank is gone.
    """
    loader = to_learn_from(loader, classes=getattr(getattr(model, "space", None), "num_classes", None) or None)
    device = torch_device(device)
    model.to(device).to(memory_format=torch.channels_last).train()
    loop = _Loop(
        model,
        loader,
        cfg,
        stage,
        sampler=sampler,
        evaluate=evaluate,
        engine=engine,
        extras=extras,
        device=device,
        world=world,
    )
    return loop.run()
