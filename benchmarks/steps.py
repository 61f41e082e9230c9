"""Variants of one training step, nasfast and plain PyTorch at its best: times, memory, and a table.

Only BatchNorms train. A workload gives the same network with the same weights twice: on nasfast's operators, and of
plain modules. A variant whose loss differs from the others is not timed.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import floor
from benchmarks.harness import (
    freeze_all_but_batch_norms,
    in_new_process,
    medians,
    peak_growth,
    process_memory,
    saved_bytes,
    trim_memory,
)
from nasfast.measure.timing import TrainingStep, measure
from nasfast.ops.chain.call import FrozenConv2d
from nasfast.ops.tensors import storage_dtype
from nasfast.spaces import Arch

_OURS = "nasfast"
# relative tolerance of a loss of about 7; bf16 rounds activations to 8 bits in some sixty layers
_LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True)
class Variant:
    """How a step is run.

    Attributes:
        engine: `nasfast`; `eager`; `memsave`, which is eager with frozen convolutions that keep no input; `compile`.
        layout: `contiguous` or `channels_last`.
        dtype: `fp32`, or `bf16` autocast.
    """

    engine: str
    layout: str
    dtype: str

    @property
    def name(self) -> str:
        return " ".join([self.engine, *([] if self.engine == _OURS else [self.layout]), self.dtype])


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(_OURS, "channels_last", "fp32"),
        Variant(_OURS, "channels_last", "bf16"),
        Variant("eager", "contiguous", "fp32"),
        Variant("eager", "channels_last", "fp32"),
        Variant("eager", "channels_last", "bf16"),
        Variant("memsave", "channels_last", "fp32"),
        Variant("memsave", "channels_last", "bf16"),
        Variant("compile", "contiguous", "fp32"),
        Variant("compile", "channels_last", "fp32"),
        Variant("compile", "channels_last", "bf16"),
    )
}


class Workload(ABC):
    """A network and its batch. It must be picklable, because memory is measured in separate processes."""

    name: str
    batch: int
    resolution: int
    num_classes: int

    @abstractmethod
    def ours(self) -> tuple[nn.Module, Arch | None]:
        """The network on nasfast's operators, and the path to run if it is a supernet."""

    @abstractmethod
    def plain(self) -> nn.Module:
        """The network of plain modules."""

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """The network of plain modules with any weights; it is only traced."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 3, self.resolution, self.resolution

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Images and labels, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.shape, generator=generator)
        return images, torch.randint(self.num_classes, (self.batch,), generator=generator)


def train_batch_norms(network: nn.Module) -> nn.Module:
    """Freeze everything except the affine parameters of BatchNorms, and turn their running statistics off."""
    freeze_all_but_batch_norms(network.train())
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return network


def keep_no_inputs(network: nn.Module) -> nn.Module:
    """Let frozen convolutions keep no input for backward, and change nothing else: what one autograd function saves."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.requires_grad:
            module.forward = functools.partial(frozen_conv2d, module)
    return network


