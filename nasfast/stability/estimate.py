"""`nasfast run --seeds N --dry-run`: the tasks, with time and memory from a few timed steps. It writes nothing."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nasfast.data import Loader
from nasfast.retrain import retrain
from nasfast.runtime.device import use_threads
from nasfast.settings.run import RunConfig
from nasfast.settings.tasks import TaskSettings
from nasfast.stability.run import check_seeds, with_threads
from nasfast.stability.work import seed_task
from nasfast.stages.inputs import configured_space, evidence_for, retrain_loaders
from nasfast.supernet import build
from nasfast.tasks.room import MEMORY, workers_for
from nasfast.tasks.view import duration
from nasfast.train import evaluate
from nasfast.train.supernet import make_supernet, train_supernet

_FEW, _MORE = 2, 8
"""Numbers of steps that are timed; their difference has no start and no end of a stage in it."""


@dataclass(frozen=True)
class TaskEstimate:
    """What one kind of task takes.

    Attributes:
        what: the kind of task.
        number: how many there are.
        seconds: time of one, if nothing else uses its cores.
        memory: bytes of its process.
    """

    what: str
    number: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class Plan:
    """What a run with several seeds takes; `str` of it is a table."""

    estimates: tuple[TaskEstimate, ...]
    threads: int
    at_a_time: int
    settings: TaskSettings

    @property
    def seconds(self) -> float:
        """Time of all tasks on this machine; networks are trained when all seeds are scored."""
        return sum(math.ceil(e.number / self.at_a_time) * e.seconds for e in self.estimates)

    def __str__(self) -> str:
        width = max(len(e.what) for e in self.estimates)
        lines = [f"{'tasks':{width}}  number  threads  {'time of one':>11}  memory of one"]
        for e in self.estimates:
            memory = f"{e.memory / 2**30:.1f} GiB"
            lines.append(f"{e.what:{width}}  {e.number:6}  {self.threads:7}  {duration(e.seconds):>11}  {memory:>13}")
        where = "" if self.settings.executor == "processes" else ", if the cluster has as many free cores"
        lines.append(f"{self.at_a_time} at a time: about {duration(self.seconds)}{where}. Nothing was written.")
        if not self.settings.workers and max(e.memory for e in self.estimates) > MEMORY:
            lines.append(
                f"A run counts {MEMORY / 2**30:.0f} GiB for each task, and these need more: set --workers to what fits."
            )
        if self.settings.max_hours is not None and 3600 * self.settings.max_hours < self.seconds:
            lines.append(f"--max-hours {self.settings.max_hours:g} ends before that; --resume continues.")
        return "\n".join(lines)


def plan_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings()) -> Plan:
    """Time a few steps of each kind of task in this process.

    Raises:
        ConfigError, DataError: the settings or images cannot be used.
    """
    check_seeds(cfg, seeds)
    cfg = with_threads(cfg, seeds).resolved()
    use_threads(cfg.threads)
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        trial = _Trial(cfg, folder)
        trainings = 2 * seeds + cfg.retrain.random_architectures
        kinds = [
            ("seeds (supernet, score, search)", seeds, trial.seed_seconds),
            ("networks (retraining)", trainings, trial.network_seconds),
        ]
        estimates = [TaskEstimate(what, number, seconds(), _memory()) for what, number, seconds in kinds]
    # the tasks of the run, so that as many count as fitting here as there
    tasks = [seed_task(cfg, number) for number in range(seeds)]
    return Plan(tuple(estimates), cfg.threads, settings.workers or workers_for(tasks), settings)


class _Trial:
    """A few steps of the tasks of a run."""

    def __init__(self, cfg: RunConfig, folder: str) -> None:
        self.cfg, self.folder = cfg, folder
        self.space, self.loader = configured_space(cfg)
        self.batches, self.loading = _timed_batches(self.loader, cfg.torch_device)

    def seed_seconds(self) -> float:
        """Seconds of a supernet with its score."""
        cfg = self.cfg
        net, sampler = make_supernet(self.space, cfg.method, cfg.supernet, seed=cfg.seed)

        def steps(batches: Sequence[Any]) -> object:
            settings = cfg.train.replace(epochs=1)
            with tempfile.TemporaryDirectory(dir=self.folder) as out:
                return train_supernet(net, batches, sampler, settings, run_dir=out, device=cfg.torch_device)

        seconds = (self._step(steps) + self.loading) * len(self.loader) * cfg.train.epochs
        score = cfg.score.score
        if score.additive:
            return seconds
        evidence = evidence_for(cfg, net)
        paths = list(dict.fromkeys(evidence.sample()))
        score.function(evidence, paths[0])  # reads the images, too
        begin = time.perf_counter()
        for path in paths[1:3]:
            score.function(evidence, path)
        return seconds + (time.perf_counter() - begin) / max(1, len(paths[1:3])) * len(paths)

    def network_seconds(self) -> float:
        """Seconds of the retraining of a network."""
        cfg = self.cfg
        train, val = retrain_loaders(cfg, self.space)
        arch = tuple(max(layer.options, key=lambda choice: _macs(layer, choice)) for layer in self.space.layers)
        few, _ = _timed_batches(val, cfg.torch_device)

        def steps(batches: Sequence[Any]) -> object:
            settings = cfg.retrain.replace(train=cfg.retrain.train.replace(epochs=1))
            with tempfile.TemporaryDirectory(dir=self.folder) as out:
                return retrain(self.space, arch, batches, few[:1], settings, run_dir=out, device=cfg.torch_device)

        network = build(self.space, arch, activation=cfg.supernet.activation).to(cfg.torch_device)
        begin = time.perf_counter()
        evaluate(network, few, device=cfg.torch_device)
        checks = (time.perf_counter() - begin) / len(few) * len(val)
        epochs = cfg.retrain.train.epochs
        training = (self._step(steps) + self.loading) * len(train) * epochs
        return training + checks * math.ceil(epochs / cfg.retrain.train.eval_every)

    def _step(self, steps: Callable[[Sequence[Any]], object]) -> float:
        """Seconds of a step, without what the first one and the ends of a stage take besides."""
        steps(self.batches[:_FEW])
        times = []
        for number in (_FEW, _MORE):
            batches = list(itertools.islice(itertools.cycle(self.batches), number))
            begin = time.perf_counter()
            steps(batches)
            times.append(time.perf_counter() - begin)
        return max(0.0, times[1] - times[0]) / (_MORE - _FEW)


def _macs(layer: Any, choice: int) -> int:
    return layer.cost(choice).macs


def _timed_batches(loader: Loader, device: str) -> tuple[list[Any], float]:
    """A few batches, and the seconds of one."""
    begin = time.perf_counter()
    batches = list(itertools.islice(loader.epoch(0, device=device), _MORE))
    return batches, (time.perf_counter() - begin) / max(1, len(batches))


def _memory() -> int:
    """The most bytes that this process had at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the lines of the timed stages from the screen."""
    log = logging.getLogger("nasfast")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)
