"""One training step of a supernet as the unit of measurement, and the interleaved timing of variants.

`nasfast step`, `nasfast latency` and the benchmarks use it.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.engine import Engine
from nasfast.engine.capture import Capture, CudaCapture
from nasfast.measure.rounds import Round, RoundsFile
from nasfast.ops import _native
from nasfast.runtime.memory import freed_memory
from nasfast.runtime.progress import Progress
from nasfast.spaces import Arch, SearchSpace


def random_batch(space: SearchSpace, size: int, *, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal images (size, C, H, W) in channels_last and uniform labels (size,), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, space.in_channels, space.resolution, space.resolution, generator=generator)
    labels = torch.randint(space.num_classes, (size,), generator=generator)
    return images.to(device, memory_format=torch.channels_last), labels.to(device)


class TrainingStep:
    """Forward, cross entropy and backward of one batch; every call does the same work.

    The optimiser's update is left out, as in published step times; with frozen convolutions it takes a few hundred
    short vectors.

    Args:
        model: called as `model(images)`, or as `model(images, path)` if a path is given.
        images: (N, C, H, W).
        labels: (N,).
        path: a path of a supernet; None for other networks.
        bf16: whether the model runs under bf16 autocast.
    """

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, path: Arch | None = None, bf16: bool = False
    ) -> None:
        self.model, self.images, self.labels, self.bf16 = model, images, labels, bf16
        self._arguments = () if path is None else (path,)

    def loss(self) -> Tensor:
        """Run only the forward; the loss."""
        with torch.autocast(self.images.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(self.images, *self._arguments)
        loss = F.cross_entropy(logits.float(), self.labels)
        if not loss.requires_grad:
            raise ValueError("no parameter on this path trains: choose another path or method")
        return loss

    def __call__(self) -> dict[str, float]:
        """Run the step; the seconds of `forward`, `backward` and both together (`step`)."""
        self.model.zero_grad(set_to_none=True)
        if self.images.device.type == "cuda":
            return self._on_cuda()
        start = time.perf_counter()
        loss = self.loss()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        return {"forward": middle - start, "backward": end - middle, "step": end - start}

    def _on_cuda(self) -> dict[str, float]:
        # events are used because a synchronisation between the phases would keep backward's launches from running ahead
        with torch.cuda.device(self.images.device):
            start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            start.record()
            loss = self.loss()
            middle.record()
            loss.backward()
            end.record()
            torch.cuda.synchronize()
        phases = {"forward": (start, middle), "backward": (middle, end), "step": (start, end)}
        return {name: begin.elapsed_time(stop) / 1e3 for name, (begin, stop) in phases.items()}


def time_call(
    work: Callable[[], object], device: torch.device, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one call by a clock; on a GPU, between events around the work it queues on the current stream."""
    if device.type != "cuda":
        start = clock()
        work()
        return clock() - start
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3


def graphed_step(step: TrainingStep, capture: Capture | None = None) -> Callable[[], dict[str, float]]:
    """A step captured as one CUDA graph; a call replays it and returns seconds of `step`.

    Args:
        step: the step; every replay uses its images, labels and path.
        capture: how to capture; None takes CUDA graphs.
    """
    capture = capture or CudaCapture(step.images.device)

    def whole() -> None:
        # with gradients set to None, backward creates new ones and does not add
        step.model.zero_grad(set_to_none=True)
        step.loss().backward()

    (replay,) = capture.capture([whole], capture.pool())
    # `step` keeps the tensors that the graph reads
    return lambda: {"step": time_call(replay, step.images.device)}


def engine_step(engine: Engine, images: Tensor, labels: Tensor, path: Arch) -> Callable[[], dict[str, float]]:
    """A step of an engine on one path; a call returns seconds of `step`."""
    return lambda: {"step": time_call(lambda: engine.forward_backward(images, labels, [path]), images.device)}


def measure(
    variants: Mapping[str, Callable[[], dict[str, float]]],
    *,
    rounds: int,
    warmup: int = 2,
    stage: str | None = None,
    kept: RoundsFile | None = None,
) -> dict[str, dict]:
    """Run every variant in every round and summarise its times.

    Each round runs every variant once, in a rotating order, so that a busy moment of the machine affects all of them.

    Args:
        variants: name -> function that does the work once and returns {phase: seconds}.
        rounds: number of timed rounds.
        warmup: number of rounds before, which are not timed (compilation, caches, memory pools).
        stage: what the screen calls the rounds, with what has just run; None shows nothing.
        kept: gets each round when it is whole; those that it has are not timed again, but the rounds before are run.

    Returns:
        name -> phase -> {"median_ms", "q20_ms", "q80_ms"} over the timed rounds.
    """
    names = list(variants)
    made: list[Round] = [] if kept is None else kept.rounds
    add = made.append if kept is None else kept.add
    total = (warmup + rounds - len(made)) * len(names) if len(made) < rounds else 0
    with Progress(stage or "", total, shown=stage is not None, timed=True) as progress:
        for i_round in range(total // len(names)):
            times, shift = dict[str, dict[str, float]](), i_round % len(names)
            for i, name in enumerate(names[shift:] + names[:shift], 1):
                phases = variants[name]()
                times[name] = {phase: 1e3 * seconds for phase, seconds in phases.items()}
                progress.update(i_round * len(names) + i, f"{name}: {1e3 * list(phases.values())[-1]:.3g} ms")
            if i_round >= warmup:
                add(times)
    return {
        name: {phase: summarise([times[name][phase] for times in made[:rounds]], "ms") for phase in made[0][name]}
        for name in names
    }


def summarise(samples: list[float], unit: str) -> dict[str, float]:
    """Median, 20 % and 80 % quantile, by the keys `median_UNIT`, `q20_UNIT` and `q80_UNIT`."""
    names = (f"median_{unit}", f"q20_{unit}", f"q80_{unit}")
    return dict(zip(names, map(float, np.quantile(samples, (0.5, 0.2, 0.8))), strict=True))


@contextmanager
def measuring(threads: int = 0) -> Iterator[None]:
    """Context with this many CPU threads (0 changes nothing), in which cuDNN takes its fastest algorithms by trial."""
    before = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(threads or before[0])
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.benchmark = before[1]


def machine() -> dict[str, Any]:
    """The CPU, GPU, versions and date, for files of results."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "nasfast_isa": None if _native.extension is None else _native.extension.isa(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "freed_memory": freed_memory(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
