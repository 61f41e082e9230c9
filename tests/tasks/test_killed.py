"""Driver and workers are killed with SIGKILL while networks train; a later driver ends with the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import task_functions
from killable import loader

from nasfast.tasks.task import TASK_FILE
from nasfast.tasks.work import execute

pytestmark = pytest.mark.kill

TASKS = 3


def start(folder: Path, images: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, task_functions.__file__, str(folder), str(images), "1", str(TASKS)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def worker_of(folder: Path) -> int:
    """Number of the process that works on a task; its lock file names it."""
    while True:
        for path in folder.glob("net-*/.lock"):
            try:
                return int(path.read_text().split('"pid": ')[1].split(",")[0])
            except (OSError, IndexError):
                continue
        time.sleep(0.005)


def contents(folder: Path) -> dict[str, bytes]:
    names = [f"net-{i}/{TASK_FILE}" for i in range(TASKS)]
    names += [str(p.relative_to(folder)) for p in folder.glob("net-*/checkpoints/*")]
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_nothing_is_lost_when_workers_and_drivers_are_killed(tmp_path):
    rng, images, folder = random.Random(5), tmp_path / "images", tmp_path / "killed"
    loader(images)  # makes them
    for task in task_functions.training_tasks(images, TASKS):
        assert execute(task, str(tmp_path / "undisturbed" / task.name), ".", None) == ("done", "")

    driver = start(folder, images)
    worker = worker_of(folder)
    time.sleep(rng.uniform(0, 0.5))
    os.kill(worker, signal.SIGKILL)
    second = worker_of(folder)
    while second == worker:
        second = worker_of(folder)
    time.sleep(rng.uniform(0, 0.5))
    driver.kill()
    driver.communicate()

    out, err = start(folder, images).communicate(timeout=300)
    assert [line.split()[:2] for line in out.splitlines()] == [[f"net-{i}", "done"] for i in range(TASKS)], err
    assert contents(folder) == contents(tmp_path / "undisturbed")
    assert not [p for p in folder.rglob(".*") if p.name != ".lock"], "left-over files"
    with pytest.raises(ProcessLookupError):
        for _ in range(400):
            os.kill(second, 0)
            time.sleep(0.1)
