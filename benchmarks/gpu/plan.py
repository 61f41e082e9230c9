"""Runs the plan for a machine with a CUDA GPU: three commands of at most five minutes each, each useful alone.

    bash benchmarks/gpu.sh measure|check|tests [--out DIR] [--part NAME]... [--device cuda|cpu]
    bash benchmarks/gpu.sh --report [--out DIR]
    bash benchmarks/gpu.sh --list

Every command first builds the extension for this GPU, into a folder of its own, and all other parts import that build.
Each part is a process with a time limit, so that a crash, a lost CUDA context or a hang ends only its own part. A part
may use the time that earlier parts did not need. The program writes to DIR: rows.jsonl gets every result at once,
log.txt has the output of the parts, and report.md is one page of all results there. `--device cpu` runs the same code
on tiny networks with emulated kernels, to test the plan itself; it needs an extension with NASFAST_EMULATION=ON. This
module needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import report

ROOT = Path(__file__).resolve().parents[2]
ROWS, LOG, REPORT = "rows.jsonl", "log.txt", "report.md"
# what the part `build` makes, relative to ROOT
BUILD = Path("build", "gpu-plan")
# seconds between the interruption of a part and its end by force
_GRACE = 3.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Part:
    """One part of the plan: its name, its seconds, and what it measures."""

    name: str
    seconds: int
    text: str


_BUILD = Part("build", 45, "the extension, for this GPU and one instruction set")
COMMANDS: dict[str, tuple[Part, ...]] = {
    "measure": (
        _BUILD,
        Part("machine", 30, "device, versions, clocks, and the constants of the model: copies, launches, rates"),
        Part("parity", 55, "every chain at its real size against float64, beside eager autocast"),
        Part("bits", 30, "random paths: early launches on and off, eager and graphs, two runs: the same bits"),
        Part("launches", 40, "every launch of a step beside the model, and the constants that fit"),
        Part("step", 100, "the step with optimizer: nasfast on CUDA and on Triton, PyTorch at its best"),
    ),
    "check": (
        _BUILD,
        Part("sanitizer", 125, "compute-sanitizer: memcheck, racecheck, initcheck, synccheck over small chains"),
        Part("ncu", 70, "Nsight Compute of the eight largest kernels of a step"),
        Part("paths", 60, "images per second with a new path every step"),
    ),
    "tests": (_BUILD, Part("tests", 255, "the tests marked gpu: kernels of CUDA and Triton, engine, measurements")),
}
PARTS = tuple({part.name: part for parts in COMMANDS.values() for part in parts}.values())


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, without lines that were cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def command_of(part: Part, device: str, rows: Path, seconds: float) -> list[str]:
    """The command line of a part."""
    if part.name == "tests":
        return tests_command(rows, ["tests"] if device == "cuda" else _DRY_TESTS, device)
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part.name, "--rows", str(rows)]
    return [*command, "--device", device, "--seconds", f"{seconds:.0f}"]


# tests of CUDA kernels, of Triton and of the engine, for `--device cpu`
_DRY_TESTS = [
    "tests/ops/test_cuda_boundary.py::test_nan_reaches_the_input_that_is_made",
    "tests/ops/test_triton.py::test_two_runs_are_equal_bit_for_bit",
    "tests/engine/test_engine.py::test_a_smaller_last_batch_runs_eagerly",
]


def tests_command(rows: Path, tests: Sequence[str], device: str) -> list[str]:
    """The command line of pytest on the tests marked gpu; it writes a row for each test."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--continue-on-collection-errors"]
    # the settings are given explicitly, because pytest runs in the folder of the build
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.rows", "--rows", str(rows), "--part", "tests"]
    if device == "cuda" and find_spec("xdist"):
        command += ["-n", str(processes())]
    return [*command, *(str(ROOT / test) for test in tests)]


