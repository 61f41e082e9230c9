"""Which tile sizes a Triton kernel runs with: the default of its family, or what tuning found on this device.

With NASFAST_TUNE=1 the first call of a kernel for a shape times every configuration of its family
(`_triton/configs.py`) and keeps the fastest, in memory and in a JSON file per device in the cache folder. Without it
that file is still used. Without either, and under the interpreter, nothing is timed and the default runs.
"""

import json
import os
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import triton

from nasfast._triton.configs import FAMILIES, Config
from nasfast.files import write_atomic

Result = TypeVar("Result")

_ROUNDS = 5


def run(
    family: str, kernel: str, shape: tuple[int | str, ...], device: torch.device, launch: Callable[[Config], Result]
) -> Result:
    """launch(config) with the configuration for this kernel, shape and device.

    Args:
        family: key of FAMILIES.
        kernel, shape: what the best configuration may depend on; they name it in the file.
        launch: launches the kernel; may be called several times, and must write the same each time.
    """
    configs = FAMILIES[family]
    name = next(iter(configs))
    if device.type == "cuda":
        key = " ".join(map(str, (kernel, *shape)))
        table = _table(_path(device.index))
        found = table.get(key)
        if (
            found not in configs
            and os.environ.get("NASFAST_TUNE") == "1"
            and not torch.cuda.is_current_stream_capturing()
        ):
            found = min(configs, key=lambda name: _milliseconds(lambda: launch(configs[name])))
            table |= {**_read(_path(device.index)), key: found}  # others may have written meanwhile
            write_atomic(_path(device.index), json.dumps(table, indent=1, sort_keys=True).encode())
        name = found if found in configs else name
    return launch(configs[name])


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@cache
def _path(device_index: int) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    device = torch.cuda.get_device_name(device_index).replace(" ", "-").replace("/", "-")
    return root / "nasfast" / f"tiles-{device}-triton{triton.__version__}.json"


@cache
def _table(path: Path) -> dict[str, str]:
    return _read(path)


def _read(path: Path) -> dict[str, str]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a file that cannot be read is measured again
        return {}
    return table if isinstance(table, dict) else {}