def frozen_conv2d(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The forward of a frozen convolution without bias, with zeros as padding."""
    if not x.requires_grad:
        return functional.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    dtype = storage_dtype(x)
    (stride, _), (padding, _) = conv.stride, conv.padding
    return FrozenConv2d.apply(x.to(dtype), conv.weight.to(dtype), stride, padding, conv.groups)


def make_step(workload: Workload, variant: Variant) -> TrainingStep:
    """Make the step of one variant, without a warm-up."""
    model, path = workload.ours() if variant.engine == _OURS else (workload.plain(), None)
    images, labels = workload.inputs()
    memory_format = getattr(torch, f"{variant.layout}_format" if variant.layout == "contiguous" else variant.layout)
    model, images = model.to(memory_format=memory_format), images.contiguous(memory_format=memory_format)
    if variant.engine == "memsave":
        model = keep_no_inputs(model)
    if variant.engine == "compile":
        model = torch.compile(model, dynamic=False)
    return TrainingStep(model, images, labels, path=path, bf16=variant.dtype == "bf16")


def bench(workload: Workload, variants: list[Variant], *, rounds: int, threads: int, quick: bool) -> dict:
    """Measure one row of results: times, memory, ratios and fraction of the floor of every variant."""
    # without a reset, torch.compile counts each network of one class as a recompilation of the same code
    torch.compiler.reset()
    steps = {variant.name: make_step(workload, variant) for variant in variants}
    check_losses(steps, {variant.name: variant.dtype for variant in variants})
    times = measure(steps, rounds=rounds)
    del steps
    trace = floor.trace(workload.skeleton, workload.shape)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    used = [name for name in dtypes if any(variant.dtype == name for variant in variants)]
    machines = {name: floor.measure_machine(dtypes[name], quick=quick) for name in used}
    floors = {name: floor.step_floor(trace, machine, dtypes[name]) for name, machine in machines.items()}
    return {
        "workload": workload.name,
        "batch": workload.batch,
        "resolution": workload.resolution,
        "threads": threads,
        "macs_per_image": trace.macs // workload.batch,
        "ceilings": {name: machine._asdict() for name, machine in machines.items()},
        "floor_ms": {
            name: {"forward": 1e3 * f.forward, "backward": 1e3 * f.backward, "step": 1e3 * f.step}
            for name, f in floors.items()
        },
        "variants": {
            variant.name: {
                "times": times[variant.name],
                "per_image_ms": times[variant.name]["step"]["median_ms"] / workload.batch,
                "fraction_of_floor": 1e3 * floors[variant.dtype].step / times[variant.name]["step"]["median_ms"],
                "memory": measure_memory(workload, variant, threads),
            }
            for variant in variants
        },
        "ratios": ratios_to_peers(variants, times),
    }


def check_losses(steps: dict[str, TrainingStep], dtypes: dict[str, str]) -> None:
    """Check that all variants compute the same loss.

    Raises:
        RuntimeError: a loss differs from that of the first fp32 variant or, without one, of the first variant.
    """
    losses = {name: float(step.loss().detach()) for name, step in steps.items()}
    reference = next((name for name in losses if dtypes[name] == "fp32"), next(iter(losses)))
    for name, loss in losses.items():
        allowed = _LOSS_TOLERANCE[dtypes[name]] * abs(losses[reference])
        if not math.isfinite(loss) or abs(loss - losses[reference]) > allowed:
            raise RuntimeError(f"{name} has loss {loss}, {reference} has {losses[reference]}: not the same work")


def ratios_to_peers(variants: list[Variant], times: dict[str, dict]) -> dict[str, dict]:
    """Step time of each of our variants divided by that of the best peer of its dtype, and of all peers."""
    ms = medians(times)
    ratios = {}
    for ours in (variant for variant in variants if variant.engine == _OURS):
        peers = [variant for variant in variants if variant.engine != _OURS]
        groups = {"same_dtype": [p for p in peers if p.dtype == ours.dtype], "all": peers}
        ratios[ours.name] = {
            group: {"peer": best.name, "ratio": ms[ours.name] / ms[best.name]}
            for group, members in groups.items()
            if members and (best := min(members, key=lambda p: ms[p.name]))
        }
    return ratios


def measure_memory(workload: Workload, variant: Variant, threads: int) -> dict[str, int]:
    """Memory of one step in bytes, in a fresh process.

    Returns:
        "saved": size of the distinct storages that autograd keeps for backward, without parameters;
        "kept": growth of resident memory in a forward pass, with what the hooks on saved tensors cannot count;
        "peak": growth of resident memory from before a step to its peak.
    """
    return in_new_process(step_memory, workload, variant, threads)


def step_memory(workload: Workload, variant: Variant, threads: int) -> dict[str, int]:
    """What `measure_memory` returns, measured in this process."""
    torch.set_num_threads(threads)
    step = make_step(workload, variant)
    step()
    saved = saved_bytes(step.loss, exclude=[*step.model.parameters(), *step.model.buffers(), step.images])

    step.model.zero_grad(set_to_none=True)
    peak = peak_growth(lambda: step.loss().backward())

    step.model.zero_grad(set_to_none=True)
    trim_memory()
    before = process_memory("VmRSS")
    loss = step.loss()
    trim_memory()
    kept = process_memory("VmRSS") - before
    del loss
    return {"saved": saved, "kept": kept, "peak": peak}


def show(row: dict) -> None:
    """Print one row of `bench`."""
    print(
        f"\n{row['workload']}: batch {row['batch']}, {row['resolution']} x {row['resolution']}, "
        f"{row['threads']} threads, {row['macs_per_image'] / 1e6:.0f} million MACs per image; median ms, MiB"
    )
    for dtype, ceilings in row["ceilings"].items():
        print(
            f"floor {dtype}: {row['floor_ms'][dtype]['step']:.1f} ms (copy {ceilings['bytes'] / 1e9:.1f} GB/s, "
            f"matrix product {ceilings['matmul'] / 1e9:.0f}, vector {ceilings['vector'] / 1e9:.0f} GFLOP/s)"
        )
    print(
        f"{'':28} {'forward':>9} {'backward':>9} {'step':>9} {'q20 - q80':>17} {'per image':>9} {'of floor':>8} "
        f"{'saved':>7} {'kept':>7} {'peak':>7}"
    )
    for name, result in row["variants"].items():
        step, memory = result["times"]["step"], result["memory"]
        sizes = " ".join(f"{memory[kind] / 2**20:7.0f}" for kind in ("saved", "kept", "peak"))
        print(
            f"{name:28} {result['times']['forward']['median_ms']:9.1f} {result['times']['backward']['median_ms']:9.1f} "
            f"{step['median_ms']:9.1f} {step['q20_ms']:8.1f} - {step['q80_ms']:<6.1f} {result['per_image_ms']:9.2f} "
            f"{result['fraction_of_floor']:8.2f} {sizes}"
        )
    for ours, groups in row["ratios"].items():
        parts = [f"{g['ratio']:.2f} of {g['peer']}" for g in groups.values()]
        print(f"{ours}: step {', '.join(dict.fromkeys(parts))}", end="")
        eager = f"eager channels_last {ours.split()[-1]}"
        if eager in row["variants"]:
            memory, peer = (row["variants"][name]["memory"] for name in (ours, eager))
            # allocators that keep their pages have no peak
            shares = [f"{kind} {memory[kind] / peer[kind]:.2f}" for kind in ("saved", "peak") if peer[kind]]
            print(f"; memory {', '.join(shares)} of {eager}", end="")
        print(flush=True)
