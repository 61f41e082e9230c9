"""One training step under torch.profiler, with a range per layer and phase: tables, a Chrome trace, ranges for nsys."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from nasfast.config import ConfigError
from nasfast.measure.config import ProfileConfig
from nasfast.measure.timing import TrainingStep, measuring, random_batch
from nasfast.ops.autograd import WRAPPER
from nasfast.runtime.device import torch_device
from nasfast.settings import METHODS
from nasfast.spaces import Arch
from nasfast.supernet import Supernet

TRACE_FILE, NSYS_FILE, NCU_FILE = "trace.json", "nsys", "ncu"

# unrecorded steps, in which kernels compile, memory pools grow and cuDNN chooses algorithms
_WARMUP = 3


@dataclass(frozen=True)
class OpRow:
    """An operator.

    Attributes:
        name: its name.
        self_ms: ms without the operators that it calls.
        share: share of the ms of all operators.
        calls: number of calls.
    """

    name: str
    self_ms: float
    share: float
    calls: int


@dataclass(frozen=True)
class LayerRow:
    """A layer.

    Attributes:
        name: its name in the supernet.
        block: the block that the profiled path chooses there.
        forward_ms, backward_ms: ms of its ranges; 0 if it has no backward.
    """

    name: str
    block: str
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class ProfileReport:
    """The tables of one step; `str` of a report shows them.

    Attributes:
        title: describes the step.
        ops: the operators, longest `self_ms` first.
        layers: the layers in the order of the forward pass; the last row is the time outside of all layers.
        trace: the Chrome trace; None with the tracer `nvtx`, which fills no table either.
        nsys, ncu: command lines that record the same ranges under nsys, and the counters of every kernel under ncu;
            None on a machine without a GPU.
    """

    title: str
    ops: tuple[OpRow, ...]
    layers: tuple[LayerRow, ...]
    trace: Path | None
    nsys: str | None
    ncu: str | None

    def __str__(self) -> str:
        lines = [self.title, ""]
        if self.layers:
            total = sum(row.forward_ms + row.backward_ms for row in self.layers)
            lines.append(f"{'layer':14} {'block':10} {'forward ms':>11} {'backward ms':>12} {'share':>6}")
            for row in self.layers:
                share = (row.forward_ms + row.backward_ms) / total
                lines.append(
                    f"{row.name:14} {row.block:10} {row.forward_ms:11.2f} {row.backward_ms:12.2f} {share:6.1%}"
                )
            lines += ["", f"{'operator':60} {'self ms':>9} {'share':>6} {'calls':>6}"]
            lines += [f"{row.name[:60]:60} {row.self_ms:9.2f} {row.share:6.1%} {row.calls:6}" for row in self.ops]
            lines.append("")
        if self.trace is not None:
            lines.append(f"trace: {self.trace} (chrome://tracing, ui.perfetto.dev)")
        if self.nsys is not None:
            lines.append(f"the same ranges under nsys: {self.nsys}")
        if self.ncu is not None:
            lines.append(f"counters of every kernel under ncu: {self.ncu}")
        return "\n".join(lines)


def profile(cfg: ProfileConfig = ProfileConfig()) -> ProfileReport:
    """Record one training step of a path: forward, cross entropy, backward.

    Every layer has a range `forward NAME` and `backward NAME` (stem.0, layers.0, ..., head.0, classifier) inside the
    ranges `forward` and `backward`. Hooks make the ranges, so the operators run as without a profile.

    Raises:
        ConfigError: the space is unknown, the device does not exist, or the tracer is `nvtx` without a GPU.
        ArchError: the path does not belong to the space.
        ValueError: nothing on the path trains.
        OSError: the folder cannot be written.
    """
    space, path = cfg.resolve()
    images, labels = random_batch(space, cfg.batch, device=torch_device(cfg.device), seed=cfg.seed)
    on_gpu = images.device.type == "cuda"
    if cfg.tracer == "nvtx" and not on_gpu:
        raise ConfigError(f"tracer='nvtx' marks ranges for nsys and needs a GPU, got device={cfg.device!r}")
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    preset = METHODS[cfg.method]
    net = Supernet(space, init=preset.init, layer_indicators=preset.layer_indicators, seed=cfg.seed)
    net.freeze(preset.trainable, classifier=preset.classifier)
    net.to(images.device).to(memory_format=torch.channels_last).train()
    step = TrainingStep(net, images, labels, path=path, bf16=cfg.dtype == "bf16")
    title = (
        f"one training step: {space.name}, {cfg.method}, batch {cfg.batch}, {space.resolution} x {space.resolution}, "
        f"{cfg.dtype}, {images.device}"
    )
    nsys, ncu = (_nsys_command(cfg), _ncu_command(cfg)) if torch.cuda.is_available() else (None, None)
    layers = _layers_of(net, path)
    with measuring(cfg.threads), _Ranges({name: module for name, (module, _) in layers.items()}) as ranges:
        for _ in range(_WARMUP):
            _run(step, ranges)
        if cfg.tracer == "nvtx":
            # every range and operator also becomes an NVTX range of the same name
            with torch.autograd.profiler.emit_nvtx():
                torch.cuda.profiler.start()
                _run(step, ranges)
                torch.cuda.synchronize(images.device)
                torch.cuda.profiler.stop()
            return ProfileReport(title, (), (), None, nsys, ncu)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as recorded:
            _run(step, ranges)
            if on_gpu:
                torch.cuda.synchronize(images.device)
    recorded.export_chrome_trace(str(out / TRACE_FILE))
    blocks = {name: block for name, (_, block) in layers.items()}
    ops, rows = _tables(recorded.key_averages(), blocks, top=cfg.top, on_gpu=on_gpu)
    return ProfileReport(title, ops, rows, out / TRACE_FILE, nsys, ncu)


def _run(step: TrainingStep, ranges: _Ranges) -> None:
    """Run one step inside the ranges `forward` and `backward`."""
    step.model.zero_grad(set_to_none=True)
    with torch.profiler.record_function("forward"):
        loss = step.loss()
    with torch.profiler.record_function("backward"):
        loss.backward()
    ranges.end_step()


def _layers_of(net: Supernet, path: Arch) -> dict[str, tuple[nn.Module, str]]:
    """Name -> layer and its block on the path, in the order of the forward pass."""
    space = net.space
    parts: list[tuple[str, Iterable[nn.Module], list[str]]] = [
        ("stem", net.stem, [layer.label(0) for layer in space.stem_layers]),
        ("layers", net.layers, space.describe(path)),
        ("head", net.head, [layer.label(0) for layer in space.head_layers]),
    ]
    layers = {
        f"{part}.{i}": (module, label)
        for part, modules, labels in parts
        for i, (module, label) in enumerate(zip(modules, labels, strict=True))
    }
    return {**layers, "classifier": (net.classifier, "linear")}


class _Ranges:
    """Context in which hooks make ranges around the forward and backward of layers that run one after another.

    A backward range begins in the node that PyTorch puts behind a hooked module, so that the nodes of the layer lie
    within it. It ends when the gradient of the layer's input exists, or the gradients of its parameters if the input
    needs none, because a module's own hook for the end does not wait for these.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._open: dict[str, torch.profiler.record_function] = {}
        self._handles: list[RemovableHandle] = []
        self._step_handles: list[RemovableHandle] = []

    def __enter__(self) -> _Ranges:
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(partial(self._before_forward, name)),
                module.register_forward_hook(lambda *_, name=name: self._close(f"forward {name}")),
                module.register_full_backward_pre_hook(lambda *_, name=name: self._start(f"backward {name}")),
            ]
        return self

    def __exit__(self, *_: Any) -> None:
        self.end_step()
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> None:
        """Close the open ranges, and remove the hooks of this step."""
        self._close(*self._open)
        for handle in self._step_handles:
            handle.remove()
        self._step_handles.clear()

    def _before_forward(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        end_backward = partial(self._close, f"backward {name}")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: end_backward())
        elif trained := [p for p in module.parameters() if p.requires_grad]:
            handle = register_multi_grad_hook(trained, lambda grads: end_backward())
            self._step_handles.append(handle)
        self._start(f"forward {name}")

    def _start(self, name: str) -> None:
        self._open[name] = torch.profiler.record_function(name)
        self._open[name].__enter__()

    def _close(self, *names: str) -> None:
        for name in names:
            opened = self._open.pop(name, None)
            if opened is not None:
                opened.__exit__(None, None, None)


