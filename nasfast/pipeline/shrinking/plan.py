"""What `nasfast shrink --dry_run` says: what is searched, what not, and time and memory of each stage."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nasfast import shrink
from nasfast.display import counted
from nasfast.pipeline.children import gpus_for, workers_for
from nasfast.pipeline.estimate import Plan, Timing, Work, busy_notes, start_of_task
from nasfast.pipeline.shrinking.files import clone
from nasfast.pipeline.shrinking.images import lesson_epochs
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.run import ShrinkConfig, ShrinkRun
from nasfast.pipeline.shrinking.stages import BEFORE_IMAGES, absolute_limits, full_costs, sizes_of
from nasfast.pipeline.shrinking.timing import deployed_network
from nasfast.runtime.device import use_threads
from nasfast.search import Limits
from nasfast.settings import TaskSettings
from nasfast.shrink import Found

_BATCH = 16
"""Images of a timed step."""

_EXPORT, _PAGE, _CAPTURE = 55.0, 5.0, 5.0
"""Seconds of an export, of which most is torch.onnx.export's, of the page, and of the capture of one network."""

_LATENCY = {"fp32": 30.0, "int8": 120.0}
"""Seconds of the latencies of a size."""

_ELIMINATION = 2.5e-9
"""Seconds of an elimination of channels per cube of their number."""


@dataclass(frozen=True)
class Pace:
    """Timings of one image at the full size.

    Attributes:
        forward: of the full network.
        train: of a step of its adaptation, which is faster where `fuse` serves.
        train_all: of a step of all its weights.
        decode: of reading an image.
    """

    forward: Timing
    train: Timing
    train_all: Timing
    decode: Timing


def plan_shrink(cfg: ShrinkConfig, seeds: int = 1, settings: TaskSettings = TaskSettings()) -> Plan:
    """Time a few steps of a run, or of one of several seeds; nothing is written.

    Raises:
        ConfigError, DataError, ShrinkError, InfeasibleConstraintError: as the run would.
    """
    start = start_of_task()
    use_threads(cfg.threads)
    begin, worked = time.perf_counter(), time.thread_time()
    work = Material(ShrinkRun(cfg))
    found, sizes = planned_sizes(work)
    stages = tuple(_stages(work, found, sizes, _pace(work)))
    notes = (
        str(found),
        "",
        f"images: {len(work.images.train):,} to train on, {len(work.images.val):,} to judge by, "
        f"{work.images.classes} classes; sides that are searched: {', '.join(map(str, sizes))} pixels",
        f"they are normalised by mean {list(work.images.data.mean)} and standard deviation "
        f"{list(work.images.data.std)}: --data.mean and --data.std change it for weights of another training",
        *busy_notes(time.perf_counter() - begin, time.thread_time() - worked),
        "",
    )
    threads, tasks = torch.get_num_threads(), None
    if seeds > 1:
        whole, tasks = functools.reduce(Timing.__add__, (stage.one for stage in stages)) + start, settings
        workers = settings.workers or workers_for(seeds, threads=threads, gpus=gpus_for(cfg.latency_device))
        stages = (Work("seeds (whole runs)", seeds, whole, workers),)
    return Plan(stages, threads, tasks, notes, settings.max_hours)


def planned_sizes(work: Material) -> tuple[Found, tuple[int, ...]]:
    """What is found in the network, and the sides that a run searches, as far as a few runs of it tell.

    Raises:
        ConfigError, DataError, ShrinkError, InfeasibleConstraintError: as the run would.
    """
    work.check()
    full_ms = partial(_full_latency, work)
    costs = full_costs(work, full_ms)
    limits = absolute_limits(work, costs)
    untimed = Limits(limits.get("max_macs"), limits.get("max_params"))
    return work.searched(work.resolution), sizes_of(work, costs, limits, lambda _: untimed, full_ms)


def _full_latency(work: Material, size: int) -> float:
    """Milliseconds of the full network at a size, by a few runs."""
    found = work.searched(size)
    run = deployed_network(work, found, found.full)
    return 1e3 * min(run()["run"] for _ in range(5))


