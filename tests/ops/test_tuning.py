"""The choice of tile sizes, with a simulated clock."""

import contextlib
import json
import random

import pytest
import torch

pytest.importorskip("triton")

from nasfast.ops import _triton

if _triton.why_missing() is not None:
    pytest.skip(_triton.why_missing(), allow_module_level=True)

from nasfast._triton.configs import FAMILIES
from nasfast.ops import tuning

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def made_up_device(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU/2")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("NASFAST_TUNE", raising=False)
    forget()
    yield
    forget()


def forget():
    tuning._path.cache_clear()
    tuning._table.cache_clear()


def chosen():
    return tuning.run("pointwise", "kernel", ("bf16", 3), CUDA, lambda config: config)


class FakeGpu:
    """A stream that runs behind the host, whose launches take 20 to 60 us; times in us.

    Args:
        durations: duration of a launch, by what it returns.
        captures: whether CUDA graphs can be captured.
    """

    def __init__(self, monkeypatch, durations, *, captures=True):
        self.durations, self.captures = durations, captures
        self.host = self.end = 0.0  # what the host has done, and when the last kernel ends
        self.random = random.Random(0)
        self.captured = None
        self.launches = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = max(gpu.host, gpu.end)

            def synchronize(self):
                gpu.host = max(gpu.host, self.time)

            def elapsed_time(self, end):
                return (end.time - self.time) / 1e3

        class Stream:
            def wait_stream(self, other):
                pass

        class CUDAGraph:
            def capture_begin(self, capture_error_mode):
                gpu.captured = 0.0

            def capture_end(self):
                self.duration, gpu.captured = gpu.captured, None
                if not gpu.captures:
                    raise RuntimeError("another error")

            def replay(self):
                gpu.run(self.duration)

        for name, fake in (("Event", Event), ("Stream", Stream), ("CUDAGraph", CUDAGraph)):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def launch(self, config):
        self.launches += 1
        if self.captured is None:
            self.run(self.durations(config))
        elif self.captures:
            self.captured += self.durations(config)
        else:
            raise RuntimeError("cannot be captured")
        return config

    def run(self, duration):
        self.host += self.random.uniform(20, 60)
        self.end = max(self.host, self.end) + duration


def best_of(gpu):
    return tuning.run("pointwise", "kernel", ("bf16", 3), CUDA, gpu.launch)


def clock(monkeypatch, fastest, short=5.0, long=7.0, **options):
    """A GPU on which one configuration is faster than the others."""
    wanted = FAMILIES["pointwise"][fastest]
    return FakeGpu(monkeypatch, lambda config: short if config == wanted else long, **options)


def test_nothing_is_timed_unless_asked(monkeypatch, tmp_path):
    gpu = clock(monkeypatch, "wide")
    assert best_of(gpu) == next(iter(FAMILIES["pointwise"].values()))
    assert gpu.launches == 1 and list(tmp_path.iterdir()) == []


def test_the_fastest_is_kept_in_memory_and_on_disk(monkeypatch, tmp_path):
    gpu = clock(monkeypatch, "wide")
    monkeypatch.setenv("NASFAST_TUNE", "1")
    assert best_of(gpu) == FAMILIES["pointwise"]["wide"]
    timed = gpu.launches
    assert best_of(gpu) == FAMILIES["pointwise"]["wide"] and gpu.launches == timed + 1
    (file,) = (tmp_path / "nasfast").iterdir()
    assert file.name.startswith("tiles-Some-GPU-2-triton")
    assert json.loads(file.read_text()) == {"kernel bf16 3": "wide"}
    # a later process
    forget()
    monkeypatch.delenv("NASFAST_TUNE")
    assert chosen() == FAMILIES["pointwise"]["wide"]


@pytest.mark.parametrize("content", ["{torn", "[]", '{"kernel bf16 3": "no longer there"}'])
def test_a_file_that_is_of_no_use_means_the_default(content, tmp_path):
    file = tuning._path(0)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert chosen() == next(iter(FAMILIES["pointwise"].values()))


def test_nothing_is_timed_during_a_capture(monkeypatch):
    gpu = clock(monkeypatch, "wide")
    monkeypatch.setenv("NASFAST_TUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert best_of(gpu) == next(iter(FAMILIES["pointwise"].values())) and gpu.launches == 1


@pytest.mark.parametrize("fastest", FAMILIES["pointwise"])
def test_kernels_that_end_before_the_next_launch_are_told_apart(fastest, monkeypatch):
    """The difference is 2 us of 5, where the host needs 20 to 60 for a launch."""
    monkeypatch.setenv("NASFAST_TUNE", "1")
    assert best_of(clock(monkeypatch, fastest)) == FAMILIES["pointwise"][fastest]


def test_without_captures_long_kernels_are_told_apart_and_short_ones_keep_the_default(monkeypatch, caplog):
    monkeypatch.setenv("NASFAST_TUNE", "1")
    assert best_of(clock(monkeypatch, "wide", 100.0, 150.0, captures=False)) == FAMILIES["pointwise"]["wide"]
    # the first error is raised, not the error of ending the capture
    assert {record.message for record in caplog.records} == {
        "times queued launches, because their capture failed: cannot be captured"
    }
    tuning._table(tuning._path(0)).clear()
    gpu = clock(monkeypatch, "wide", 5.0, 5.1, captures=False)
    assert best_of(gpu) == next(iter(FAMILIES["pointwise"].values()))


def test_one_configuration_is_not_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("NASFAST_TUNE", "1")
    monkeypatch.setitem(FAMILIES, "pointwise", {"wide": FAMILIES["pointwise"]["wide"]})
    gpu = clock(monkeypatch, "wide")
    assert best_of(gpu) == FAMILIES["pointwise"]["wide"]
    assert gpu.launches == 1 and list(tmp_path.iterdir()) == []
