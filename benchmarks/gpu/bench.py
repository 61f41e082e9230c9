"""What the parts of the plan share: a part's settings, and the step that it measures.

The step is forward, cross entropy, backward and update of the mean path of the 6^20 space with 224 x 224 images and
bf16 autocast; only BatchNorms train. The batch is 32 where nothing else is said. On the CPU the network is tiny, and
the CUDA kernels are emulated.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import json_lines
from benchmarks.captures import EagerCapture, nothing_deferred
from benchmarks.gpu.launches import count_chain_calls
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.engine.capture import CudaCapture
from nasfast.measure.timing import TrainingStep, random_batch, time_call
from nasfast.ops import use_backend
from nasfast.spaces import Arch, Block, FixedLayer, SearchSpace, Stage, get_space, mean_path
from nasfast.supernet import Supernet


@dataclass(frozen=True)
class Bench:
    """The settings of a part: where it measures, where it writes its rows, and when it must end.

    Attributes:
        part: name of the part.
        rows: file of JSON lines.
        device: `cuda` or `cpu`.
        end: time limit of the part, by time.monotonic().
        images: of a batch on a GPU.
    """

    part: str
    rows: Path
    device: str
    end: float
    images: int = 32

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def batch(self) -> int:
        return self.images if self.on_gpu else self.images // 32

    @cached_property
    def space(self) -> SearchSpace:
        if self.on_gpu:
            return get_space("mobilenet_v2")
        choices = (Block("mbconv", 3, 1), Block("mbconv", 3, 2))
        return SearchSpace(
            name="dry",
            resolution=8,
            num_classes=4,
            stem=(FixedLayer(Block("conv", 3), 8, stride=2),),
            stages=(Stage(8, 2, 1, choices),),
            head=(FixedLayer(Block("conv", 1), 16),),
        )

    @cached_property
    def path(self) -> Arch:
        return mean_path(self.space)

    def row(self, kind: str, **fields: Any) -> None:
        """Append a result to the file of rows, and print it."""
        row = {"part": self.part, "kind": kind, **fields}
        print(row, flush=True)
        json_lines.append(self.rows, row)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Write an error within this context as a row, and continue."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            last = traceback.format_exception_only(error)[-1].strip()
            where = traceback.format_tb(error.__traceback__)[-3:]
            self.row("error", what=what, error=last[:2000], tail="".join(where).splitlines())


@dataclass(frozen=True)
class Variant:
    """A way to run the step.

    Attributes:
        ops: `nasfast` or `torch`.
        how: `eager`, `graph` (one CUDA graph of the path), `engine` (that of nasfast), or `compile` (torch.compile with
            max-autotune, in one CUDA graph).
        defers: whether the engine's chains leave their last BatchNorm to the next one.
    """

    ops: str
    how: str
    defers: bool = True

    @property
    def name(self) -> str:
        return f"{self.ops} {self.how}" + ("" if self.defers else ", no deferral")

    @contextmanager
    def chosen(self, bench: Bench) -> Iterator[None]:
        """Within this context, operators run as the variant says."""
        with ExitStack() as stack:
            if self.ops == "nasfast" and not bench.on_gpu:  # the emulation has to be named
                stack.enter_context(use_backend("cuda"))
            if not self.defers:
                stack.enter_context(nothing_deferred())
            yield


# so small that all steps measure the same network
_RATE = 1e-6
ENGINE, WRITTEN = Variant("nasfast", "engine"), Variant("nasfast", "engine", defers=False)


def network(bench: Bench, variant: Variant) -> Supernet:
    net = Supernet(bench.space, init="he", layer_indicators=False, fused=variant.ops == "nasfast")
    net.freeze("bn")
    return net.to(device=bench.device, memory_format=torch.channels_last).train()


def make_engine(
    bench: Bench, variant: Variant
) -> tuple[Supernet, GraphEngine | EagerEngine, torch.Tensor, torch.Tensor]:
    """A network, its engine by a variant that is `engine` or `eager`, and images and labels."""
    images, labels = random_batch(bench.space, bench.batch, device=bench.device)
    net = network(bench, variant)
    if variant.how == "eager":
        return net, EagerEngine(net, bf16=True), images, labels
    capture = None if bench.on_gpu else EagerCapture()
    return net, GraphEngine(net, tuple(images.shape), bf16=True, capture=capture), images, labels


@contextmanager
def on_cuda_kernels(bench: Bench, variant: Variant) -> Iterator[None]:
    """Within this context, operators run as the variant says.

    Raises:
        NoCudaKernel: no CUDA kernel of a chain ran.
    """
    with variant.chosen(bench), count_chain_calls() as chains:
        yield
    if not chains:
        raise NoCudaKernel(f"{variant.name}: no CUDA kernel of a chain ran")


class Fixed(nn.Module):
    """A supernet with a fixed path."""

    def __init__(self, net: Supernet, path: Arch) -> None:
        super().__init__()
        self.net, self.path = net, path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x, self.path)


def _optimizer(net: nn.Module) -> torch.optim.SGD:
    trainable = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=_RATE, momentum=0.9, nesterov=True, fused=True)


class Whole:
    """Forward, loss, backward and update; a call returns seconds of `step`. `loss`: that of the first call."""

    def __init__(self, bench: Bench, variant: Variant) -> None:
        self.device = torch.device(bench.device)
        if variant.how == "engine":
            net, engine, images, labels = make_engine(bench, variant)
            update = _optimizer(net)
            self.loss = float(engine.forward_backward(images, labels, [bench.path]).loss)
            self.run = lambda: (engine.forward_backward(images, labels, [bench.path]), update.step())
            return
        images, labels = random_batch(bench.space, bench.batch, device=bench.device)
        net = network(bench, variant)
        model, path, update = net, bench.path, _optimizer(net)
        if variant.how == "compile":
            options = {"mode": "max-autotune-no-cudagraphs"} if bench.on_gpu else {"backend": "eager"}
            model, path = torch.compile(Fixed(net, path), dynamic=False, **options), None
        step = TrainingStep(model, images, labels, path=path, bf16=True)
        self.loss = float(step.loss().detach())

        def whole() -> None:
            model.zero_grad(set_to_none=True)
            step.loss().backward()
            update.step()

        whole()
        if variant.how != "eager":
            capturing = CudaCapture(self.device) if bench.on_gpu else EagerCapture()
            (whole,) = capturing.capture([whole], capturing.pool())
        self.run = whole

    def __call__(self) -> dict[str, float]:
        return {"step": time_call(self.run, self.device)}


def make(bench: Bench, variant: Variant) -> Whole:
    """Make a step that has run once, and write a row with the kernels that did.

    Raises:
        NoCudaKernel: the variant is one of nasfast, and no CUDA kernel of a chain ran.
    """
    with variant.chosen(bench), count_chain_calls() as chains:
        step = Whole(bench, variant)
    bench.row("kernels", variant=variant.name, cuda=dict(chains), loss=step.loss)
    if variant.ops == "nasfast" and not chains:
        raise NoCudaKernel(f"{variant.name}: no CUDA kernel of a chain ran")
    return step


class NoCudaKernel(SystemExit):
    """What should have run our CUDA kernels ran others: no later number would mean anything."""


def random_paths(bench: Bench, count: int) -> list[Arch]:
    generator = random.Random(0)
    return [tuple(generator.randrange(len(layer.choices)) for layer in bench.space.layers) for _ in range(count)]
