"""`nasfast.fuse` against PyTorch on CNNs of torchvision and, where it is installed, timm: training and inference.

    python -m benchmarks.bench_fuse_models [--models NAME ...] [--threads N] [--compile] [--rounds N] [--out FILE]

Every row has one model, what trains, and a type. All variants are in channels_last. On one thread, the default, times
are CPU times of the thread, so that other programs on the machine disturb them less; on more they are wall times, which
need a quiet machine. Freed memory stays with the process: otherwise one variant gives it back to the system, and the
next one waits for new pages. "nasfast" is `fuse` by default, and "always" with `only_faster=False`. `of_better` is the
time of the first divided by the least of "always" and eager PyTorch, between which the rule chooses, and `ran_fused`
the number of chains that it ran on the operator, 0 where the model's own forward ran. The peers are eager PyTorch;
without gradients also eager PyTorch with BatchNorms folded into convolutions by torch.nn.utils.fusion, which torch.fx
applies; and with `--compile` torch.compile, which takes minutes for a row. Then rows have two more variants: the fused
model compiled, and the backend "nasfast" of torch.compile, of which `backend_ratio` is the time divided by that of the
faster of `fuse` and torch.compile. `first_call_s` are seconds until the end of the first step, in which a variant is
compiled; inductor keeps what it compiled on disk, so that a second run compiles faster. Every row is written as soon as
it is measured, and a run that was stopped continues with the same `--out`.

In half, no rows train all weights: on a CPU, PyTorch takes more than a minute for such a step of two images.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch._inductor.config
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse as fold

import nasfast
from benchmarks.harness import freeze_all_but_batch_norms, medians, positive, read_json, seconds, write_json
from nasfast.fusion.dynamo import compile_graph
from nasfast.fusion.report import FUSED
from nasfast.measure.timing import measure
from nasfast.runtime.memory import keep_freed_memory

BATCH, RESOLUTION, ROUNDS = 8, 160, 3
# "pretrained": BatchNorms train in eval mode, so that they keep their statistics
TRAINS = ("batch norms", "pretrained", "all", "nothing")
TYPES = ("fp32", "autocast bf16", "bfloat16", "half")
_LEFT_OUT = {("all", "half")}
_DTYPES = {"bfloat16": torch.bfloat16, "half": torch.half}
# relative difference of the losses of two variants
_TOLERANCE = {"fp32": 1e-3, "autocast bf16": 5e-2, "bfloat16": 5e-2, "half": 2e-2}

MODELS = (
    "torchvision/mobilenet_v2", "torchvision/mobilenet_v3_small", "torchvision/mobilenet_v3_large",
    "torchvision/mnasnet0_5", "torchvision/shufflenet_v2_x0_5", "torchvision/shufflenet_v2_x1_0",
    "torchvision/regnet_x_400mf", "torchvision/regnet_y_400mf", "torchvision/resnet18", "timm/mobilenetv2_100",
    "timm/mobilenetv3_small_100", "timm/efficientnet_lite0", "timm/fbnetc_100", "timm/semnasnet_100",
    "timm/hardcorenas_a", "timm/ghostnet_100", "timm/rexnet_100", "timm/tinynet_e", "timm/lcnet_100",
    "timm/mobilenetv4_conv_small", "timm/regnety_002", "torchvision/efficientnet_b0", "torchvision/googlenet",
    "torchvision/densenet121",
)  # fmt: skip
# measured only where they are named
_MORE = ("torchvision/mnasnet1_0",)
# the variants of `--compile`
_COMPILED = ("compile", "compiled fused", "backend")
# and those that are ours
_OURS = ("nasfast", "always", "compiled fused", "backend")


def names() -> list[str]:
    """The models that can be made here."""
    timm = importlib.util.find_spec("timm") is not None
    return [name for name in MODELS if timm or not name.startswith("timm/")]


def make(name: str) -> nn.Module:
    """A model with random weights, the same at every call."""
    torch.manual_seed(0)
    home, _, kind = name.partition("/")
    if home == "timm":
        import timm

        return timm.create_model(kind, pretrained=False)
    # GoogLeNet warns about its initial weights, and its auxiliary classifiers need larger images
    settings = {"aux_logits": False, "init_weights": False} if kind == "googlenet" else {}
    return getattr(torchvision.models, kind)(weights=None, **settings)


def prepare(model: nn.Module, trains: str, kind: str) -> nn.Module:
    """Freeze what does not train, and convert to the type."""
    model = (
        model.to(memory_format=torch.channels_last)
        .train(trains in ("batch norms", "all"))
        .requires_grad_(trains == "all")
    )
    if trains in ("batch norms", "pretrained"):
        freeze_all_but_batch_norms(model)
    return model.to(_DTYPES.get(kind, torch.float32))


def make_run(
    model: nn.Module, trains: str, kind: str, images: Tensor, labels: Tensor
) -> Callable[[], dict[str, float]]:
    """A variant for `measure`: one step or one inference; `run.loss` is the last loss."""
    images = images.to(_DTYPES.get(kind, torch.float32))
    autocast = torch.autocast("cpu", torch.bfloat16) if kind == "autocast bf16" else nullcontext()
    # the processor time of several threads counts how they wait for each other
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def run() -> dict[str, float]:
        # dropout must drop the same
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        start = clock()
        with autocast, torch.set_grad_enabled(trains != "nothing"):
            loss = F.cross_entropy(model(images).float(), labels)
        if trains != "nothing":
            loss.backward()
        end = clock()
        run.loss = float(loss.detach())
        return {"step": end - start}

    return run


def bench(
    name: str, trains: str, kind: str, batch: int, resolution: int, rounds: int, *, compiled: bool = False
) -> dict:
    """One row; with an entry "unable" and without times where PyTorch itself cannot run the model in the type.

    Raises:
        RuntimeError: the variants compute different losses.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, resolution, resolution, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), generator=generator)
    eager = prepare(make(name), trains, kind)
    row = dict(model=name, trains=trains, type=kind, batch=batch, resolution=resolution, rounds=rounds)
    row["threads"] = torch.get_num_threads()
    row |= {"compiled": list(_COMPILED) if compiled else [], "load_average": os.getloadavg()[0]}
    try:
        make_run(eager, trains, kind, images[:2], labels[:2])()
    except RuntimeError as error:
        return {**row, "unable": str(error).splitlines()[0]}
    models = {"eager": eager, "nasfast": copy.deepcopy(eager), "always": copy.deepcopy(eager)}
    report = nasfast.fuse(models["nasfast"])
    nasfast.fuse(models["always"], only_faster=False)
    if trains == "nothing":
        try:
            models["folded"] = prepare(fold(make(name).eval()), trains, kind)
        except Exception as error:  # torch.fx cannot trace every model
            print(f"{name}: torch.fx does not fold it: {str(error).splitlines()[0]}")
    if compiled:
        torch.compiler.reset()
        # dropout must drop the same as in eager PyTorch
        torch._inductor.config.fallback_random = True
        plain, fused = copy.deepcopy(eager), copy.deepcopy(models["nasfast"])
        backends = zip(
            _COMPILED, (plain, fused, copy.deepcopy(eager)), ("inductor", "inductor", compile_graph), strict=True
        )
        models |= {variant: torch.compile(model, backend=to) for variant, model, to in backends}  # type: ignore[misc]
    runs = {variant: make_run(model, trains, kind, images, labels) for variant, model in models.items()}
    first_calls = {variant: seconds(run)[0] for variant, run in runs.items()}
    times = measure(runs, rounds=rounds, warmup=1)
    for variant, run in runs.items():
        if not math.isclose(run.loss, runs["eager"].loss, rel_tol=_TOLERANCE[kind]):
            raise RuntimeError(f"{name}, {trains}, {kind}: {variant} has loss {run.loss}, eager {runs['eager'].loss}")
    ms = medians(times)
    peer = min((variant for variant in ms if variant not in _OURS), key=ms.__getitem__)
    if compiled:
        row["backend_ratio"] = ms["backend"] / min(ms["nasfast"], ms["compile"])
    return {
        **row,
        "first_call_s": first_calls,
        "times": times,
        "peer": peer,
        "ratio": ms["nasfast"] / ms[peer],
        "ratio_to_eager": ms["nasfast"] / ms["eager"],
        "of_better": ms["nasfast"] / min(ms["eager"], ms["always"]),
        "convolutions": report.convolutions,
        "in_chains": report.fused,
        "ran_fused": sum(chain.runs == FUSED for chain in report.chains),
    }


