"""Children of a run: pieces of work, each in a process of this machine or on a worker of a Ray cluster (extra `ray`).

A task is a function by name, JSON arguments and a folder: files in, files out. It is finished when its `task.json`
exists. A task that was interrupted continues in its folder, wherever it runs next. `child_task` is one that opens a
run with a seed of its own; any other function serves, too.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal

import torch

from nasfast.config import difference, merge
from nasfast.pipeline.run import same_images
from nasfast.runtime.capacity import cores, free_memory
from nasfast.runtime.device import use_threads
from nasfast.runtime.files import seal, unseal, write_atomic
from nasfast.runtime.imports import import_modules, imported
from nasfast.runtime.lock import RunDirectoryError, run_lock
from nasfast.runtime.progress import Progress, duration
from nasfast.runtime.termination import Terminated, raise_on_sigterm
from nasfast.settings import MACHINE, RunConfig, TaskSettings

_LOG = logging.getLogger(__name__)

TASK_FILE, LOG_FILE = "task.json", "task.log"

MEMORY = 2 << 30
"""Bytes that a task is taken to need: PyTorch with its libraries, a small network and its images."""

GRACE = 30.0
"""Seconds in which a worker saves what it has when its driver is gone, or the time is over."""

_SECONDS_TO_REACH = 10.0

_LOOK = 5.0
"""Seconds between looks at the progress while no task ends."""

Status = Literal["done", "failed", "stopped"]
Ending = tuple[Status, str]
"""How an attempt ended, and its error on one line."""


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
        gpus: number of GPUs that it needs, 0 or 1.
        machine: further arguments, on which no result depends; they may change from one call to the next.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    gpus: int = 0
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            written = json.loads(json.dumps(self.identity, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TaskError(f"task {self.name!r}: arguments must be JSON values: {error}") from error
        if written != self.identity:
            raise TaskError(
                f"task {self.name!r}: arguments must be JSON, with lists and not tuples, and with keys of text: got "
                f"{dict(self.arguments)!r}"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the result, as JSON."""
        return {"function": self.function, "arguments": dict(self.arguments), "threads": self.threads}


@dataclass(frozen=True)
class TaskResult:
    """How a task ended.

    `status` is `done`; `failed` in every attempt; or `stopped` by the time limit, from which a later call continues.
    `result` is None unless done, `error` one line or empty, and `log` the file with everything that its attempts
    printed.
    """

    name: str
    status: Status
    result: Any
    error: str
    log: Path


def child_task(cfg: RunConfig, name: str, function: str, *, seed: int, in_run: bool = False, **arguments: Any) -> Task:
    """A task that opens a child of a run: one with a seed of its own, and the validation images that all seeds have.

    Its function has the child's settings from `child_settings`. The child is in the folder of the task, or with
    `in_run` in the directory of the run, which the caller has locked.
    """
    child = cfg.replace(seed=seed, data=same_images(cfg.data, cfg.seed), search=cfg.search.replace(seed=seed))
    config, machine = child.parted(MACHINE)
    out = config.pop("out")
    return Task(
        name,
        function,
        {"config": config, **arguments},
        threads=child.threads or torch.get_num_threads(),  # results depend on it: a task has that of this process
        gpus=gpus_for(child.torch_device),
        machine=machine | ({"out": out} if in_run else {}),
    )


def child_settings(folder: Path, config: Mapping[str, Any], machine: Mapping[str, Any]) -> RunConfig:
    """The settings of a child from the two parts that a task has."""
    return RunConfig.from_dict(merge({**config, "out": str(folder)}, machine))


def check_done(results: Sequence[TaskResult], what: str) -> None:
    """Raise TaskError while tasks are not finished; `what` says what they are and how to continue."""
    if missing := [result for result in results if result.status != "done"]:
        failed = [f"; {r.name}: {r.error} (log: {r.log})" for r in missing if r.status == "failed"]
        raise TaskError(f"{len(missing)} of {len(results)} {what}" + "".join(failed))


