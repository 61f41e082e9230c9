"""The overhead of the executor of tasks, and a sweep of kills of drivers and workers.

    python -m benchmarks.bench_tasks [--tasks 50] [--seconds 0.2] [--kills 0] [--seed 0] [--out FILE]

The overhead has two parts: what each task takes besides its own time (its lock, log and files, and the way to the
worker and back), and what the first task of a worker takes, because the worker starts and imports PyTorch. Tasks sleep,
so that other programs on the same cores count less.

`--kills N` trains small supernets as tasks of two workers and kills the driver or a worker with SIGKILL, N times in
all, over as many rounds as that takes. A part of the kills comes at any moment, the others wait until the running
attempt of a task has written a checkpoint. After each round, all results must have the bytes of undisturbed ones.
`saved` counts the kills that hit a task with a checkpoint, `resumed` the attempts that continued from one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import positive, write_json
from nasfast.spaces import Block, FairSampler, FixedLayer, SearchSpace, Stage
from nasfast.supernet import Supernet
from nasfast.tasks import Task, TaskRunner, TaskSettings
from nasfast.tasks.task import TASK_FILE
from nasfast.tasks.work import execute
from nasfast.train import TrainConfig, train_supernet

_NETWORKS, _WORKERS = 4, 2
_MOST_SECONDS = 5.0
"""Longest time from the moment at which a worker is seen at work to a kill at any moment."""

_SAVED_SHARE, _MOST_SECONDS_SAVED = 0.7, 1.0
"""Share of the kills that wait for a checkpoint of a running attempt, and the longest time from then to the kill."""

_DRIVER_SHARE = 0.25
"""Share of the kills that hit the driver."""


def sleep(folder: Path, *, number: int, seconds: float) -> int:
    """A task that uses no processor."""
    time.sleep(seconds)
    return number


def train(folder: Path, *, seed: int, epochs: int) -> str:
    """A task that trains a small supernet on random images and saves often; the digest of the last checkpoint."""
    choices = (Block("mbconv", 3, 2), Block("mbconv", 5, 1))
    stem = (FixedLayer(Block("conv", 3), 8, stride=2),)
    space = SearchSpace("small", 16, 4, stem, (Stage(8, 2, 2, choices),), (FixedLayer(Block("conv", 1), 16),))
    torch.manual_seed(seed)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(4, (8,))) for _ in range(10)]
    final = train_supernet(
        Supernet(space, seed=seed),
        batches,
        FairSampler(space, seed=seed),
        TrainConfig(epochs=epochs, lr=0.1, checkpoint_every=20, log_every=20),
        run_dir=folder,
        resume=(folder / "checkpoints").exists(),
    )
    return hashlib.sha256(final.read_bytes()).hexdigest()


def overhead(tasks: int, seconds: float) -> dict[str, float]:
    """Seconds that one worker takes besides the tasks' own: per task, and for its first one besides."""
    name = f"{__spec__.name}:sleep"
    with tempfile.TemporaryDirectory() as folder, TaskRunner(folder, TaskSettings(workers=1)) as runner:
        begin = time.perf_counter()
        runner.run([Task("first", name, {"number": -1, "seconds": seconds})])
        first = time.perf_counter() - begin - seconds
        begin = time.perf_counter()
        runner.run([Task(f"task-{i}", name, {"number": i, "seconds": seconds}) for i in range(tasks)])
        each = (time.perf_counter() - begin) / tasks - seconds
    return {"tasks": tasks, "seconds_each": each, "seconds_first": first, "share_of_a_minute": each / 60}


def _networks(epochs: int) -> list[Task]:
    return [Task(f"net-{i}", "benchmarks.bench_tasks:train", {"seed": i, "epochs": epochs}) for i in range(_NETWORKS)]


def drive(folder: str, epochs: int) -> None:
    """The driver that is killed."""
    with TaskRunner(folder, TaskSettings(workers=_WORKERS, attempts=10**6)) as runner:
        bad = [result for result in runner.run(_networks(epochs)) if result.status != "done"]
    sys.exit(f"not done: {bad}" if bad else 0)