def summary(rows: Sequence[dict]) -> list[str]:
    """For every kind of row: median, least and greatest ratio, and the same of the backend."""
    lines = []
    for trains in TRAINS:
        for kind in TYPES:
            here = [row for row in rows if (row.get("trains"), row.get("type")) == (trains, kind)]
            ratios = [row["ratio"] for row in here if "ratio" in row]
            unable = f"; PyTorch cannot run {len(here) - len(ratios)}" if len(ratios) < len(here) else ""
            if ratios:
                lines.append(
                    f"trains {trains:11} {kind:13} {len(ratios):3} models: median {statistics.median(ratios):.2f}, "
                    f"from {min(ratios):.2f} to {max(ratios):.2f}{unable}"
                )
                backends = [row["backend_ratio"] for row in here if "backend_ratio" in row]
                if backends:
                    lines[-1] += (
                        f"; backend by the faster of fuse and compile: median {statistics.median(backends):.2f}, "
                        f"from {min(backends):.2f} to {max(backends):.2f}"
                    )
            elif here:
                lines.append(f"trains {trains:11} {kind:13}{unable}")
    return lines


def describe(row: dict) -> str:
    """One line of what is printed while the benchmark runs."""
    begin = f"{row['model']:34} trains {row['trains']:11} {row['type']:13}"
    if "unable" in row:
        return f"{begin} PyTorch cannot run it: {row['unable']}"
    times = medians(row["times"])
    of_eager = ", ".join(f"{name} {ms / times['eager']:.2f}" for name, ms in times.items() if name != "eager")
    first = f"first calls {sum(row['first_call_s'].values()):.0f} s"
    return f"{begin} {row['ratio']:.2f} of {row['peer']:7}; of eager: {of_eager}; {first}"


_KEYS = ("model", "trains", "type", "batch", "resolution", "rounds", "threads", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = (*names(), *_MORE)
    parser.add_argument("--models", nargs="+", choices=known, metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=TRAINS)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--batch", type=positive, default=BATCH, help="images per step")
    parser.add_argument("--resolution", type=positive, default=RESOLUTION, help="side of the images in pixels")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="timed rounds")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--compile", action="store_true", help="also torch.compile and the backend")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the results, written after every row; rows that it has are kept"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    rows: list[dict] = read_json(args.out) if args.out and args.out.exists() else []
    compiled = list(_COMPILED) if args.compile else []
    measured = [[row.get(key) or [] for key in _KEYS] for row in rows]
    for name in args.models or names():
        for trains in args.trains:
            for kind in args.types:
                settings = name, trains, kind, args.batch, args.resolution, args.rounds
                if [*settings, args.threads, compiled] in measured or (trains, kind) in _LEFT_OUT:
                    continue
                rows.append(bench(*settings, compiled=args.compile))
                print(describe(rows[-1]), flush=True)
                if args.out:
                    write_json(args.out, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
