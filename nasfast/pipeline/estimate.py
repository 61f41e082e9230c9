"""`nasfast run --dry_run`: the stages, with time and memory from a few timed steps. No run begins."""

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

import torch

from nasfast.data import Loader
from nasfast.display import text_table
from nasfast.indicators.registry import gives_table, score_of
from nasfast.indicators.scores import Evidence
from nasfast.pipeline.check import check_scoring
from nasfast.pipeline.inputs import configured_space, evidence_for, retrain_loaders
from nasfast.retrain import retrain
from nasfast.runtime.device import use_threads
from nasfast.runtime.lock import run_lock
from nasfast.runtime.progress import duration
from nasfast.search.limits import read_limits
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import Arch, SearchSpace
from nasfast.supernet import Supernet, build
from nasfast.tasks import MEMORY, gpus_for, workers_for
from nasfast.train import evaluate
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)

_FEW, _MORE = 2, 8
"""Numbers of steps that are timed; their difference has no start and no end of a stage in it."""


@dataclass(frozen=True)
class Work:
    """One kind of work: the time of one if nothing else uses its cores, and whether they run side by side, as tasks.

    `memory` is the peak in bytes of the process that timed it, which other kinds may have set.
    """

    what: str
    number: int
    seconds: float
    memory: int
    apart: bool = True


@dataclass(frozen=True)
class Plan:
    """What a run takes; `str` of it is a table. Each kind of work begins when the one before has ended.

    `threads` are those of each, `settings` those of its tasks if it has any, and `notes` lines in front of the table.
    """

    estimates: tuple[Work, ...]
    threads: int
    at_a_time: int
    settings: TaskSettings | None
    notes: tuple[str, ...] = ()
    max_hours: float | None = None

    @property
    def seconds(self) -> float:
        """Time of everything on this machine."""
        return sum(math.ceil(e.number / (self.at_a_time if e.apart else 1)) * e.seconds for e in self.estimates)

    def __str__(self) -> str:
        head = "tasks" if self.settings is not None and all(e.apart for e in self.estimates) else "stages"
        table = [[head, "number", "threads", "time of one", "memory, at most"]]
        for e in self.estimates:
            memory = f"{e.memory / 2**30:.1f} GiB"
            table.append([e.what, str(e.number), str(self.threads), duration(e.seconds), memory])
        how, where = "One after another", ""
        if self.settings is not None:
            how = f"{self.at_a_time}{'' if head == 'tasks' else ' networks'} at a time"
            where = "" if self.settings.executor == "processes" else ", if the cluster has as many free cores"
        lines = [*self.notes, *text_table(table, right=1)]
        lines.append(f"{how}: about {duration(self.seconds)}{where}. Nothing was trained.")
        largest = max((e.memory for e in self.estimates if e.apart), default=0)
        if self.settings is not None and not self.settings.workers and largest > MEMORY:
            lines.append(
                f"A run counts {MEMORY / 2**30:.0f} GiB for each task, and these may need more: set "
                "--workers to what fits."
            )
        if self.max_hours is not None and 3600 * self.max_hours < self.seconds:
            lines.append(f"--max_hours {self.max_hours:g} ends before that; --resume continues.")
        return "\n".join(lines)


def plan_run(cfg: RunConfig, tasks: TaskSettings | None = None, *, max_hours: float | None = None) -> Plan:
    """Time a few steps of each stage of a run in this process; raises what the run would, where it would be refused."""
    use_threads(cfg.threads)
    trial = Trial(cfg)
    number = cfg.retrain.top_k * cfg.retrain.seeds + cfg.retrain.random_architectures
    # networks first: a peak of memory never falls, and the supernet's is not theirs
    networks = Work("networks (retraining)", number, trial.network_seconds(), memory())
    stages = [
        Work(what, 1, seconds(), memory(), apart=False)
        for what, seconds in (
            ("supernet", trial.supernet_seconds),
            ("score", trial.score_seconds),
            ("search", trial.search_seconds),
        )
    ]
    at_a_time, threads = 1, torch.get_num_threads()
    if tasks is not None:
        at_a_time = tasks.workers or workers_for(number, threads=threads, gpus=gpus_for(cfg.torch_device))
    quick = [e.what for e in stages if not e.seconds]
    estimates = (*(e for e in stages if e.seconds), networks)
    return Plan(estimates, threads, at_a_time, tasks, _notes(cfg, trial, quick), max_hours)


def _notes(cfg: RunConfig, trial: Trial, quick: Sequence[str]) -> tuple[str, ...]:
    """What is planned, and what the times leave out."""
    space = trial.space
    macs = [
        sum(extreme(cost.macs for cost in row.values()) for row in space.option_costs()) + space.fixed_cost.macs
        for extreme in (min, max)
    ]
    limits = read_limits(cfg.search, space)
    given = " and ".join(f"{name} {value:,.10g}" for name, value in limits.given.items()) or "none"
    notes = [
        f"{space.name}: {len(space)} layers, {space.cardinality:.3g} architectures of {macs[0]:,} to {macs[1]:,} MACs",
        f"{len(trial.loader.source):,} training images of {space.num_classes} classes; limits of the search: {given}",
    ]
    notes += limits.met_by_all(space)
    if quick:
        notes.append(f"Not timed, because they take seconds: {', '.join(quick)}. Networks are timed at the most MACs.")
    if (cfg.run_dir / "checkpoints").exists():
        notes.append(f"{cfg.run_dir} has a run already: this is the time of a whole one.")
    return (*notes, *trial.written)


