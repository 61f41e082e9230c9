"""Bytes that the kernels of one training step move, beside the floor; needs no GPU.

    python -m benchmarks.gpu_model.traffic [--space mobilenet_v2] [--batch 32] [--dtypes bf16 fp32] [--backend cuda]
                                           [--out FILE]

recorder.py records the step. Each tensor that a launch is given counts once, as if the caches served all repeated
reads. The floor is that of benchmarks.floor: forward writes and reads every convolution's output once, backward
writes once and reads three times. It includes no statistics, and no gradient twice.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.floor import Machine, step_floor, trace
from benchmarks.gpu_model.recorder import BACKENDS, Workload, record_step
from benchmarks.harness import positive, write_json
from nasfast.spaces import get_space, mean_path
from nasfast.supernet import StandaloneNetwork

# on this machine the floor in seconds is the number of bytes
_ONE_BYTE_PER_SECOND = Machine(1.0, float("inf"), float("inf"))


def traffic(space_name: str, batch: int, dtype: str, backend: str = "triton") -> dict:
    """Bytes by kernel, in all and of the floor, for a step of the mean path that trains only BatchNorms."""
    space = get_space(space_name)
    path = mean_path(space)
    shape = (batch, space.in_channels, space.resolution, space.resolution)
    workload = Workload(space_name, path, batch, dtype=dtype, engine="eager", backend=backend)
    launches = record_step(workload).launches
    kernels: dict[str, list[int]] = defaultdict(list)
    for launch in launches:
        kernels[launch.kernel].append(launch.bytes)
    found = trace(lambda: StandaloneNetwork(space, path), shape)
    found.linear_macs = found.linear_weights = 0  # PyTorch's own kernels compute the classifier
    floor = step_floor(found, _ONE_BYTE_PER_SECOND, torch.bfloat16 if dtype == "bf16" else torch.float32)
    total = sum(launch.bytes for launch in launches)
    return {
        "space": space_name,
        "batch": batch,
        "dtype": dtype,
        "backend": backend,
        "launches": len(launches),
        "bytes": total,
        "floor_bytes": floor.step,
        "times_the_floor": total / floor.step,
        "kernels": {name: {"launches": len(c), "bytes": sum(c)} for name, c in sorted(kernels.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--space", default="mobilenet_v2")
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="see Workload")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rows = [traffic(args.space, args.batch, dtype, args.backend) for dtype in args.dtypes]
    for row in rows:
        print(
            f"{row['space']} batch {row['batch']} {row['dtype']}: {row['bytes'] / 1e9:.2f} GB in {row['launches']} "
            f"kernels, {row['times_the_floor']:.2f} x the floor of {row['floor_bytes'] / 1e9:.2f} GB"
        )
        for name, found in sorted(row["kernels"].items(), key=lambda item: -item[1]["bytes"]):
            print(f"  {name:32} {found['launches']:4} launches {found['bytes'] / 1e6:9.1f} MB")
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