def _pace(work: Material) -> Pace:
    source = work.images.train
    start = time.thread_time()
    shown, labels = work.images.read(source, work.resolution, _BATCH)
    decode = time.thread_time() - start
    x, network = work.images.prepared(shown), clone(work.form)

    def train() -> None:
        nn.functional.cross_entropy(network(x), labels).backward()

    with torch.no_grad():
        forward = _timed(partial(network, x))
    train_all = _timed(train)
    scales, classifier = shrink.affine_parameters(network.requires_grad_(False))
    for p in (*scales, *classifier):
        p.requires_grad_(True)
    batches = forward, _timed(train), train_all, Timing(decode, decode)
    return Pace(*(batch * (1 / len(x)) for batch in batches))


def _timed(call: Callable[[], Tensor | None]) -> Timing:
    """Seconds that this thread works, which has a part in all that is parallel; those of a quiet machine."""
    call()
    times = []
    for _ in range(3):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return Timing(statistics.median(times), max(times))


def _seconds(seconds: float) -> Timing:
    return Timing(seconds, seconds)


def _stages(work: Material, found: Found, sizes: tuple[int, ...], pace: Pace) -> Iterator[Work]:
    """The stages of a run."""
    cfg, count, full = work.cfg, len(work.images.train), work.resolution
    images = Timing(0.0, 0.0, 2 * count * full**2 * work.pretrained.channels)
    lesson = pace.train * (cfg.teacher_epochs * count)
    features = shrink.last_linear(work.form)[1].in_features
    views = lesson_epochs(cfg.epochs) * count
    targets = pace.forward * views + Timing(0.0, 0.0, 4 * views * features)
    yield Work(
        "adapt the full network",
        1,
        (pace.decode + pace.forward) * count + lesson + targets + _seconds(_CAPTURE) + images,
    )
    candidates = sum(len(place.candidates) for place in found.places)
    columns = [layer.columns for place in found.places for d in place.dimensions for layer in d.readers]
    gram = Timing(0.0, 0.0, 8 * 2 * sum(n**2 for n in columns))
    orders = _seconds(_ELIMINATION * sum(n**3 for n in columns))
    # what is in front of a choice is computed once, so about half of the network runs for each
    scores = pace.forward * (cfg.measure_images + candidates * cfg.score_images / 2)
    latency = _seconds(_LATENCY[cfg.latency_dtype] if "max_latency_ms" in cfg.bounds else 0.0)
    for size in sizes:
        share = (size / full) ** 2
        own = (lesson + _seconds(_CAPTURE)) * (share if size < full else 0.0)
        yield Work(f"measure at {size} px", 1, own + scores * share + orders + latency + gram)
    least = min([b.value if b.share else 0.5 for b in cfg.bounds.values()])
    lessons = pace.train * (cfg.epochs * count)
    adapted = lessons * least + _seconds(_CAPTURE)
    finalists = adapted * (len(sizes) if len(sizes) > 1 else 0)
    yield Work("search", 1, pace.forward * (cfg.top_k * len(sizes) * 1.5 * cfg.held_out / 2) + finalists)
    networks = 1 + (3 + cfg.random_networks if cfg.comparison else 0)
    # the validation images are read at each size, and answered before and after adaptation, by the full network once
    val = len(work.images.val)
    judged = pace.forward * (min(val, BEFORE_IMAGES) + val)
    others = (adapted + judged * least) * networks
    if cfg.comparison and cfg.int8 and cfg.latency_device == "onnx":
        others += pace.forward * val
    read = pace.decode * (len({full, *sizes}) * val)
    name = f"judge the full network, adapt and judge {counted(networks, 'other')}"
    yield Work(name, 1, pace.forward * val + others + read + images)
    exports = int(cfg.export)
    if cfg.finetune == "all":
        exports *= 2
        all_weights = pace.train_all * (cfg.finetune_epochs * count) + judged
        yield Work("train all weights of the result", 1, all_weights * least + images)
    yield Work("page and export", 1, _seconds(_PAGE + exports * _EXPORT))
