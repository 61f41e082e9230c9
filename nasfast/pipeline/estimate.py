"""`nasfast run --dry_run`: the stages, with time and memory from a few timed steps. No run begins."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import math
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nasfast.data import Loader
from nasfast.display import text_table
from nasfast.indicators.registry import gives_table, score_of
from nasfast.indicators.scores import Evidence
from nasfast.pipeline.check import check_scoring
from nasfast.pipeline.inputs import configured_space, evidence_for, image_loaders, retrain_loaders
from nasfast.retrain import retrain
from nasfast.runtime.capacity import cores
from nasfast.runtime.device import use_threads
from nasfast.runtime.lock import run_lock
from nasfast.runtime.progress import calling, duration
from nasfast.search.limits import read_limits
from nasfast.search.sampling import sample_under
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import Arch, SearchSpace
from nasfast.supernet import Supernet, build
from nasfast.tasks import MEMORY, gpus_for, workers_for
from nasfast.train import evaluate
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)

_STEPS = 3
"""Timed steps, after one that is not timed."""

_TRIED = (4, 64)
"""Images of such a step at 224 x 224 pixels, and the most of them at smaller sizes: they take less than 2 GB."""

_PATH_IMAGES = 16
"""Images on which paths are scored."""

_DRAWS = 100
"""Random architectures within the limits, of which the largest is timed."""

_BUSY = 0.5
"""Load of the machine, in shares of its cores, above which the plan says so."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a piece of work by the median and by the slowest timed step, and its peak of memory in bytes."""

    seconds: float
    slowest: float
    memory: int = 0

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.seconds + other.seconds, self.slowest + other.slowest, max(self.memory, other.memory))

    def __mul__(self, count: float) -> Timing:
        return Timing(self.seconds * count, self.slowest * count, self.memory)


@dataclass(frozen=True)
class Work:
    """One kind of work: what one takes if nothing else uses its cores, and whether they run side by side, as tasks."""

    what: str
    number: int
    one: Timing
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
    def total(self) -> Timing:
        """Everything on this machine."""
        parts = (e.one * math.ceil(e.number / (self.at_a_time if e.apart else 1)) for e in self.estimates)
        return functools.reduce(Timing.__add__, parts)

    def __str__(self) -> str:
        head = "tasks" if self.settings is not None and all(e.apart for e in self.estimates) else "stages"
        table = [[head, "number", "threads", "time of one", "memory, at most"]]
        for e in self.estimates:
            memory = f"{e.one.memory / 2**30:.1f} GiB"
            table.append([e.what, str(e.number), str(self.threads), duration(e.one.seconds), memory])
        how, where = "One after another", ""
        if self.settings is not None:
            how = f"{self.at_a_time}{'' if head == 'tasks' else ' networks'} at a time"
            where = "" if self.settings.executor == "processes" else ", if the cluster has as many free cores"
        lines = [*self.notes, *text_table(table, right=1)]
        total = self.total
        lines.append(
            f"{how}: about {duration(total.seconds)}{where}, up to {duration(total.slowest)} by the slowest of "
            f"{_STEPS} steps of each kind. Nothing was trained."
        )
        largest = max((e.one.memory for e in self.estimates if e.apart), default=0)
        if self.settings is not None and not self.settings.workers and largest > MEMORY:
            lines.append(
                f"A run counts {MEMORY / 2**30:.0f} GiB for each task, and these may need more: set "
                "--workers to what fits."
            )
        if self.max_hours is not None and 3600 * self.max_hours < total.seconds:
            lines.append(f"--max_hours {self.max_hours:g} ends before that; --resume continues.")
        return "\n".join(lines)


