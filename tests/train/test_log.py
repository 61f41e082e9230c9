"""metrics.jsonl with several writers."""

from __future__ import annotations

import os

import pytest
from torch.utils.tensorboard import SummaryWriter

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


def test_nothing_is_shown_when_not_wanted(tmp_path, capsys):
    for shown in (False, True):
        with TrainLog(tmp_path, "a", step=0, total=9, shown=shown) as log:
            log.write(1, loss=1.0)
        assert ("a 1/9" in capsys.readouterr().err) == shown


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
