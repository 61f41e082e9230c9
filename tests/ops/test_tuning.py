"""The choice of tile sizes, with a clock that is made up."""

import json

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


def clock(monkeypatch, fastest):
    """Time configurations by which of them a launch uses."""
    configs = FAMILIES["pointwise"]
    current = []

    def milliseconds(call):
        current.append(call())
        return 1.0 if current[-1] == configs[fastest] else 2.0

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    return current


def test_nothing_is_timed_unless_asked(monkeypatch, tmp_path):
    timed = clock(monkeypatch, "wide")
    assert chosen() == next(iter(FAMILIES["pointwise"].values()))
    assert timed == [] and list(tmp_path.iterdir()) == []


def test_the_fastest_is_kept_in_memory_and_on_disk(monkeypatch, tmp_path):
    timed = clock(monkeypatch, "wide")
    monkeypatch.setenv("NASFAST_TUNE", "1")
    assert chosen() == FAMILIES["pointwise"]["wide"]
    assert len(timed) == len(FAMILIES["pointwise"])
    assert chosen() == FAMILIES["pointwise"]["wide"] and len(timed) == len(FAMILIES["pointwise"])
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
    timed = clock(monkeypatch, "wide")
    monkeypatch.setenv("NASFAST_TUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen() == next(iter(FAMILIES["pointwise"].values())) and timed == []
