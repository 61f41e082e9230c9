"""Time variants of the same work side by side, and write results that say where they come from.

Variants are interleaved in one process: each round runs every variant once, in a rotating order, so that a busy moment
of the machine touches all of them. Medians and quantiles are over rounds.
"""

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy
import torch

ROOT = Path(__file__).parent.parent


def measure(variants: dict[str, Callable[[], dict[str, float]]], *, rounds: int, warmup: int = 2) -> dict[str, dict]:
    """Run every variant in every round and summarise its times.

    Args:
        variants: name -> function that does the work once and returns {phase: seconds}.
        rounds: timed rounds.
        warmup: rounds thrown away (compilation, caches, memory pools).

    Returns:
        name -> phase -> {"median_ms", "q20_ms", "q80_ms"}.
    """
    times: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    names = list(variants)
    for i_round in range(warmup + rounds):
        shift = i_round % len(names)
        for name in names[shift:] + names[:shift]:
            for phase, seconds in variants[name]().items():
                if i_round >= warmup:
                    times[name].setdefault(phase, []).append(seconds * 1e3)
    return {
        name: {phase: summarise(samples, "ms") for phase, samples in phases.items()} for name, phases in times.items()
    }


def summarise(samples: list[float], unit: str) -> dict[str, float]:
    """Median, 20 % and 80 % quantile, keyed `median_UNIT` and so on."""
    names = (f"median_{unit}", f"q20_{unit}", f"q80_{unit}")
    return dict(zip(names, map(float, np.quantile(samples, (0.5, 0.2, 0.8))), strict=True))


def forward_backward(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
) -> Callable[[], dict[str, float]]:
    """A variant for `measure`: function(*inputs), then the gradients of every input that requires one."""
    leaves = [tensor for tensor in inputs if tensor.requires_grad]

    def run() -> dict[str, float]:
        start = time.perf_counter()
        y = function(*inputs)
        middle = time.perf_counter()
        torch.autograd.grad(y, leaves, grad)
        end = time.perf_counter()
        return {"forward": middle - start, "backward": end - middle, "full": end - start}

    return run


def saved_bytes(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> int:
    """Bytes of the distinct tensors one forward keeps for backward, inputs that are saved as they are included."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(*inputs)
    del y
    return sum(saved.values())


def ratios(summaries: dict[str, dict], ours: str, phase: str) -> dict[str, float]:
    """How many times longer than ours each other variant takes (medians), and "best_peer": the smallest of them."""
    mine = summaries[ours][phase]["median_ms"]
    others = {name: phases[phase]["median_ms"] / mine for name, phases in summaries.items() if name != ours}
    return {**others, "best_peer": min(others.values())}


def provenance() -> dict:
    """Device, versions, commit and date of a result file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scipy": scipy.__version__,
    }


def _commit() -> str | None:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, rows: list[dict]) -> None:
    """Write rows with their provenance, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
