"""What a worker does with one task: its log, its lock, its threads, its function, and the file of its result."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nasfast.runtime.device import use_threads
from nasfast.runtime.files import temporary_beside
from nasfast.runtime.imports import import_modules
from nasfast.runtime.lock import RunDirectoryError, run_lock
from nasfast.runtime.progress import listening
from nasfast.runtime.termination import Terminated, raised, stopped_at
from nasfast.tasks.task import LOG_FILE, Status, Task, TaskError, save_result, saved_result

PROGRESS_FILE = ".progress"
"""In the folder of a task that a worker has begun: stage, done, total. The stage is empty until the task tells one."""

GRACE = 30.0
"""Seconds in which a worker saves what it has when its driver is gone, or the time is over."""

_SECONDS_PER_TELLING = 1.0

Ending = tuple[Status, str]
"""How an attempt ended, and its error on one line."""


def execute(task: Task, folder: str, here: str, deadline: float | None, modules: tuple[str, ...] = ()) -> Ending:
    """Run one task in this process, whose main thread this must be.

    Args:
        task: what to do.
        folder: the task's folder, an absolute path.
        here: working directory of the driver, to which relative paths in the arguments refer.
        deadline: time (`time.time`) at which the task saves what it has and stops; None for none.
        modules: what `nasfast.runtime.imports` imports first.

    Returns:
        How it ended. Errors of the function are an ending, too, and their tracebacks are in the log.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with _logged(path / LOG_FILE):
        _say(f"{task.function} on {socket.gethostname()}, process {os.getpid()}")
        ending = _attempt(task, path, here, deadline, modules)
        _say(": ".join(filter(None, ending)))
    return ending


def _attempt(task: Task, path: Path, here: str, deadline: float | None, modules: tuple[str, ...]) -> Ending:
    try:
        with raised(), stopped_at(deadline), _locked(path):
            if saved_result(path, task) is not None:
                return "done", ""
            os.chdir(here)
            use_threads(task.threads)
            import_modules(modules)
            _note(path / PROGRESS_FILE, "", 0, 0)
            with listening(_teller(path / PROGRESS_FILE)):
                result = _function(task)(path, **task.arguments, **task.machine)
            save_result(path, task, result)
            return "done", ""
    except (Terminated, KeyboardInterrupt):
        return "stopped", "its worker was told to stop"
    except Exception as error:
        _say(traceback.format_exc())
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        (path / PROGRESS_FILE).unlink(missing_ok=True)


def _function(task: Task) -> Callable[..., Any]:
    """The function of a task.

    Raises:
        TaskError: this process cannot import it.
    """
    module, _, name = task.function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"task {task.name!r}: this worker cannot import {task.function}: {error}") from error


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Append what this process writes to standard output and error, C code included, to a file."""
    logging.basicConfig(format="%(message)s", stream=sys.__stderr__)
    logging.getLogger("nasfast").setLevel(logging.INFO)
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for standard in (1, 2):
            os.dup2(file, standard)
        faulthandler.enable(2)
        yield
    finally:
        sys.stdout.flush()
        for standard, before in zip((1, 2), kept, strict=True):
            os.dup2(before, standard)
            os.close(before)
        os.close(file)


def _say(text: str) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    os.write(2, f"[{now}] {text}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the task's folder; wait for a worker whose driver is gone, which has `GRACE` seconds to save and end.

    Raises:
        RunDirectoryError: another process still holds it, or the folder cannot be written.
    """
    patience = time.monotonic() + GRACE + 5
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(run_lock(folder))
                break
            except RunDirectoryError:
                if time.monotonic() > patience:
                    raise
                time.sleep(0.1)
        yield


def _teller(path: Path) -> Callable[[str, int, int], None]:
    """A listener that writes the newest state to a file, at most once a second."""
    last = -_SECONDS_PER_TELLING

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last < _SECONDS_PER_TELLING:
            return
        last = time.monotonic()
        _note(path, stage, done, total)

    return tell


def _note(path: Path, stage: str, done: int, total: int) -> None:
    """Write the state of a task."""
    # only the screen shows it, so a full disk may lose it, and it need not survive a crash
    with contextlib.suppress(OSError):
        temporary = temporary_beside(path)
        temporary.write_text(json.dumps([stage, done, total]), encoding="utf-8")
        os.replace(temporary, path)
