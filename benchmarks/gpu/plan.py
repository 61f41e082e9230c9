"""The ten-minute plan for a machine with a CUDA GPU.

    bash benchmarks/gpu.sh [--out DIR] [--part NAME]... [--list] [--device cuda|cpu]

Parts run in the order of what they teach, each in a process of its own with a time limit, so that no part can take
another one with it: a crash, a lost CUDA context or a hang ends its part alone. A part may use the time that those
before it left. DIR gets rows.jsonl, to which every result is appended as soon as it is there, log.txt, what the parts
printed, and summary.txt. `--device cpu` runs the same code on tiny networks under Triton's interpreter, to try the plan
itself. This file needs nothing but Python.
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
# seconds between asking a part to end and killing it
_GRACE = 3.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Part:
    """One row of the plan: seconds it may take, and what it tells."""

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
    """Add a row to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a line that was cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def command_of(part: Part, device: str, rows: Path, seconds: float) -> list[str]:
    """What runs a part."""
    if part.name == "tests":
        return tests_command(rows, part.name, ["tests"] if device == "cuda" else _DRY_TESTS, device)
    return [
        sys.executable, "-m", "benchmarks.gpu.parts", part.name,
        "--rows", str(rows), "--device", device, "--seconds", f"{seconds:.0f}",
    ]  # fmt: skip


# one Triton test and one engine test, for a plan that is only tried
_DRY_TESTS = [
    "tests/ops/test_triton.py::test_two_runs_are_equal_bit_for_bit",
    "tests/engine/test_engine.py::test_a_smaller_last_batch_runs_eagerly",
]


def tests_command(rows: Path, part: str, tests: Sequence[str], device: str) -> list[str]:
    """pytest on the tests marked gpu, which writes a row for each."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--continue-on-collection-errors"]
    # the settings are named, because a part may run it in another folder, whose nasfast it is to test
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.rows", "--rows", str(rows), "--part", part]
    if device == "cuda" and find_spec("xdist"):
        command += ["-n", str(processes())]
    return [*command, *(str(ROOT / test) for test in tests)]


def processes() -> int:
    """How many processes may use the GPU at once: one per core, and 2 GiB of its memory for each."""
    question = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        mebibytes = int(subprocess.run(question, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        mebibytes = 8192
    return max(1, min(16, os.cpu_count() or 1, mebibytes // 2048))


def environment_of(device: str) -> dict[str, str]:
    """Of the parts: this checkout first, and the interpreter only without a GPU."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    return env


def run_part(part: Part, command: Sequence[str], env: dict[str, str], out: Path, limit: float) -> dict[str, Any]:
    """Run a part and append how it ended; returns that row."""
    append(out / ROWS, {"part": part.name, "kind": "start", "limit_s": round(limit, 1)})
    start = time.monotonic()
    with (out / LOG).open("ab") as log:
        log.write(f"==== {part.name}, at most {limit:.0f} s\n".encode())
        log.flush()
        begin, code, timed_out = log.tell(), None, False
        # a session of its own: what the part started ends with it
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            _signal(child, signal.SIGINT)  # Python says where it was
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
    """Run parts one after another and write the summary after each."""
    out.mkdir(parents=True, exist_ok=True)
    kernels = ROOT / "nasfast" / "_triton"  # an installation makes it
    if not kernels.exists():
        kernels.symlink_to("../kernels/triton")
    env, start, end = environment_of(device), time.monotonic(), 0.0
    for part in parts:
        end += part.seconds
        limit = end - (time.monotonic() - start)
        print(f"{part.name}: {part.text}; at most {limit:.0f} s", flush=True)
        row = run_part(part, command_of(part, device, out / ROWS, limit), env, out, limit)
        print(f"  {row['seconds']} s" + ("" if row["ok"] else f", {row['error']}"), flush=True)
        try:
            summary = summarise_file(out / ROWS)
        except Exception:  # the parts that are left matter more than this page
            summary = traceback.format_exc()
        (out / SUMMARY).write_text(summary, encoding="utf-8")
    print("\n" + (out / SUMMARY).read_text(encoding="utf-8") + f"written: {out}")


def summarise_file(path: Path) -> str:
    """The summary of a file of rows: of every part, its last run."""
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
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help="run this one; repeatable")
    parser.add_argument("--list", action="store_true", help="list the parts with their seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the plan on tiny networks")
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
