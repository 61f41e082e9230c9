"""Runs the plan for a machine with a CUDA GPU: ten minutes, the most valuable facts first.

    bash benchmarks/gpu.sh [--out DIR] [--part NAME]... [--seconds N] [--device cuda|cpu]
    bash benchmarks/gpu.sh --report [--out DIR]
    bash benchmarks/gpu.sh --list

Each part is a process with a time limit, so that a crash, a lost CUDA context or a hang ends only its own part; the
next one runs. The program writes to DIR: rows.jsonl gets every result at once, log.txt has the output of the parts, and
report.md is one page of all results there. `--device cpu` runs the same code on tiny networks with emulated kernels, to
test the plan itself; it needs an extension with NASFAST_EMULATION=ON. This module imports neither torch nor nasfast.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import json_lines
from benchmarks.gpu.report import report

ROOT = Path(__file__).resolve().parents[2]
ROWS, LOG, REPORT = "rows.jsonl", "log.txt", "report.md"
SECONDS = 600
# seconds between the interruption of a part and its end by force, and that a part must have to begin
_GRACE, _LEAST = 3.0, 5.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Part:
    """One part of the plan: its name and argument, the seconds that it should and may take, and what it does."""

    name: str
    seconds: int
    limit: int
    text: str


_MODELS = ("mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "resnet50")
# those that begin behind `SECONDS` run where others take less, or by name
PARTS = (
    Part("build", 10, 240, "machine, versions, and the extension that is there; built only where none runs here"),
    Part("demo", 15, 60, "the demo's supernet in the default precision: first step, images per second"),
    *(Part(f"fuse {model}", 15, 45, "fuse beside eager PyTorch and one CUDA graph") for model in _MODELS),
    *(
        Part(f"adapt {model}", 12, 30, "as fuse, in eval mode: statistics stay")
        for model in ("mobilenet_v2", "resnet50")
    ),
    Part("command bf16", 35, 75, "nasfast step in bf16: first steps and medians"),
    Part("engine", 20, 60, "the 6^20 step: the engine, without deferral, and the memory floor"),
    Part("matrices", 25, 60, "orthogonalize by size class, orthogonalize_, qr and geqrf beside PyTorch"),
    Part("peer graph 32", 45, 90, "the 6^20 step in eager PyTorch and in one CUDA graph, beside the engine"),
    Part("launches", 10, 30, "every launch of a step, beside the formula of gpu_step"),
    Part(
        "peer compile 32", 90, 150, "the 6^20 step by torch.compile, max-autotune, in one CUDA graph, beside the engine"
    ),
    Part("parity", 45, 75, "every chain of a step against float64, beside eager autocast; eight images"),
    Part("bits", 25, 45, "random paths: eager and graphs, two runs: the same bits"),
    Part("tests", 45, 150, "tests of the CUDA kernels, the engine and the measurements, in a fixed order"),
    Part("ncu", 25, 60, "Nsight Compute of the eight largest kernels of the step, one section"),
    Part("sanitizer", 45, 75, "compute-sanitizer: memcheck, racecheck, initcheck, synccheck over chains and matrices"),
    Part("peer graph 128", 40, 75, "as with 32, of 128 images"),
    Part("command fp32", 35, 75, "nasfast step in fp32"),
    Part("peer compile 128", 90, 150, "as with 32, of 128 images"),
    *(Part(f"compile {model}", 20, 60, "torch.compile in one CUDA graph beside fuse in one") for model in _MODELS),
)


def part_command(part: Part, device: str, rows: Path, seconds: float) -> list[str]:
    """The command line of a part."""
    if part.name == "tests":
        return tests_command(rows, _TESTS if device == "cuda" else _DRY_TESTS, device)
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part.name, "--rows", str(rows)]
    return [*command, "--device", device, "--seconds", f"{seconds:.0f}"]


# in this order; they need neither jsonargparse nor torchvision, and compile nothing at run time
_TESTS = [
    "tests/engine",
    *(f"tests/ops/test_{name}.py" for name in ("arrivals", "orthogonalize", "qr", "cuda_chain", "operators")),
    *(f"tests/measure/test_{name}.py" for name in ("timing", "step_times")),
]
# for `--device cpu`
_DRY_TESTS = [
    "tests/ops/test_cuda_boundary.py::test_nan_reaches_the_input_that_is_made",
    "tests/engine/test_engine.py::test_a_smaller_last_batch_runs_eagerly",
]


def tests_command(rows: Path, tests: Sequence[str], device: str) -> list[str]:
    """The command line of pytest on the tests marked gpu; it writes a row for each test."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "benchmarks.gpu.rows", "--rows", str(rows), "--part", "tests"]
    if device == "cuda" and find_spec("xdist"):
        command += ["-n", str(processes()), "--dist", "loadfile"]
    return [*command, *tests]


