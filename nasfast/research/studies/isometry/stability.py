"""How stable the ranking of candidates is between seeds, which takes trained supernets."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from nasfast.indicators.bn_gamma import score
from nasfast.research.analysis.fairness import SeedStability, seed_stability
from nasfast.spaces import FairSampler, SearchSpace
from nasfast.supernet import Init, Supernet
from nasfast.train import TrainConfig, train_supernet


def indicator_stability(
    space: SearchSpace,
    loader: object,
    *,
    init: Init = "orthogonal",
    seeds: Sequence[int] = (0, 1),
    cfg: TrainConfig | None = None,
) -> SeedStability:
    """Train the indicators of one space from several seeds and compare their rankings of candidates.

    This test decides whether one initialisation ranks more fairly than another. It trains one supernet per seed.

    Args:
        space: space of the supernet.
        loader: as for `train_supernet`.
        init: initialisation of the frozen weights.
        seeds: seeds of weights and paths, at least two.
        cfg: settings of each training; None takes one epoch.

    Raises:
        ValueError: fewer than two seeds.
    """
    if len(seeds) < 2:
        raise ValueError(f"indicator_stability: needs two seeds to compare, got {len(seeds)}")
    tables = []
    for seed in seeds:
        net = Supernet(space, init=init, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            sampler = FairSampler(space, seed=seed, layer_indicators=True)
            train_supernet(net, loader, sampler, cfg or TrainConfig(epochs=1), run_dir=folder)
        tables.append(score(net))
    return seed_stability(tables)