class Trial:
    """A few steps of the stages of a run with these resolved settings."""

    def __init__(self, cfg: RunConfig) -> None:
        check_free(cfg)
        self.cfg = cfg
        self.space: SearchSpace
        self.space, self.loader = configured_space(cfg)
        self.net: Supernet
        self.net, self._sampler = make_supernet(self.space, cfg.method, cfg.supernet, seed=cfg.seed)
        check_scoring(cfg, self.net)

    @property
    def written(self) -> tuple[str, ...]:
        """A line about what stays on the disk, if anything does; only a cache of images, which the run reads."""
        folder = self.loader.cache_folder
        return () if folder is None else (f"Decoded images stay in {folder}, where the run finds them.",)

    def supernet_seconds(self) -> float:
        """Seconds of the supernet's training."""
        cfg = self.cfg
        _LOG.info("timing a few steps of the supernet")

        def steps(batches: Sequence[Any]) -> object:
            settings = cfg.train.replace(epochs=1)
            with tempfile.TemporaryDirectory() as out:
                return train_supernet(self.net, batches, self._sampler, settings, run_dir=out, device=cfg.torch_device)

        return _step_seconds(steps, self.loader, cfg.torch_device) * len(self.loader) * cfg.train.epochs

    def score_seconds(self) -> float:
        """Seconds of the table of scores; 0 if they take seconds, or if the search scores whole paths."""
        score = self.cfg.score
        if score.table is not None or score_of(score).additive or not gives_table(score):
            return 0.0
        _LOG.info("timing the scores of a few paths")
        evidence = evidence_for(self.cfg, self.net)
        return self._path_seconds(evidence) * len(dict.fromkeys(evidence.sample()))

    def search_seconds(self) -> float:
        """Seconds of a search that scores whole paths; 0 for one over a table, which takes seconds."""
        search = self.cfg.search
        if gives_table(self.cfg.score):
            return 0.0
        _LOG.info("timing the scores of a few architectures of the search")
        return self._path_seconds(evidence_for(self.cfg, self.net)) * search.population * search.generations

    def network_seconds(self) -> float:
        """Seconds of the retraining of the largest network."""
        _LOG.info("timing a few steps of retraining the largest network")
        arch = tuple(max(row, key=lambda choice: row[choice].macs) for row in self.space.option_costs())
        return network_seconds(self.cfg, self.space, arch)

    def _path_seconds(self, evidence: Evidence) -> float:
        """Seconds of the score of a path."""
        score = score_of(self.cfg.score)
        paths = list(dict.fromkeys(evidence.sample(3)))
        score.function(evidence, paths[0])  # reads the images, too
        begin = time.perf_counter()
        for path in paths[1:]:
            score.function(evidence, path)
        return (time.perf_counter() - begin) / max(1, len(paths[1:]))


def network_seconds(cfg: RunConfig, space: SearchSpace, arch: Arch, *, hold_out: bool = False) -> float:
    """Seconds of the retraining of one network; `hold_out` as in `retrain_loaders`."""
    device, epochs = cfg.torch_device, cfg.retrain.train.epochs
    train, val = retrain_loaders(cfg, space, hold_out=hold_out)
    few, _ = _timed_batches(val, device)
    # batches that are drawn already are augmented, and steps take as long from any weights
    once = cfg.retrain.train.replace(epochs=1)
    settings = cfg.retrain.replace(init="he", auto_augment=None, patience=None, train=once)

    def steps(batches: Sequence[Any]) -> object:
        with tempfile.TemporaryDirectory() as out:
            return retrain(space, arch, batches, few[:1], settings, run_dir=out, device=device)

    network = build(space, arch, activation=cfg.supernet.activation).to(device)
    begin = time.perf_counter()
    evaluate(network, few, device=device)
    checks = (time.perf_counter() - begin) / len(few) * len(val)
    training = _step_seconds(steps, train, device) * len(train) * epochs
    return training + checks * math.ceil(epochs / cfg.retrain.train.eval_every)


def check_free(cfg: RunConfig) -> None:
    """Refuse a run directory that is in use: the run would need its lock, and steps are timed without it."""
    with run_lock(cfg.run_dir, create=False):
        pass


def _step_seconds(steps: Callable[[Sequence[Any]], object], loader: Loader, device: str) -> float:
    """Seconds of a batch and its step, without what the first one and the ends of a stage take besides."""
    given, loading = _timed_batches(loader, device)
    times = []
    with _quiet():
        steps(given[:_FEW])
        for number in (_FEW, _MORE):
            batches = list(itertools.islice(itertools.cycle(given), number))
            begin = time.perf_counter()
            steps(batches)
            times.append(time.perf_counter() - begin)
    return max(0.0, times[1] - times[0]) / (_MORE - _FEW) + loading


def _timed_batches(loader: Loader, device: str) -> tuple[list[Any], float]:
    """A few batches, and the seconds of one."""
    next(iter(loader.epoch(0, device=device)))  # the first batch waits until the images are cached, where they are
    begin = time.perf_counter()
    batches = list(itertools.islice(loader.epoch(0, device=device), _MORE))
    return batches, (time.perf_counter() - begin) / max(1, len(batches))


def memory() -> int:
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
