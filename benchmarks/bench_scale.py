"""What searches take on many workers: a simulation of the executor of tasks, checked against measured runs.

    python -m benchmarks.bench_scale check [--out FILE]        # runs of the real executor beside their simulation
    python -m benchmarks.bench_scale simulate [--out FILE]     # 1 to 1,000 workers
    python -m benchmarks.bench_scale --summary                 # the rows of both files as Markdown

`check` runs tasks of 8 to 16 CPU seconds with one and with two workers, undisturbed and with workers that are killed in
chosen parts of tasks. A task notes the clock and its processor time behind each part. The simulation gets the mean
seconds of each task's parts, those of a worker's start, and the parts in which workers die. It must predict which
attempt begins when and with which checkpoint, and the seconds of the whole run. On a busy machine parts take longer,
in the run and in its simulation alike, so the check holds there too. `quiet_seconds` is the simulation with processor
seconds instead.

`simulate` runs searches on more workers, with deaths at random moments, slow workers, and storage that all of them
read. docs/scale.md explains the model and has the tables.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import positive, write_json
from nasfast.runtime.files import write_atomic
from nasfast.search import stratified_sample
from nasfast.spaces import nas_bench_macro
from nasfast.tasks import Task, TaskRunner, TaskSettings

RESULTS = Path(__file__).parent / "results"
CHECK, SIMULATED = RESULTS / "scale_check_cpu-2core-avx512.json", RESULTS / "scale.json"

NEVER = math.inf

Life = Callable[[int, int, float], float]
"""(task, attempt from 0, seconds of work in its checkpoint) -> seconds from there to the death of its worker."""


@dataclass(frozen=True)
class Work:
    """A task of the simulation.

    Attributes:
        seconds: its own work, if nothing disturbs it.
        checkpoint: seconds of work from one checkpoint to the next.
    """

    seconds: float
    checkpoint: float = NEVER


@dataclass(frozen=True)
class Place:
    """Where tasks run.

    Attributes:
        workers: number of workers.
        start: seconds until a new worker begins its first task.
        each: seconds between two tasks of a worker.
        slow_share, slowdown: share of the workers that are slow, and how many times longer they take.
        reading: share of the storage's rate that one task reads, if nothing disturbs it.
        attempts: how often a task is tried.
    """

    workers: int
    start: float = 0.0
    each: float = 0.0
    slow_share: float = 0.0
    slowdown: float = 1.0
    reading: float = 0.0
    attempts: int = 3


@dataclass(frozen=True)
class Outcome:
    """What a simulated run did.

    Attributes:
        seconds: from the begin to the end of the last attempt.
        attempts: (task, seconds of its work in its checkpoint, seconds of its work at the end) of each attempt, in the
            order in which they begin.
        deaths: number of workers that died.
        failed: number of tasks that failed in every attempt.
    """

    seconds: float
    attempts: tuple[tuple[int, float, float], ...]
    deaths: int
    failed: int

    @property
    def repeated(self) -> float:
        """Seconds of work that later attempts did again."""
        reached: dict[int, float] = {}
        total = 0.0
        for task, begin, end in self.attempts:
            total += max(0.0, reached.get(task, begin) - begin)
            reached[task] = end
        return total


def simulate(tasks: Sequence[Work], place: Place, life: Life = lambda *_: NEVER) -> Outcome:
    """Run tasks as `nasfast.tasks.TaskRunner` does: in the given order, a repeated attempt behind all that wait.

    Args:
        tasks: what to run.
        place: the workers.
        life: when workers die.
    """
    waiting, tries, saved = deque(range(len(tasks))), Counter[int](), [0.0] * len(tasks)
    idle: list[int] = []
    running: list[tuple[float, int, int, bool]] = []  # when it ends, worker, task, whether the worker dies
    attempts: list[tuple[int, float, float]] = []
    now, begun, deaths, failed = 0.0, 0, 0, 0
    slow = round(place.slow_share * place.workers)
    # an upper bound: towards the end fewer tasks read at a time
    waits = max(1.0, place.reading * min(place.workers, len(tasks)))
    while waiting or running:
        while waiting and len(running) < place.workers:
            task = waiting.popleft()
            worker, before = (idle.pop(), place.each) if idle else (begun, place.start)
            begun = max(begun, worker + 1)
            # numbers of workers go on behind deaths, so the share of slow ones stays
            factor = waits * (place.slowdown if worker % place.workers < slow else 1.0)
            left, until = factor * (tasks[task].seconds - saved[task]), life(task, tries[task], saved[task])
            tries[task] += 1
            end = saved[task] + min(left, until) / factor
            attempts.append((task, saved[task], end))
            heapq.heappush(running, (now + before + min(left, until), worker, task, until < left))
            if until < left and (step := tasks[task].checkpoint) < NEVER:
                # the small part is for a death just behind a checkpoint, in spite of rounding
                saved[task] = max(saved[task], step * math.floor(end / step + 1e-9))
        now, worker, task, dies = heapq.heappop(running)
        if not dies:
            idle.append(worker)
            continue
        deaths += 1
        if tries[task] < place.attempts:
            waiting.append(task)
        else:
            failed += 1
    return Outcome(now, tuple(attempts), deaths, failed)


# real runs

PARTS_FILE, SAVED_FILE = "parts.jsonl", "saved"
"""In the folder of a task: a line for each begin of an attempt and each part; how many parts the checkpoint has."""

_PARTS = (16, 10, 8, 14, 10, 12)
"""Parts of each task."""

_EVERY = 4
"""Parts from one checkpoint to the next."""

_KILLS = {0: [6], 3: [2, 9], 4: [5]}
"""Task -> the part behind which its worker dies, in its first attempt, its second, ...; numbers of parts begin at 0."""

_MATRIX, _PRODUCTS = 384, 1500


def part() -> None:
    """About a second of processor time."""
    a = torch.randn(_MATRIX, _MATRIX, generator=torch.Generator().manual_seed(0))
    for _ in range(_PRODUCTS):
        a = torch.tanh(a @ a)


def work(folder: Path, *, parts: int, every: int, kills: list[int]) -> int:
    """A task of so many parts, which saves how many are done."""
    saved, path = folder / SAVED_FILE, folder / PARTS_FILE
    done = int(saved.read_text()) if saved.exists() else 0
    attempt = path.read_text().count("begin") if path.exists() else 0
    with path.open("a") as file:

        def note(what: str, number: int) -> None:
            times = {"time": time.time(), "cpu": time.process_time(), "pid": os.getpid()}
            file.write(json.dumps({"what": what, "number": number, **times}) + "\n")
            file.flush()

        note("begin", done)
        for number in range(done, parts):
            part()
            note("part", number)
            if kills[attempt : attempt + 1] == [number]:
                os.kill(os.getpid(), signal.SIGKILL)
            if (number + 1) % every == 0:
                write_atomic(saved, str(number + 1).encode())
    return parts


@dataclass(frozen=True)
class Attempt:
    """An attempt of a real run.

    Attributes:
        task: number of the task.
        pid: process of its worker.
        first: number of parts that were done before.
        times, cpus: clock and processor time of the worker at the begin and behind each part, in seconds.
    """

    task: int
    pid: int
    first: int
    times: tuple[float, ...]
    cpus: tuple[float, ...]


def attempts_of(folder: Path, tasks: Sequence[Task]) -> list[Attempt]:
    """The attempts of a run, in the order in which they began."""
    found = []
    for i, task in enumerate(tasks):
        lines = [json.loads(line) for line in (folder / task.name / PARTS_FILE).read_text().splitlines()]
        begins = [k for k, line in enumerate(lines) if line["what"] == "begin"]
        for a, b in zip(begins, [*begins[1:], len(lines)], strict=True):
            own = lines[a:b]
            times, cpus = (tuple(line[key] for line in own) for key in ("time", "cpu"))
            found.append(Attempt(i, own[0]["pid"], own[0]["number"], times, cpus))
    return sorted(found, key=lambda attempt: attempt.times[0])


def measured(workers: int, kills: Mapping[int, list[int]]) -> dict[str, Any]:
    """Run tasks on the real executor, and compare the run with its simulation."""
    tasks = [
        Task(f"task-{i}", f"{__spec__.name}:work", {"parts": n, "every": _EVERY, "kills": kills.get(i, [])})
        for i, n in enumerate(_PARTS)
    ]
    with tempfile.TemporaryDirectory() as folder, TaskRunner(folder, TaskSettings(workers=workers)) as runner:
        cpu, begin = time.process_time(), time.time()
        results = runner.run(tasks)
        seconds, cpu = time.time() - begin, time.process_time() - cpu
        assert all(result.status == "done" for result in results), results
        found = attempts_of(Path(folder), tasks)
    form = {"workers": workers, "kills": sum(map(len, kills.values())), "seconds": seconds, "driver_cpu": cpu}
    return {**form, **compared(found, begin, workers, kills)}


def compared(found: Sequence[Attempt], begin: float, workers: int, kills: Mapping[int, list[int]]) -> dict[str, Any]:
    """The simulation of a measured run, from its mean seconds.

    Args:
        found: the attempts of the run.
        begin: when it began.
        workers: number of workers.
        kills: the parts behind which workers died.
    """
    first: dict[int, Attempt] = {}
    gaps, last = [], dict[int, float]()
    for attempt in found:
        if attempt.pid in first:
            gaps.append(attempt.times[0] - last[attempt.pid])
        first.setdefault(attempt.pid, attempt)
        last[attempt.pid] = attempt.times[-1]
    # a worker is asked for at the begin, and where another has died
    begins = sorted(attempt.times[0] for attempt in first.values())
    deaths = [a.times[-1] for a in found if a.first + len(a.times) - 1 < _PARTS[a.task]]
    asked = sorted([begin] * workers + deaths)[: len(begins)]
    start = statistics.mean(b - a for a, b in zip(asked, begins, strict=True))
    start_cpu = statistics.mean(attempt.cpus[0] for attempt in first.values())
    each = statistics.mean(gaps)
    form: dict[str, Any] = {
        "start_seconds": start,
        "start_cpu": start_cpu,
        "starts": len(first),
        "each_seconds": each,
        "parts": sum(len(attempt.times) - 1 for attempt in found),
        "cpu": sum(attempt.cpus[-1] - attempt.cpus[0] for attempt in found) + start_cpu * len(first),
        "attempts": [[attempt.task, attempt.first] for attempt in found],
    }
    for name, clock, place in (
        ("simulated", "times", Place(workers, start, each)),
        ("quiet", "cpus", Place(workers, start_cpu)),
    ):
        lengths = [_part_seconds(found, i, clock) for i in range(len(_PARTS))]
        outcome = simulate(
            [Work(n * s, _EVERY * s) for n, s in zip(_PARTS, lengths, strict=True)], place, _kills(kills, lengths)
        )
        form[f"{name}_seconds"] = outcome.seconds
        form[f"{name}_parts"] = sum(round((end - saved) / lengths[task]) for task, saved, end in outcome.attempts)
        form[f"{name}_attempts"] = [[task, round(saved / lengths[task])] for task, saved, _ in outcome.attempts]
    return form


def _part_seconds(found: Sequence[Attempt], task: int, clock: str) -> float:
    """Mean seconds of a part of a task."""
    own = [getattr(attempt, clock) for attempt in found if attempt.task == task]
    return sum(times[-1] - times[0] for times in own) / sum(len(times) - 1 for times in own)


def _kills(kills: Mapping[int, list[int]], lengths: Sequence[float]) -> Life:
    def life(task: int, attempt: int, saved: float) -> float:
        behind = kills.get(task, [])[attempt : attempt + 1]
        return (behind[0] + 1) * lengths[task] - saved if behind else NEVER

    return life


# searches on many workers

_WORKERS = (1, 8, 64, 1000)

_EPOCH = (74.0, 145.0, 177.0)
"""Processor seconds of one epoch of NAS-Bench-Macro's cheapest, middle and dearest network on 18,000 images
(docs/ranking.md 7)."""

_SUPERNET = Work(1519.0, 1519.0 / 30)
"""The default's supernet and score on these images: 30 epochs, a checkpoint behind each (docs/ranking.md 3)."""

