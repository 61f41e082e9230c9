"""`nasfast.fuse` against PyTorch on CNNs of torchvision and, where it is installed, timm: training and inference.

    python -m benchmarks.bench_fuse_models [--models NAME ...] [--out FILE]

Every row has one model, what trains, and a type. All variants are in channels_last and on one thread. Times are CPU
times of the thread, so that other programs on the machine disturb them less. The peers are eager PyTorch and, without
gradients, eager PyTorch with BatchNorms folded into convolutions by torch.fx.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse as fold

import nasfast
from benchmarks.harness import positive, write_json
from nasfast.measure.timing import measure

BATCH, RESOLUTION, ROUNDS = 8, 160, 3
TRAINS = ("batch norms", "all", "nothing")
TYPES = ("fp32", "autocast bf16", "bfloat16")
# relative difference of the losses of two variants
_TOLERANCE = {"fp32": 1e-3, "autocast bf16": 5e-2, "bfloat16": 5e-2}

MODELS = (
    "torchvision/mobilenet_v2", "torchvision/mobilenet_v3_small", "torchvision/mobilenet_v3_large",
    "torchvision/mnasnet0_5", "torchvision/shufflenet_v2_x0_5", "torchvision/shufflenet_v2_x1_0",
    "torchvision/regnet_x_400mf", "torchvision/regnet_y_400mf", "torchvision/resnet18", "timm/mobilenetv2_100",
    "timm/mobilenetv3_small_100", "timm/efficientnet_lite0", "timm/fbnetc_100", "timm/semnasnet_100",
    "timm/hardcorenas_a", "timm/ghostnet_100", "timm/rexnet_100", "timm/tinynet_e", "timm/lcnet_100",
    "timm/mobilenetv4_conv_small", "timm/regnety_002", "torchvision/efficientnet_b0", "torchvision/googlenet",
    "torchvision/densenet121",
)  # fmt: skip


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
    model = model.to(memory_format=torch.channels_last).train(trains != "nothing").requires_grad_(trains == "all")
    if trains == "batch norms":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(True)
    return model.bfloat16() if kind == "bfloat16" else model


def make_run(
    model: nn.Module, trains: str, kind: str, images: Tensor, labels: Tensor
) -> Callable[[], dict[str, float]]:
    """A variant for `measure`: one step or one inference; `run.loss` is the last loss."""
    images = images.bfloat16() if kind == "bfloat16" else images
    autocast = torch.autocast("cpu", torch.bfloat16) if kind == "autocast bf16" else nullcontext()

    def run() -> dict[str, float]:
        # dropout must drop the same
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        start = time.thread_time()
        with autocast, torch.set_grad_enabled(trains != "nothing"):
            loss = F.cross_entropy(model(images).float(), labels)
        if trains != "nothing":
            loss.backward()
        end = time.thread_time()
        run.loss = float(loss.detach())
        return {"step": end - start}

    return run


def bench(name: str, trains: str, kind: str, batch: int, resolution: int, rounds: int) -> dict:
    """One row.

    Raises:
        RuntimeError: the variants compute different losses.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, resolution, resolution, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), generator=generator)
    eager = prepare(make(name), trains, kind)
    models = {"eager": eager, "nasfast": copy.deepcopy(eager)}
    report = nasfast.fuse(models["nasfast"])
    if trains == "nothing":
        try:
            models["folded"] = prepare(fold(make(name).eval()), trains, kind)
        except Exception as error:  # torch.fx cannot trace every model
            print(f"{name}: torch.fx does not fold it: {str(error).splitlines()[0]}")
    runs = {variant: make_run(model, trains, kind, images, labels) for variant, model in models.items()}
    times = measure(runs, rounds=rounds, warmup=1)
    for variant, run in runs.items():
        if not math.isclose(run.loss, runs["eager"].loss, rel_tol=_TOLERANCE[kind]):
            raise RuntimeError(f"{name}, {trains}, {kind}: {variant} has loss {run.loss}, eager {runs['eager'].loss}")
    medians = {variant: phases["step"]["median_ms"] for variant, phases in times.items()}
    peer = min((variant for variant in medians if variant != "nasfast"), key=medians.__getitem__)
    return {
        "model": name,
        "trains": trains,
        "type": kind,
        "batch": batch,
        "resolution": resolution,
        "rounds": rounds,
        "times": times,
        "peer": peer,
        "ratio": medians["nasfast"] / medians[peer],
        "ratio_to_eager": medians["nasfast"] / medians["eager"],
        "convolutions": report.convolutions,
        "in_chains": report.fused,
    }


def summary(rows: list[dict]) -> list[str]:
    """For every kind of row: median, least and greatest ratio."""
    lines = []
    for trains in TRAINS:
        for kind in TYPES:
            ratios = [row["ratio"] for row in rows if (row["trains"], row["type"]) == (trains, kind)]
            if ratios:
                lines.append(
                    f"trains {trains:11} {kind:13} {len(ratios):3} models: median {statistics.median(ratios):.2f}, "
                    f"from {min(ratios):.2f} to {max(ratios):.2f}"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=names(), metavar="NAME", help=f"some of {', '.join(names())}")
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=TRAINS)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--batch", type=positive, default=BATCH, help="images per step")
    parser.add_argument("--resolution", type=positive, default=RESOLUTION, help="side of the images in pixels")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="timed rounds")
    parser.add_argument("--out", type=Path, help="JSON file for the results, written after every model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict] = []
    for name in args.models or names():
        for trains in args.trains:
            for kind in args.types:
                rows.append(bench(name, trains, kind, args.batch, args.resolution, args.rounds))
                row = rows[-1]
                print(
                    f"{name:34} trains {trains:11} {kind:13} {row['ratio']:.2f} of {row['peer']:6} "
                    f"({row['ratio_to_eager']:.2f} of eager)",
                    flush=True,
                )
        if args.out:
            write_json(args.out, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