def plan_run(cfg: RunConfig, tasks: TaskSettings | None = None, *, max_hours: float | None = None) -> Plan:
    """Time a few steps of each stage of a run in this process; raises what the run would, where it would be refused."""
    use_threads(cfg.threads)
    load = os.getloadavg()[0]
    trial = Trial(cfg)
    number = cfg.retrain.top_k * cfg.retrain.seeds + cfg.retrain.random_architectures
    stages = [
        Work("supernet", 1, trial.supernet(), apart=False),
        Work("score", 1, trial.score(), apart=False),
        Work("search", 1, trial.search(), apart=False),
        Work("networks (retraining)", number, trial.network()),
    ]
    at_a_time, threads = 1, torch.get_num_threads()
    if tasks is not None:
        at_a_time = tasks.workers or workers_for(number, threads=threads, gpus=gpus_for(cfg.torch_device))
    quick = [e.what for e in stages if not e.one.seconds]
    notes = _notes(cfg, trial, quick)
    if load > _BUSY * cores():
        notes = (*notes, f"The machine is busy (load {load:.1f}, {cores()} cores): a quiet one takes less time.")
    return Plan(tuple(e for e in stages if e.one.seconds), threads, at_a_time, tasks, notes, max_hours)


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
        f"{trial.images:,} training images of {space.num_classes} classes; limits of the search: {given}",
    ]
    notes += limits.met_by_all(space)
    if quick:
        notes.append(
            f"Not timed, because they take seconds: {', '.join(quick)}. "
            "Networks are timed at about the most MACs that the limits allow."
        )
    if (cfg.run_dir / "checkpoints").exists():
        notes.append(f"{cfg.run_dir} has a run already: this is the time of a whole one.")
    return (*notes, *trial.written)


