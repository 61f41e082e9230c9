"""Ray: what is refused, without Ray; and, where Ray is installed, tasks on a cluster whose worker is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nasfast.pipeline.children import TASK_FILE, Task, TaskError, TaskRunner, TaskSettings, execute


def refused(tmp_path, address: str | None = None) -> str:
    with pytest.raises(TaskError) as error, TaskRunner(tmp_path, TaskSettings(executor="ray", ray_address=address)):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def fake_ray(monkeypatch, error: Exception) -> None:
    def init(*_, **__):
        raise error

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__version__="2.99.0", init=init))


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'nasfast[ray]'" in refused(tmp_path)


def test_an_address_where_nothing_listens(tmp_path, monkeypatch):
    fake_ray(monkeypatch, AssertionError("asked although nothing listens"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        text = refused(tmp_path, address)
    for words in (address, "refused", "Ray 2.99.0", "ray start --head"):
        assert words in text
    assert "no Ray cluster at nonsense" in refused(tmp_path, "nonsense")


def test_no_cluster_on_this_machine_and_one_of_another_version(tmp_path, monkeypatch):
    fake_ray(monkeypatch, ConnectionError("Could not find any running Ray instance."))
    assert "no Ray cluster of this machine (Could not find any running Ray instance.)" in refused(tmp_path)
    fake_ray(monkeypatch, RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.40.0"))
    text = refused(tmp_path)
    assert "cluster was started with: Ray: 2.40.0" in text and "this process has Ray 2.99.0" in text


@pytest.mark.kill
def test_a_cluster_gives_the_same_bytes_and_survives_a_killed_worker(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", "2"]
    options = ["--port", str(port), "--include-dashboard=false", "--disable-usage-stats"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    head = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert any(b"Ray runtime started" in line for line in head.stdout)
        tasks = [
            Task("add", "task_functions:add", {"a": 2, "b": 3}),
            Task("die", "task_functions:die_once"),
            Task("fail", "task_functions:always_fail", {"text": "no images"}),
        ]
        settings = TaskSettings(executor="ray", ray_address=f"127.0.0.1:{port}", attempts=2)
        with TaskRunner(tmp_path / "ray", settings) as runner:
            added, died, failed = runner.run(tasks)
        assert (added.status, died.status, died.result) == ("done", "done", 3)
        assert (failed.status, failed.error) == ("failed", "ValueError: no images")
        execute(tasks[0], tmp_path / "here", ".")
        assert (tmp_path / "here" / TASK_FILE).read_bytes() == (tmp_path / "ray/add" / TASK_FILE).read_bytes()
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)
