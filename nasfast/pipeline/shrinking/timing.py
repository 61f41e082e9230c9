"""Times of a run of `nasfast shrink`: the table of latencies of a size, and whole networks beside each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nasfast.measure.config import LatencyConfig
from nasfast.measure.deployed import Timed, deployed, in_onnxruntime, second
from nasfast.measure.latency import Subject, latency
from nasfast.measure.timing import measure, measuring
from nasfast.pipeline.run import log_stage
from nasfast.pipeline.shrinking.files import read_record, write_record
from nasfast.pipeline.shrinking.int8 import INT8_FILE
from nasfast.pipeline.shrinking.latency import network_graph, shrink_subject, write_graph
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.run import ShrinkConfig, ShrinkRun
from nasfast.shrink import Found
from nasfast.spaces import Arch

# timed rounds, whole networks to which a table of latencies is fitted, and others that it is compared with
_ROUNDS, _CALIBRATE, _VALIDATE = 20, 24, 12
_NETWORK_ROUNDS = 60

TIMES_FILE = "times.json"

STEP = 8
"""Pixels between sides at which the full network is timed."""


def timing_settings(cfg: ShrinkConfig, **options: Any) -> LatencyConfig:
    """What is timed; one thread by its processor time, which leaves out the time in which other programs ran."""
    one = cfg.latency_threads == 1 and cfg.latency_device != "cuda"
    options |= {"threads": cfg.latency_threads, "dtype": cfg.latency_dtype, "clock": "cpu" if one else "wall"}
    return LatencyConfig(device=cfg.latency_device, **options)


def measure_latency(work: Material, size: int) -> dict[str, Any]:
    """The table of latencies of a size; writes size-N/latency.json."""
    path, started, found = latency_file(work, size), time.monotonic(), work.searched(size)
    cfg = timing_settings(work.cfg, rounds=_ROUNDS, calibrate=_CALIBRATE, validate=_VALIDATE, seed=work.cfg.seed)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["fingerprint"] == found.space.fingerprint and content["config"] == cfg.to_dict():
            return dict(content)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    work.run.begin_writing()
    report = latency(cfg, shrink_subject(found))
    path.unlink(missing_ok=True)
    report.save(path)
    error = report.content["validation"]["error"]
    log_stage("latency", started, f"{size} px: relative error {error['median']:.1%} median, {error['max']:.1%} at most")
    return report.content


def subject_of_run(out: str | Path, size: int | None) -> Subject:
    """What `nasfast.measure.latency` times of a run, at a side of its images; None takes the largest."""
    work = Material(ShrinkRun.look(out))
    return shrink_subject(work.searched(size or work.resolution))


def latency_file(work: Material, size: int) -> Path:
    """The table of latencies of a size."""
    return work.run.dir / f"size-{size}" / "latency.json"


def full_latency(work: Material, side: int) -> float:
    """Milliseconds of the full network at a side, beside the largest if it is another; writes size-N/full_ms.json."""
    settings = timing_settings(work.cfg, rounds=_NETWORK_ROUNDS if side == work.resolution else _ROUNDS)
    path, about = work.run.dir / f"size-{side}" / "full_ms.json", settings.to_dict()
    if (record := read_record(path, about)) is None:
        work.run.begin_writing()
        found = work.searched(side)
        if side == work.resolution:
            with measuring(settings.threads):
                times = measure({"full": deployed_network(work, found, found.full)}, rounds=settings.rounds)
            ms = float(times["full"]["run"]["median_ms"])
        else:
            ms = network_timer(work)(found, found.full)
        record = write_record(path, about, {"ms": ms})
    return float(record["ms"])


def pixel_share(full_ms: Callable[[int], float], resolution: int, limit: float) -> float:
    """The share of pixels at which the full network takes `limit` ms, by a line through its times at three sides.

    It is below that of the times, because a part of the time does not depend on the pixels, and may be negative. Times
    that do not grow say nothing about that part: then it is the share of the times.

    Args:
        full_ms: milliseconds of the full network at a side.
        resolution: its largest side.
        limit: in ms.
    """
    share = min(1.0, limit / full_ms(resolution))
    sides = {resolution, *(max(STEP, STEP * round(resolution * share**power / STEP)) for power in (1 / 4, 1 / 2))}
    if len(sides) == 1:
        return share
    slope, start = np.polyfit([(side / resolution) ** 2 for side in sides], [full_ms(side) for side in sides], 1)
    return (limit - float(start)) / float(slope) if slope > 0 else share


def network_timer(work: Material) -> Callable[[Found, Arch], float]:
    """A function that gives the milliseconds of the network of an architecture.

    It is timed beside the full network, of which it takes the share: processors change their speed.
    """
    settings = timing_settings(work.cfg, rounds=_ROUNDS)
    whole = work.searched(work.resolution)
    full, full_ms = deployed_network(work, whole, whole.full), full_latency(work, work.resolution)

    def latency(found: Found, arch: Arch) -> float:
        with measuring(settings.threads):
            times = measure({"full": full, "small": deployed_network(work, found, arch)}, rounds=settings.rounds)
        return full_ms * float(times["small"]["run"]["median_ms"]) / float(times["full"]["run"]["median_ms"])

    return latency


def network_times(work: Material, networks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of whole networks, interleaved; writes times.json."""
    path, cfg, started = work.run.dir / TIMES_FILE, work.cfg, time.monotonic()
    keys = "arch", "peer", "bits"
    archs = {name: [r["size"], *map(r["about"].get, keys)] for name, r in networks.items()}
    settings = timing_settings(cfg, rounds=_NETWORK_ROUNDS)
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    runtime = {"onnx": "onnxruntime", "cpu": "PyTorch on the CPU", "cuda": "PyTorch on the GPU"}[settings.device]
    runtime += " in 8 bits" if settings.dtype == "int8" else ""
    about = {"runtime": f"{runtime}, one image, {threads}", "dtype": settings.dtype, "networks": archs}
    if (record := read_record(path, about)) is not None:
        return record
    work.run.begin_writing()
    first = {name: next(n for n in archs if archs[n] == key) for name, key in archs.items()}  # of equal networks
    with measuring(settings.threads):
        runs = {}
        for name in dict.fromkeys(first.values()):
            size, arch, peer, bits = archs[name]
            found = work.searched(size) if peer is None else work.peer
            if bits is None:
                runs[name] = deployed_network(work, found, tuple(arch) if arch else found.full)
            else:
                data, as_it_is = (work.run.network(name) / INT8_FILE).read_bytes(), settings.replace(dtype="fp32")
                runs[name] = second(in_onnxruntime(data, timed_images(work, size), as_it_is))
        measured = measure(runs, rounds=settings.rounds)
    record = write_record(path, about, {"networks": {name: measured[same]["run"] for name, same in first.items()}})
    log_stage("time", started, f"{len(runs)} networks by {about['runtime']}")
    return record


def deployed_network(work: Material, found: Found, arch: Arch) -> Timed:
    """What runs the network of an architecture once, as it is timed."""
    cfg, graph = timing_settings(work.cfg), network_graph(found, arch)
    images = timed_images(work, found.space.resolution)
    data = write_graph(graph) if cfg.device == "onnx" else None
    return second(deployed(graph, images, cfg) if data is None else in_onnxruntime(data, images, cfg))


def timed_images(work: Material, side: int) -> Tensor:
    """What networks of a side are timed with: one random image."""
    return torch.randn(1, work.pretrained.channels, side, side, generator=torch.Generator().manual_seed(0))
