"""Runs the ten-minute plan for a machine with a CUDA GPU.

    bash benchmarks/gpu.sh [--out DIR] [--part NAME]... [--list] [--device cuda|cpu]

The most informative parts run first. Each part is a process with a time limit, so that a crash, a lost CUDA context or
a hang ends only its own part. A part may use the time that earlier parts did not need. The program writes three files
to DIR: rows.jsonl gets every result at once, log.txt has the output of the parts, and summary.txt a page of results.
`--device cpu` runs the same code on tiny networks under Triton's interpreter, to test the plan itself. This module
needs only Python's standard library.
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

from benchmarks.gpu.summary import summarise

ROOT = Path(__file__).resolve().parents[2]
ROWS, LOG, SUMMARY = "rows.jsonl", "log.txt", "summary.txt"
# seconds between the interruption of a part and its end by force
_GRACE = 3.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Part:
    """One part of the plan: its name, its seconds, and what it measures."""

    name: str
    seconds: int
    text: str


PARTS = (
    Part("machine", 30, "device, versions, clocks, copy bandwidth, matrix products, cost of launches and replays"),
    Part("step", 110, "bf16 step: PyTorch eager and in a CUDA graph, nasfast eager and on its engine"),
    Part("kernels", 40, "every kernel of that step, with grid and arguments of the Triton ones"),
    Part("tests", 120, "the tests marked gpu: Triton kernels, engine, measurements"),
    Part("paths", 60, "images per second with a new path every step"),
    Part("native", 110, "build for this GPU and one instruction set; orthogonalize on CUDA: tests and times"),
    Part("compile", 115, "the step under torch.compile, beside the engine"),
)


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
        return tests_command(rows, part.name, ["tests"] if device == "cuda" else _DRY_TESTS, device)
    return [
        sys.executable,
        "-m",
        "benchmarks.gpu.parts",
        part.name,
        "--rows",
        str(rows),
        "--device",
        device,
        "--seconds",
        f"{seconds:.0f}",
    ]


# one Triton test and one engine test, for `--device cpu`
_DRY_TESTS = [
    "tests/ops/test_triton.py::test_two_runs_are_equal_bit_for_bit",
    "tests/engine/test_engine.py::test_a_smaller_last_batch_runs_eagerly",
]


def tests_command(rows: Path, part: str, tests: Sequence[str], device: str) -> list[str]:
    """The command line of pytest on the tests marked gpu; it writes a row for each test."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--continue-on-collection-errors"]
    # the settings are given explicitly, because the part `native` runs pytest in the folder of its own build
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.rows", "--rows", str(rows), "--part", part]
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


def environment_of(device: str) -> dict[str, str]:
    """The environment of the parts: imports come from this checkout, and the CPU uses Triton's interpreter."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    return env


def run_part(part: Part, command: Sequence[str], env: dict[str, str], out: Path, limit: float) -> dict[str, Any]:
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
    append(out / ROWS, row)
    return row


def _signal(child: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        pass


def run_plan(parts: Sequence[Part], device: str, out: Path) -> None:
    """Run the parts one after another, and write the summary after each."""
    out.mkdir(parents=True, exist_ok=True)
    kernels = ROOT / "nasfast" / "_triton"  # an installation has this folder, a checkout does not
    if not kernels.exists():
        kernels.symlink_to("../kernels/triton")
    env, start, end = environment_of(device), time.monotonic(), 0.0
    for part in parts:
        # a dry run on a CPU, which may be busy, has no machine to give back in time
        end += part.seconds if device == "cuda" else 4 * part.seconds
        limit = end - (time.monotonic() - start)
        print(f"{part.name}: {part.text}; at most {limit:.0f} s", flush=True)
        row = run_part(part, command_of(part, device, out / ROWS, limit), env, out, limit)
        print(f"  {row['seconds']} s" + ("" if row["ok"] else f", {row['error']}"), flush=True)
        try:
            summary = summarise_file(out / ROWS)
        except Exception:  # the remaining parts matter more than this page
            summary = traceback.format_exc()
        (out / SUMMARY).write_text(summary, encoding="utf-8")
    print("\n" + (out / SUMMARY).read_text(encoding="utf-8") + f"written: {out}")


def summarise_file(path: Path) -> str:
    """The summary of a file of rows, from the last run of every part."""
    last: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(path):
        if row["kind"] == "start":
            last[row["part"]] = []
        last.setdefault(row["part"], []).append(row)
    return summarise(last)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: %(default)s")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help="run only this part; repeatable")
    parser.add_argument("--list", action="store_true", help="list the parts and their seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the plan on tiny networks")
    args = parser.parse_args(arguments)
    parts = [part for part in PARTS if args.part is None or part.name in args.part]
    if args.list:
        print("\n".join(f"{part.name:8} {part.seconds:4} s  {part.text}" for part in parts))
        print(f"{'all':8} {sum(part.seconds for part in parts):4} s")
        return
    # the exception that this raises ends the running part too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu.sh: ended from outside"))
    run_plan(parts, args.device, args.out.resolve())


if __name__ == "__main__":
    main()
