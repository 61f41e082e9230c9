"""The machine: device, versions and clocks."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from typing import Any

import torch

from nasfast.measure.timing import machine

_PACKAGES = "torch", "torchvision", "triton", "numpy", "pytest", "pytest-xdist", "pybind11", "cmake", "ninja"
_SMI = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu"


def machine_row(device: str) -> dict[str, Any]:
    """CPU, GPU, versions and clocks."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    row: dict[str, Any] = {**machine(), "cores": os.cpu_count(), "packages": versions, "clocks": clocks()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row |= {
            "capability": torch.cuda.get_device_capability(),
            "multiprocessors": properties.multi_processor_count,
            "memory_GiB": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nvcc": shutil.which("nvcc"),
        }
    return row


def clocks() -> dict[str, str]:
    """Clocks, power and temperature by nvidia-smi, or an error."""
    if shutil.which("nvidia-smi") is None:
        return {"error": "no nvidia-smi"}
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = answer.stdout.strip().splitlines()[0].split(", ") if answer.returncode == 0 else []
    return dict(zip(_SMI.split(","), values, strict=False)) or {"error": answer.stderr.strip()[:500]}