def processes() -> int:
    """The number of processes that may use the GPU at once: one per core, each with 2 GiB of the GPU's memory."""
    question = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        mebibytes = int(subprocess.run(question, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        mebibytes = 8192
    return max(1, min(16, os.cpu_count() or 1, mebibytes // 2048))


def part_environment(device: str) -> dict[str, str]:
    """The environment of the parts: nasfast and the benchmarks of this checkout."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    paths = dict.fromkeys([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["PYTHONPATH"] = os.pathsep.join(paths)
    # what somebody has set for other work would decide what is measured
    for name in ("TRITON_INTERPRET", "NASFAST_BACKEND", "NASFAST_CUDA_DEBUG"):
        env.pop(name, None)
    return env | {"NASFAST_EMULATE_CUDA": "1"} if device == "cpu" else env


def run_part(part: Part, command: Sequence[str], env: dict[str, str], out: Path, limit: float) -> dict[str, Any]:
    """Run a part, append a row on its end, and return this row."""
    json_lines.append(out / ROWS, {"part": part.name, "kind": "start", "limit_s": round(limit, 1)})
    start = time.monotonic()
    with (out / LOG).open("ab") as log:
        log.write(f"==== {part.name}, at most {limit:.0f} s\n".encode())
        log.flush()
        begin, code, timed_out = log.tell(), None, False
        # in a session of its own, so that the processes that the part started can be killed with it
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            _signal(child, signal.SIGINT)  # makes Python print where it is
            try:
                child.wait(_GRACE)
            except subprocess.TimeoutExpired:
                pass
        finally:
            _signal(child, signal.SIGKILL)
            child.wait()
    with (out / LOG).open("rb") as log:
        log.seek(begin)
        tail = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    ok = code == 0 and not timed_out
    row = {"part": part.name, "kind": "end", "ok": ok, "seconds": round(time.monotonic() - start, 1)}
    if not ok:
        row |= {"error": f"stopped after {limit:.0f} s" if timed_out else f"exit code {code}", "tail": tail}
    json_lines.append(out / ROWS, row)
    return row


def _signal(child: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        pass


def run_plan(parts: Sequence[Part], device: str, out: Path, seconds: float = SECONDS) -> bool:
    """Run the parts one after another, and write the report after each; returns whether all ended well.

    None begins after `seconds`, and none goes on. A dry run on a CPU, which may be busy, has no machine to give back in
    time.
    """
    out.mkdir(parents=True, exist_ok=True)
    env, well = part_environment(device), True
    end = time.monotonic() + (seconds if device == "cuda" else float("inf"))
    for part in parts:
        limit = min(part.limit * (1 if device == "cuda" else 10), end - time.monotonic())
        print(f"{part.name}: {part.text}; at most {max(0.0, limit):.0f} s", flush=True)
        if limit < _LEAST:
            row = {"part": part.name, "kind": "end", "ok": False, "seconds": 0.0, "error": "no time", "tail": []}
            json_lines.append(out / ROWS, row)
        else:
            row = run_part(part, part_command(part, device, out / ROWS, limit), env, out, limit)
        print(f"  {row['seconds']} s" + ("" if row["ok"] else f", {row['error']}"), flush=True)
        well &= row["ok"]
        write_report(out)
    print("\n" + (out / REPORT).read_text(encoding="utf-8") + f"written: {out}")
    return well


def write_report(out: Path) -> None:
    """Write the report of all rows there, from the last run of every part."""
    last: dict[str, list[dict[str, Any]]] = {}
    for row in json_lines.read(out / ROWS):
        if row["kind"] == "start":
            last[row["part"]] = []
        last.setdefault(row["part"], []).append(row)
    try:
        text = report(last)
    except Exception:  # the remaining parts matter more than this page
        text = traceback.format_exc()
    (out / REPORT).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: %(default)s")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help="run only this part; repeatable")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="no part goes on after this; default: %(default)s"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the parts: when each begins, and the seconds that it takes"
    )
    parser.add_argument(
        "--report", action="store_true", help="write the page of the results in DIR again, and print it"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the plan on tiny networks")
    args = parser.parse_args(arguments)
    out = args.out.resolve()
    if args.list:
        begins = accumulate((part.seconds for part in PARTS), initial=0)
        for p, at in zip(PARTS, begins, strict=False):
            print(f"{at:4}  {p.name:26} {p.seconds:4} s, at most {p.limit:3}  {p.text}")
        return
    if args.report:
        write_report(out)
        print((out / REPORT).read_text(encoding="utf-8"))
        return
    parts = [part for part in PARTS if args.part is None or part.name in args.part]
    # the exception that this raises ends the running part too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu.sh: ended from outside"))
    sys.exit(not run_plan(parts, args.device, out, args.seconds))


if __name__ == "__main__":
    main()