_RETRAINED = Work(20 * _EPOCH[1], _EPOCH[1])
"""A middle network by the default of 20 epochs."""

_HOUR = 3600.0

_DRAWS = 20


def sample(number: int) -> list[Work]:
    """The trainings of `rank --train NUMBER`: one epoch, which has no checkpoint but its end."""
    space = nas_bench_macro()
    macs = [space.cost(arch).macs for arch in stratified_sample(space, number)]
    seconds = np.interp(macs, np.quantile(macs, (0.0, 0.5, 1.0)), _EPOCH)
    return [Work(float(s)) for s in seconds]


def seeds(number: int) -> list[list[Work]]:
    """The two phases of `run --seeds NUMBER`: supernets, then the answer, the baseline and three random networks."""
    return [[_SUPERNET] * number, [_RETRAINED] * (2 * number + 3)]


def searches() -> dict[str, list[list[Work]]]:
    """Searches by name, each as phases of which one waits for the one before."""
    return {
        "run --seeds 3": seeds(3),
        "run --seeds 32": seeds(32),
        "rank --train 24": [sample(24)],
        "rank --train 1000": [sample(1000)],
    }


_QUIET = Place(1, start=5.0, each=0.03)

SCENES: dict[str, tuple[Place, float]] = {
    "undisturbed": (_QUIET, NEVER),
    "a death per worker in 24 h": (_QUIET, 24 * _HOUR),
    "a death per worker and hour": (_QUIET, _HOUR),
    "a death per worker and hour, --attempts 20": (replace(_QUIET, attempts=20), _HOUR),
    "one worker of 20 takes twice as long": (replace(_QUIET, slow_share=0.05, slowdown=2.0), NEVER),
    "storage for 100 readers": (replace(_QUIET, reading=0.01), NEVER),
}
"""Name -> the workers, and the mean seconds from one death of a worker to its next."""


