"""Whether the disk has room for the checkpoints of a run with several seeds."""

from __future__ import annotations

import shutil

from nasfast.data.cache_store import size_text
from nasfast.settings import RunConfig
from nasfast.spaces import SearchSpace
from nasfast.stages.inputs import checked_space
from nasfast.train import CheckpointError
from nasfast.train.supernet import make_supernet


def check_room(cfg: RunConfig, seeds: int, workers: int) -> None:
    """Refuse more seeds than there is room for, before anything is trained.

    Args:
        cfg: settings of the run; its folder need not exist.
        seeds: number of seeds.
        workers: the most tasks that run at a time.

    Raises:
        CheckpointError: the disk is too small; the text says how many seeds it has room for.
        ConfigError, DataError, InfeasibleConstraintError: see `nasfast.stages.inputs.checked_space`.
    """
    each, once = bytes_of(cfg, checked_space(cfg), seeds, workers)
    found = [*cfg.run_dir.glob("seed-*/checkpoints/*"), *cfg.run_dir.glob("networks/*/*/checkpoints/*")]
    # a checkpoint of the best evaluation may be a second name of another file
    there = {status.st_ino: status.st_size for status in (path.stat() for path in found)}
    folder = next(path for path in (cfg.run_dir.absolute(), *cfg.run_dir.absolute().parents) if path.is_dir())
    room = shutil.disk_usage(folder).free + sum(there.values())
    if seeds * each + once > room:
        raise CheckpointError(
            f"the checkpoints of {seeds} seeds need {size_text(seeds * each + once)} in {cfg.run_dir}, where there is "
            f"room for {size_text(room)}, which is enough for {max(0, int((room - once) // each))} seeds: free some "
            "space, lower --seeds or train.keep_checkpoints, or choose another --out. Nothing was trained"
        )


def bytes_of(cfg: RunConfig, space: SearchSpace, seeds: int, workers: int) -> tuple[float, float]:
    """Bytes of the checkpoints that stay of a seed, and of those that a run has once, up to a few percent.

    A seed leaves its supernet, and at most two networks: the answer and the structural baseline.

    Args:
        cfg, seeds, workers: see `check_room`.
        space: the space of the run.
    """
    # how weights begin does not change their number, and these are drawn quickly
    drawn = cfg.supernet.replace(init="he", **dict.fromkeys(cfg.supernet.aligned))
    net, _ = make_supernet(space, cfg.method, drawn)
    tensors = [*net.state_dict().values(), *(p for p in net.parameters() if p.requires_grad)]  # the latter have momenta
    supernet = sum(tensor.nbytes for tensor in tensors)
    params = sum(max(cost.params for cost in row.values()) for row in space.cost_table) + space.fixed_cost.params
    network = 4 * params * (2 if cfg.retrain.ema is None else 3)  # fp32: weights, momenta, and their average
    kept = (cfg.retrain.train.keep_checkpoints + 1) * network  # the best evaluated one is kept, too
    # each worker writes one more before it deletes an old one; supernets have ended when networks are trained
    peers = cfg.retrain.random_architectures
    writing = max(min(workers, seeds) * supernet, min(workers, 2 * seeds + peers) * network)
    once = writing + peers * kept
    return cfg.train.keep_checkpoints * supernet + 2 * kept, once
