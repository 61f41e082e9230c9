"""Functions that the tests of `nasfast.pipeline.children` run as tasks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch


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
    (folder / "waits").touch()
    try:
        time.sleep(600)
    finally:
        (folder / "saved").touch()