def bound(phases: Sequence[Sequence[Work]], workers: int) -> float:
    """The least seconds of any schedule: the work of each phase on all workers, or its longest task."""
    return sum(max(sum(w.seconds for w in phase) / workers, max(w.seconds for w in phase)) for phase in phases)


def _random_deaths(mean: float, rng: random.Random) -> Life:
    return lambda *_: mean * rng.expovariate(1.0)


def scene(phases: Sequence[Sequence[Work]], place: Place, mean_life: float) -> dict[str, float]:
    """A search in one scene: means over draws of the moments of death."""
    rows = []
    for seed in range(_DRAWS if mean_life < NEVER else 1):
        rng = random.Random(seed)
        rows.append([simulate(phase, place, _random_deaths(mean_life, rng)) for phase in phases])
    total = sum(w.seconds for phase in phases for w in phase)
    seconds = [sum(outcome.seconds for outcome in row) for row in rows]
    least = bound(phases, place.workers)
    return {
        "seconds": statistics.mean(seconds),
        "most_seconds": max(seconds),
        "over_bound": statistics.mean(seconds) / least,
        "busy": total / place.workers / statistics.mean(seconds),
        "deaths": statistics.mean(sum(outcome.deaths for outcome in row) for row in rows),
        "repeated": statistics.mean(sum(outcome.repeated for outcome in row) for row in rows) / total,
        "failed": statistics.mean(sum(outcome.failed for outcome in row) for row in rows),
    }