def processes() -> int:
    """The number of processes that may use the GPU at once: one per core, each with 2 GiB of the GPU's memory."""
    question = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        mebibytes = int(subprocess.run(question, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        mebibytes = 8192
    return max(1, min(16, os.cpu_count() or 1, mebibytes // 2048))


def imported_from(device: str) -> Path:
    """The folder from which the parts import nasfast. They start in it, because `python -m` looks there first."""
    return ROOT / BUILD / "lib" if device == "cuda" else ROOT


def environment_of(device: str) -> dict[str, str]:
    """The environment of the parts: nasfast comes from the build, the rest from this checkout."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    paths = dict.fromkeys([str(imported_from(device)), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["PYTHONPATH"] = os.pathsep.join(paths)
    # what somebody has set for other work would decide what is measured
    for name in ("TRITON_INTERPRET", "NASFAST_BACKEND", "NASFAST_CUDA_EARLY", "NASFAST_CUDA_DEBUG"):
        env.pop(name, None)
    if device == "cpu":
        env |= {"TRITON_INTERPRET": "1", "NASFAST_EMULATE_CUDA": "1"}
    return env


def run_part(
    part: Part, command: Sequence[str], env: dict[str, str], out: Path, limit: float, folder: Path = ROOT
) -> dict[str, Any]:
    """Run a part, append a row on its end, and return this row."""
    append(out / ROWS, {"part": part.name, "kind": "start", "limit_s": round(limit, 1)})
    start = time.monotonic()
    with (out / LOG).open("ab") as log:
        log.write(f"==== {part.name}, at most {limit:.0f} s\n".encode())
        log.flush()
        begin, code, timed_out = log.tell(), None, False
        # in a session of its own, so that the processes that the part started can be killed with it
        child = subprocess.Popen(
            command,
            cwd=folder,
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
    append(out / ROWS, row)
    return row


def _signal(child: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        pass


def run_plan(parts: Sequence[Part], device: str, out: Path) -> bool:
    """Run the parts one after another, and write the report after each; returns whether all ended well."""
    out.mkdir(parents=True, exist_ok=True)
    kernels = ROOT / "nasfast" / "_triton"  # an installation has this folder, a checkout does not
    if not kernels.exists():
        kernels.symlink_to("../kernels/triton")
    env, start, end, well = environment_of(device), time.monotonic(), 0.0, True
    for part in parts:
        # a dry run on a CPU, which may be busy, has no machine to give back in time
        end += part.seconds if device == "cuda" else 10 * part.seconds
        limit = end - (time.monotonic() - start)
        print(f"{part.name}: {part.text}; at most {limit:.0f} s", flush=True)
        folder = ROOT if part.name == "build" else imported_from(device)
        row = run_part(part, command_of(part, device, out / ROWS, limit), env, out, limit, folder)
        print(f"  {row['seconds']} s" + ("" if row["ok"] else f", {row['error']}"), flush=True)
        well &= row["ok"]
        write_report(out)
        if part.name == "build" and not row["ok"]:
            print("nothing else runs without the build: see log.txt", flush=True)
            break
    print("\n" + (out / REPORT).read_text(encoding="utf-8") + f"written: {out}")
    return well


def write_report(out: Path) -> None:
    """Write the report of all rows there, from the last run of every part."""
    last: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(out / ROWS):
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
    parser.add_argument("command", nargs="?", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: %(default)s")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help="run only this part; repeatable")
    parser.add_argument("--list", action="store_true", help="list the commands, their parts and seconds")
    parser.add_argument(
        "--report", action="store_true", help="write the page of the results in DIR again, and print it"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the plan on tiny networks")
    args = parser.parse_args(arguments)
    out = args.out.resolve()
    if args.list:
        for command, parts in COMMANDS.items():
            print(f"{command}: {sum(part.seconds for part in parts)} s")
            print("\n".join(f"  {part.name:9} {part.seconds:4} s  {part.text}" for part in parts))
        return
    if args.report:
        write_report(out)
        print((out / REPORT).read_text(encoding="utf-8"))
        return
    if args.command is None:
        parser.error(f"needs a command: {', '.join(COMMANDS)}, or --report or --list")
    parts = [part for part in COMMANDS[args.command] if args.part is None or part.name in args.part]
    # the exception that this raises ends the running part too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu.sh: ended from outside"))
    sys.exit(not run_plan(parts, args.device, out))


if __name__ == "__main__":
    main()