def _tables(
    averages: Any, blocks: dict[str, str], *, top: int, on_gpu: bool
) -> tuple[tuple[OpRow, ...], tuple[LayerRow, ...]]:
    """Both tables from the profiler's averages by name; times are device times on a GPU, CPU times otherwise."""
    phases = ("forward", "backward")
    ranges = {f"{phase} {name}" for phase in phases for name in blocks} | set(phases)
    total_time, self_time = (
        ("device_time_total", "self_device_time_total") if on_gpu else ("cpu_time_total", "self_cpu_time_total")
    )
    in_range = dict.fromkeys(ranges, 0.0)
    ops: dict[str, tuple[float, int]] = {}
    for event in averages:
        # a GPU's kernels and ranges are also events of the device, which would count the same time twice
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        if event.key in ranges:
            in_range[event.key] += getattr(event, total_time) / 1e3
            continue
        # an operator runs inside its autograd function, to which the profiler gives its time
        wrapped = event.key.startswith(WRAPPER) and not event.key.endswith("Backward")
        name = event.key.removeprefix(WRAPPER) if wrapped else event.key
        ms, calls = ops.get(name, (0.0, 0))
        ops[name] = (ms + getattr(event, self_time) / 1e3, calls + (0 if wrapped else event.count))
    everything = sum(ms for ms, _ in ops.values())
    longest = sorted(ops.items(), key=lambda op: -op[1][0])[:top]
    rows = [LayerRow(name, block, *(in_range[f"{phase} {name}"] for phase in phases)) for name, block in blocks.items()]
    covered = [sum(getattr(row, f"{phase}_ms") for row in rows) for phase in phases]
    rest = [max(0.0, in_range[phase] - ms) for phase, ms in zip(phases, covered, strict=True)]
    return (
        tuple(OpRow(name, ms, ms / everything, calls) for name, (ms, calls) in longest),
        (*rows, LayerRow("rest", "loss, pool", *rest)),
    )


def _nsys_command(cfg: ProfileConfig) -> str:
    """The command line that runs this command under nsys with the tracer `nvtx`; it captures only the profiled step."""
    nsys = ["nsys", "profile", "--trace=cuda,nvtx,cudnn,cublas", "--capture-range=cudaProfilerApi"]
    nsys += ["--capture-range-end=stop", f"--output={Path(cfg.out) / NSYS_FILE}"]
    return shlex.join([*nsys, *_traced_command(cfg)])


def _ncu_command(cfg: ProfileConfig) -> str:
    """The command line that runs this command under ncu, which runs every kernel of the profiled step several times."""
    ncu = ["ncu", "--set=full", "--nvtx", "--profile-from-start=off", f"--export={Path(cfg.out) / NCU_FILE}"]
    return shlex.join([*ncu, *_traced_command(cfg)])


def _traced_command(cfg: ProfileConfig) -> list[str]:
    """This command with the tracer `nvtx`."""
    cfg = cfg.replace(tracer="nvtx", device=cfg.device if cfg.device.startswith("cuda") else "cuda")
    default = ProfileConfig().to_dict()
    flags = [f"--{key}={value}" for key, value in cfg.to_dict().items() if value != default[key]]
    return ["nasfast", "profile", *flags]