def simulated() -> list[dict[str, Any]]:
    """All searches in all scenes on all numbers of workers, in the given order and with the longest tasks first."""
    rows = []
    for name, phases in searches().items():
        longest_first = [sorted(phase, key=lambda w: -w.seconds) for phase in phases]
        for scene_name, (place, mean_life) in SCENES.items():
            for workers in _WORKERS:
                here = replace(place, workers=workers)
                row = {"search": name, "scene": scene_name, "workers": workers, "bound": bound(phases, workers)}
                row |= scene(phases, here, mean_life)
                row["longest_first_seconds"] = scene(longest_first, here, mean_life)["seconds"]
                rows.append(row)
    return rows


def summary() -> list[str]:
    """The rows of both files as Markdown."""
    lines = [
        "| workers | kills | order and checkpoints of attempts | parts | seconds: run | simulated | on a quiet machine "
        "| CPU seconds | of them starts | driver |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in json.loads(CHECK.read_text())["rows"]:
        same = sum(a == b for a, b in zip(r["attempts"], r["simulated_attempts"], strict=True))
        lines.append(
            f"| {r['workers']} | {r['kills']} | {same} of {len(r['attempts'])} as simulated | {r['parts']}, simulated "
            f"{r['simulated_parts']} | {r['seconds']:.1f} | {r['simulated_seconds']:.1f} "
            f"({r['simulated_seconds'] / r['seconds'] - 1:+.1%}) | {r['quiet_seconds']:.1f} | {r['cpu']:.1f} "
            f"| {r['starts']} x {r['start_cpu']:.1f} | {r['driver_cpu']:.2f} |"
        )
    rows = json.loads(SIMULATED.read_text())["rows"]
    heads = [f"{workers:,} worker{'s' * (workers > 1)}" for workers in _WORKERS]
    lines += ["", f"| search | scene | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for name in dict.fromkeys(r["search"] for r in rows):
        for scene_name in SCENES:
            cells = [_cell(r) for r in rows if (r["search"], r["scene"]) == (name, scene_name)]
            lines.append(f"| {name} | {scene_name} | {' | '.join(cells)} |")
    return lines


def _cell(row: Mapping[str, Any]) -> str:
    failed = f", {row['failed']:.1f} fail" if row["failed"] else ""
    return f"{row['seconds'] / 60:.1f} min, {row['busy']:.0%}{failed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("check", "simulate"))
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2], help="of the check")
    parser.add_argument("--out", type=Path, help="file of the rows; default: that of benchmarks/results")
    parser.add_argument("--summary", action="store_true", help="only print the rows of both files as Markdown")
    args = parser.parse_args()
    if args.summary or args.what is None:
        print("\n".join(summary()))
    elif args.what == "check":
        rows = []
        for workers in args.workers:
            for kills in ({}, _KILLS):
                rows.append(measured(workers, kills))
                print(json.dumps(rows[-1]), flush=True)
                write_json(args.out or CHECK, rows)
    else:
        write_json(args.out or SIMULATED, simulated())


if __name__ == "__main__":
    main()
