"""SIGTERM while training: the step is finished and saved, and a resumed run ends as an unbroken one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from tiny import tiny_space

from nasfast.runtime.distributed import SINGLE
from nasfast.runtime.termination import Terminated
from nasfast.supernet import build
from nasfast.train import Evaluation, TrainStage, evaluate, train
from nasfast.train.checkpoint import CheckpointFolder, load_checkpoint
from nasfast.train.log import read_metrics


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Interrupting(ranks.Shares):
    """Sends SIGTERM before it gives its batch number `at`, counted over epochs."""

    def __init__(self, at: int) -> None:
        super().__init__(ranks.BATCHES, SINGLE)
        self.left = at

    def epoch(self, *args, **kwargs):
        for batch in super().epoch(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                send()
            yield batch


def trained(
    out: Path, *, at: int = 0, before_evaluation: Callable[[], None] = lambda: None, resume: bool = False
) -> Path:
    torch.manual_seed(0)

    def evaluation(model) -> Evaluation:
        before_evaluation()
        return evaluate(model, ranks.HELD_OUT)

    return train(
        build(tiny_space(), ranks.ARCH),
        Interrupting(at),
        ranks.SETTINGS,
        TrainStage("retrain/best", out, "f", resume=resume),
        evaluate=evaluation,
    )


def contents(out: Path) -> tuple[list[dict], dict[str, bytes]]:
    lines = [{k: v for k, v in m.items() if k != "images_per_s"} for m in read_metrics(out)]
    return lines, {path.name: path.read_bytes() for path in (out / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[list[dict], dict[str, bytes]]:
    out = tmp_path_factory.mktemp("unbroken")
    trained(out)
    return contents(out)


@pytest.mark.parametrize("at", [1, 4, 5])
def test_it_saves_after_the_step_and_resumes_to_the_same_bytes(tmp_path, unbroken, at):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as stopped:
        trained(tmp_path, at=at)
    saved = CheckpointFolder(tmp_path / "checkpoints", "retrain-best").path(at)
    assert stopped.value.saved == f"retrain/best: step {at} of 8 is saved in {saved}"
    assert load_checkpoint(saved).state["step"] == at
    # the fourth step ends an epoch, but its evaluation is not waited for
    assert load_checkpoint(saved).state["evaluation_due"] == (at == 4)
    assert not any("eval_top1" in m for m in read_metrics(tmp_path)[: at + 1] if m["step"] == at)
    assert signal.getsignal(signal.SIGTERM) is before
    trained(tmp_path, resume=True)
    lines, files = contents(tmp_path)
    assert lines == unbroken[0]
    assert {name: files[name] for name in unbroken[1]} == unbroken[1]


@pytest.mark.parametrize("number", [1, 2], ids=["first evaluation", "last evaluation"])
def test_an_evaluation_is_cut_short_and_done_again(tmp_path, unbroken, number):
    calls = []

    def interrupt() -> None:
        calls.append(1)
        if len(calls) == number:
            send()
            pytest.fail("it went on")

    with pytest.raises(Terminated, match="143"):
        trained(tmp_path, before_evaluation=interrupt)
    newest = load_checkpoint(CheckpointFolder(tmp_path / "checkpoints", "retrain-best").path(4 * number))
    assert newest.state["evaluation_due"]
    assert len([m for m in read_metrics(tmp_path) if "eval_top1" in m]) == number - 1
    trained(tmp_path, resume=True)
    assert contents(tmp_path) == unbroken


def test_one_that_comes_with_the_end_is_not_lost(tmp_path):
    """If SIGTERM comes too late to stop a stage, it ends the program after the stage."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                CheckpointFolder, "save", lambda *_, _save=CheckpointFolder.save, **k: (send(), _save(*_, **k))
            )
            ranks.supernet(tmp_path, SINGLE, epochs=1, checkpoint_every=0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [1]
