"""`nasfast run --dry_run`: the stages, with time and memory from a few timed steps. No run begins."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import math
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
from nasfast.indicators.registry import configured_score, gives_table
from nasfast.ops import empty_cache
from nasfast.pipeline.children import MEMORY, gpus_for, workers_for
from nasfast.pipeline.evidence import build_evidence, check_scoring, image_loaders, open_inputs, retrain_loaders
from nasfast.pipeline.run import resolved
from nasfast.retrain import retrain
from nasfast.runtime.capacity import cores, free_memory
from nasfast.runtime.device import use_threads
from nasfast.runtime.memory import freed_memory, keep_freed_memory
from nasfast.runtime.progress import calling, duration
from nasfast.search.limits import layer_costs
from nasfast.search.sampling import sample_under
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import Arch, SearchSpace
from nasfast.supernet import Supernet, build
from nasfast.train import evaluate
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)

_STEPS = 3
"""Timed steps, after one that is not timed."""

_LARGEST, _BATCH = 160, (6, 64)
"""The largest side of timed images in pixels, how many a step has, and the most of smaller ones: under 2 GB."""

_PATH_IMAGES = 32
"""Images on which paths are scored, at most."""

_LARGE = 2500
"""Bytes for each pixel of a batch from which a run may need too much: networks take up to twice as many."""

_DRAWS = 100
"""Random architectures within the limits, of which the largest is timed."""

_LONGEST_START = 10.0
"""Seconds that a process takes at most until its work begins."""

_BUSY = 1.6
"""How many times as long as its work takes a plan lasts on a busy machine, at least; with DALI 1.35 on a quiet one."""


@dataclass(frozen=True)
class Clock:
    """Seconds that work would take if nothing else used the machine.

    On a CPU they are those that the thread which calls it works, for it has a part in all that is parallel. Images that
    `workers` load beside it take a share of all cores. A GPU is timed as it is.
    """

    device: str
    workers: int

    def work(self) -> float:
        """Seconds of this thread, since any moment."""
        return time.perf_counter() if self.device != "cpu" else time.thread_time()

    def loading(self) -> float:
        """Seconds of images that this process loads, since any moment."""
        return self.work() if self.device != "cpu" or not self.workers else time.process_time() / cores()


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
class Steps:
    """Seconds of each timed step of so many images, and its bytes beside what was there before."""

    images: int
    seconds: Sequence[float]
    memory: int


@dataclass(frozen=True)
class Work:
    """One kind of work: what one takes if nothing else uses its cores, and how many tasks run side by side.

    `at_a_time` is None for what no task does, but this process.
    """

    what: str
    number: int
    one: Timing
    at_a_time: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a run takes; `str` of it is a table. Each kind of work begins when the one before has ended.

    `threads` are those of each, `settings` those of its tasks if it has any, and `notes` lines in front of the table.
    `memory` is what the machine has for it, in bytes; None where that is not known.
    """

    estimates: tuple[Work, ...]
    threads: int
    settings: TaskSettings | None
    notes: tuple[str, ...] = ()
    max_hours: float | None = None
    memory: int | None = None

    @property
    def too_large(self) -> str:
        """What needs more memory than there is, and what to do, in a sentence; empty if nothing does."""
        needed = {e.what: e.one.memory * min(e.at_a_time or 1, e.number) for e in self.estimates}
        what = max(needed, key=lambda name: needed[name])
        if self.memory is None or needed[what] <= self.memory:
            return ""
        side_by_side = "fewer --workers, " if max(self._at_a_time, default=1) > 1 else ""
        return (
            f"This machine has {self.memory / 2**30:.1f} GiB of memory for it, and {what} takes up to "
            f"{needed[what] / 2**30:.1f} GiB: give {side_by_side}a smaller --data.batch_size or --space.resolution."
        )

    @property
    def total(self) -> Timing:
        """Everything on this machine."""
        parts = (e.one * math.ceil(e.number / (e.at_a_time or 1)) for e in self.estimates)
        return functools.reduce(Timing.__add__, parts)

    @property
    def _at_a_time(self) -> list[int]:
        """How many tasks run side by side, of each kind of them."""
        return sorted({e.at_a_time for e in self.estimates if e.at_a_time is not None})

    def __str__(self) -> str:
        head = "tasks" if self.settings is not None and all(e.at_a_time for e in self.estimates) else "stages"
        table = [[head, "number", "threads", "time of one", "memory, at most"]]
        for e in self.estimates:
            memory = f"{e.one.memory / 2**30:.1f} GiB"
            table.append([e.what, str(e.number), str(self.threads), duration(e.one.seconds), memory])
        order, condition = "One after another", ""
        if self.settings is not None:
            order = f"{' to '.join(map(str, self._at_a_time))}{'' if head == 'tasks' else ' networks'} at a time"
            condition = "" if self.settings.executor == "processes" else ", if the cluster has as many free cores"
        lines = [*self.notes, *text_table(table, right=1)]
        total = self.total
        lines.append(
            f"{order}: about {duration(total.seconds)}{condition}, up to {duration(total.slowest)} by the slowest of "
            f"{_STEPS} steps of each kind. Nothing was trained."
        )
        largest = max((e.one.memory for e in self.estimates if e.at_a_time), default=0)
        if self.settings is not None and not self.settings.workers and largest > MEMORY:
            lines.append(
                f"A run counts {MEMORY / 2**30:.0f} GiB for each task, and these may need more: set "
                "--workers to what fits."
            )
        lines += filter(None, [self.too_large])
        if self.max_hours is not None and 3600 * self.max_hours < total.seconds:
            lines.append(f"--max_hours {self.max_hours:g} ends before that; --resume continues.")
        return "\n".join(lines)


