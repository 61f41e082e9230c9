"""The tile sizes with which a Triton kernel runs: the default of its family, or the fastest ones on this device.

With NASFAST_TUNE=1, the first call of a kernel for a shape times every configuration of its family
(`_triton/configs.py`) and keeps the fastest, in memory and in one JSON file per device in the cache folder. Without
NASFAST_TUNE, the choices in that file are still used. For a shape that is not in it, and under the interpreter, the
default runs and nothing is timed.

A kernel of a few microseconds ends before Python has launched the next one, so timing single launches would time the
host. One sample is therefore a replay of a CUDA graph of many launches, or many queued launches if the capture fails.
"""

import contextlib
import json
import logging
import os
import statistics
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
import triton

from nasfast._triton.configs import FAMILIES, Config
from nasfast.runtime.files import write_atomic

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

# number of launches in one sample, and of samples of each configuration
_LAUNCHES, _ROUNDS = 50, 7
# Another configuration is chosen only if it takes less than this share of the default's time, so that noise does not
# choose between equals.
_WORTH = 0.98


def run(
    family: str, kernel: str, shape: tuple[int | str, ...], device: torch.device, launch: Callable[[Config], Result]
) -> Result:
    """Call launch(config) with the configuration for this kernel, shape and device.

    Args:
        family: key of FAMILIES.
        kernel, shape: what the best configuration may depend on; they name it in the file.
        launch: launches the kernel. It may be called several times, and must write the same results each time.
    """
    configs = FAMILIES[family]
    name = next(iter(configs))
    if device.type == "cuda":
        key = " ".join(map(str, (kernel, *shape)))
        table = _table(_path(device.index))
        chosen = table.get(key)
        if (
            len(configs) > 1
            and chosen not in configs
            and os.environ.get("NASFAST_TUNE") == "1"
            and not torch.cuda.is_current_stream_capturing()
        ):
            chosen = _fastest({name: partial(launch, config) for name, config in configs.items()})
            table |= {**_read(_path(device.index)), key: chosen}  # other processes may have written to the file
            write_atomic(_path(device.index), json.dumps(table, indent=1, sort_keys=True).encode())
        name = chosen if chosen in configs else name
    return launch(configs[name])


def _fastest(calls: dict[str, Callable[[], object]]) -> str:
    """The call with the smallest median over interleaved rounds; the first call if no other is clearly faster."""
    samples = {name: _repeated(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, sample in samples.items():
            times[name].append(_milliseconds(sample))
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    default, best = next(iter(medians)), min(medians, key=medians.__getitem__)
    return best if medians[best] < _WORTH * medians[default] else default


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    """A function that makes _LAUNCHES launches: a replay of a CUDA graph, or single launches if the capture fails."""

    def queued() -> None:
        for _ in range(_LAUNCHES):
            call()

    call()  # compiles
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            # other threads may continue to use CUDA, such as one that pins memory for a loader
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                queued()
            except RuntimeError:
                # ending a failed capture raises another error, which says less
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        sample = graph.replay
    except RuntimeError as error:
        _logger.warning("times queued launches, because their capture failed: %s", error)
        sample = queued
    torch.cuda.current_stream().wait_stream(stream)
    sample()
    return sample


def _milliseconds(sample: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    sample()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


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
    except (OSError, ValueError):  # without a readable file, everything is timed again
        return {}
    return table if isinstance(table, dict) else {}
