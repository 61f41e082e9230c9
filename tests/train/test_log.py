"""metrics.jsonl with several writers."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from nasfast.runtime.progress import Progress, duration, followed_by
from nasfast.train import TrainConfig, TrainStage, train
from nasfast.train.log import TrainLog, read_metrics

LINES = 60


def _writer(run_dir, stage: str) -> int:
    """A child that writes the metrics of a stage again and again from the start, each time one line more."""
    pid = os.fork()
    if pid == 0:
        try:
            for begin in range(LINES):
                with TrainLog(run_dir, stage, step=begin, total=LINES, shown=False) as log:
                    log.write(begin + 1, loss=float(begin))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def test_stages_side_by_side_lose_no_line(tmp_path):
    """Three processes append to one file and replace it."""
    children = [_writer(tmp_path, stage) for stage in "abc"]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    for stage in "abc":
        assert [m["step"] for m in read_metrics(tmp_path) if m["stage"] == stage] == list(range(1, LINES + 1))
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3 * LINES


def test_a_line_behind_a_torn_one_is_whole(tmp_path):
    with TrainLog(tmp_path, "a", step=0, total=9, shown=False) as log:
        log.write(1, loss=1.0)
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"stage": "b", "st')
        log.write(2, loss=2.0)
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]


def test_without_a_terminal_a_line_comes_every_half_minute(tmp_path, monkeypatch, capsys):
    seconds = [0.0, 29.0, 30.0, 31.0, 59.0, 60.0]
    for shown in (False, True):
        now = iter(seconds)
        monkeypatch.setattr("nasfast.runtime.progress.time", SimpleNamespace(monotonic=lambda now=now: next(now)))
        with TrainLog(tmp_path, "a", step=0, total=9, shown=shown) as log:
            log.write(1, loss=1.0)
            for step in (2, 3, 4):
                log.tick(step)  # nothing was read; the text is that of the last line of metrics.jsonl
            log.write(5, loss=2.0)
        lines = capsys.readouterr().err.splitlines()
        wanted = ["a 2/9  eta 1 min 45 s  loss 1", "a 5/9  eta 48 s  loss 2"]
        assert lines == (wanted if shown else [])
        assert [m["step"] for m in read_metrics(tmp_path)] == [1, 5]


@pytest.mark.parametrize("call", ["__init__", "add_scalar", "close"])
def test_tensorboard_may_fail(tmp_path, monkeypatch, caplog, call):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, call, fail)
    with TrainLog(tmp_path, "a", step=0, total=9, shown=False) as log:
        log.write(1, loss=1.0)
        log.write(2, loss=2.0)
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]
    assert caplog.text.count("none from here on, metrics.jsonl has all figures") == 1


def test_a_narrow_terminal_shows_counter_and_time(tmp_path, monkeypatch, capsys):
    """Names and numbers as long as those of a real stage; the metrics are cut and nothing else."""
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    with TrainLog(tmp_path, "retrain/random-3", step=0, total=120_000, shown=True) as log:
        log.write(99_999, epoch=17, lr=0.0123, loss=1.2345, top1=0.4321, images_per_s=1234.5, grad_norm=9.87)
        log._progress._bar.refresh()
    shown = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).replace("\r", "\n")
    lines = [line for line in shown.splitlines() if "99999" in line]
    assert lines and all(re.match(r"retrain/random-3 +99999/120000 +eta \d+ s ", line) for line in lines)
    assert max(map(len, lines)) <= 60


def test_the_time_that_is_left_counts_the_networks_that_follow(tmp_path, monkeypatch, capsys):
    now = iter([0.0, 600.0, 600.0, 1200.0])
    monkeypatch.setattr("nasfast.runtime.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    with TrainLog(tmp_path, "a", step=0, total=100, shown=True) as log:
        log.write(10, loss=1.0)  # 60 s per step: 5400 s are left
    with followed_by(2), TrainLog(tmp_path, "b", step=0, total=100, shown=True) as log:
        log.write(10, loss=1.0)  # 5400 s of this one, and 12000 s
    first, second = capsys.readouterr().err.splitlines()
    assert first == "a 10/100  eta 1 h 30 min  loss 1"
    assert second == "b 10/100  eta 1 h 30 min, all 4 h 50 min  loss 1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (59.1, "1 min 00 s"), (599.1, "10 min"), (3541, "1 h 00 min"), (float("inf"), "unknown")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_without_tensorboard_the_metrics_are_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("nasfast.train.log.SummaryWriter", None)
    with TrainLog(tmp_path, "supernet", step=0, total=1, shown=False) as log:
        log.write(1, loss=2.0)
    assert [m["loss"] for m in read_metrics(tmp_path)] == [2.0] and not (tmp_path / "tensorboard").exists()


def test_the_bar_moves_at_every_step_though_metrics_come_rarely(tmp_path, monkeypatch, capsys):
    """On a GPU nothing is read between two lines of metrics.jsonl, and a first step may wait for captures."""
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    tick = TrainLog.tick

    def ticked(self, step):
        tick(self, step)
        seen.append(int(self._progress._bar.tasks[0].completed))

    monkeypatch.setattr(TrainLog, "tick", ticked)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    batches = [(torch.randn(4, 3, 1, 1), torch.tensor([0, 1, 0, 1]))] * 7
    train(model, batches, TrainConfig(epochs=1, lr=0.1, log_every=100), TrainStage("s", tmp_path, "f"))
    assert seen == list(range(1, 8)) and len(read_metrics(tmp_path)) == 1


def test_without_rich_there_are_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr("nasfast.runtime.progress.LINE_EVERY", 0.0)
    with Progress("score", 2) as progress:
        progress.update(1)
    assert capsys.readouterr().err.startswith("score 1/2  eta ")
