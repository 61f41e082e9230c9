"""What the benchmarks share: memory, ratios, and result files with their provenance.

`nasfast.measure.timing.measure` interleaves the variants in one process and times them.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import multiprocessing
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from nasfast import ops
from nasfast.measure.timing import machine
from nasfast.runtime.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Result = TypeVar("Result")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def freeze_all_but_batch_norms(network: nn.Module) -> None:
    """Let only the affine parameters of BatchNorms train."""
    network.requires_grad_(False)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(True)


# ---- times


def seconds(call: Callable[[], Result]) -> tuple[float, Result]:
    """Wall seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def timed(step: Callable[[], object]) -> Callable[[], dict[str, float]]:
    """A variant for `nasfast.measure.timing.measure`: wall and processor seconds of a step."""

    def run() -> dict[str, float]:
        cpu = time.process_time()
        wall, _ = seconds(step)
        return {"step": wall, "cpu": time.process_time() - cpu}

    return run


def medians(times: Mapping[str, dict], phase: str = "step") -> dict[str, float]:
    """Median ms of a phase by variant, of what `nasfast.measure.timing.measure` returns."""
    return {name: phases[phase]["median_ms"] for name, phases in times.items()}


def ratios(times: Mapping[str, dict], ours: str, phase: str) -> dict[str, float]:
    """Median time of each other variant divided by that of ours; "best_peer" is the smallest of these ratios."""
    ms = medians(times, phase)
    peers = {name: median / ms[ours] for name, median in ms.items() if name != ours}
    return {**peers, "best_peer": min(peers.values())}


# ---- memory


def saved_bytes(
    function: Callable[..., object], inputs: Iterable[torch.Tensor] = (), *, exclude: Iterable[torch.Tensor] = ()
) -> int:
    """Count the bytes of the distinct storages that one forward pass keeps for backward.

    Hooks on saved tensors count what eager autograd, autograd.Function, registered operators and compiled graphs save.

    Args:
        function, inputs: function(*inputs) is the forward pass; inputs count if they are saved.
        exclude: tensors that do not count besides instances of nn.Parameter, which exist anyway.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded and not isinstance(tensor, nn.Parameter):
            # kept, so that no later storage gets the same address
            saved[storage._cdata] = storage
        # the tensor itself would keep the graph alive, and with it everything that is counted here
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(*inputs)
    del y
    return sum(storage.nbytes() for storage in saved.values())


def in_new_process(function: Callable[..., Result], *arguments: object) -> Result:
    """What a function returns in a spawned process, which shares no memory with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def trim_memory() -> None:
    """Return freed memory to the system, so that it is not counted."""
    gc.collect()
    ops.empty_cache()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def process_memory(field: str) -> int:
    """Bytes by a field of /proc/self/status: `VmRSS`, which is resident, or `VmHWM`, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_growth(step: Callable[[], object]) -> int:
    """Bytes by which resident memory grows from before a step to its peak."""
    trim_memory()
    before = process_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return process_memory("VmHWM") - before


# ---- files of results


def provenance() -> dict:
    """Device, versions, commit and date of a result file."""
    commit = None
    if shutil.which("git") is not None:
        result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        commit = result.stdout.strip() or None
    return {"commit": commit, **machine(), "scipy": importlib.metadata.version("scipy")}


def write_json(path: Path, rows: list[dict]) -> None:
    """Write rows and their provenance, and make the folder if necessary; a file that is there is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n").encode())


def read_json(path: Path) -> list[dict]:
    """The rows of a file of `write_json`."""
    return json.loads(path.read_text())["rows"]
