"""Makes sure that the parts run the CUDA kernels: of the build that is there, or where none runs here, of a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.plan import ROOT, part_environment
from benchmarks.gpu.system import machine_row
from nasfast.measure.doctor import environment

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
    """Write rows with the machine and with what a part imports; build in this checkout only if that does not run here.

    Raises:
        SystemExit: the build failed, or its kernels do not run here.
    """
    bench.row("machine", **machine_row(bench.device))
    start, compiled = time.monotonic(), False
    package = inspect_import(bench.device)
    why = problem(package, bench.device)
    if why and bench.on_gpu:
        bench.row("left_out", what="the build that was there", error=why)
        _build()
        compiled, package = True, inspect_import(bench.device)
        why = problem(package, bench.device)
    bench.row("built", compiled=compiled, seconds=round(time.monotonic() - start, 1), **package)
    bench.row("doctor", **environment())
    if why:
        sys.exit(f"the parts would not run the CUDA kernels: {why}")


def problem(package: dict[str, Any], device: str) -> str | None:
    """Why a part that imports this would run no CUDA kernels; None if it would."""
    if not Path(package["from"]).is_relative_to(ROOT):
        return f"nasfast is imported from {package['from']}"
    if package["missing"]:
        return package["missing"]
    if device == "cpu":
        return package["emulation"]
    if not package["build"]["cuda_operators"]:
        return "the extension has no CUDA operators"
    return None if package["device"]["kernels_run"] else package["device"]["error"]


def inspect_import(device: str) -> dict[str, Any]:
    """What a part of the plan imports as nasfast."""
    command = [sys.executable, "-c", _ASK]
    result = subprocess.run(command, cwd=ROOT, env=part_environment(device), capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"nasfast cannot be imported from {ROOT}: {result.stderr[-1500:]}")
    return json.loads(result.stdout)


def _build() -> None:
    """Build in this checkout, for this GPU and one instruction set of the CPU."""
    major, minor = torch.cuda.get_device_capability()
    settings = {"NASFAST_NATIVE": "ON", "NASFAST_CUDA": "ON", "NASFAST_ISAS": "BASELINE", "NASFAST_EMULATION": "OFF"}
    env = {**os.environ, **settings, "CUDAARCHS": f"{major}{minor}-real"}
    if subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=env).returncode:
        sys.exit("the build failed")
