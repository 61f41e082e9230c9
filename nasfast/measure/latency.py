"""`nasfast latency`: the times of all candidates of a space on this machine, as a table that a search can take.

Every candidate is timed alone at its shapes. What that adds or hides is fitted to the times of a few whole networks:
T = scale * (sum of the parts) + (number of parts) * per_part. Both numbers go into the entries, so that the table stays
additive. In a module with choices, what is outside of them cannot be timed alone, so all of it is one more part, whose
time is the second number: T = scale * (sum of the candidates) + outside. docs/latency.md says what such a table tells.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.config import ConfigError
from nasfast.measure.config import LatencyConfig
from nasfast.measure.deployed import Timed, deployed, fold, in_onnxruntime, second
from nasfast.measure.doctor import environment
from nasfast.measure.measured import check_replaceable, relative_errors
from nasfast.measure.onnx_parts import OnnxPart, export_parts, join_parts
from nasfast.measure.rounds import RoundsFile
from nasfast.measure.timing import machine, measure, measuring
from nasfast.ops.precision import resolve_precision
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.runtime.onnx import check_provider
from nasfast.runtime.progress import Progress
from nasfast.spaces import SKIP, Arch, CostTable, LayerSpace, ModuleSpace, SearchSpace, UniformSampler, format_arch
from nasfast.spaces.cost import output_size
from nasfast.spaces.cost_table import FORMAT, LARGE_ERROR, parse_cost_table
from nasfast.supernet import ModuleSupernet, StandaloneNetwork, build, inherit

_LOG = logging.getLogger(__name__)

# quotient of the 80 % and 20 % quantiles of a part's times from which on the report names it
_UNSTEADY = 2.0
# draws of an architecture that was not drawn before
_TRIES = 100
_STEM, _HEAD = "stem", "head and classifier"
_FIXED = f"{_STEM}, {_HEAD}"


class _Head(nn.Module):
    """What follows the searchable layers: (N, C, H, W) -> logits (N, num_classes)."""

    def __init__(self, network: StandaloneNetwork) -> None:
        super().__init__()
        self.head, self.classifier = network.head, network.classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.head(x).mean((2, 3)))


@dataclass(frozen=True)
class Parts:
    """The parts of all networks of a space, each once.

    Attributes:
        modules: name -> module and the shape (C, H, W) of its input.
        layers: for each layer, option -> name of its part; None for an identity, which takes no time.
        between: name of a part that is not timed -> names and shares of those between which it lies.
    """

    modules: dict[str, tuple[nn.Module, tuple[int, int, int]]]
    layers: tuple[dict[int, str | None], ...]
    between: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)

    def names(self, arch: Arch) -> list[str]:
        """The names of the parts of a network, in their order."""
        chosen = (row[choice] for row, choice in zip(self.layers, arch, strict=True))
        known = {*self.modules, *self.between}
        return [name for name in (_STEM, *chosen, _HEAD) if name is not None and name in known]


@dataclass(frozen=True)
class Subject:
    """What is timed: the parts of a space, and whole networks.

    Attributes:
        space: the space.
        parts: its parts.
        make_network: gives the network of an architecture.
        outside: whether a network has more than its parts; the rest is then one part more, whose time is fitted.
        archs: gives so many different architectures by a seed, any first ones of which have all kinds of costs; None
            takes those of fewest and most MACs and random ones.
        write_onnx: gives the ONNX file of a part or a network; None where it, or its result, leaves that to
            torch.onnx.export.
    """

    space: LayerSpace
    parts: Parts
    make_network: Callable[[Arch], nn.Module]
    outside: bool
    archs: Callable[[int, int], list[Arch]] | None = None
    write_onnx: Callable[[nn.Module], bytes | None] | None = None


def _covering(space: LayerSpace) -> Iterator[Arch]:
    """Architectures that together have every candidate of every layer."""
    for number in range(max(map(len, space.options))):
        yield tuple(options[min(number, len(options) - 1)] for options in space.options)


def space_parts(space: SearchSpace, *, seed: int = 0) -> Parts:
    """The parts of a space; layers of equal shapes share those of equal candidates.

    They are taken from whole networks, so that they are what a network runs.
    """
    side = output_size(space.layers[-1].size, space.layers[-1].stride)
    modules: dict[str, tuple[nn.Module, tuple[int, int, int]]] = {}
    layers: list[dict[int, str | None]] = [{} for _ in space.layers]
    names: dict[object, str | None] = {}
    for arch in _covering(space):
        network = _network(space, arch, seed)
        if len(network.stem):
            modules.setdefault(_STEM, (network.stem, (space.in_channels, space.resolution, space.resolution)))
        modules.setdefault(_HEAD, (_Head(network), (space.layers[-1].out_channels, side, side)))
        for i, (layer, choice, module) in enumerate(zip(space.layers, arch, network.blocks, strict=True)):
            block = None if choice == SKIP else layer.choices[choice]
            shapes = (layer.in_channels, layer.out_channels, layer.stride, layer.size, layer.activation)
            if (block, shapes) not in names:
                name = None if isinstance(module, nn.Identity) else f"layer {i}, {layer.label(choice)}"
                names[block, shapes] = name
                if name is not None:
                    modules[name] = module, (layer.in_channels, layer.size, layer.size)
            layers[i][choice] = names[block, shapes]
    return Parts(modules, tuple(layers))


def module_parts(net: ModuleSupernet) -> Parts:
    """The candidates of a supernet of a module, as they are in its networks."""
    space = net.space
    if not space.in_channels:
        raise ConfigError(f"{space.name} was not traced with square images (N, C, H, H), so it is not timed")
    for choice in space.choices:
        if len(choice.inputs) != 1 or len(choice.inputs[0]) != 3:
            raise ConfigError(
                f"choice {choice.name!r} gets {len(choice.inputs)} inputs of shapes {list(choice.inputs)} in one call, "
                "and a table of latencies needs one of (C, H, W): time the networks of nasfast.inherit instead"
            )
    paths = {module: path for path, module in net.module.named_modules()}
    modules: dict[str, tuple[nn.Module, tuple[int, int, int]]] = {}
    layers: list[dict[int, str | None]] = [{} for _ in space.choices]
    for arch in _covering(space):
        network = inherit(net, arch)
        for i, (choice, value) in enumerate(zip(space.choices, arch, strict=True)):
            name = None if choice.branches[value].identity else f"{space.place(i)}, {choice.label(value)}"
            layers[i][value] = name
            if name is not None:
                channels, height, width = choice.inputs[0]
                modules[name] = network.get_submodule(paths[net.layers[i]]), (channels, height, width)
    return Parts(modules, tuple(layers))


def _network(space: SearchSpace, arch: Arch, seed: int) -> StandaloneNetwork:
    network = build(space, arch, init="he", seed=seed)
    assert isinstance(network, StandaloneNetwork)  # the network of a space of layers
    return network


@dataclass(frozen=True)
class Fit:
    """How the time of a network follows from the times of its parts: scale * sum + parts * per_part, in ms.

    Attributes:
        scale: below 1 where parts run faster in a network than alone, above 1 where they run slower.
        per_part: what every part adds; below 0 where timing a part alone adds the overhead of a call.
    """

    scale: float = 1.0
    per_part: float = 0.0

    @classmethod
    def least_squares(
        cls, sums: Sequence[float], counts: Sequence[int], measured: Sequence[float], *, shortest: float = math.inf
    ) -> Fit:
        """The fit of least squared relative errors over some networks.

        Args:
            sums: for each network, the sum of the times of its parts in ms.
            counts: for each network, the number of its parts.
            measured: its time in ms.
            shortest: the time of the shortest part in ms; where it would cost nothing, `per_part` is 0.
        """
        rows = np.array([sums, counts], float).T / np.array(measured)[:, None]
        scale, per_part = map(float, np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0])
        if not scale > 0:
            raise RuntimeError(
                f"the times of {len(measured)} networks do not grow with those of their layers (scale {scale:.2f}): "
                "the machine was too busy, or too few networks were timed: give more --rounds or --calibrate"
            )
        if scale * shortest + per_part <= 0:
            # no part may cost nothing, or a search takes it everywhere
            scale, per_part = float(np.linalg.lstsq(rows[:, :1], np.ones(len(rows)), rcond=None)[0][0]), 0.0
        return cls(scale, per_part)

    @classmethod
    def with_outside(
        cls, sums: Sequence[float], counts: Sequence[int], measured: Sequence[float], *, shortest: float
    ) -> tuple[Fit, float]:
        """As `least_squares`, of networks that have more than their parts, and the milliseconds of the rest.

        Where the fit would give the rest, or the shortest part, a time below 0, the time per part or the rest is 0.
        """
        columns = np.array([sums, counts, np.ones(len(sums))], float).T / np.array(measured)[:, None]
        for chosen in ([0, 1, 2], [0, 2], [0]):
            if chosen == [0, 1, 2] and len(set(counts)) == 1:
                continue
            found = np.zeros(3)
            found[chosen] = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)[0]
            scale, per_part, outside = map(float, found)
            if scale > 0 and outside >= 0 and scale * shortest + per_part > 0:
                return cls(scale, per_part), outside
        raise RuntimeError(
            f"the times of {len(measured)} networks do not grow with those of their layers (scale {scale:.2f}): the "
            "machine was too busy, or too few networks were timed: give more --rounds or --calibrate"
        )

    def value(self, milliseconds: float) -> float:
        """What a part adds to the time of a network."""
        return max(0.0, self.scale * milliseconds + self.per_part)


@dataclass(frozen=True)
class LatencyReport:
    """A measured table; `str` of a report is a text for a terminal.

    Attributes:
        content: that of the file, which `nasfast.spaces.read_cost_table` reads.
    """

    content: dict[str, Any]
    space: LayerSpace

    @property
    def table(self) -> CostTable:
        """The table as a search takes it."""
        return parse_cost_table(self.content, self.space)

    def save(self, path: str | Path) -> None:
        """Write the file; an older one of the same space and settings of the runtime is replaced."""
        check_replaceable(path, self.content)
        write_atomic(Path(path), (json.dumps(self.content, indent=1) + "\n").encode())

    def __str__(self) -> str:
        content, table = self.content, self.table
        rows = [[row[v] for v in options] for row, options in zip(table.integers, self.space.options, strict=True)]
        least, most = table.value(sum(map(min, rows))), table.value(sum(map(max, rows)))
        pixels = f"{self.space.resolution} x {self.space.resolution}"
        lines = [
            f"latency in ms of {self.space.name}, {pixels}: {content['about']}",
            f"{len(content['parts'])} different parts, {content['rounds']} interleaved rounds, medians",
            "",
        ]
        values: dict[int, list[str]] = {}
        for entry in content["entries"]:
            values.setdefault(entry["layer"], []).append(f"{entry['label']} {entry['value']:.3f}")
        lines += [f"layer {i:2}: {', '.join(texts)}" for i, texts in values.items()]
        lines += [
            f"{'outside of choices' if isinstance(self.space, ModuleSpace) else _FIXED}: {content['fixed']:.3f}",
            f"whole networks: {least:.2f} to {most:.2f}",
        ]
        fit = content["fit"]
        if fit["networks"]:
            lines.append(
                f"fitted to {len(fit['networks'])} whole networks: {fit['scale']:.3f} times the sum of the parts "
                f"{'+' if fit['per_part_ms'] >= 0 else '-'} {abs(fit['per_part_ms']):.4f} per part"
            )
        return "\n".join([*lines, *_unsteady_lines(content), *_validation_lines(content, least)])


def _unsteady_lines(content: Mapping[str, Any]) -> list[str]:
    unsteady = {name: t for name, t in content["parts"].items() if t["q80_ms"] > _UNSTEADY * t["q20_ms"]}
    if not unsteady:
        return []
    worst, times = max(unsteady.items(), key=lambda part: part[1]["q80_ms"])
    return [
        f"{len(unsteady)} of {len(content['parts'])} parts took very different times in different rounds (e.g. "
        f"{worst}: {times['q20_ms']:.3g} to {times['q80_ms']:.3g} ms between the 20 % and 80 % quantiles): measure "
        "again when the machine is less busy"
    ]


def _validation_lines(content: Mapping[str, Any], least: float) -> list[str]:
    """What the validation found, for networks of which the fastest takes `least` ms by the table."""
    validation = content["validation"]
    if validation is None:
        return ["not validated: --validate 20 compares the table with the times of 20 random networks"]
    error = validation["error"]
    lines = [
        f"predicted against measured on {len(validation['networks'])} random networks: relative error "
        f"{error['median']:.1%} median, {error['q80']:.1%} for 80 % of them, {error['max']:.1%} at most; "
        f"predictions are {error['bias']:+.1%} in the median"
    ]
    if "median_by_macs" in error:
        lines.append(f"a line in the MACs, fitted to the same networks: {error['median_by_macs']:.1%} median")
    typical = float(np.median([row["median_ms"] for row in validation["networks"]]))
    limit = typical * max(0.0, 1 - error["q80"])
    if limit >= least:
        lines.append(
            f"a limit needs a margin of that size: for networks of at most {typical:.3g} ms, set "
            f"--search.max_latency_ms {limit:.3g} (four of five networks are within it)"
        )
    else:
        lines.append(
            "with an error of that size this table serves no limit: measure again on a quiet machine, with more rounds"
        )
    if error["q80"] > LARGE_ERROR:
        lines.append(
            f"an error above {LARGE_ERROR:.0%} for 80 % of the networks hides differences between them: "
            "docs/latency.md says what lowers it"
        )
    return lines + [
        f"  {row['predicted_ms']:8.2f} against {row['median_ms']:8.2f} ({row['q20_ms']:.2f} - {row['q80_ms']:.2f})  "
        f"[{row['arch']}]"
        for row in validation["networks"]
    ]


def _dtype(cfg: LatencyConfig) -> str:
    """The number type that is timed."""
    return cfg.dtype if cfg.dtype == "int8" else resolve_precision(cfg.dtype, cfg.device)


def table_head(cfg: LatencyConfig, space: LayerSpace) -> dict[str, Any]:
    """The part of a file that says what is measured; it is known before the measurement."""
    device = cfg.device.partition(":")[0]
    return {
        "format": FORMAT,
        "quantity": "latency",
        "unit": "ms",
        "space": space.name,
        "fingerprint": space.fingerprint,
        "resolution": space.resolution,
        "num_classes": space.num_classes,
        "device": device,
        "runtime": f"onnxruntime {cfg.provider}" if device == "onnx" else "compiled" if cfg.compiled else "eager",
        "dtype": _dtype(cfg),
        "threads": cfg.threads,
        "batch": cfg.batch,
        "clock": cfg.clock,
    }


def latency(
    cfg: LatencyConfig = LatencyConfig(),
    net: ModuleSupernet | Subject | None = None,
    *,
    rounds_file: str | Path | None = None,
) -> LatencyReport:
    """Time every candidate of every layer at its shapes, and whole networks, interleaved; make a table of latencies.

    Args:
        cfg: what is measured, and how.
        net: a supernet that `nasfast.Supernet.from_module` made, or the parts of another module, whose space is
            measured in place of `cfg.space`. Its networks run as their modules are: only the BatchNorms of nasfast's
            own units are folded.
        rounds_file: keeps each round until the report is there; the same measurement goes on from it.

    Raises:
        ConfigError: the space is unknown or too small for the networks asked for, the device does not exist, or
            onnxruntime has no such provider; with `net`, `cfg.calibrate` is 0, or see `module_parts`.
        RuntimeError: the extra `onnx` is missing, a network cannot be exported, compiled or quantised, or the times
            contradict each other.
    """
    cfg = cfg.replace(dtype=_dtype(cfg))
    subject = _choose_subject(cfg, net)
    space, parts = subject.space, subject.parts
    if cfg.device == "onnx":
        check_provider(cfg.provider)
    else:
        torch_device(cfg.device)
    archs = (subject.archs or functools.partial(_architectures, space, cfg))(cfg.calibrate + cfg.validate, cfg.seed)
    kept = None if rounds_file is None else RoundsFile(Path(rounds_file), _subject(cfg, space))
    with measuring(cfg.threads):
        if kept is not None and kept.rounds:
            _LOG.info("goes on after %d rounds, which %s has", len(kept.rounds), kept.path)
        work = _deploy(cfg, subject, archs)
        _LOG.info("timing %d parts and %d networks, %d rounds", len(parts.modules), len(archs), cfg.rounds)
        measured = measure(work, rounds=cfg.rounds, stage="latency", kept=kept)
        times = {name: phases["run"] for name, phases in measured.items()}
        measured_on = machine()
    fitted, validated = archs[: cfg.calibrate], archs[cfg.calibrate :]
    medians = {name: summary["median_ms"] for name, summary in times.items()}
    for name, ends in parts.between.items():
        medians[name] = sum(share * medians[end] for end, share in ends)
    sums = [sum(medians[name] for name in parts.names(arch)) for arch in fitted]
    counts = [len(parts.names(arch)) for arch in fitted]
    fit, outside = Fit(), 0.0
    if fitted:
        shortest, wholes = min(medians[name] for name in parts.modules), [medians[format_arch(arch)] for arch in fitted]
        if subject.outside:
            fit, outside = Fit.with_outside(sums, counts, wholes, shortest=shortest)
        else:
            fit = Fit.least_squares(sums, counts, wholes, shortest=shortest)
    fixed = outside + sum(fit.value(medians[name]) for name in (_STEM, _HEAD) if name in medians)
    content = {
        **table_head(cfg, space),
        "about": "",
        "fixed": fixed,
        "entries": [
            {
                "layer": i,
                "choice": choice,
                "label": space.label(i, choice),
                "value": 0.0 if name is None else fit.value(medians[name]),
                "part": name,
            }
            for i, row in enumerate(parts.layers)
            for choice, name in sorted(row.items())
        ],
        "parts": {name: times[name] for name in parts.modules},
        "fit": {
            "scale": fit.scale,
            "per_part_ms": fit.per_part,
            "networks": [{"arch": format_arch(arch), **times[format_arch(arch)]} for arch in fitted],
        },
        "rounds": cfg.rounds,
        "config": cfg.to_dict(),
        "machine": measured_on,
        "environment": environment(),
        "validation": None,
    }
    if validated:
        content["validation"] = _validation(parse_cost_table(content, space), space, fitted, validated, times)
    content["about"] = _about(content)
    return LatencyReport(content, space)


def _choose_subject(cfg: LatencyConfig, net: ModuleSupernet | Subject | None) -> Subject:
    """What is timed."""
    if net is None:
        space = cfg.resolve()
        return Subject(space, space_parts(space, seed=cfg.seed), lambda arch: _network(space, arch, cfg.seed), False)
    if not cfg.calibrate:
        raise ConfigError("calibrate must be at least 4 for a module, whose part outside of choices is fitted, got 0")
    if isinstance(net, Subject):
        return net
    return Subject(net.space, module_parts(net), functools.partial(inherit, net), True)


def _subject(cfg: LatencyConfig, space: LayerSpace) -> dict[str, Any]:
    """What must be equal for rounds of another process to count; more rounds may be asked for later."""
    settings = {name: value for name, value in cfg.to_dict().items() if name != "rounds"}
    on = {name: value for name, value in machine().items() if name in ("cpu", "gpu", "cpu_capability")}
    return {"settings": settings, "fingerprint": space.fingerprint, **on, "versions": environment()["versions"]}


def _deploy(cfg: LatencyConfig, subject: Subject, archs: Sequence[Arch]) -> dict[str, Timed]:
    """What runs each part and each network once, by name.

    In onnxruntime a network is joined from the exported parts. That of a module, which has more than its candidates,
    is exported.
    """
    work: dict[str, Timed] = {}
    space, parts = subject.space, subject.parts
    with Progress("prepare", len(parts.modules) + len(archs)) as progress:
        ready: dict[str, Timed] = {}
        exported: dict[str, OnnxPart] = {}
        if cfg.device == "onnx":
            ready = {name: run for name, part in parts.modules.items() if (run := _written(subject, *part, cfg))}
            left = {name: part for name, part in parts.modules.items() if name not in ready}
            if left:
                _LOG.info("exporting %d parts to ONNX", len(left))
                progress.update(0, "export to ONNX")
                exported = export_parts({name: (fold(part.eval()), shape) for name, (part, shape) in left.items()})
        for name, (module, shape) in parts.modules.items():
            progress.update(len(work), name)
            if name in ready:
                work[name] = ready[name]
            elif name in exported:
                work[name] = _run_joined([exported[name]], shape, cfg)
            else:
                work[name] = deployed(module, _images(cfg, shape), cfg)
        shape = (space.in_channels, space.resolution, space.resolution)
        for arch in archs:
            name = format_arch(arch)
            progress.update(len(work), f"network {name}")
            if exported and not isinstance(space, ModuleSpace):
                work[name] = _run_joined([exported[part] for part in parts.names(arch)], shape, cfg)
                continue
            network = subject.make_network(arch)
            run = _written(subject, network, shape, cfg) if cfg.device == "onnx" else None
            work[name] = run or deployed(network, _images(cfg, shape), cfg)
    return work


def _written(subject: Subject, module: nn.Module, shape: tuple[int, int, int], cfg: LatencyConfig) -> Timed | None:
    """What runs a part or a network in onnxruntime, if the subject writes it."""
    data = None if subject.write_onnx is None else subject.write_onnx(module)
    return None if data is None else second(in_onnxruntime(data, _images(cfg, shape), cfg))


def _run_joined(parts: Sequence[OnnxPart], shape: tuple[int, int, int], cfg: LatencyConfig) -> Timed:
    return in_onnxruntime(join_parts(parts), _images(cfg, shape), cfg)


def _images(cfg: LatencyConfig, shape: tuple[int, int, int]) -> Tensor:
    return torch.randn(cfg.batch, *shape, generator=torch.Generator().manual_seed(cfg.seed))


def _architectures(space: LayerSpace, cfg: LatencyConfig, count: int, seed: int) -> list[Arch]:
    """Different architectures: those to which sums are fitted, then those that validate.

    The extremes are among the former, because a search under a limit goes there.
    """
    if count > space.cardinality:
        raise ConfigError(
            f"space {space.name!r} has {space.cardinality} architectures, and {count} different ones are to be timed: "
            "lower --calibrate or --validate"
        )
    extremes = (
        tuple(extreme(row, key=lambda choice: row[choice].macs) for row in space.option_costs())
        for extreme in (min, max)
    )
    archs = dict.fromkeys(list(extremes)[: cfg.calibrate])
    sampler = UniformSampler(space, seed=seed)
    for _ in range(_TRIES * count):
        if len(archs) >= count:
            break
        archs.setdefault(sampler.step()[0])
    if len(archs) < count:
        raise ConfigError(f"{_TRIES * count} draws gave only {len(archs)} different architectures: lower --validate")
    return list(archs)


def _validation(
    table: CostTable,
    space: LayerSpace,
    fitted: Sequence[Arch],
    archs: Sequence[Arch],
    times: Mapping[str, dict[str, float]],
) -> dict[str, Any]:
    """Predicted and measured times of architectures that were not fitted, and quantiles of the relative error.

    A line in the MACs, fitted to the same networks as the table, is the baseline that the table must beat.
    """
    rows = [{"arch": format_arch(a), "predicted_ms": table.cost(a), **times[format_arch(a)]} for a in archs]
    measured = np.array([row["median_ms"] for row in rows])
    error = relative_errors(np.array([row["predicted_ms"] for row in rows]), measured)
    if fitted:
        macs = [[space.cost(arch).macs, 1] for arch in fitted]
        line = np.linalg.lstsq(macs, [times[format_arch(arch)]["median_ms"] for arch in fitted], rcond=None)[0]
        by_macs = np.array([[space.cost(arch).macs, 1] for arch in archs]) @ line / measured - 1
        error["median_by_macs"] = float(np.median(np.abs(by_macs)))
    return {"error": error, "networks": rows}


def _about(content: Mapping[str, Any]) -> str:
    """One line on the origin of the table."""
    measured_on = content["machine"]
    threads = content["threads"] or measured_on["threads"]
    device = f"{measured_on['cpu']}, {threads} thread{'s' if threads > 1 else ''}"
    if content["device"] == "cuda":
        device = measured_on["gpu"]
    text = f"{content['device']} ({content['runtime']}), batch {content['batch']}, {device}"
    if content["clock"] == "cpu":
        text += ", processor time"
    if content["validation"] is None:
        return f"{text}; not validated"
    count, error = len(content["validation"]["networks"]), content["validation"]["error"]
    return f"{text}; error {error['median']:.1%} median, {error['q80']:.1%} for 80 % of {count} random networks"