def save_result(folder: Path, task: Task, result: Any) -> None:
    """Write the result of a task, which finishes the task."""
    try:
        text = seal({**task.identity, "result": result})
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {task.name!r}: {task.function} must return JSON values: {error}") from error
    write_atomic(folder / TASK_FILE, text.encode())


def load_result(folder: Path, task: Task) -> tuple[Any] | None:
    """The result of a finished task in a tuple, or None if the task is not finished."""
    path = folder / TASK_FILE
    if not path.exists():
        return None
    try:
        identity = unseal(path.read_text(encoding="utf-8"))
        result = identity.pop("result")
    except (ValueError, LookupError) as error:
        raise TaskError(f"{path} is damaged ({error}): delete it, and the task runs again") from error
    if identity != task.identity:
        raise TaskError(
            f"{path} is the result of another task: {difference(identity, task.identity)}; choose another --out, or "
            f"delete {folder}"
        )
    return (result,)


def threads_for(tasks: int) -> int:
    """Threads for each of `tasks` tasks, such that all cores are in use: one, unless there are fewer tasks than cores.

    Results depend on the number of threads, so the caller keeps this number for later calls.
    """
    return max(1, cores() // max(1, tasks))


def gpus_for(device: str) -> int:
    """GPUs that a task needs which trains on a device, such as `cpu` or `cuda:0`."""
    return int(device.startswith("cuda"))


def workers_for(number: int, *, threads: int, gpus: int = 0) -> int:
    """How many of `number` tasks of so many threads may run at a time here; at least one.

    Tasks on a GPU run one after another, because they would share it; a Ray cluster gives each a GPU of its own.
    """
    if gpus:
        return 1
    by_cores, by_memory = min(cores() // threads, number), free_memory() // MEMORY
    if by_memory < by_cores:
        _LOG.info(
            "%d tasks at a time, although the cores would do for %d: %.1f GiB of memory are free, and a task counts as "
            "%.1f GiB; --workers sets another number",
            max(1, by_memory),
            by_cores,
            free_memory() / 2**30,
            MEMORY / 2**30,
        )
    return max(1, min(by_cores, by_memory))


class TaskRunner:
    """A context in which tasks run; the lock on the folder and the time limit stay from one `run` to the next.

    The folder holds the folders of the tasks, and all workers must see it under this path.
    """

    def __init__(self, folder: str | Path, settings: TaskSettings = TaskSettings()) -> None:
        self.folder, self.settings = Path(folder).absolute(), settings
        self._stack = contextlib.ExitStack()
        self._ray: Any = None
        self._deadline: float | None = None
        self._stopping = False
        self._stops: dict[str, Callable[[bool], Any]] = {}

    def __enter__(self) -> TaskRunner:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_lock_folder(self.folder))
            if self.settings.executor == "ray":
                self._ray = _join_cluster(self.settings.ray_address)
                stack.callback(self._ray.shutdown)
            if self.settings.max_hours is not None:
                self._deadline = time.monotonic() + 3600 * self.settings.max_hours
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def time_is_over(self) -> bool:
        """Whether `max_hours` have passed since this runner began."""
        return self._seconds_left == 0

    @property
    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def run(self, tasks: Iterable[Task]) -> list[TaskResult]:
        """Run tasks that are not finished yet.

        An attempt that raises, or whose worker dies, is repeated from what it left in its folder. A task that fails in
        every attempt is logged and reported, and the others go on.
        """
        tasks = list(tasks)
        repeated = [name for name, count in Counter(task.name for task in tasks).items() if count > 1]
        if repeated:
            raise TaskError(f"two tasks have the name {repeated[0]!r}: give each its own")
        missing = [task for task in tasks if load_result(self.folder / task.name, task) is None]
        endings: dict[str, Ending] = {}
        if missing:
            # a cluster queues what does not fit yet
            largest = max(missing, key=lambda task: task.threads)
            workers = self.settings.workers or workers_for(len(missing), threads=largest.threads, gpus=largest.gpus)
            endings = self._run_all(missing, len(missing) if self._ray else workers)
        return [self._result(task, *endings.get(task.name, ("done", ""))) for task in tasks]

    def _run_all(self, tasks: Sequence[Task], at_a_time: int) -> dict[str, Ending]:
        """Run tasks, each attempt watched by a thread; if this process is told to stop, so are they."""
        endings: dict[str, Ending] = {}
        begin = time.monotonic()
        with Progress("tasks", len(tasks)) as progress, ThreadPoolExecutor(at_a_time) as pool:
            futures = {pool.submit(self._run_one, task): task for task in tasks}
            waiting = set(futures)
            try:
                while waiting:
                    ended, waiting = wait(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
                    for future in ended:
                        name = futures[future].name
                        endings[name] = future.result()
                        text = ": ".join(filter(None, endings[name]))
                        took = duration(time.monotonic() - begin)
                        _LOG.info("%d of %d tasks ended after %s; %s %s", len(endings), len(tasks), took, name, text)
                    progress.update(len(endings))
            except BaseException:
                self._stop(pool, futures)
                raise
        return endings

    def _stop(self, pool: ThreadPoolExecutor, futures: Iterable[Future[Ending]]) -> None:
        """Let running tasks save what they have, and end their workers."""
        self._stopping = True
        pool.shutdown(wait=False, cancel_futures=True)
        for at_once in (False, True):
            for stop in list(self._stops.values()):
                stop(at_once)
            wait(futures, timeout=GRACE)

    def _run_one(self, task: Task) -> Ending:
        """Attempts at one task until it is done, has failed too often, or the time is over."""
        folder, error = self.folder / task.name, ""
        attempt = self._on_cluster if self._ray else self._in_process
        for number in range(1, self.settings.attempts + 1):
            if self._stopping or self.time_is_over:
                return "stopped", ""
            try:
                status, error = attempt(task, folder, os.getcwd(), imported())
            except Exception as fault:  # of a process that died, or of Ray, whose machine did
                status, error = "failed", f"no answer from its worker ({type(fault).__name__}: {_one_line(fault)})"
            finally:
                self._stops.pop(task.name, None)
            if status == "done":
                return "done", ""
            if self._stopping or self.time_is_over:
                return "stopped", ""
            _LOG.warning("task %s, attempt %d: %s", task.name, number, error)
        _LOG.warning("task %s failed: its log is %s", task.name, folder / LOG_FILE)
        return "failed", error

    def _in_process(self, task: Task, *arguments: Any) -> Ending:
        """One attempt in a new process of this machine; EOFError if the process died."""
        # a forked process would share locks and threads of PyTorch with this one
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(sender, task, *arguments))
        process.start()
        self._stops[task.name] = lambda at_once: process.kill() if at_once else process.terminate()
        if self._stopping:
            process.terminate()
        sender.close()
        try:
            if not receiver.poll(self._seconds_left):
                process.terminate()  # the task saves what it has
                if not receiver.poll(GRACE):
                    process.kill()
                    return "stopped", "its worker did not end when the time was over"
            return receiver.recv()
        finally:
            receiver.close()
            process.join()

    def _on_cluster(self, task: Task, folder: Path, directory: str, modules: Any) -> Ending:
        """One attempt on a worker of the Ray cluster, which decides when and where."""
        remote = self._ray.remote(num_cpus=task.threads, num_gpus=task.gpus, max_retries=0)(_work_on_cluster)
        reference = remote.remote(task, folder, directory, modules)
        self._stops[task.name] = lambda at_once: self._ray.cancel(reference, force=at_once)
        if self._stopping:
            self._ray.cancel(reference)
        if not self._ray.wait([reference], timeout=self._seconds_left)[0]:
            self._ray.cancel(reference)  # what runs saves what it has, and what waits never starts
            if not self._ray.wait([reference], timeout=GRACE)[0]:
                self._ray.cancel(reference, force=True)
                return "stopped", "its worker did not end when the time was over"
        return self._ray.get(reference)

    def _result(self, task: Task, status: Status, error: str) -> TaskResult:
        folder = self.folder / task.name
        result = None
        if status == "done":
            saved = load_result(folder, task)
            if saved is None:
                status, error = "failed", f"{folder / TASK_FILE} is missing: does this machine see the worker's files?"
            else:
                result = saved[0]
        return TaskResult(task.name, status, result, error, folder / LOG_FILE)


def _join_cluster(address: str | None) -> Any:
    """Ray, connected to a running cluster; TaskError if it cannot be."""
    try:
        import ray
    except ImportError as error:
        raise TaskError(
            "--executor ray needs Ray on this machine and on all of the cluster: pip install 'nasfast[ray]'"
        ) from error
    cluster = f"Ray cluster at {address}" if address else "Ray cluster of this machine"
    try:
        if address:
            # once, because Ray tries a dead address for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_REACH).close()
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds: for no cluster, for another version, for an address
        raise TaskError(
            f"no {cluster} ({_one_line(error)}); this process has Ray {ray.__version__}, and all must have one "
            "version of it and of Python; start one with `ray start --head`, or give its address by "
            "--ray_address HOST:PORT"
        ) from error
    return ray


def execute(task: Task, folder: Path, directory: str, modules: tuple[str, ...] = ()) -> Ending:
    """Run one task in this process, whose main thread this must be; an error of its function is an ending, too.

    `folder` is absolute. Relative paths in the arguments refer to `directory`, the working directory of the driver.
    `modules` are imported first. At SIGTERM the task saves what it has and stops.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _log_to(folder / LOG_FILE):
        _log(f"{task.function} on {socket.gethostname()}, process {os.getpid()}")
        ending: Ending
        try:
            # a worker whose driver is gone has `GRACE` seconds to save and end
            with raise_on_sigterm(), _lock_folder(folder, patience=GRACE + 5):
                if load_result(folder, task) is None:
                    os.chdir(directory)
                    import_modules(modules)
                    save_result(folder, task, _call(task, folder))
                ending = "done", ""
        except (Terminated, KeyboardInterrupt):
            ending = "stopped", "its worker was told to stop"
        except Exception as error:
            _log(traceback.format_exc())
            ending = "failed", f"{type(error).__name__}: {_one_line(error)}"
        _log(": ".join(filter(None, ending)))
    return ending


def _call(task: Task, folder: Path) -> Any:
    """Call the function of a task; TaskError if this process cannot import it."""
    use_threads(task.threads)
    module, _, name = task.function.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"task {task.name!r}: this worker cannot import {task.function}: {error}") from error
    return function(folder, **task.arguments, **task.machine)


def _work(sender: Any, task: Task, *arguments: Any) -> None:
    """`execute` in a process of its own, which leaves Ctrl-C to its driver, and ends when the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    ending = execute(task, *arguments)
    with contextlib.suppress(OSError):  # the driver is gone
        sender.send(ending)


def _work_on_cluster(*arguments: Any) -> Ending:
    """`execute` on a worker of Ray, which cancels by the signal of Ctrl-C."""
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    return execute(*arguments)


def _end_with_driver() -> None:
    driver = parent_process()
    assert driver is not None, "a worker has a parent"
    driver.join()
    os.kill(os.getpid(), signal.SIGTERM)  # a task saves what it has
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Append what this process writes to standard output and error, C code included, to a file."""
    logging.basicConfig(format="%(message)s", stream=sys.__stderr__)
    logging.getLogger("nasfast").setLevel(logging.INFO)
    sys.stdout.flush()
    copies = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for standard in (1, 2):
            os.dup2(file, standard)
        faulthandler.enable(2)
        yield
    finally:
        sys.stdout.flush()
        for standard, copy in zip((1, 2), copies, strict=True):
            os.dup2(copy, standard)
            os.close(copy)
        os.close(file)


def _log(text: str) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.write(2, f"[{now}] {text}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def _lock_folder(folder: Path, *, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder, waiting so many seconds for another process that has it."""
    end = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(run_lock(folder))
                break
            except RunDirectoryError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.1)
        yield


def _one_line(error: BaseException) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())
