"""The lock of a run directory: exclusive among processes, gone with its holder; left-over files are removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nasfast.runtime import lock
from nasfast.runtime.lock import RunDirectoryError, run_lock

HOLDER = """
import os, sys, time
from nasfast.runtime.lock import run_lock
with run_lock(sys.argv[1]):
    name = "worker" if len(sys.argv) > 2 and os.fork() == 0 else "held"
    # print may write a line in pieces, between which another process writes
    os.write(1, f"{name} {os.getpid()}\\n".encode())
    time.sleep(60)
"""


def start_holder(folder: Path, *extra: str) -> tuple[subprocess.Popen, dict[str, int]]:
    """A process that holds the lock, and the numbers of it and of its forked child."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDER, str(folder), *extra]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    return process, {k: int(v) for k, v in (process.stdout.readline().split() for _ in range(1 + len(extra)))}


@pytest.fixture
def holder(tmp_path):
    process, _ = start_holder(tmp_path)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_a_second_process_is_refused_and_changes_nothing(tmp_path, holder):
    (tmp_path / ".archs.json.99999999.tmp").touch()
    before = snapshot(tmp_path)
    with pytest.raises(RunDirectoryError) as refused, run_lock(tmp_path):
        pass
    text = str(refused.value)
    for words in (str(tmp_path), f"process {holder.pid}", os.uname().nodename, "since 20", "choose another --out"):
        assert words in text
    assert "\n" not in text
    assert snapshot(tmp_path) == before


def test_the_lock_goes_with_a_killed_process(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").exists()
    with run_lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    process, numbers = start_holder(tmp_path, "fork")
    try:
        process.kill()
        process.wait()
        os.kill(numbers["worker"], 0)
        with run_lock(tmp_path):
            pass
    finally:
        os.kill(numbers["worker"], signal.SIGKILL)
        process.stdout.close()


def test_a_lock_within_a_lock_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with run_lock(tmp_path / "run"):
        with run_lock("run"):
            pass
        assert (tmp_path / "run" / ".lock").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("locks", [True, False])
def test_a_second_thread_is_refused_like_a_process(locks, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr(fcntl, "flock", fail)

    def enter() -> str:
        with run_lock(tmp_path / "run"), run_lock(tmp_path / "run"):
            return threading.current_thread().name

    with ThreadPoolExecutor(1, thread_name_prefix="cell") as other:
        with run_lock(tmp_path / "run"):
            with pytest.raises(
                RunDirectoryError, match=r"run is in use by another thread of this process \(Main.*Nothing"
            ):
                other.submit(enter).result()
            assert lock._held[str(tmp_path / "run")][0] is threading.current_thread()
        assert other.submit(enter).result() == "cell_0"
    assert lock._held == {}


def test_one_of_many_threads_that_begin_together_gets_in(tmp_path):
    together, inside = threading.Barrier(8), threading.Barrier(8)

    def enter(_: int) -> bool:
        together.wait(30)
        try:
            with run_lock(tmp_path / "run"):
                inside.wait(30)
                return True
        except RunDirectoryError:
            inside.wait(30)
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(enter, range(8))) == 1


def test_a_child_of_a_process_with_threads_can_lock(tmp_path):
    """The fork comes while another thread looks for a lock."""
    with lock._guard:
        child = os.fork()
        if child == 0:
            try:
                with run_lock(tmp_path):
                    os._exit(0)
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_directory_with_files_is_kept_and_an_absent_one_is_not_made(tmp_path):
    with run_lock(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert os.listdir(tmp_path / "new") == ["file"]
    with run_lock(tmp_path / "absent", create=False):
        pass
    assert not (tmp_path / "absent").exists()


def test_the_lock_of_a_removed_file_keeps_nobody_out(tmp_path, monkeypatch):
    """Between the opening and the locking of the file its holder may end, and another begin with a new file."""
    plain, stolen = fcntl.flock, []

    def after_another(descriptor, flags):
        if not stolen:
            (tmp_path / ".lock").unlink()
            stolen.append(start_holder(tmp_path)[0])
        plain(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", after_another)
    try:
        with pytest.raises(RunDirectoryError) as refused, run_lock(tmp_path):
            pass
        assert f"process {stolen[0].pid} " in str(refused.value)
    finally:
        stolen[0].kill()
        stolen[0].wait()
        stolen[0].stdout.close()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with run_lock(tmp_path), run_lock(tmp_path):
        pass
    warning = f"has no locks ({os.strerror(errno.ENOLCK)}): make sure that no other process writes there"
    assert caplog.text.count(warning) == 1
    assert lock._held == {}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "ftruncate", "open", "mkdir"])
def test_a_directory_that_cannot_be_written_is_an_error_and_left_alone(tmp_path, monkeypatch, call):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os if call != "mkdir" else Path, call, fail)
    with pytest.raises(RunDirectoryError, match="cannot write to run directory .*No space left.*free some space"):
        with run_lock(tmp_path):
            raise AssertionError("unreachable")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("run_dir", ["file", "file/below", "/proc/nasfast"])
def test_what_is_no_directory_is_an_error(tmp_path, run_dir):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="run directory .*choose another --out"), run_lock(tmp_path / run_dir):
        pass


def test_only_left_over_temporary_files_are_removed(tmp_path, caplog, holder):
    run_dir = tmp_path / "run"
    ours, dead = os.getpid(), 99_999_999
    left = [
        f".config.yaml.{dead}.tmp",
        f"checkpoints/.supernet-00000004.safetensors.{dead}.tmp",
        f"report/.pareto.png.{dead}.tmp",
        f"retrain/best/.model.onnx.{dead}.tmp",
        f".archs.json.{ours}.tmp",
        f".archs.json.{10**30}.tmp",
    ]
    kept = [
        f".report.html.{holder.pid}.tmp",  # of a report being written
        f"config.yaml.{dead}.tmp",
        ".config.yaml.tmp",
        f".{dead}.tmp",
        ".archs.json.-1.tmp",
        f"images/.cat.{dead}.tmp",
        f"checkpoints/supernet-{dead}.safetensors",
    ]
    for name in (*left, *kept):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()
    with caplog.at_level("INFO"), run_lock(run_dir):
        pass
    assert {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()} == set(kept)
    assert caplog.text.count("which a killed process left") == len(left)
