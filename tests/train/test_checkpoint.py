"""Checkpoint files: round trip, damage, fall-back, refusal, full disks."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import pytest
import torch

from nasfast.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    load_checkpoint,
    save_checkpoint,
)


def sample(step: int = 1, fingerprint: str = "abc") -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model.weight": torch.randn(3, 4, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last),
        "model.half": torch.randn(5, generator=generator).bfloat16(),
        "model.count": torch.tensor(7),
        "model.mask": torch.tensor([True, False]),
        "model.none": torch.empty(0, 3),
        "momentum.weight": torch.randn(3, 4, 3, 3, generator=generator),
        "rng.cpu": torch.get_rng_state(),
    }
    return Checkpoint(tensors, {"fingerprint": fingerprint, "step": step, "sums": {"loss": 0.1}, "name": "ü"})


def test_round_trip(tmp_path):
    path, saved = tmp_path / "c.safetensors", sample()
    save_checkpoint(path, saved)
    loaded = load_checkpoint(path)
    assert loaded.state == saved.state
    assert loaded.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        got = loaded.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor), name
    save_checkpoint(tmp_path / "again.safetensors", loaded)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_tensor_known_by_two_names_is_saved_under_both(tmp_path):
    shared = torch.randn(4)
    save_checkpoint(tmp_path / "c", Checkpoint({"a": shared, "b": shared, "c": shared[:2]}, {}))
    loaded = load_checkpoint(tmp_path / "c").tensors
    assert torch.equal(loaded["a"], shared)
    assert torch.equal(loaded["b"], shared)
    assert torch.equal(loaded["c"], shared[:2])


def test_any_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, Checkpoint({"w": torch.randn(40), "v": torch.arange(5)}, {"step": 3}))
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CheckpointError, match=r"c\.safetensors"):
            load_checkpoint(path)
    path.write_bytes(data)
    load_checkpoint(path)


def test_a_file_of_someone_else_is_refused(tmp_path):
    from safetensors.torch import save

    path = tmp_path / "c.safetensors"
    path.write_bytes(save({"w": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="absent.safetensors is not a readable checkpoint"):
        load_checkpoint(tmp_path / "absent.safetensors")


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    made = CheckpointFolder(tmp_path / "checkpoints", "supernet", keep=3)
    for step in (5, 10, 15):
        made.save(step, sample(step))
    return made


@pytest.mark.parametrize("prefix", ["net[1]*", "supernet-2"])
def test_prefixes_do_not_mix_and_are_no_patterns(folder, prefix):
    """`retrain(name="net[1]")` makes such a prefix; without its checkpoints a run would start again."""
    other = CheckpointFolder(folder.folder, prefix, keep=1)
    other.save(1, sample(1))
    other.save(2, sample(2))
    assert other.paths() == [other.path(2)]
    assert len(folder.paths()) == 3


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_ones(folder, monkeypatch, call):
    before = {path: path.read_bytes() for path in folder.paths()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match="No space left on device; the checkpoints already in .* are intact"):
        folder.save(20, sample(20))
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in folder.paths()} == before
    assert sorted(os.listdir(folder.folder)) == [p.name for p in folder.paths()], "a temporary file was left"
    assert folder.latest(fingerprint="abc")[1].state["step"] == 15


def test_room_for_one_more_than_are_kept_is_asked_for(folder, monkeypatch):
    there = sum(path.stat().st_size for path in folder.paths())
    size = there // len(folder.paths())
    free = (folder.keep + 1) * size - there
    usage = shutil.disk_usage(folder.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    folder.check_room(size, evaluates=False)
    with pytest.raises(CheckpointError, match="no room for 4 checkpoints of .* MB in .* nothing was trained yet"):
        folder.check_room(size + 1, evaluates=False)
    with pytest.raises(CheckpointError, match="no room for 5 checkpoints"):
        folder.check_room(size, evaluates=True)
    folder.best.hardlink_to(folder.paths()[-1])  # a second name takes no space
    with pytest.raises(CheckpointError, match="no room for 5 checkpoints"):
        folder.check_room(size, evaluates=True)
    folder.best.unlink()
    folder.best.write_bytes(bytes(size))
    folder.check_room(size, evaluates=True)


# the best


def test_the_best_is_kept_and_does_not_count(folder):
    folder.save(20, sample(20), best=True)
    assert folder.best.read_bytes() == folder.path(20).read_bytes()
    assert folder.best.stat().st_ino == folder.path(20).stat().st_ino, "it takes its place twice"
    for step in (25, 30, 35):
        folder.save(step, sample(step))
    assert [p.name for p in folder.paths()] == [f"supernet-{s:08d}.safetensors" for s in (25, 30, 35)]
    assert load_checkpoint(folder.best).state["step"] == 20
    folder.save(40, sample(40), best=True)
    assert load_checkpoint(folder.best).state["step"] == load_checkpoint(folder.path(40)).state["step"] == 40


def test_the_best_is_a_copy_where_there_are_no_links(folder, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    folder.save(20, sample(20), best=True)
    assert folder.best.read_bytes() == folder.path(20).read_bytes()
    assert folder.best.stat().st_ino != folder.path(20).stat().st_ino
    assert not list(folder.folder.glob(".*"))


def test_the_best_is_the_last_fall_back(folder):
    folder.save(20, sample(20), best=True)
    folder.save(25, sample(25))
    for path in folder.paths():
        path.unlink()
    assert folder.latest(fingerprint="abc")[1].state["step"] == 20


# saving while training goes on


class Slow(CheckpointFolder):
    """A folder whose saving waits for `go`, and fails if told to."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.begun, self.go, self.fails, self.steps = threading.Semaphore(0), threading.Semaphore(0), False, []

    def save(self, step: int, checkpoint: Checkpoint, *, best: bool = False) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=30)
        if self.fails:
            raise CheckpointError(f"no room for {step}")
        super().save(step, checkpoint, best=best)
        self.steps.append(step)


@pytest.fixture
def slow(tmp_path) -> Slow:
    return Slow(tmp_path / "checkpoints", "supernet")


def test_saving_does_not_hold_up_and_the_end_waits_for_it(slow):
    with CheckpointWriter(slow) as writer:
        writer.save(5, sample(5))
        assert slow.begun.acquire(timeout=30)
        assert slow.paths() == []
        slow.go.release()
    assert slow.steps == [5]


@pytest.mark.parametrize("again", [True, False])
def test_an_error_is_raised_at_the_next_save_or_the_end(slow, again):
    slow.fails = True
    slow.go.release(2)
    with pytest.raises(CheckpointError, match="no room for 5"), CheckpointWriter(slow) as writer:
        writer.save(5, sample(5))
        if again:
            writer.save(10, sample(10))
            pytest.fail("it went on")


def test_what_ended_the_training_goes_before_an_error_of_saving(slow, caplog):
    slow.fails = True
    slow.go.release()
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(slow) as writer:
        writer.save(5, sample(5))
        raise KeyboardInterrupt
    assert "no room for 5" in caplog.text
