"""A retrained network and its folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny import batches, tiny_space

from nasfast.retrain import RetrainConfig, retrain
from nasfast.train import TrainConfig

ARCH = (1, 0, 2, 1)


@pytest.fixture(scope="session")
def retrained(tmp_path_factory) -> SimpleNamespace:
    """`folder` of the exported model, `result`, and `val`, the batches it was judged on."""
    run_dir, val = tmp_path_factory.mktemp("retrained"), batches(4, seed=1)
    cfg = RetrainConfig(train=TrainConfig(epochs=8, lr=0.1))
    result = retrain(tiny_space(), ARCH, batches(8), val, cfg, run_dir=run_dir, activation="tanh")
    return SimpleNamespace(run_dir=run_dir, folder=run_dir / "retrain" / "best", result=result, val=val, arch=ARCH)
