"""What a user does first, measured as it is for the user: seconds to the first step, then medians.

The demo trains its supernet, `nasfast.fuse` speeds models of torchvision up, and `nasfast step` shows its rows. On the
CPU networks are tiny, and operators are those that nasfast chooses there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nasfast
from benchmarks.captures import EagerCapture
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.launches import count_chain_calls
from benchmarks.harness import freeze_all_but_batch_norms
from nasfast.measure.config import StepTimesConfig
from nasfast.measure.step_times import step_times
from nasfast.measure.timing import TrainingStep, graphed_step, measure, measuring, random_batch
from nasfast.ops.precision import resolve_precision
from nasfast.runtime.progress import calling
from nasfast.settings import TrainConfig
from nasfast.spaces import get_space
from nasfast.train.supernet import make_supernet, train_supernet

MODELS = ("mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "resnet50")
EAGER_AND_GRAPHS = ("torch eager", "nasfast fuse", "torch graph", "nasfast fuse graph")
COMPILED = ("torch compile graph", "nasfast fuse graph")


def bench_demo(bench: Bench) -> None:
    """Train the supernet of `nasfast run --config demo` in the default precision; a row for each line of its log."""
    space, steps, every = (get_space("digits_macro"), 280, 20) if bench.on_gpu else (bench.space, 4, 2)
    images, labels = random_batch(space, 64 if bench.on_gpu else 2)
    start = time.monotonic()

    def logged(stage: str, step: int, metrics: Any) -> None:
        bench.row("demo", step=step, of=steps, s=time.monotonic() - start, precision=precision, **metrics)

    precision = resolve_precision("auto", bench.device)
    net, sampler = make_supernet(space, "dinas")
    with tempfile.TemporaryDirectory() as out, calling([logged]), count_chain_calls() as chains:
        cfg = TrainConfig(epochs=1, lr=0.1, log_every=every)
        train_supernet(net, [(images, labels)] * steps, sampler, cfg, run_dir=out, device=bench.device)
    bench.row("kernels", variant="demo", cuda=dict(chains))


def bench_fuse(bench: Bench, name: str, kinds: tuple[str, ...], evaluating: bool = False) -> None:
    """Time the step of a model of torchvision in these ways, interleaved, with BatchNorms that train, in bf16 autocast.

    `evaluating`: in eval mode, as a pretrained network is adapted, whose BatchNorms keep their statistics. A row says
    when the first step of each had ended, with the defaults of PyTorch; later ones have cuDNN's fastest algorithms, by
    trial.
    """
    images = torch.randn(32 if bench.on_gpu else 2, 3, *(224 if bench.on_gpu else 32,) * 2, device=bench.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(len(images), device=bench.device)
    steps: dict[str, Callable[[], dict[str, float]]] = {}
    for kind in kinds:
        with bench.attempt(kind), count_chain_calls() as chains:
            model = _model(name).to(bench.device).train(not evaluating)
            start = time.monotonic()
            steps[kind] = _fused_step(bench, model, kind, images, labels)
            steps[kind]()
            bench.row("first_step", name=kind, first_s=time.monotonic() - start, cuda=dict(chains))
    if steps:
        with measuring():
            times = measure(steps, rounds=20 if bench.on_gpu else 1)
        for kind, phases in times.items():
            bench.row("step", name=kind, **phases["step"])


def _fused_step(
    bench: Bench, model: nn.Module, kind: str, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], dict[str, float]]:
    """The step of a model in a way of `EAGER_AND_GRAPHS` or `COMPILED`."""
    if "fuse" in kind:
        nasfast.fuse(model)
    if "compile" in kind:
        model.compile(dynamic=False, **({} if bench.on_gpu else {"backend": "eager"}))
    step = TrainingStep(model, images, labels, bf16=True)
    return graphed_step(step, None if bench.on_gpu else EagerCapture()) if "graph" in kind else step


def _model(name: str) -> nn.Module:
    """A model of torchvision with random weights, of which only BatchNorms train, in channels_last."""
    from torchvision import models  # without it, only these parts fail

    model = models.get_model(name, weights=None).to(memory_format=torch.channels_last)
    freeze_all_but_batch_norms(model)
    return model


def bench_step_command(bench: Bench, dtype: str) -> None:
    """The rows of `nasfast step --dtype DTYPE`, each when it has run twice and with its median."""
    with tempfile.TemporaryDirectory() as folder:
        bench.space.save(Path(folder) / "space.yaml")
        space = "mobilenet_v2" if bench.on_gpu else str(Path(folder) / "space.yaml")
        settings = {"space": space, "batch": bench.batch, "dtype": dtype, "device": bench.device}
        cfg = StepTimesConfig(**settings, rounds=10 if bench.on_gpu else 1)  # type: ignore[arg-type]  # by its fields
        report = step_times(cfg, callback=lambda row: bench.row("first_step", **row))
    for row in report.rows:
        bench.row("step", name=row.name, **row.times["step"])