def warn_of_memory(cfg: RunConfig, tasks: TaskSettings | None) -> None:
    """Say before a run begins on the CPU if it needs more memory than there is; steps are tried where it may be so."""
    pixels = cfg.data.batch_size * cfg.space.get().resolution ** 2
    if cfg.torch_device != "cpu" or pixels * _LARGE < free_memory():
        return
    if sentence := plan_run(cfg, tasks).too_large:
        _LOG.warning("%s", sentence)


def start_of_task() -> Timing:
    """A process that a task is given: it imports what this one did before it planned."""
    seconds = min(time.thread_time(), _LONGEST_START)
    return Timing(seconds, seconds)


def plan_run(cfg: RunConfig, tasks: TaskSettings | None, *, max_hours: float | None = None) -> Plan:
    """Time a few steps of each stage of a run in this process; raises what the run would, where it would be refused.

    `tasks` are those of `Run`.
    """
    cfg = resolved(cfg)
    use_threads(cfg.threads)
    begin, worked = time.perf_counter(), time.thread_time()
    start = start_of_task() if tasks is not None else Timing(0.0, 0.0)
    trial = Trial(cfg)
    number = cfg.retrain.top_k * cfg.retrain.seeds + cfg.retrain.random_architectures
    stages = [
        Work("supernet", 1, trial.supernet()),
        Work("score", 1, trial.score()),
        Work("search", 1, trial.search()),
    ]
    one, at_a_time, threads = trial.network() + start, None, torch.get_num_threads()
    if tasks is not None:
        at_a_time = tasks.workers or workers_for(number, threads=threads, gpus=gpus_for(cfg.torch_device))
    stages.append(Work("networks (retraining)", number, one, at_a_time))
    quick = [e.what for e in stages if not e.one.seconds]
    notes = _notes(trial, quick)
    took, worked = time.perf_counter() - begin, time.thread_time() - worked
    if cfg.torch_device == "cpu":
        notes = (*notes, *busy_notes(took, worked))
    memory = _fresh_peak() + free_memory() if cfg.torch_device == "cpu" else None
    return Plan(tuple(e for e in stages if e.one.seconds), threads, tasks, notes, max_hours, memory)


def busy_notes(took: float, worked: float) -> tuple[str, ...]:
    """A sentence where a plan took much longer than the work of its thread, in seconds."""
    if took <= _BUSY * worked:
        return ()
    return (
        f"The machine was busy: this plan took {duration(took)} for {duration(worked)} of work. The times are those of "
        "a quiet one.",
    )


