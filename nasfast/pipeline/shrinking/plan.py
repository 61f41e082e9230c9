"""What `nasfast shrink --dry_run` says: what is searched, what not, and minutes and memory of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nasfast import shrink
from nasfast.display import text_table
from nasfast.pipeline.estimate import busy_notes
from nasfast.pipeline.shrinking.files import clone
from nasfast.pipeline.shrinking.latency import network_graph
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.run import ShrinkConfig, ShrinkRun
from nasfast.pipeline.shrinking.stages import absolute_limits, full_costs, sizes_of
from nasfast.pipeline.shrinking.timing import deployed_graph, timing_settings
from nasfast.runtime.device import use_threads
from nasfast.runtime.progress import duration
from nasfast.search import Limits
from nasfast.shrink import Found

_BATCH = 16
"""Images of a timed step."""

_EXPORT, _PAGE, _CAPTURE = 55.0, 5.0, 5.0
"""Seconds of an export, of which most is torch.onnx.export's, of the page, and of the capture of one network."""

_ELIMINATION = 2.5e-9
"""Seconds of an elimination of channels per cube of their number."""


@dataclass(frozen=True)
class Pace:
    """Seconds per image at the full size.

    Attributes:
        forward: of the full network.
        train: of a step of its adaptation, which is faster where `fuse` serves.
        train_all: of a step of all its weights.
        decode: of reading an image.
    """

    forward: float
    train: float
    train_all: float
    decode: float


def plan_shrink(cfg: ShrinkConfig) -> str:
    """The plan of a run, in seconds; nothing is written.

    Raises:
        ConfigError, DataError, ShrinkError: as the run would.
    """
    use_threads(cfg.threads)
    begin, worked = time.perf_counter(), time.thread_time()
    work = Material(ShrinkRun(cfg))
    work.check()
    full_ms = partial(_full_latency, work)
    found, costs = work.searched(work.resolution), full_costs(work, full_ms)
    limits = absolute_limits(work, costs)
    untimed = Limits(limits.get("max_macs"), limits.get("max_params"))
    sizes = sizes_of(work, costs, limits, lambda _: untimed, full_ms)
    pace = _pace(work)
    rows = [["stage", "minutes", "memory"]]
    stages = _stages(work, found, sizes, pace)
    rows += [[name, f"{seconds / 60:.1f}", f"{memory / 2**30:.1f} GiB"] for name, seconds, memory in stages]
    total = duration(sum(seconds for _, seconds, _ in stages))
    lines = [
        str(found),
        "",
        f"images: {len(work.images.train):,} to train on, {len(work.images.val):,} to judge by, "
        f"{work.images.classes} classes; sides that are searched: {', '.join(map(str, sizes))} pixels",
        "",
        *text_table(rows, right=1),
        f"together {total} on this machine, with {torch.get_num_threads()} threads",
        *busy_notes(time.perf_counter() - begin, time.thread_time() - worked),
    ]
    return "\n".join(lines)


def _full_latency(work: Material, size: int) -> float:
    """Milliseconds of the full network at a size, by a few runs."""
    found = work.searched(size)
    shape = work.pretrained.channels, size, size
    run = deployed_graph(network_graph(found, found.full), timing_settings(work.cfg), shape)
    return 1e3 * min(run()["run"] for _ in range(5))


def _pace(work: Material) -> Pace:
    source = work.images.train
    start = time.thread_time()
    shown, labels = work.images.read(source, work.resolution, _BATCH)
    decode = (time.thread_time() - start) / len(shown)
    x, network = work.images.prepared(shown), clone(work.form)

    def train() -> None:
        nn.functional.cross_entropy(network(x), labels).backward()

    with torch.no_grad():
        forward = _fastest(partial(network, x))
    train_all = _fastest(train)
    scales, classifier = shrink.affine_parameters(network.requires_grad_(False))
    for p in (*scales, *classifier):
        p.requires_grad_(True)
    return Pace(forward / len(x), _fastest(train) / len(x), train_all / len(x), decode)


def _fastest(call: Callable[[], Tensor | None]) -> float:
    """Seconds that this thread works, which has a part in all that is parallel; those of a quiet machine."""
    call()
    times = []
    for _ in range(3):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def _stages(work: Material, found: Found, sizes: tuple[int, ...], pace: Pace) -> list[tuple[str, float, float]]:
    """Name, seconds and bytes of each stage."""
    cfg, count = work.cfg, len(work.images.train)
    full = work.resolution
    pixels = count * full**2 * work.pretrained.channels
    lesson = cfg.teacher_epochs * count * pace.train
    stages = [
        (
            "adapt the full network",
            count * (pace.decode + pace.forward) + lesson + cfg.epochs * count * pace.forward + _CAPTURE,
            2.0 * pixels,
        )
    ]
    candidates = sum(len(place.candidates) for place in found.places)
    columns = [layer.columns for place in found.places for d in place.dimensions for layer in d.readers]
    gram = 8.0 * 2 * sum(n**2 for n in columns)
    orders = _ELIMINATION * sum(n**3 for n in columns)
    # what is in front of a choice is computed once, so about half of the network runs for each
    scores = (cfg.measure_images + candidates * cfg.score_images / 2) * pace.forward
    latency = 30.0 if "max_latency_ms" in cfg.bounds else 0.0
    for size in sizes:
        share = (size / full) ** 2
        own = 0.0 if size == full else (lesson + _CAPTURE) * share
        stages.append((f"measure at {size} px", own + scores * share + orders + latency, gram))
    searched = cfg.top_k * len(sizes) * 1.5 * cfg.held_out * pace.forward / 2
    stages.append(("search", searched, 0.0))
    least = min([b.value if b.share else 0.5 for b in cfg.bounds.values()])
    networks = 1 + (3 + cfg.random_networks if cfg.comparison else 0)
    each = cfg.epochs * count * pace.train
    seconds = each + networks * each * least + (networks + 1) * _CAPTURE
    stages.append((f"adapt the full network and {networks} others", seconds, 2.0 * pixels))
    exports = int(cfg.export)
    if cfg.finetune == "all":
        exports *= 2
        trained = cfg.finetune_epochs * count * pace.train_all * least
        stages.append(("train all weights of the result", trained, 2.0 * pixels))
    stages.append(("page and export", _PAGE + exports * _EXPORT, 0.0))
    return stages
