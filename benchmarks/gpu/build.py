"""Builds the extension for this GPU, and makes sure that the other parts will import it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.plan import BUILD, ROOT, environment_of, imported_from

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Bench

# what a part of the plan gets when it imports nasfast
_ASK = """
import json, nasfast
from nasfast.ops import _native
extension = _native.extension
print(json.dumps({
    "from": nasfast.__file__,
    "missing": _native.why_missing(),
    "emulation": _native.why_no_emulation(),
    "build": extension and extension.build_info()._asdict(),
    "device": extension and extension.cuda_device_info()._asdict(),
}))
"""


def bench_build(bench: Bench) -> None:
    """Build, and write a row with what a part imports.

    Raises:
        SystemExit: the build failed, or a part would run other kernels.
    """
    start = time.monotonic()
    if bench.on_gpu:
        _build()
    found = imported(bench.device)
    bench.row("built", seconds=round(time.monotonic() - start, 1), **found)
    if why := problem(found, bench.device):
        sys.exit(f"the parts would not run the CUDA kernels: {why}")


def problem(found: dict[str, Any], device: str) -> str | None:
    """Why a part that imports this would run no CUDA kernels; None if it would."""
    if not Path(found["from"]).is_relative_to(imported_from(device)):
        return f"nasfast is imported from {found['from']}"
    if found["missing"]:
        return found["missing"]
    if device == "cpu":
        return found["emulation"]
    if not found["build"]["cuda_operators"]:
        return "the extension has no CUDA operators"
    return None if found["device"]["kernels_run"] else found["device"]["error"]


def imported(device: str) -> dict[str, Any]:
    """What a part of the plan imports as nasfast."""
    command = [sys.executable, "-c", _ASK]
    folder = imported_from(device)
    result = subprocess.run(command, cwd=folder, env=environment_of(device), capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"nasfast cannot be imported from {folder}: {result.stderr[-1500:]}")
    return json.loads(result.stdout)


def _build() -> None:
    """A folder that was built before is built again only where sources have changed."""
    folder = ROOT / BUILD
    shutil.rmtree(folder / "lib", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    major, minor = torch.cuda.get_device_capability()
    settings = {"NASFAST_NATIVE": "ON", "NASFAST_CUDA": "ON", "NASFAST_ISAS": "BASELINE", "NASFAST_EMULATION": "OFF"}
    env = {**os.environ, **settings, "CUDAARCHS": f"{major}{minor}-real"}
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "build", "--build-base", folder]
    command += ["--build-lib", folder / "lib", "--build-temp", folder / "native"]
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        sys.exit("the build failed")
