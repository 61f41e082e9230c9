"""The latency rows of the paper's Table 2, measured on this machine, beside the published figures."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nasfast.display import text_table
from nasfast.engine import GraphEngine
from nasfast.measure.config import StepTimesConfig
from nasfast.measure.doctor import environment
from nasfast.measure.timing import (
    TrainingStep,
    engine_step,
    graphed_step,
    machine,
    measure,
    measuring,
    random_batch,
)
from nasfast.ops.precision import resolve_precision
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.settings import METHODS, MethodName
from nasfast.spaces import Arch, SearchSpace, format_arch
from nasfast.supernet import Supernet

_LOG = logging.getLogger(__name__)

PUBLISHED_MS = {"spos": 137.4, "bnnas": 96.3, "dinas_paper": 93.1}
"""Published ms per step by method: Table 2, column latency, rows SPOS, BNNAS(S), and Ours(F) with layer indicators."""

PUBLISHED = (
    "published: DI-NAS paper, Table 2; ms of one complete forward and backward propagation, NVIDIA GeForce RTX 3080, "
    "batch 32;\nits path, resolution and number type are not stated"
)

_OURS = "DI-NAS, nasfast ops"
_PHASES = ("forward", "backward", "step")
# row, method, whether it uses the operators of nasfast, and what runs it
_ROWS: tuple[tuple[str, MethodName, bool, str], ...] = (
    ("SPOS", "spos", False, "eager"),
    ("BNNAS", "bnnas", False, "eager"),
    ("DI-NAS, reference ops", "dinas_paper", False, "eager"),
    (_OURS, "dinas_paper", True, "eager"),
)
_GRAPH_ROWS: tuple[tuple[str, MethodName, bool, str], ...] = (
    ("DI-NAS, torch graph", "dinas_paper", False, "graph"),
    ("DI-NAS, nasfast engine", "dinas_paper", True, "engine"),
)
_GRAPH_NOTE = (
    "torch graph: forward and backward of this one path on the reference ops, as one CUDA graph;\n"
    "nasfast engine: CUDA graphs per layer and candidate, which serve every path"
)


@dataclass(frozen=True)
class StepTimesRow:
    """The times of one method.

    Attributes:
        name: name of the row.
        method: method of `nasfast.settings.METHODS`.
        trainable: what trains.
        times: phase (`forward`, `backward`, `step`) -> `median_ms`, `q20_ms`, `q80_ms`; rows on CUDA graphs have only
            `step`.
        published_ms: the paper's ms per step; None if it has none.
    """

    name: str
    method: str
    trainable: str
    times: dict[str, dict[str, float]]
    published_ms: float | None

    @property
    def step_ms(self) -> float:
        """Median ms of the step."""
        return self.times["step"]["median_ms"]


@dataclass(frozen=True)
class StepTimesReport:
    """The rows, the step that was measured, and the machine; `str` of a report is a table.

    `first_steps` are what `step_times` gives to `callback`.
    """

    config: StepTimesConfig
    space: SearchSpace
    path: Arch
    rows: tuple[StepTimesRow, ...]
    machine: dict[str, Any]
    environment: dict[str, list[str]]
    first_steps: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All contents as JSON; the published figures have a label."""
        return {
            "config": self.config.to_dict(),
            "space": self.space.name,
            "resolution": self.space.resolution,
            "path": format_arch(self.path),
            "macs_per_image": self.space.cost(self.path).macs,
            "rows": [asdict(row) for row in self.rows],
            "first_steps": list(self.first_steps),
            "published": PUBLISHED,
            "machine": self.machine,
            "environment": self.environment,
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict` to a file."""
        write_atomic(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def __str__(self) -> str:
        cfg, first = self.config, self.rows[0]
        device = self.machine["gpu"] if self.machine["device"].startswith("cuda") else self.machine["cpu"]
        lines = [
            f"one training step, forward and backward, in ms: {self.space.name}, batch {cfg.batch}, "
            f"{self.space.resolution} x {self.space.resolution}, {cfg.dtype}",
            f"path [{format_arch(self.path)}], {self.space.cost(self.path).macs / 1e6:.0f} million MACs per image",
            f"machine: {device}, {self.machine['threads']} threads, {self.machine['cpu_capability']}, "
            f"nasfast {self.machine['nasfast_isa'] or 'without native kernels'}, torch {self.machine['torch']}",
            "",
        ]
        table = [["", "trains", *_PHASES, "q20 - q80", "per image", "/ SPOS", "published", "published / SPOS"]]
        for row in self.rows:
            quick = row.times["step"]
            table.append(
                [
                    row.name,
                    row.trainable,
                    *(f"{row.times[phase]['median_ms']:.1f}" if phase in row.times else "-" for phase in _PHASES),
                    f"{quick['q20_ms']:.1f} - {quick['q80_ms']:.1f}",
                    f"{row.step_ms / cfg.batch:.2f}",
                    f"{row.step_ms / first.step_ms:.2f}",
                    "-" if row.published_ms is None else f"{row.published_ms:.1f}",
                    "-" if row.published_ms is None else f"{row.published_ms / PUBLISHED_MS['spos']:.2f}",
                ]
            )
        return "\n".join(
            [
                *lines,
                *text_table(table, right=1),
                "",
                PUBLISHED,
                "reference ops, which SPOS and BNNAS use too: plain PyTorch modules, eager, channels_last",
                *([_GRAPH_NOTE] if len(self.rows) > len(_ROWS) else []),
                "times are medians over interleaved rounds",
            ]
        )


def step_times(
    cfg: StepTimesConfig = StepTimesConfig(), *, callback: Callable[[dict[str, Any]], object] | None = None
) -> StepTimesReport:
    """Time one training step of SPOS, BN-NAS and DI-NAS on plain PyTorch, and of DI-NAS on the operators of nasfast.

    All rows run the same path of the same space on the same images, interleaved in this process. A step is forward,
    cross entropy and backward, as in the paper, without the optimiser's update. On a GPU, DI-NAS also runs on CUDA
    graphs: PyTorch's graph of this one path, and the graphs of nasfast's engine.

    The weights of all rows are the same draw (`he`), each row with a copy in its own memory format: times do not depend
    on their values, and other initialisations take longer than the measurement.

    Args:
        cfg: which step, and how often.
        callback: called with each row as soon as it has run twice: `name`, `first_s` until its first step had ended,
            with network, captures and choice of algorithms, and `second_ms`. The log says the same.

    Raises:
        ConfigError: the space is unknown or the device does not exist.
        ArchError: the path does not belong to the space.
        EngineError: the engine's buffers do not fit the GPU's memory, or something cannot be captured.
        ValueError: the batch is too small for the statistics of a BatchNorm, or nothing on the path trains.
    """
    cfg = cfg.replace(dtype=resolve_precision(cfg.dtype, cfg.device))
    space, path = cfg.resolve()
    images, labels = random_batch(space, cfg.batch, device=torch_device(cfg.device), seed=cfg.seed)
    rows = _ROWS + (_GRAPH_ROWS if images.device.type == "cuda" else ())
    steps: dict[str, Callable[[], dict[str, float]]] = {}
    trainable: dict[str, str] = {}
    first_steps: list[dict[str, Any]] = []
    networks: dict[tuple[bool, bool], Supernet] = {}  # one of each structure, on the CPU
    with measuring(cfg.threads):
        for name, method, fused, runner in rows:
            start = time.perf_counter()
            indicators = METHODS[method].layer_indicators
            if (fused, indicators) not in networks:
                networks[fused, indicators] = Supernet(
                    space, init="he", layer_indicators=indicators, fused=fused, seed=cfg.seed
                )
            net = copy.deepcopy(networks[fused, indicators])
            trainable[name] = net.freeze(METHODS[method].trainable).trainable
            net.to(images.device).to(memory_format=torch.channels_last).train()
            steps[name] = _make_step(net, runner, images, labels, path, bf16=cfg.dtype == "bf16")
            steps[name]()
            first = time.perf_counter() - start
            row = {"name": name, "first_s": first, "second_ms": 1e3 * steps[name]()["step"]}
            _LOG.info("%(name)s: first step after %(first_s).1f s, the second took %(second_ms).1f ms", row)
            first_steps.append(row)
            if callback is not None:
                callback(row)
        _LOG.info("timing %d rows, %d rounds", len(steps), cfg.rounds)
        times = measure(steps, rounds=cfg.rounds, warmup=0, stage="step")
        measured_on = {"device": str(images.device), **machine()}
    # the paper has no figures for nasfast's operators or for graphs
    measured = tuple(
        StepTimesRow(
            name, method, trainable[name], times[name], None if fused or runner != "eager" else PUBLISHED_MS[method]
        )
        for name, method, fused, runner in rows
    )
    return StepTimesReport(cfg, space, path, measured, measured_on, environment(), tuple(first_steps))


def _make_step(
    net: Supernet, runner: str, images: torch.Tensor, labels: torch.Tensor, path: Arch, *, bf16: bool
) -> Callable[[], dict[str, float]]:
    """The step of a row as a function that returns its seconds."""
    if runner == "engine":
        return engine_step(GraphEngine(net, tuple(images.shape), bf16=bf16), images, labels, path)
    step = TrainingStep(net, images, labels, path=path, bf16=bf16)
    return graphed_step(step) if runner == "graph" else step
