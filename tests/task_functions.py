"""Functions that the tests of `nasfast.tasks` run as tasks, and a driver that may be killed.

As a script, `task_functions.py FOLDER IMAGES WORKERS TASKS` runs that many small supernets.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

from nasfast.runtime.termination import raised
from nasfast.tasks import Task, TaskRunner, TaskSettings


def count(folder: Path) -> int:
    """How often this task has begun, this time included."""
    with open(folder / "begun", "a+") as file:
        file.write("x")
        file.flush()
        return file.tell()


def add(folder: Path, *, a: int, b: int) -> dict[str, int]:
    print("adding")
    os.system("echo from another program")
    count(folder)
    return {"sum": a + b, "threads": torch.get_num_threads()}


def die_once(folder: Path) -> int:
    if count(folder) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return count(folder)


def always_fail(folder: Path, *, text: str) -> None:
    count(folder)
    raise ValueError(text)


def wait_for_ever(folder: Path) -> None:
    try:
        time.sleep(600)
    finally:
        (folder / "saved").touch()


def train(folder: Path, *, images: str, seed: int) -> str:
    """A small supernet; the digest of its last checkpoint."""
    from killable import SETTINGS, supernet_stage

    settings = SETTINGS.replace(lr=0.1 + 0.1 * seed)
    final = supernet_stage(folder, Path(images), resume=True, settings=settings)
    return hashlib.sha256(final.read_bytes()).hexdigest()


def training_tasks(images: Path, number: int) -> list[Task]:
    return [
        Task(f"net-{seed}", "task_functions:train", {"images": str(images), "seed": seed}) for seed in range(number)
    ]


if __name__ == "__main__":
    target, given = map(Path, sys.argv[1:3])
    workers, number = map(int, sys.argv[3:])
    with raised(), TaskRunner(target, TaskSettings(workers=workers, attempts=9)) as runner:
        for found in runner.run(training_tasks(given, number)):
            print(found.name, found.status, found.result)
