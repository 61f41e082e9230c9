"""What the benchmarks share: bytes saved for backward, ratios, and result files with their provenance.

`nasfast.measure.timing.measure` interleaves the variants in one process and times them.
"""

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from nasfast.measure.timing import machine
from nasfast.runtime.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent


def saved_bytes(
    function: Callable[..., object], inputs: Iterable[torch.Tensor] = (), *, exclude: Iterable[torch.Tensor] = ()
) -> int:
    """Count the bytes of the distinct storages that one forward pass keeps for backward.

    Hooks on saved tensors count what eager autograd, autograd.Function, registered operators and compiled graphs save.

    Args:
        function, inputs: function(*inputs) is the forward pass; inputs count if they are saved.
        exclude: tensors that do not count besides instances of nn.Parameter, which exist anyway.
    """
    there = {tensor.untyped_storage()._cdata for tensor in exclude}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in there and not isinstance(tensor, torch.nn.Parameter):
            # kept, so that no later storage gets the same address
            saved[storage._cdata] = storage
        # the tensor itself would keep the graph alive, and with it everything that is counted here
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(*inputs)
    del y
    return sum(storage.nbytes() for storage in saved.values())


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def ratios(summaries: dict[str, dict], ours: str, phase: str) -> dict[str, float]:
    """Median time of each other variant divided by that of ours; "best_peer" is the smallest of these ratios."""
    mine = summaries[ours][phase]["median_ms"]
    others = {name: phases[phase]["median_ms"] / mine for name, phases in summaries.items() if name != ours}
    return {**others, "best_peer": min(others.values())}


def timed(step: Callable[[], object]) -> Callable[[], dict[str, float]]:
    """A variant for `nasfast.measure.timing.measure`: wall and processor seconds of a step."""

    def run() -> dict[str, float]:
        start, cpu = time.perf_counter(), time.process_time()
        step()
        return {"step": time.perf_counter() - start, "cpu": time.process_time() - cpu}

    return run


def provenance() -> dict:
    """Device, versions, commit and date of a result file."""
    return {"commit": _commit(), **machine(), "scipy": importlib.metadata.version("scipy")}


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or None


def write_json(path: Path, rows: list[dict]) -> None:
    """Write rows and their provenance, and make the folder if necessary; a file that is there is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n").encode())


def append_line(path: Path, row: dict) -> None:
    """Append a row to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict]:
    """The rows of a file of JSON lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
