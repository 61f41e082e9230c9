"""Tasks end as their functions say, wherever they run; what is wrong with them is said before anything runs."""

from __future__ import annotations

import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import as_completed
from pathlib import Path

import pytest
import task_functions

from nasfast.pipeline import children
from nasfast.pipeline.children import (
    LOG_FILE,
    TASK_FILE,
    Task,
    TaskError,
    TaskRunner,
    TaskSettings,
    execute,
    load_result,
    save_result,
    threads_for,
)
from nasfast.runtime import progress
from nasfast.runtime.lock import RunDirectoryError

ADD = Task("deep/add", "task_functions:add", {"a": 2, "b": 3}, threads=2)
FAIL = Task("fail", "task_functions:always_fail", {"text": "no\nimages"})
MISSING = Task("missing", "task_functions:no_such_function")
DIE = Task("die", "task_functions:die_once")


def here(task: Task, folder: Path):
    """One attempt in this process."""
    return execute(task, folder / task.name, ".")


def test_a_task_writes_its_result_and_its_log(tmp_path, capfd):
    assert here(ADD, tmp_path) == ("done", "")
    form = json.loads((tmp_path / "deep/add" / TASK_FILE).read_text())
    assert form.pop("digest")
    assert form == {
        "function": "task_functions:add",
        "arguments": {"a": 2, "b": 3},
        "threads": 2,
        "result": {"sum": 5, "threads": 2},
    }
    log = (tmp_path / "deep/add" / LOG_FILE).read_text()
    assert "from another program" in log and log.rstrip().endswith("done")
    assert "another program" not in "".join(capfd.readouterr())
    assert here(ADD, tmp_path) == ("done", "")
    assert (tmp_path / "deep/add/begun").read_text() == "x", "a finished task ran again"


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (FAIL, "ValueError: no images"),
        (MISSING, "this worker cannot import task_functions:no_such_function"),
        (Task("odd", "builtins:len"), "TypeError"),
    ],
    ids=["raises", "no function", "wrong call"],
)
def test_an_error_is_an_ending_with_a_traceback_in_the_log(task, error, tmp_path):
    status, text = here(task, tmp_path)
    assert status == "failed" and error in text and "\n" not in text
    assert "Traceback" in (tmp_path / task.name / LOG_FILE).read_text()
    assert load_result(tmp_path / task.name, task) is None


def test_a_signal_stops_a_task_that_may_still_save(tmp_path):
    begin = time.monotonic()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert here(Task("wait", "task_functions:wait_for_ever"), tmp_path) == ("stopped", "its worker was told to stop")
    assert time.monotonic() - begin < 30
    assert (tmp_path / "wait/saved").exists()


def test_a_finished_folder_is_not_taken_for_another_task(tmp_path):
    save_result(tmp_path / "add", ADD, 1)
    other = Task("add", ADD.function, {"a": 2, "b": 4}, threads=2)
    with pytest.raises(TaskError, match=r"another task: arguments.b was 3, now 4"), TaskRunner(tmp_path) as runner:
        runner.run([other])
    (tmp_path / "add" / TASK_FILE).write_text("{")
    with pytest.raises(TaskError, match="is damaged"):
        load_result(tmp_path / "add", other)


def test_how_many_tasks_fit(monkeypatch, caplog):
    monkeypatch.setattr(children, "cores", lambda: 8)
    monkeypatch.setattr(children, "free_memory", lambda: 7 << 30)
    assert [threads_for(n) for n in (1, 3, 8, 20)] == [8, 2, 1, 1]
    with caplog.at_level("INFO", "nasfast"):
        assert children.workers_for(20, threads=1) == 3, "2 GiB each"
    assert "3 tasks at a time, although the cores would do for 8: 7.0 GiB of memory are free" in caplog.text
    caplog.clear()
    assert children.workers_for(3, threads=1) == 3 and not caplog.text
    assert children.workers_for(20, threads=4) == 2
    assert children.workers_for(20, threads=16) == 1
    assert children.workers_for(20, threads=1, gpus=1) == 1
    monkeypatch.setattr(children, "free_memory", lambda: 0)
    assert children.workers_for(20, threads=1) == 1


@pytest.mark.parametrize("value", [{1}, (1, 2), float("nan"), {1: 2}, Path("x")])
def test_arguments_that_are_not_json_are_refused(value, tmp_path):
    with pytest.raises(TaskError, match="'bad'.*JSON"), TaskRunner(tmp_path) as runner:
        runner.run([Task("bad", "task_functions:add", {"a": value})])