def kills(number: int, seed: int, epochs: int = 100) -> dict[str, Any]:
    """Kill drivers and workers `number` times; counts of kills, rounds and results of other bytes."""
    rng = random.Random(seed)
    found: dict[str, Any] = {
        "driver": 0, "worker": 0, "saved": 0, "resumed": 0, "rounds": 0, "different": [], "lost": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for task in _networks(epochs):
            assert execute(task, f"{folder}/undisturbed/{task.name}", ".", None)[0] == "done"
        expected = _contents(Path(folder) / "undisturbed")
        while found["driver"] + found["worker"] < number:
            target = Path(folder) / f"round-{found['rounds']}"
            _round(target, epochs, number, rng, found)
            found["rounds"] += 1
            results = _contents(target)
            found["resumed"] += sum(log.read_text().count("continues from") for log in target.glob("net-*/task.log"))
            found["lost"] += sorted(expected.keys() - results.keys())
            found["different"] += [name for name in expected if results.get(name, expected[name]) != expected[name]]
            print(json.dumps(found), flush=True)
    return found


def _round(target: Path, epochs: int, number: int, rng: random.Random, found: dict[str, Any]) -> None:
    """Train all networks in `target`, with kills until there are enough of them."""
    command = [sys.executable, "-m", "benchmarks.bench_tasks", "--drive", str(target), str(epochs)]
    while True:
        driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while driver.poll() is None and found["driver"] + found["worker"] < number:
            _kill(driver, target, rng, found)
        _, said = driver.communicate()
        if driver.returncode == 0:
            return
        if driver.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the driver ended with status {driver.returncode}: {said}")


def _kill(driver: subprocess.Popen[str], target: Path, rng: random.Random, found: dict[str, Any]) -> None:
    """Kill the driver or a worker at a random moment, and count it; nothing if there is none any more."""
    aims = rng.random() < _SAVED_SHARE
    while driver.poll() is None:
        workers = _workers(target, driver.pid)
        if any(folder.saved_now for folder in workers.values()) if aims else workers:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, _MOST_SECONDS_SAVED if aims else _MOST_SECONDS))
    workers = _workers(target, driver.pid)
    if rng.random() < _DRIVER_SHARE:
        if driver.poll() is None:
            driver.kill()
            found["driver"] += 1
            found["saved"] += any(folder.saved for folder in workers.values())
    elif candidates := [victim for victim, folder in workers.items() if folder.saved_now or not aims]:
        victim = rng.choice(candidates)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return
        found["worker"] += 1
        found["saved"] += workers[victim].saved


class _Saved(NamedTuple):
    """Whether a running task has a checkpoint, and whether its present attempt has written one."""

    saved: bool
    saved_now: bool


def _workers(target: Path, driver: int) -> dict[int, _Saved]:
    """Numbers of the processes of this driver that hold the lock of a task, and what the task has saved."""
    found = {}
    for path in target.glob("net-*/.lock"):
        try:
            number, since = json.loads(path.read_text())["pid"], path.stat().st_mtime
            parent = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1]
            times = [p.stat().st_mtime for p in path.parent.glob("checkpoints/*.safetensors")]
        except (OSError, ValueError):
            continue
        if int(parent) == driver and not (path.parent / TASK_FILE).exists():
            found[number] = _Saved(bool(times), max(times, default=0.0) > since)
    return found


def _contents(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob(f"net-*/{TASK_FILE}"), *folder.glob("net-*/checkpoints/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=positive, default=50)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        drive(args.drive[0], int(args.drive[1]))
    rows: list[dict[str, Any]] = [{"kind": "overhead", **overhead(args.tasks, args.seconds)}]
    print(json.dumps(rows[0]))
    if args.kills:
        rows.append({"kind": "kills", "seed": args.seed, **kills(args.kills, args.seed)})
    if args.out:
        write_json(args.out, rows)
    if args.kills and (rows[1]["lost"] or rows[1]["different"]):
        sys.exit("results were lost or differ")


if __name__ == "__main__":
    main()
