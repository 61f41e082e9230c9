"""The training loop, which supernet training, the search of cells and retraining share: read `_Training.run`.

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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nasfast.engine import Engine, make_engine
from nasfast.runtime.device import torch_device
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.termination import Terminated, defer_sigterm
from nasfast.settings import TrainConfig
from nasfast.spaces import Sampler
from nasfast.train.batches import EpochLoader, to_learn_from
from nasfast.train.checkpoint import SUFFIX, CheckpointError, CheckpointFolder, CheckpointWriter, load_checkpoint
from nasfast.train.config import TrainExtras, TrainStage
from nasfast.train.evaluate import Evaluation
from nasfast.train.exchange import Outcome, exchange
from nasfast.train.log import TrainLog
from nasfast.train.schedule import lr_at
from nasfast.train.state import Sums, TrainState, begin, seed_other_rank, with_precision

_LOG = logging.getLogger(__name__)


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient is no longer finite; the last good checkpoint is kept."""


def make_optimizer(model: nn.Module, cfg: TrainConfig) -> torch.optim.SGD:
    """SGD over the parameters that train; weight decay applies only to tensors of two or more dimensions."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("nothing to train: no parameter has requires_grad=True; see Supernet.freeze")
    decayed, plain = [p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    # on a GPU one launch for each group, where PyTorch's default has four or five; elsewhere the default
    fused = trainable[0].is_cuda or None
    optimizer = torch.optim.SGD(groups, lr=cfg.peak_lr, momentum=cfg.momentum, nesterov=cfg.nesterov, fused=fused)
    if fused and cfg.momentum:
        # That launch takes the momentum of all its parameters or of none, and those of a path begin at different steps.
        # From zero, the first momentum is the gradient, as without one.
        for p in trainable:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def update(optimizer: torch.optim.SGD, clip_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most `clip_norm`, if that is not 0, and make a step.

    Parameters whose `grad` is None are left as they are, with their momentum.

    Returns:
        The norm of all gradients before the scaling.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if clip_norm:
        norm = nn.utils.clip_grad_norm_(parameters, clip_norm)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
    optimizer.step()
    return norm


@dataclass
class _Training:
    """One call of `train`; see there for the arguments. `run` is the loop.

    Attributes:
        at: the position: step, sums since the last log line, and the best evaluation.
        judged: the network that is evaluated: the average of the weights where there is one.
        pending: (step, outcome, gradient norm) of steps whose results are still on the device.
        stopped: whether a rank was asked to stop.
    """

    model: nn.Module
    loader: EpochLoader
    cfg: TrainConfig
    stage: TrainStage
    sampler: Sampler | None
    evaluate: Callable[[nn.Module], Evaluation] | None
    extras: TrainExtras
    device: str
    world: World

    def __post_init__(self) -> None:
        model, loader, cfg, stage = self.model, self.loader, self.cfg, self.stage
        self.optimizer = make_optimizer(model, cfg)
        self.total = cfg.epochs * len(loader)
        self.averaged: AveragedModel | None = None
        if (decay := self.extras.ema) is not None:
            self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.judged: nn.Module = model if self.averaged is None else self.averaged.module
        self.state = TrainState(
            model,
            self.optimizer,
            self.sampler,
            self.averaged,
            fingerprint=stage.fingerprint,
            settings={
                "stage": stage.name,
                "train": cfg.result_settings,
                "batches_per_epoch": len(loader),
                **stage.settings,
            },
            loader_kind=getattr(loader, "kind", None),
        )
        folder = Path(stage.run_dir) / "checkpoints"
        self.folder = CheckpointFolder(folder, stage.file_prefix, keep=cfg.keep_checkpoints)
        self.at = begin(self.state, self.folder, stage=stage, world=self.world)
        self.seed = torch.initial_seed()
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.log: TrainLog | None = None
        self.writer: CheckpointWriter | None = None
        self.pending: list[tuple[int, Outcome, Tensor]] = []
        self.stopped = False

    def run(self, engine: Callable[[torch.optim.SGD], Engine] | None) -> Path:
        """Make the steps that are left, and return the path of the last checkpoint."""
        cfg, extras, at, per_epoch = self.cfg, self.extras, self.at, len(self.loader)
        warmup = round(cfg.warmup_epochs * per_epoch)
        with ExitStack() as stack:
            self.stop = stack.enter_context(defer_sigterm())  # first, so that SIGTERM waits for the last checkpoint
            if self.world.is_main:
                self.open_files(stack)
            if at.evaluation_due:
                self.conclude(evaluates=True)
            runner, largest = None if engine is None else engine(self.optimizer), 0
            self.clock, self.seen = time.monotonic(), 0
            while at.step < self.total and not self.exhausted:
                epoch, start = divmod(at.step, per_epoch)
                for x, y in self.loader.epoch(epoch, start=start, device=self.device):
                    lr = lr_at(at.step, total=self.total, peak=cfg.peak_lr, warmup=warmup, end=cfg.lr_end)
                    paths = None if self.sampler is None else self.sampler.step()
                    # a resumed run may begin with the short batch that ends an epoch: an engine serves the largest
                    if runner is None or (engine is None and len(x) > largest):
                        runner, largest = self.new_engine(x), len(x)
                    if self.world.rank:
                        seed_other_rank(self.seed, self.world.rank, at.step, device=self.device)
                    if extras.mix is not None:
                        x, y = extras.mix(x, y)
                        x = x.contiguous(memory_format=torch.channels_last)
                    for group in self.optimizer.param_groups:
                        group["lr"] = lr
                    # gradients of several paths add up (FairNAS, algorithm 1)
                    result = runner.forward_backward(x, y, paths)
                    outcome = exchange(
                        self.trainable,
                        result,
                        len(x),
                        stop=self.stop.requested,
                        world=self.world,
                        same_path=paths is not None,
                    )
                    norm = update(self.optimizer, cfg.clip_norm).to(outcome.loss.device)
                    if self.averaged is not None:
                        self.averaged.update_parameters(self.model)
                    at.step += 1
                    if self.log:  # without reading anything, so that a GPU is not waited for
                        self.log.tick(at.step)
                    self.pending.append((at.step, outcome, norm))
                    epoch_ends, ends = at.step % per_epoch == 0, at.step == self.total
                    evaluates = self.evaluate is not None and epoch_ends and (ends or (epoch + 1) % cfg.eval_every == 0)
                    due = at.step % cfg.checkpoint_every == 0 if cfg.checkpoint_every else epoch_ends
                    saves, logs = evaluates or due or ends, at.step % cfg.log_every == 0 or epoch_ends
                    # reading waits for a GPU, so it is done rarely there; on the CPU every step is read at once. Ranks
                    # stop where they read, so all must agree on `logs` and `saves`.
                    if x.device.type == "cpu" or logs or saves:
                        self.read(1 if paths is None else len(paths))
                    if logs:
                        self.write_means(epoch, lr)
                    if saves or self.stopped:
                        self.conclude(evaluates=evaluates)
                if at.step < self.total and (done := at.step % per_epoch):
                    raise RuntimeError(f"loader has length {per_epoch} but epoch {epoch} ended after {done} batches")
        self.take_result()
        return self.folder.path(at.step)

    @property
    def exhausted(self) -> bool:
        """Whether the training ends early."""
        return self.extras.patience is not None and self.at.stale >= self.extras.patience

    def open_files(self, stack: ExitStack) -> None:
        """Check that checkpoints fit on the disk, and open log and checkpoint writer."""
        stage, at = self.stage, self.at
        if at.step < self.total:
            self.folder.check_room(self.state.size, evaluates=self.evaluate is not None)
        shown = self.world.leads and not stage.quiet
        self.log = stack.enter_context(
            TrainLog(Path(stage.run_dir), stage.name, step=at.step, total=self.total, shown=shown)
        )
        self.writer = stack.enter_context(CheckpointWriter(self.folder))

    def new_engine(self, x: Tensor) -> Engine:
        """What `cfg.engine` asks for: on a CPU an `EagerEngine`, which calls the model."""
        cfg, shape = self.cfg, tuple(x.shape)
        smoothing, bf16 = cfg.label_smoothing, cfg.precision == "bf16"
        return make_engine(self.model, cfg.engine, batch=shape, label_smoothing=smoothing, bf16=bf16)

    def read(self, paths: int) -> None:
        """Read the results of the steps since the last read together; `paths` is the number of paths of a step."""
        steps, self.pending = self.pending, []
        rows = [
            torch.stack([torch.as_tensor(v, dtype=torch.float64, device=norm.device) for v in (*outcome, norm)])
            for _, outcome, norm in steps
        ]
        for (step, *_), (loss, correct, images, stop, norm) in zip(steps, torch.stack(rows).tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                if self.writer:
                    self.writer.wait()
                saved, cfg = self.folder.paths(), self.cfg
                raise TrainingDivergedError(
                    f"{self.stage.name}: loss {loss}, gradient norm {norm} at step {step} of {self.total}; stopped. "
                    f"Last good checkpoint: {saved[-1] if saved else 'none yet'}. "
                    f"Lower lr ({cfg.lr}) or clip_norm ({cfg.clip_norm})"
                )
            self.at.sums.add(loss, int(correct), int(images) * paths)
            self.seen += int(images) * paths
            self.stopped |= stop > 0

    def write_means(self, epoch: int, lr: float) -> None:
        """Log the means since the last log line."""
        sums, now = self.at.sums, time.monotonic()
        if self.log:
            speed = self.seen / max(now - self.clock, 1e-9)
            loss, top1 = sums.loss / sums.steps, sums.correct / sums.images
            self.log.write(self.at.step, epoch=epoch, lr=lr, loss=loss, top1=top1, images_per_s=speed)
        self.at.sums, self.clock, self.seen = Sums(), now, 0

    def conclude(self, *, evaluates: bool) -> None:
        """Evaluate and save, then end the training if SIGTERM came.

        SIGTERM does not wait for an evaluation; the checkpoint then says that the evaluation is due.
        """
        at, better = self.at, False
        at.evaluation_due = evaluates
        if self.evaluate is not None and evaluates and not self.stopped:
            try:
                with self.stop.interruptible():
                    self.world.broadcast(self.judged.buffers())  # the running statistics of rank 0 count
                    result = self.evaluate(self.judged)
                at.evaluation_due, better = False, at.best is None or result.top1 > at.best
                at.stale = 0 if better else at.stale + 1
                if better:
                    at.best = result.top1
                if self.log:
                    self.log.write(at.step, eval_top1=result.top1, eval_top5=result.top5, eval_loss=result.loss)
            except Terminated:
                self.stopped = True
        if self.writer:
            self.writer.save(at.step, self.state.capture(at), best=better)
        if self.stopped:
            if self.writer:
                self.writer.wait()
            raise Terminated(
                f"{self.stage.name}: step {at.step} of {self.total} is saved in {self.folder.path(at.step)}"
            )
        if evaluates:
            self.clock = time.monotonic()  # the speed is that of steps

    def take_result(self) -> None:
        """Give the model the weights that count: those of the best evaluation with patience, else the average."""
        if self.exhausted and self.at.step < self.total:
            _LOG.info(
                "%s: stopped after %d of %d epochs, because %d evaluations were not better than the best top-1, %.2f%%",
                self.stage.name,
                self.at.step // len(self.loader),
                self.cfg.epochs,
                self.at.stale,
                100 * (self.at.best or 0.0),
            )
        if self.extras.patience is not None and self.evaluate is not None:
            if self.world.is_main:
                try:
                    best = load_checkpoint(self.folder.best)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{error}; it has the network that early stopping keeps: delete "
                        f"{self.folder.stem}-*{SUFFIX} and train again"
                    ) from error
                self.model.load_state_dict(best.part("model." if self.averaged is None else "average.module."))
            self.world.broadcast(self.model.state_dict().values())
        elif self.averaged is not None:
            self.model.load_state_dict(self.judged.state_dict())


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
    cfg = with_precision(cfg, stage, device)
    model.to(device).to(memory_format=torch.channels_last).train()
    with world.lock(stage.run_dir):
        return _Training(model, loader, cfg, stage, sampler, evaluate, extras, device, world).run(engine)
