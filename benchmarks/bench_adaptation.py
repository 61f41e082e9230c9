"""Test-time adaptation of BatchNorms (TENT, Wang et al. 2021), plain and after `nasfast.fuse`: time and memory.

    python -m benchmarks.bench_adaptation [--batch 8] [--resolution 224] [--rounds 5] [--out FILE]

The network is torchvision's resnet50 with random weights. Times are CPU times of the thread, of interleaved rounds;
memory is what a forward keeps for backward, besides parameters and images.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import nasfast
from benchmarks.harness import medians, positive, saved_bytes, write_json
from benchmarks.steps import train_batch_norms
from nasfast.measure.timing import measure
from nasfast.runtime.memory import keep_freed_memory


def make() -> nn.Module:
    """The network as TENT configures it: statistics of the batch, and only affine parameters of BatchNorms train."""
    torch.manual_seed(0)
    return train_batch_norms(torchvision.models.resnet50().to(memory_format=torch.channels_last))


def make_step(model: nn.Module, images: Tensor) -> Callable[[], dict[str, float]]:
    """A step for `measure`."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)

    def step() -> dict[str, float]:
        start = time.thread_time()
        logits = model(images)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        entropy.backward()
        optimizer.step()
        return {"step": time.thread_time() - start}

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=positive, default=8, help="images per step")
    parser.add_argument("--resolution", type=positive, default=224, help="side of the images in pixels")
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    images = torch.randn(args.batch, 3, args.resolution, args.resolution).contiguous(memory_format=torch.channels_last)
    plain = make()
    faster, smaller = copy.deepcopy(plain), copy.deepcopy(plain)
    nasfast.fuse(faster)
    nasfast.fuse(smaller, only_faster=False)
    models = {"eager": plain, "fused": faster, "fused, only_faster=False": smaller}
    kept = {
        name: saved_bytes(model, [images], exclude=[*model.parameters(), *model.buffers(), images])
        for name, model in models.items()
    }
    times = measure({name: make_step(model, images) for name, model in models.items()}, rounds=args.rounds)
    for name, ms in medians(times).items():
        print(f"{name}: {ms:.0f} ms of CPU time, keeps {kept[name] / 2**20:.0f} MiB for backward")
    if args.out:
        write_json(args.out, [{"batch": args.batch, "resolution": args.resolution, "times": times, "kept_bytes": kept}])


if __name__ == "__main__":
    main()
