"""A differentiable search: weights and architecture logits learn together, on one set of images or on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.space import CellSpace
from nasfast.research.cells.state import SEARCH, TRAIN, CellSearch, CellSearchResult
from nasfast.research.cells.steps import CellSearchEngine
from nasfast.train import TrainConfig, TrainStage
from nasfast.train.batches import to_learn_from
from nasfast.train.loop import train

__all__ = ["SEARCH", "TRAIN", "WEIGHTS", "CellSearchConfig", "CellSearchResult", "search_cells"]

WEIGHTS = TrainConfig(
    epochs=150, lr=0.025, lr_end=1e-3, weight_decay=3e-4, label_smoothing=0.0, clip_norm=5.0, checkpoint_every=0
)
"""How weights learn in the published settings (arXiv 2009.01272, section 7): 150 epochs, SGD from 0.025 to 0.001."""


_DSNAS = CellSearchConfig()


def search_cells(
    space: CellSpace,
    loader: object,
    cfg: CellSearchConfig = _DSNAS,
    train_cfg: TrainConfig | None = None,
    *,
    held_out: object | None = None,
    run_dir: str | Path,
    name: str = "cells",
    resume: bool = False,
    device: str = "cpu",
    settings: dict[str, Any] | None = None,
    fused: bool = True,
    progress: Callable[[int], None] | None = None,
) -> CellSearchResult:
    """Search an architecture of cells, with the package's training loop, logs and checkpoints.

    Args:
        space: the space of cells.
        loader: loader of the training images; see `nasfast.train.train`.
        cfg: how the architecture learns.
        train_cfg: how the weights learn; None means `WEIGHTS`.
        held_out: loader of the held-out images. With `cfg.bilevel` the architecture learns from them; without, it must
            be None.
        run_dir: gets checkpoints, metrics.jsonl, tensorboard events, and the files of `CellSearchResult.save`.
        name: name of the stage in checkpoints and metrics.
        resume: continue from the newest good checkpoint.
        device: where to search.
        settings: whatever else the result depends on, such as the data, as JSON; a checkpoint with others is refused.
        fused: use the operators of `nasfast.ops`; otherwise plain PyTorch, for comparison.
        progress: called with the number of steps done, instead of progress on the screen.

    Raises:
        ValueError: `held_out` without `cfg.bilevel`, or the reverse; a loader without batches; label smoothing or bf16.
        TrainingDivergedError, CheckpointError, RunDirectoryError, FileExistsError, Terminated: see
            `nasfast.train.train`.
    """
    if cfg.bilevel != (held_out is not None):
        raise ValueError(f"bilevel={cfg.bilevel} needs {'a' if cfg.bilevel else 'no'} held_out loader")
    train_cfg = train_cfg or WEIGHTS
    if train_cfg.label_smoothing or train_cfg.precision != "fp32":
        raise ValueError(
            "a search of cells needs label_smoothing=0 and precision='fp32', in which local costs are defined, got "
            f"{train_cfg.label_smoothing} and {train_cfg.precision!r}"
        )
    loader = to_learn_from(loader)
    held = None if held_out is None else to_learn_from(held_out)
    search = CellSearch(space, cfg, train_cfg.epochs * len(loader), fused=fused)
    train(
        search,
        loader,
        train_cfg,
        TrainStage(
            name,
            run_dir,
            space.fingerprint,
            settings={"search": cfg.to_dict(), **(settings or {})},
            resume=resume,
            quiet=progress is not None,
        ),
        device=device,
        engine=lambda optimizer: CellSearchEngine(search, optimizer, held, progress),
    )
    found = search.result()
    found.save(run_dir)
    return found
