"""Which architectures of a run are retrained, and the names of their networks.

From a search `best`, `best-2`, ..., beside them `random`, `random-2`, ...; of a search of cells, its own names; and
`arch-1_0_2_1` for one that a user names. Each may have `-seed-N` behind it.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nasfast.config import ConfigError
from nasfast.pipeline.inputs import Inputs, read_any_space
from nasfast.pipeline.run import read_result
from nasfast.search import SearchResult, equal_cost_peers, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.settings import RunConfig
from nasfast.spaces import Arch, ArchSpace, SearchSpace, arch_file_text, load_arch

_LOG = logging.getLogger(__name__)

SEED = "-seed-"
"""Stands between the name of a network and its seed, where that is not the run's."""


def choose_architectures(
    cfg: RunConfig, archs: Sequence[Arch | str] = (), *, pareto: bool = False
) -> tuple[ArchSpace, dict[str, Arch]]:
    """The space of a run, and the architectures to retrain by the names of their networks; see `retrain_best`."""
    run_dir = cfg.run_dir
    space = read_any_space(run_dir)
    if archs:
        return space, _name_archs(read_arch(arch, space) for arch in archs)
    if not isinstance(space, SearchSpace):
        if pareto:
            raise ConfigError("a search of cells computes no Pareto front: leave --pareto out")
        return space, load_cell_results(run_dir, space)
    result = load_search_result(run_dir, space)
    if pareto:
        return space, _name_archs(require_front(result, run_dir))
    best = dict(list(name_candidates(result).items())[: cfg.retrain.top_k])
    if len(best) < cfg.retrain.top_k:
        path = run_dir / ARCHS_FILE
        _LOG.warning("retrain.top_k=%d, but %s has %d architectures", cfg.retrain.top_k, path, len(best))
    # a later search than that of config.yaml may have had other limits
    limited = cfg if result.settings is None else cfg.replace(search=result.settings)
    return space, best | random_peers(cfg, Inputs.of(limited, space), result.candidates[0].arch)


def random_peers(cfg: RunConfig, inputs: Inputs, arch: Arch) -> dict[str, Arch]:
    """The random architectures of the cost of `arch` that the settings ask for: `random`, `random-2`, ..."""
    count, rng = cfg.retrain.random_architectures, random.Random(cfg.seed)
    if count:
        inputs.limits.check(inputs.space)
    peers = equal_cost_peers(inputs.space, rng, arch, count, limits=inputs.limits)
    return {"random" if i == 0 else f"random-{i + 1}": peer for i, peer in enumerate(peers)}


def list_trainings(cfg: RunConfig, archs: Mapping[str, Arch]) -> dict[str, tuple[Arch, int]]:
    """Every training by the name of its network: an architecture and a seed.

    The first has the seed of the run and the name as it is, the others have names such as `best-seed-1`. Random
    architectures are trained once each, because they stand for architectures and not for one of them.
    """
    trainings, first = {}, cfg.seed
    for name, arch in archs.items():
        trainings[name] = (arch, first)
        if not name.startswith("random"):
            seeds = range(first + 1, first + cfg.retrain.seeds)
            trainings |= {f"{name}{SEED}{seed}": (arch, seed) for seed in seeds}
    return trainings


def read_arch(arch: Arch | str, space: ArchSpace) -> Arch:
    """An architecture of a space, given as a value or as text."""
    return space.parse(arch) if isinstance(arch, str) else space.check(arch)


def _name_archs(archs: Iterable[Arch]) -> dict[str, Arch]:
    return {f"arch-{arch_file_text(arch)}": arch for arch in archs}


def load_cell_results(run_dir: Path, space: ArchSpace) -> dict[str, Arch]:
    """What a search of cells wrote, by its names."""
    paths = sorted(run_dir.glob("arch_*.json"))
    if not paths:
        raise FileNotFoundError(f"no arch_NAME.json in {run_dir}: a search of cells writes them at its end")
    return {path.stem.removeprefix("arch_"): load_arch(path, space) for path in paths}


def load_search_result(run_dir: Path, space: SearchSpace) -> SearchResult:
    """archs.json."""
    load = functools.partial(load_candidates, space=space)
    return read_result(run_dir / ARCHS_FILE, load, f"nasfast search --out {run_dir}")


def name_candidates(result: SearchResult) -> dict[str, Arch]:
    """The candidates of a search under the names of their networks."""
    return {"best" if i == 0 else f"best-{i + 1}": c.arch for i, c in enumerate(result.candidates)}


def front_points(result: SearchResult) -> list[Arch]:
    """Every architecture on the front against MACs or on that against a table, each once."""
    return list(dict.fromkeys(point.arch for point in result.points[len(result.candidates) :]))


def require_front(result: SearchResult, run_dir: Path) -> list[Arch]:
    """`front_points`, of which there must be some."""
    if not (points := front_points(result)):
        raise ConfigError(
            f"{run_dir / ARCHS_FILE} has no Pareto front, because the score scores whole paths: name architectures "
            "with --arch, or search with score.distill=true"
        )
    return points