def test_a_folder_has_one_runner_at_a_time(tmp_path):
    with open(tmp_path / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process would: a lock is the open file's
        with pytest.raises(RunDirectoryError, match="is in use by another process"), TaskRunner(tmp_path):
            pass


def test_two_tasks_of_one_name_are_refused(tmp_path):
    with pytest.raises(TaskError, match="two tasks have the name 'die'"), TaskRunner(tmp_path) as runner:
        runner.run([DIE, DIE])


def fork_workers(monkeypatch) -> None:
    """Workers are forks of this process, because Python with PyTorch takes seconds to start."""
    monkeypatch.setattr(children, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.mark.slow
def test_processes_carry_on_after_errors_and_deaths(tmp_path, caplog, capfd, monkeypatch):
    fork_workers(monkeypatch)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    looks = itertools.count()

    def wait_for_one(futures, **_):
        """A look before any has ended, and then one at a time, however quick they are."""
        ended = {next(as_completed(futures))} if next(looks) else set()
        return ended, futures - ended

    monkeypatch.setattr(children, "wait", wait_for_one)
    with TaskRunner(tmp_path, TaskSettings(workers=1, attempts=2)) as runner:
        found = runner.run([FAIL, DIE, ADD])
        again = runner.run([ADD])
    assert [r.name for r in found] == ["fail", "die", "deep/add"]
    failed, died, added = found
    assert (failed.status, failed.error) == ("failed", "ValueError: no images")
    assert task_functions.count(tmp_path / "fail") == 3, "two attempts"
    assert "Traceback" in failed.log.read_text()
    assert (died.status, died.result) == ("done", 3), "the second attempt counts twice"
    assert (added.status, added.result) == ("done", {"sum": 5, "threads": 2})
    assert again[0].result == added.result and task_functions.count(tmp_path / "deep/add") == 2
    assert "task die, attempt 1: no answer from its worker (EOFError" in caplog.text
    assert "task fail, attempt 2: ValueError: no images" in caplog.text
    assert "task fail failed: its log is" in caplog.text
    signs = [line.split("  ")[0] for line in capfd.readouterr().err.splitlines() if line.startswith("tasks ")]
    assert list(dict.fromkeys(signs)) == [f"tasks {done}/3" for done in range(4)]
    # the same bytes as in this process
    here(ADD, tmp_path / "here")
    assert (tmp_path / "here/deep/add" / TASK_FILE).read_bytes() == (tmp_path / "deep/add" / TASK_FILE).read_bytes()


@pytest.mark.slow
def test_the_time_limit_stops_cleanly_and_a_later_call_continues(tmp_path, monkeypatch):
    wait = Task("wait", "task_functions:wait_for_ever")
    with TaskRunner(tmp_path, TaskSettings(workers=1, max_hours=1.0)) as runner:
        assert runner.run([ADD])[0].status == "done"
        assert not runner.time_is_over and runner._deadline > time.monotonic() + 3000
        fork_workers(monkeypatch)  # the first one has started as users' do
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() - 7200)  # somebody sets the system's clock
        runner._deadline = time.monotonic() + 3
        found = runner.run([ADD, wait, DIE])
        assert runner.time_is_over
    assert [r.status for r in found] == ["done", "stopped", "stopped"]
    assert (tmp_path / "wait/saved").exists()
    assert not (tmp_path / "die").exists()
    assert task_functions.count(tmp_path / "deep/add") == 2


def test_a_worker_that_does_not_end_when_the_time_is_over_is_killed(tmp_path, monkeypatch):
    """It is killed while it still imports, so it never makes its folder."""
    monkeypatch.setattr(children, "GRACE", 0.1)
    with TaskRunner(tmp_path, TaskSettings(workers=1, max_hours=0.2 / 3600)) as runner:
        (found,) = runner.run([Task("wait", "task_functions:wait_for_ever")])
    assert (found.status, found.result) == ("stopped", None)
    assert not (tmp_path / "wait").exists() and not multiprocessing.active_children()


@pytest.mark.kill
def test_the_worker_of_a_killed_driver_saves_and_ends(tmp_path):
    begin = time.monotonic()
    driver = os.fork()
    if driver == 0:
        try:
            with TaskRunner(tmp_path) as runner:
                runner.run([Task("wait", "task_functions:wait_for_ever")])
        finally:
            os._exit(1)
    while not (tmp_path / "wait/waits").exists():
        assert os.waitpid(driver, os.WNOHANG) == (0, 0) and time.monotonic() < begin + 200
        time.sleep(0.1)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    while not (tmp_path / "wait/saved").exists():
        assert time.monotonic() < begin + 300
        time.sleep(0.1)
    with TaskRunner(tmp_path, TaskSettings(max_hours=1e-9)) as runner:
        assert runner.run([Task("wait", "task_functions:wait_for_ever")])[0].status == "stopped"