def _notes(trial: Trial, quick: Sequence[str]) -> tuple[str, ...]:
    """What is planned, and what the times leave out."""
    cfg, space, limits = trial.cfg, trial.inputs.space, trial.inputs.limits
    least, most = layer_costs(space, "macs").range
    maxima = " and ".join(f"{name} {value:,.10g}" for name, value in limits.maxima.items()) or "none"
    notes = [
        f"{space.name}: {len(space)} layers, {space.cardinality:.3g} architectures of {least:,} to {most:,} MACs",
        f"{trial.images:,} training images of {space.num_classes} classes; limits of the search: {maxima}",
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
    """A few steps of the stages of a run; times and memory are scaled to its batches."""

    def __init__(self, cfg: RunConfig) -> None:
        self.inputs, images = open_inputs(cfg)
        loader, _ = image_loaders(cfg, self.inputs.space, images=images)
        # how long a step takes depends on no value of the weights, and orthogonal ones take long to make
        plain = {name: None for name in cfg.supernet.aligned}
        settings = cfg.supernet.replace(init="he", **plain)
        self.images, self.cfg, self._loads = len(loader.source), cfg, _loads(loader, cfg.train.epochs)
        self._small, small = _smaller(cfg, self.inputs.space)
        self.net: Supernet
        self.net, self._sampler = make_supernet(small, cfg.method, settings, seed=cfg.seed)
        check_scoring(cfg, self.net, configured_score(cfg.score))
        self._clock = Clock(cfg.torch_device, cfg.data.workers)
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

        loader = image_loaders(self._small, self.net.space)[0]
        batch = min(cfg.data.batch_size, self.images)
        number, images = self.images // batch, _pixels(self.inputs.space) * batch
        return _step(steps, loader, self._clock, images, self._loads) * (number * cfg.train.epochs)

    def score(self) -> Timing:
        """The table of scores; nothing if it takes seconds, or if the search scores whole paths."""
        settings = self.cfg.score
        if settings.table is not None or configured_score(settings).additive or not gives_table(settings):
            return Timing(0.0, 0.0)
        one, paths = self._path()
        return one * paths

    def search(self) -> Timing:
        """A search that scores whole paths; nothing for one over a table, which takes seconds."""
        if gives_table(self.cfg.score):
            return Timing(0.0, 0.0)
        search = self.cfg.search
        return self._path()[0] * (search.population * search.generations)

    def network(self) -> Timing:
        """The retraining of a network about as large as the limits allow."""
        _LOG.info("timing a few steps of retraining a large network")
        space, rng = self.inputs.space, random.Random(self.cfg.seed)
        archs = [sample_under(space, rng, self.inputs.limits) for _ in range(_DRAWS)]
        arch = max(archs, key=lambda arch: space.cost(arch).macs)
        return network_timing(self.cfg, space, arch)

    def _path(self) -> tuple[Timing, int]:
        """The score of a path, and how many a table needs."""
        _LOG.info("timing the scores of a few paths")
        cfg, small, score = self.cfg, self._small, configured_score(self.cfg.score)
        size = min(_PATH_IMAGES, cfg.data.batch_size, self.images)
        evidence = build_evidence(small.replace(data=small.data.replace(batch_size=size)), self.net, score)
        held = image_loaders(small, self.net.space)[1]
        images = min(len(held.source), cfg.score.images)
        if score.name == "recalibrated_accuracy":
            batches = _timed_batches(held, self._clock)[0]
            half = evidence = evidence.on(evidence.images, loaders=(batches, batches))
            counts = [2 * sum(len(labels) for _, labels in batches)] * 2
            images = cfg.recalibration_batches * cfg.data.batch_size + len(held.source)
        else:
            half = evidence.on(_halves(evidence.batches))
            counts = [sum(len(labels) for _, labels in part.batches) for part in (half, evidence)]
        # every candidate has run once before; it is then prepared, as in most paths of the run
        paths = list(dict.fromkeys(evidence.sample(max(map(len, evidence.values)) + 2 * _STEPS)))
        timed = []
        for part, sample, count in zip((half, evidence), (paths[:-_STEPS], paths[-_STEPS:]), counts, strict=True):
            seconds, before = [], _fresh_peak()
            for path in sample or paths:
                begin = self._clock.work()
                score.function(part, path)
                seconds.append(self._clock.work() - begin)
            timed.append(Steps(count, seconds[-_STEPS:], _peak() - before))
        one = _timing(timed[0], timed[1], _pixels(self.inputs.space) * images)
        return one, len(dict.fromkeys(evidence.sample()))


def _pixels(space: SearchSpace) -> float:
    """How many times as many pixels the images have as those of timed steps."""
    return max(1.0, space.resolution / _LARGEST) ** 2


def _smaller(cfg: RunConfig, space: SearchSpace) -> tuple[RunConfig, SearchSpace]:
    """Settings and space with batches that any machine has memory for."""
    few, most = _BATCH
    size = max(2, min(most, cfg.data.batch_size, round(few * max(1.0, _LARGEST / space.resolution) ** 2)))
    images = min(cfg.score.images, _PATH_IMAGES)
    # a cache would decode all images
    loader: Any = "torchvision" if cfg.data.loader in ("auto", "cache") else cfg.data.loader
    # what processes load cannot be timed from here
    workers = 0 if cfg.torch_device == "cpu" else cfg.data.workers
    data = cfg.data.replace(batch_size=size, loader=loader, workers=workers)
    space = space.replace(resolution=min(_LARGEST, space.resolution))
    return cfg.replace(data=data, score=cfg.score.replace(images=images)), space


def network_timing(cfg: RunConfig, space: SearchSpace, arch: Arch, *, hold_out: bool = False) -> Timing:
    """The retraining of one network; `hold_out` as in `retrain_loaders`."""
    clock, epochs = Clock(cfg.torch_device, cfg.data.workers), cfg.retrain.train.epochs
    loads, pixels = _loads(retrain_loaders(cfg, space, hold_out=hold_out)[0], epochs), _pixels(space)
    small, space = _smaller(cfg, space)
    train, val = retrain_loaders(small, space, hold_out=hold_out)
    few, _ = _timed_batches(val, clock)
    # batches that are drawn already are augmented, and steps take as long from any weights
    once = cfg.retrain.train.replace(epochs=1, log_every=1)
    settings = cfg.retrain.replace(init="he", auto_augment=None, patience=None, train=once)

    def steps(batches: Sequence[Any]) -> object:
        with tempfile.TemporaryDirectory() as out:
            return retrain(space, arch, batches, few[:1], settings, run_dir=out, device=clock.device)

    network = build(space, arch, activation=cfg.supernet.activation).to(clock.device)
    begin = clock.work()
    evaluate(network, few, device=clock.device)
    checks = (clock.work() - begin) / sum(len(labels) for _, labels in few) * len(val.source) * pixels
    batch = min(cfg.data.batch_size, len(train.source))
    number = len(train.source) // batch * epochs
    step = _step(steps, train, clock, pixels * batch, loads)
    return step * number + Timing(checks, checks) * math.ceil(epochs / cfg.retrain.train.eval_every)


def _loads(loader: Loader, epochs: int) -> float:
    """The share of epochs in which images are decoded: a cache does it in the first."""
    return 1 / epochs if loader.kind == "cache" else 1.0


def _step(
    steps: Callable[[Sequence[Any]], object], loader: Loader, clock: Clock, images: float, loads: float
) -> Timing:
    """A batch of so many images and its step, without what the first one and the ends of a stage take."""
    whole, loading = _timed_batches(loader, clock)

    def time_steps(batches: Sequence[Any]) -> Steps:
        moments: dict[int, tuple[float, int]] = {}
        before, size = _fresh_peak(), len(batches[0][1])
        with _quiet(), calling([lambda stage, step, metrics: moments.setdefault(step, (clock.work(), _peak()))]):
            steps(list(itertools.islice(itertools.cycle(batches), _STEPS + 1)))
        times = [moment for moment, _ in moments.values()]
        load = loads * loading * size / len(whole[0][1])
        seconds = [after - begin + load for begin, after in itertools.pairwise(times)]
        return Steps(size, seconds, max(peak for _, peak in moments.values()) - before)

    return _timing(time_steps(_halves(whole)), time_steps(whole), images)


def _halves(batches: Sequence[Any]) -> list[Any]:
    """The first half of each batch, of at least two images, which BatchNorm needs."""
    return [(x[: max(2, len(y) // 2)], y[: max(2, len(y) // 2)]) for x, y in batches]


def _timing(few: Steps, more: Steps, images: float) -> Timing:
    """The timing of so many images, on the line through the steps of `few` and `more`.

    What each further image takes is kept between half of the mean of `more` and all of it: a part of a step is the same
    for any number of images, but no time is exact.
    """
    first, second = statistics.median(few.seconds), statistics.median(more.seconds)
    mean = second / more.images
    further = (second - first) / (more.images - few.images) if more.images > few.images else mean
    seconds = second + min(mean, max(mean / 2, further)) * (images - more.images)
    memory = _fresh_peak() + round(more.memory * images / more.images)
    return Timing(seconds, seconds * max(more.seconds) / max(second, 1e-9), memory)


def _timed_batches(loader: Loader, clock: Clock) -> tuple[list[Any], float]:
    """A few batches, and the seconds of one."""
    next(iter(loader.epoch(0, device=clock.device)))  # the first batch waits until images are cached, where they are
    begin = clock.loading()
    batches = list(itertools.islice(loader.epoch(0, device=clock.device), _STEPS))
    return batches, (clock.loading() - begin) / max(1, len(batches))


def _peak() -> int:
    """The most bytes that this process had at a time, since `_fresh_peak` where the kernel can forget older ones."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if kilobytes is None else kilobytes) << 10


def _fresh_peak() -> int:
    """Give freed memory back, forget the peak of memory, and give the bytes that this process has now."""
    empty_cache()
    if freed_memory() == "kept":
        keep_freed_memory(False)
        keep_freed_memory()
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