class Trial:
    """A few steps of the stages of a run with these resolved settings; times and memory are scaled to its batches."""

    def __init__(self, cfg: RunConfig) -> None:
        check_free(cfg)
        self.space: SearchSpace
        self.space, loader = configured_space(cfg)
        # how long a step takes depends on no value of the weights, and orthogonal ones take long to make
        plain = {name: None for name in cfg.supernet.aligned}
        settings = cfg.supernet.replace(init="he", **plain)
        self.net: Supernet
        self.net, self._sampler = make_supernet(self.space, cfg.method, settings, seed=cfg.seed)
        check_scoring(cfg, self.net)
        self.images, self._given, self._loads = len(loader.source), cfg, _loads(loader, cfg.train.epochs)
        self.cfg, self._share = _smaller(cfg, self.space)
        # only a cache of images, which the run reads
        folder = loader.cache_folder
        self.written = () if folder is None else (f"Decoded images stay in {folder}, where the run finds them.",)

    def supernet(self) -> Timing:
        """The supernet's training."""
        cfg = self.cfg
        _LOG.info("timing a few steps of the supernet")

        def steps(batches: Sequence[Any]) -> object:
            settings = cfg.train.replace(epochs=1, log_every=1)
            with tempfile.TemporaryDirectory() as out:
                return train_supernet(self.net, batches, self._sampler, settings, run_dir=out, device=cfg.torch_device)

        loader = image_loaders(cfg, self.space, hold_out=cfg.holds_out)[0]
        number = max(1, self.images // self._given.data.batch_size)
        return _step(steps, loader, cfg.torch_device, self._share, self._loads) * (number * cfg.train.epochs)

    def score(self) -> Timing:
        """The table of scores; nothing if it takes seconds, or if the search scores whole paths."""
        score = self.cfg.score
        if score.table is not None or score_of(score).additive or not gives_table(score):
            return Timing(0.0, 0.0)
        evidence = evidence_for(self.cfg, self.net)
        return self._path(evidence) * len(dict.fromkeys(evidence.sample()))

    def search(self) -> Timing:
        """A search that scores whole paths; nothing for one over a table, which takes seconds."""
        search = self.cfg.search
        if gives_table(self.cfg.score):
            return Timing(0.0, 0.0)
        return self._path(evidence_for(self.cfg, self.net)) * (search.population * search.generations)

    def network(self) -> Timing:
        """The retraining of a network about as large as the limits allow."""
        _LOG.info("timing a few steps of retraining a large network")
        limits = read_limits(self.cfg.search, self.space)
        rng = random.Random(self.cfg.seed)
        drawn = [sample_under(self.space, rng, limits) for _ in range(_DRAWS)]
        arch = max(drawn, key=lambda arch: self.space.cost(arch).macs)
        return network_timing(self._given, self.space, arch)

    def _path(self, evidence: Evidence) -> Timing:
        """The score of a path."""
        _LOG.info("timing the scores of a few paths")
        score = score_of(self.cfg.score)
        paths = list(dict.fromkeys(evidence.sample(_STEPS)))
        score.function(evidence, paths[0])  # reads the images, too
        seconds, before = [], _fresh_peak()
        for path in paths[1:] or paths:
            begin = time.perf_counter()
            score.function(evidence, path)
            seconds.append(time.perf_counter() - begin)
        return _scaled(seconds, before, self._path_share() if score.images else 1.0)

    def _path_share(self) -> float:
        """How many times as many images a score of a path has in the run."""
        given, cfg = self._given, self.cfg
        held = len(image_loaders(cfg, self.space, hold_out=cfg.holds_out)[1].source)
        if given.score.name != "recalibrated_accuracy":
            return min(held, given.score.images) / min(held, cfg.score.images)
        recalibration = given.recalibration_batches * cfg.data.batch_size
        return (self._share * recalibration + held) / (recalibration + held)


def _smaller(cfg: RunConfig, space: SearchSpace) -> tuple[RunConfig, float]:
    """The settings with batches that any machine has memory for, and how many times as many images they have."""
    few, most = _TRIED
    size = max(2, min(most, cfg.data.batch_size, round(few * (224 / space.resolution) ** 2)))
    share = cfg.data.batch_size / size
    images = min(cfg.score.images, _PATH_IMAGES)
    # a cache would decode all images
    loader: Any = "torchvision" if cfg.data.loader in ("auto", "cache") else cfg.data.loader
    data = cfg.data.replace(batch_size=size, loader=loader)
    return cfg.replace(data=data, score=cfg.score.replace(images=images)), share


def network_timing(cfg: RunConfig, space: SearchSpace, arch: Arch, *, hold_out: bool = False) -> Timing:
    """The retraining of one network; `hold_out` as in `retrain_loaders`."""
    device, epochs = cfg.torch_device, cfg.retrain.train.epochs
    small, share = _smaller(cfg, space)
    loads = _loads(retrain_loaders(cfg, space, hold_out=hold_out)[0], epochs)
    train, val = retrain_loaders(small, space, hold_out=hold_out)
    few, _ = _timed_batches(val, device)
    # batches that are drawn already are augmented, and steps take as long from any weights
    once = cfg.retrain.train.replace(epochs=1, log_every=1)
    settings = cfg.retrain.replace(init="he", auto_augment=None, patience=None, train=once)

    def steps(batches: Sequence[Any]) -> object:
        with tempfile.TemporaryDirectory() as out:
            return retrain(space, arch, batches, few[:1], settings, run_dir=out, device=device)

    network = build(space, arch, activation=cfg.supernet.activation).to(device)
    begin = time.perf_counter()
    evaluate(network, few, device=device)
    checks = (time.perf_counter() - begin) / sum(len(labels) for _, labels in few) * len(val.source)
    number = max(1, len(train.source) // cfg.data.batch_size) * epochs
    return _step(steps, train, device, share, loads) * number + Timing(checks, checks) * math.ceil(
        epochs / cfg.retrain.train.eval_every
    )


def check_free(cfg: RunConfig) -> None:
    """Refuse a run directory that is in use: the run would need its lock, and steps are timed without it."""
    with run_lock(cfg.run_dir, create=False):
        pass


def _loads(loader: Loader, epochs: int) -> float:
    """The share of epochs in which images are decoded: a cache does it in the first."""
    return 1 / epochs if loader.kind == "cache" else 1.0


def _step(steps: Callable[[Sequence[Any]], object], loader: Loader, device: str, share: float, loads: float) -> Timing:
    """A batch and its step, without what the first one and the ends of a stage take; `share` times as many images."""
    given, loading = _timed_batches(loader, device)
    moments: dict[int, float] = {}
    before = _fresh_peak()
    with _quiet(), calling([lambda stage, step, metrics: moments.setdefault(step, time.perf_counter())]):
        steps(list(itertools.islice(itertools.cycle(given), _STEPS + 1)))
    seconds = [after - begin + loads * loading for begin, after in itertools.pairwise(moments.values())]
    return _scaled(seconds, before, share)


def _scaled(seconds: Sequence[float], before: int, share: float) -> Timing:
    """The timing of `share` times as many images; `before` is the memory that does not grow with them, in bytes."""
    peak = before + round(share * max(0, _peak() - before))
    return Timing(share * statistics.median(seconds), share * max(seconds), peak)


def _timed_batches(loader: Loader, device: str) -> tuple[list[Any], float]:
    """A few batches, and the seconds of one."""
    next(iter(loader.epoch(0, device=device)))  # the first batch waits until the images are cached, where they are
    begin = time.perf_counter()
    batches = list(itertools.islice(loader.epoch(0, device=device), _STEPS))
    return batches, (time.perf_counter() - begin) / max(1, len(batches))


def _peak() -> int:
    """The most bytes that this process had at a time, since `_fresh_peak` where the kernel can forget older ones."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if found is None else found) << 10


def _fresh_peak() -> int:
    """Forget the peak of memory, and give the bytes that this process has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


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
