"""Bytes that autograd keeps from forward to backward of a step, beside those of eager PyTorch; needs no GPU.

    python -m benchmarks.gpu_model.saved [--space mobilenet_v2] [--batch 32] [--arch 90] [--out FILE]

Both forward passes run on fake tensors, which have sizes and no memory, and count the distinct storages that are saved.
Parameters do not count, in any type. Eager PyTorch runs the same path with plain modules under autocast to bf16.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_model.gpus import GPUS
from benchmarks.gpu_model.recorder import BACKENDS, no_gpu
from benchmarks.harness import positive, write_json
from benchmarks.steps import train_batch_norms
from nasfast.engine.graphs import count_saved
from nasfast.spaces import get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet


def saved(space_name: str, batch: int, arch: int, backend: str) -> dict:
    """Bytes saved by forward of the mean path that trains all BatchNorms, with a backend of `Workload` and in eager."""
    space = get_space(space_name)
    path = mean_path(space)
    shape = batch, space.in_channels, space.resolution, space.resolution
    net = Supernet(space, init="gaussian", layer_indicators=False)
    net.freeze("bn")
    plain = train_batch_norms(StandaloneNetwork(space, path))
    with no_gpu(arch, backend):
        ours = _count(net, lambda images: net(images, path), shape)
    eager = _count(plain, plain, shape)
    common = {"space": space_name, "batch": batch, "arch": arch, "backend": backend}
    return {**common, "saved_bytes": ours, "eager_bytes": eager, "share_of_eager": ours / eager}


def _count(net: nn.Module, forward: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> int:
    net.to(memory_format=torch.channels_last).train()
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.to(torch.bfloat16)  # otherwise the casts of autocast would be saved and count
    with FakeTensorMode(allow_non_fake_inputs=True), count_saved() as counted:
        images = torch.empty(shape, memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            forward(images)
        return counted()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--space", default="mobilenet_v2")
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--arch", type=int, nargs="+", choices=GPUS, default=[90, 86])
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="see Workload")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rows = [saved(args.space, args.batch, arch, args.backend) for arch in args.arch]
    for row in rows:
        print(
            f"{row['space']}, batch {row['batch']}, as for sm_{row['arch']}: {row['saved_bytes'] / 1e6:.0f} MB saved, "
            f"{row['share_of_eager']:.3f} of the {row['eager_bytes'] / 1e6:.0f} MB of eager PyTorch"
        )
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
