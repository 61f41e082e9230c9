"""What a task is, and the file that says that it is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nasfast.config import difference
from nasfast.runtime.files import seal, unseal, write_atomic

TASK_FILE, LOG_FILE = "task.json", "task.log"

Status = Literal["done", "failed", "stopped"]


class TaskError(RuntimeError):
    """Tasks cannot be run as given: the text says why and what to do."""


@dataclass(frozen=True)
class Task:
    """A piece of work that can run in any process that sees its folder.

    Attributes:
        name: unique among the tasks of a runner; its folder is `name` below that of the runner.
        function: `package.module:function`, called as `function(folder, **arguments)`. It continues from whatever an
            earlier attempt left in the folder, and returns JSON that says nothing of time or place.
        arguments: JSON values.
        threads: number of CPU threads. Results depend on it, so it belongs to what the task is.
        cost: work in any unit that all tasks share; only the estimate of the remaining time uses it.
        memory: bytes that it needs; 0 takes `nasfast.tasks.MEMORY`.
        gpus: number of GPUs that it needs, 0 or 1.
        machine: further arguments, on which no result depends; they may change from one call to the next.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    cost: float = 1.0
    memory: int = 0
    gpus: int = 0
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the result, as JSON.

        Raises:
            TaskError: an argument is not JSON, or changes when it is written as JSON.
        """
        form = {"function": self.function, "arguments": dict(self.arguments), "threads": self.threads}
        try:
            written = json.loads(json.dumps(form, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TaskError(f"task {self.name!r}: arguments must be JSON values: {error}") from error
        if written != form:
            raise TaskError(
                f"task {self.name!r}: arguments must be JSON, with lists and not tuples, and with keys of text: got "
                f"{form['arguments']!r}"
            )
        return written


@dataclass(frozen=True)
class TaskResult:
    """How a task ended.

    Attributes:
        name: name of the task.
        status: `done`; `failed` in every attempt; or `stopped` by the time limit, from which a later call continues.
        result: what the function returned; None unless done.
        error: why it failed, on one line; empty unless failed.
        log: file with everything that its attempts printed.
        attempts: number of attempts of this call; 0 if it was finished before.
        seconds: wall time of these attempts.
    """

    name: str
    status: Status
    result: Any
    error: str
    log: Path
    attempts: int
    seconds: float


def check_done(results: Sequence[TaskResult], what: str) -> None:
    """Refuse to go on while tasks are not finished.

    Args:
        results: how the tasks ended.
        what: what they are, and how to continue, as the error says it behind their number.

    Raises:
        TaskError: some are not done; the text has the errors of those that failed, and their logs.
    """
    if missing := [result for result in results if result.status != "done"]:
        failed = [f"; {r.name}: {r.error} (log: {r.log})" for r in missing if r.status == "failed"]
        raise TaskError(f"{len(missing)} of {len(results)} {what}" + "".join(failed))


def save_result(folder: Path, task: Task, result: Any) -> None:
    """Write the result of a task, which finishes the task.

    Raises:
        TaskError: the result is not JSON.
        OSError: the file cannot be written.
    """
    try:
        text = seal({**task.identity, "result": result})
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {task.name!r}: {task.function} must return JSON values: {error}") from error
    write_atomic(folder / TASK_FILE, text.encode())


def saved_result(folder: Path, task: Task) -> tuple[Any] | None:
    """The result of a finished task in a tuple, or None if the task is not finished.

    Raises:
        TaskError: the file is damaged, or is of another task.
    """
    path = folder / TASK_FILE
    if not path.exists():
        return None
    try:
        form = unseal(path.read_text(encoding="utf-8"))
        result = form.pop("result")
    except (ValueError, LookupError) as error:
        raise TaskError(f"{path} is damaged ({error}): delete it, and the task runs again") from error
    if form != task.identity:
        raise TaskError(
            f"{path} is the result of another task: {difference(form, task.identity)}; choose another --out, or "
            f"delete {folder}"
        )
    return (result,)
