"""Small training stages that kill themselves at a given moment, for the tests of resuming.

As a script, `killable.py OUT STAGE:MOMENT ...` runs each stage in OUT/STAGE/MOMENT, in a forked child that kills itself
with SIGKILL at that moment; torch is imported once for all.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # PyTorch's optimizers import it, which takes seconds: once for all, and not in each forked child
from tiny import tiny_space, write_folder

import nasfast.train.checkpoint as checkpoint_module
import nasfast.train.loop as loop_module
from nasfast.data import DataConfig, FolderSource, Loader, make_loader
from nasfast.research.cells.search import CellSearchConfig, search_cells
from nasfast.research.cells.space import CellSpace, minimal_cell
from nasfast.retrain import RetrainConfig, retrain
from nasfast.spaces import FairSampler
from nasfast.supernet import Supernet
from nasfast.train import CheckpointError, TrainConfig, train_supernet
from nasfast.train.log import TrainLog

# the attribute of the package of this name is the function
retrain_module = importlib.import_module("nasfast.retrain.retrain")

# 5 batches an epoch, 15 steps; checkpoints at 4, 8, 12 and 15 cross the epochs
SETTINGS = TrainConfig(epochs=3, lr=0.3, checkpoint_every=4, log_every=3, keep_checkpoints=2)
ARCH = (1, 0, 2, 1)


def loader(images: Path, *, batch_size: int = 8) -> Loader:
    """40 images of 4 classes, shuffled and augmented; made when absent."""
    if not images.exists():
        write_folder(images, dict.fromkeys("abcd", 10), side=16)
    cfg = DataConfig(augment="cifar", batch_size=batch_size, workers=0, loader="torchvision")
    return make_loader(cfg, FolderSource(images), train=True, resolution=16, seed=1)


def supernet_stage(out: Path, images: Path, *, resume: bool, settings: TrainConfig = SETTINGS) -> Path:
    """The final checkpoint of a supernet trained along fair paths."""
    torch.manual_seed(0)  # the global generator is part of a checkpoint
    space = tiny_space()
    net, sampler = Supernet(space, seed=2), FairSampler(space, seed=2)
    return train_supernet(net, loader(images), sampler, settings, run_dir=out, resume=resume)


def retrain_stage(out: Path, images: Path, *, resume: bool, settings: TrainConfig = SETTINGS) -> Path:
    """The weights of a retrained network."""
    torch.manual_seed(0)
    made = loader(images)
    retrain(tiny_space(), ARCH, made, made, RetrainConfig(train=settings), run_dir=out, resume=resume)
    return out / "retrain" / "best" / "model.safetensors"


def cells_stage(out: Path, images: Path, *, resume: bool, settings: TrainConfig = SETTINGS) -> Path:
    """The final checkpoint of a search of cells, with held-out batches of another number, and record.npz."""
    torch.manual_seed(0)
    space = CellSpace("tiny", minimal_cell(), cells=1, channels=2, num_classes=4, resolution=16)
    cfg = CellSearchConfig(method="proxyless", bilevel=True, alpha_lr=0.05, records=4)
    train, held_out = loader(images), loader(images, batch_size=12)
    settings = settings.replace(label_smoothing=0.0)
    found = search_cells(space, train, cfg, settings, held_out=held_out, run_dir=out, resume=resume)
    np.savez(out / "record.npz", **found.arrays())
    return max((out / "checkpoints").iterdir())


STAGES = {"supernet": supernet_stage, "retrain": retrain_stage, "cells": cells_stage}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(call: int, function, *, before=None, after=None):
    """`function`, with something done before or after its call number `call`."""
    count = 0

    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call and before is not None:
            before(*args, **kwargs)
        result = function(*args, **kwargs)
        if count == call and after is not None:
            after(*args, **kwargs)
        return result

    return wrapped


def _half_write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f".{path.name}.tmp").write_bytes(data[: len(data) // 2])
    die()


def _torn_line(log: TrainLog, step: int, **metrics: float) -> None:
    with open(log._path, "a") as file:
        file.write(json.dumps({"stage": log._stage, "step": step, **metrics})[:20])
    die()


def _die(*_, **__) -> None:
    die()


def _limit_files(*_, **__) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))


def arm(moment: str) -> None:
    """Prepare this process to kill itself at `moment`."""
    folder = checkpoint_module.CheckpointFolder
    plain = checkpoint_module.write_atomic

    def only_checkpoints(write):
        return lambda path, data: (write if path.suffix == ".safetensors" else plain)(path, data)

    if moment == "in the first step":
        loop_module.update = at_call(1, loop_module.update, before=_die)
    elif moment == "in a step":
        loop_module.update = at_call(10, loop_module.update, before=_die)
    elif moment == "before a checkpoint":
        folder.save = at_call(3, folder.save, before=_die)
    elif moment == "half-written checkpoint":
        checkpoint_module.write_atomic = only_checkpoints(at_call(3, plain, before=_half_write))
    elif moment == "before the replacement":
        os.replace = at_call(4, os.replace, before=_die)  # call 1 is metrics.jsonl
    elif moment == "before the old one goes":
        checkpoint_module.write_atomic = only_checkpoints(at_call(3, plain, after=_die))
    elif moment == "between the best and its step":
        checkpoint_module.link_atomic = _die
    elif moment == "after the last checkpoint":
        folder.save = at_call(4, folder.save, after=_die)
    elif moment == "torn metrics line":
        TrainLog.write = at_call(4, TrainLog.write, before=_torn_line)
    elif moment == "before the model is saved":
        retrain_module.save_model = _die
    elif moment == "between the model and its result":
        retrain_module.save_model = at_call(1, retrain_module.save_model, after=_die)
    elif moment == "full disk":
        # a limit on the size of files, below that of a checkpoint and above that of everything else
        folder.save = at_call(2, folder.save, after=_limit_files)
    else:
        assert moment == "from outside", moment
        # in the last but one step it waits for the end, which may come late where other processes have the cores
        loop_module.update = at_call(14, loop_module.update, before=lambda *_, **__: signal.pause())


def _child(run_dir: Path, images: Path, stage: str, moment: str) -> None:
    try:
        arm(moment)
        STAGES[stage](run_dir, images, resume=False)
    except CheckpointError as error:
        (run_dir / "error.txt").write_text(str(error))
        os._exit(3)
    except BaseException:
        traceback.print_exc()
        os._exit(4)
    os._exit(0)


def main(out: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    loader(out / "images")
    for case in cases:
        stage, moment = case.split(":")
        run_dir = out / stage / moment
        pid = os.fork()
        if pid == 0:
            _child(run_dir, out / "images", stage, moment)
        if moment == "from outside":
            metrics = run_dir / "metrics.jsonl"
            while not metrics.exists() or metrics.read_text().count("\n") < 3:
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(f"{case}={os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
