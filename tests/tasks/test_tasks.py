"""Tasks end as their functions say, wherever they run; what is wrong with them is said before anything runs."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import task_functions

from nasfast.runtime import progress
from nasfast.runtime.lock import RunDirectoryError, run_lock
from nasfast.tasks import Task, TaskError, TaskRunner, TaskSettings, room, threads_for
from nasfast.tasks import runner as runner_module
from nasfast.tasks.task import LOG_FILE, TASK_FILE, save_result, saved_result
from nasfast.tasks.view import View
from nasfast.tasks.work import PROGRESS_FILE, execute

ADD = Task("deep/add", "task_functions:add", {"a": 2, "b": 3}, threads=2)
FAIL = Task("fail", "task_functions:always_fail", {"text": "no\nimages"})
MISSING = Task("missing", "task_functions:no_such_function")
DIE = Task("die", "task_functions:die_once")


def here(task: Task, folder: Path, deadline: float | None = None):
    """One attempt in this process."""
    return execute(task, str(folder / task.name), ".", deadline)


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
    assert saved_result(tmp_path / task.name, task) is None


def test_the_deadline_stops_a_task_that_may_still_save(tmp_path):
    begin = time.monotonic()
    ending = here(Task("wait", "task_functions:wait_for_ever"), tmp_path, time.time() + 0.3)
    assert ending == ("stopped", "its worker was told to stop")
    assert time.monotonic() - begin < 30
    assert (tmp_path / "wait/saved").exists()
    assert not (tmp_path / "wait" / PROGRESS_FILE).exists()


def test_a_finished_folder_is_not_taken_for_another_task(tmp_path):
    save_result(tmp_path / "add", ADD, 1)
    other = Task("add", ADD.function, {"a": 2, "b": 4}, threads=2)
    with pytest.raises(TaskError, match=r"another task: arguments.b was 3, now 4"), TaskRunner(tmp_path) as runner:
        runner.run([other])
    (tmp_path / "add" / TASK_FILE).write_text("{")
    with pytest.raises(TaskError, match="is damaged"):
        saved_result(tmp_path / "add", other)


@pytest.mark.parametrize("value", [{1}, (1, 2), float("nan"), {1: 2}, Path("x")])
def test_arguments_that_are_not_json_are_refused(value, tmp_path):
    with pytest.raises(TaskError, match="'bad'.*JSON"), TaskRunner(tmp_path) as runner:
        runner.run([Task("bad", "task_functions:add", {"a": value})])


def test_two_tasks_of_one_name_are_refused(tmp_path):
    with pytest.raises(TaskError, match="two tasks have the name 'die'"), TaskRunner(tmp_path) as runner:
        runner.run([DIE, DIE])


def test_two_drivers_of_one_folder_are_refused(tmp_path, monkeypatch):
    with run_lock(tmp_path), monkeypatch.context() as other:
        other.setattr("nasfast.runtime.lock._held", {})  # as another process sees it
        with pytest.raises(RunDirectoryError, match="in use by"), TaskRunner(tmp_path):
            pass


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"workers": -1}, "workers"),
        ({"attempts": 0}, "attempts"),
        ({"max_hours": 0.0}, "max-hours"),
        ({"max_hours": 1e9}, "max_hours must be positive and at most 1,000,000, got"),
        ({"ray_address": "a:1"}, "--executor ray"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        TaskSettings(**changes)


def test_how_many_tasks_fit(monkeypatch, caplog):
    monkeypatch.setattr(room, "cores", lambda: 8)
    monkeypatch.setattr(room, "free_memory", lambda: 7 << 30)
    assert [threads_for(n) for n in (1, 3, 8, 20)] == [8, 2, 1, 1]
    with caplog.at_level("INFO", "nasfast"):
        assert room.workers_for([DIE] * 20) == 3, "2 GiB each"
    assert "3 tasks at a time, although the cores would do for 8: 7.0 GiB of memory are free" in caplog.text
    caplog.clear()
    assert room.workers_for([DIE] * 3) == 3 and not caplog.text
    assert room.workers_for([Task("t", "f", memory=1 << 30, threads=2)] * 20) == 4
    assert room.workers_for([Task("t", "f", memory=1 << 40)] * 20) == 1
    assert room.workers_for([Task("t", "f", memory=1, gpus=1)] * 20) == 1
    assert room.workers_for([Task("t", "f", memory=1)] * 2) == 2


def test_the_view_estimates_what_is_left(tmp_path, monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("nasfast.tasks.view.time.monotonic", lambda: now[0])
    view = View()
    view.expect([DIE, ADD], later=[1.0], phase="1/2 supernets")
    view.ended(ADD, before=True)
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(["supernet", 1, 4]))
    with caplog.at_level("INFO", "nasfast"):
        for now[0] in (599.0, 600.0, 1199.0):
            view.show({"die": (DIE, tmp_path)})
    # a quarter of a task took 600 s, and one and three quarters are left; a line comes every ten minutes
    assert caplog.messages == ["1/2 supernets: 1 of 3 tasks ended, about 1 h 10 min left; running die: supernet 1/4"]


def test_the_view_shows_no_task_that_a_cluster_still_queues(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("nasfast.tasks.view.LINE_EVERY", 0.0)
    view, handed = View(), {task.name: (task, tmp_path / task.name) for task in (ADD, DIE)}
    view.expect([ADD, DIE], later=[])
    (tmp_path / "die").mkdir()
    (tmp_path / "die" / PROGRESS_FILE).write_text(json.dumps(["", 0, 0]))
    with caplog.at_level("INFO", "nasfast"):
        view.show(handed)
    assert caplog.messages == ["0 of 2 tasks ended; running die"]


def test_a_task_counts_as_begun_from_its_begin_to_its_end(tmp_path, monkeypatch):
    class Kills(Answers):
        """An executor whose worker is killed in the first attempt, behind the begin of the task."""

        def submit(self, task, folder, deadline):
            begun.append((folder / PROGRESS_FILE).exists())
            if len(begun) == 1:
                folder.mkdir(parents=True)
                (folder / PROGRESS_FILE).write_text(json.dumps(["supernet", 1, 4]))
            return super().submit(task, folder, deadline)

    begun = []
    with TaskRunner(tmp_path) as runner:
        runner._take(Kills(("failed", "killed"), ("done", "")), runner._stack)
        runner.run([ADD])
    assert begun == [False, False], "the second attempt, which is queued, is shown as the first one"

    monkeypatch.setattr(task_functions, "add", lambda folder, a, b: (folder / PROGRESS_FILE).read_text())
    assert here(ADD, tmp_path / "here") == ("done", "")
    assert saved_result(tmp_path / "here/deep/add", ADD) == (json.dumps(["", 0, 0]),)


def test_only_listeners_hear_of_progress():
    heard = []
    with progress.listening(lambda *state: heard.append(state)):
        progress.tell("a", 1, 2)
    progress.tell("b", 2, 2)
    assert heard == [("a", 1, 2)]


class Answers:
    """An executor whose attempts end as it is told: an ending, or None for one that never ends."""

    def __init__(self, *endings) -> None:
        self.capacity, self.endings = 1, list(endings)

    def submit(self, task, folder, deadline):
        future = Future()
        ending = self.endings.pop(0)
        if ending == ("done", ""):
            save_result(folder, task, 1)
        if ending is not None:
            future.set_result(ending)
        return future

    def release(self, future):
        assert future.done()

    def close(self):
        pass


def test_a_worker_that_is_told_to_stop_before_the_time_is_over_is_no_time_limit(tmp_path):
    with TaskRunner(tmp_path, TaskSettings(max_hours=1.0)) as runner:
        runner._take(Answers(("stopped", ""), ("done", "")), runner._stack)
        (found,) = runner.run([ADD])
    assert (found.status, found.attempts) == ("done", 2)


def test_what_a_cluster_never_starts_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "GRACE", 0.2)
    with TaskRunner(tmp_path, TaskSettings(max_hours=0.2 / 3600)) as runner:
        runner._take(Answers(None), runner._stack)

        def show(running):
            assert time.time() < runner._deadline + 20, "it waits for ever"

        monkeypatch.setattr(runner._view, "show", show)
        assert [found.status for found in runner.run([ADD, DIE])] == ["stopped", "stopped"]


@pytest.mark.slow
def test_processes_carry_on_after_errors_and_deaths(tmp_path, caplog):
    with TaskRunner(tmp_path, TaskSettings(workers=1, attempts=2)) as runner:
        found = runner.run([FAIL, DIE, ADD])
        again = runner.run([ADD])
    assert [r.name for r in found] == ["fail", "die", "deep/add"]
    failed, died, added = found
    assert (failed.status, failed.error, failed.attempts) == ("failed", "ValueError: no images", 2)
    assert "Traceback" in failed.log.read_text()
    assert (died.status, died.attempts) == ("done", 2)
    assert (added.status, added.result, added.attempts) == ("done", {"sum": 5, "threads": 2}, 1)
    assert (again[0].result, again[0].attempts) == (added.result, 0)
    assert "task die, attempt 1: no answer from its worker (BrokenProcessPool" in caplog.text
    assert "task fail failed in 2 attempts: ValueError: no images; its log is" in caplog.text
    # the same bytes as in this process
    here(ADD, tmp_path / "here")
    assert (tmp_path / "here/deep/add" / TASK_FILE).read_bytes() == (tmp_path / "deep/add" / TASK_FILE).read_bytes()


@pytest.mark.slow
def test_the_time_limit_stops_cleanly_and_a_later_call_continues(tmp_path):
    wait = Task("wait", "task_functions:wait_for_ever")
    with TaskRunner(tmp_path, TaskSettings(workers=1, max_hours=1.0)) as runner:
        assert runner.run([ADD])[0].status == "done"
        assert not runner.time_is_over and runner._deadline > time.time() + 3000
        # counted from here, because on a busy machine a worker takes long to start
        runner._deadline = time.time() + 5
        found = runner.run([ADD, wait, DIE])
        assert runner.time_is_over
    assert [r.status for r in found] == ["done", "stopped", "stopped"]
    assert (tmp_path / "wait/saved").exists()
    assert not (tmp_path / "die").exists()
    assert task_functions.count(tmp_path / "deep/add") == 2
