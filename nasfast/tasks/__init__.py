"""One executor for many independent pieces of work: processes of this machine, or the workers of a Ray cluster.

A task is a function by name, JSON arguments and a folder: files in, files out. It is finished when its `task.json`
exists. A task that was interrupted continues in its folder, wherever it runs next.
"""

from nasfast.settings import TaskSettings
from nasfast.tasks.room import MEMORY, gpus_for, threads_for
from nasfast.tasks.runner import TaskRunner
from nasfast.tasks.task import Task, TaskError, TaskResult, check_done

__all__ = [
    "MEMORY",
    "Task",
    "TaskError",
    "TaskResult",
    "TaskRunner",
    "TaskSettings",
    "check_done",
    "gpus_for",
    "threads_for",
]
