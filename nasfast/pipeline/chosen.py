"""Which architectures of a run are retrained and under which names, and which retrained networks are exported."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nasfast.config import ConfigError
from nasfast.pipeline.check import check_same_run, without_supernet
from nasfast.pipeline.inputs import saved_space, space_of_cells
from nasfast.retrain.export import FORM_FILE, read_form
from nasfast.search import SearchResult, equal_cost_peers, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import read_limits
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig
from nasfast.spaces import Arch, ArchSpace, SearchSpace, arch_file_text, format_arch, load_arch, read_space
from nasfast.supernet import ArchNetwork

_LOG = logging.getLogger(__name__)

SEED = "-seed-"
"""Stands between the name of a network and its seed, where that is not the run's."""


def to_retrain(
    cfg: RunConfig, archs: Sequence[Arch | str] = (), *, pareto: bool = False
) -> tuple[ArchSpace, dict[str, Arch]]:
    """The space of a run, and the architectures to retrain by the names of their networks.

    Args:
        cfg: settings of the run.
        archs: these architectures instead of those that the search chose, as values or as text; each is named after its
            values.
        pareto: whether to take every point of the fronts in archs.json, named in the same way.

    Raises:
        FileNotFoundError: the stage before has not run.
        ArchError: an architecture is not in the space of the run.
        ConfigError: a file is damaged, or the search computed no front.
        InfeasibleConstraintError: no architecture meets the limits that random ones shall meet.
    """
    check_same_run(cfg.run_dir / CONFIG_FILE, cfg, supernet=not without_supernet(cfg))
    cells = space_of_cells(cfg)
    space = saved_space(cfg) if cells is None else cells
    if archs:
        return space, _named(_read(arch, space) for arch in archs)
    if cells is not None:
        if pareto:
            raise ConfigError("a search of cells computes no Pareto front: leave --pareto out")
        return cells, _of_cells(cfg.run_dir, cells)
    found = _result(cfg.run_dir, saved_space(cfg))
    if pareto:
        return space, _named(_front(found, cfg.run_dir))
    return space, _of_layers(cfg, saved_space(cfg), found)


def with_seeds(chosen: Mapping[str, Arch], cfg: RunConfig) -> dict[str, tuple[Arch, int]]:
    """Every training by the name of its network: an architecture and a seed.

    The first has the seed of the run and the name as given, the others have names such as `best-seed-1`. Random
    architectures are trained once each, because they stand for architectures and not for one of them.
    """
    trainings = {}
    for name, arch in chosen.items():
        trainings[name] = (arch, cfg.seed)
        if not name.startswith("random"):
            seeds = range(cfg.seed + 1, cfg.seed + cfg.retrain.seeds)
            trainings |= {f"{name}{SEED}{seed}": (arch, seed) for seed in seeds}
    return trainings


def _read(arch: Arch | str, space: ArchSpace) -> Arch:
    return space.parse(arch) if isinstance(arch, str) else space.check(arch)


def _named(archs: Iterable[Arch]) -> dict[str, Arch]:
    return {f"arch-{arch_file_text(arch)}": arch for arch in archs}


def _of_cells(run_dir: Path, space: ArchSpace) -> dict[str, Arch]:
    """What a search of cells wrote, by its names."""
    paths = sorted(run_dir.glob("arch_*.json"))
    if not paths:
        raise FileNotFoundError(f"no arch_NAME.json in {run_dir}: a search of cells writes them at its end")
    return {path.stem.removeprefix("arch_"): load_arch(path, space) for path in paths}


def _result(run_dir: Path, space: SearchSpace) -> SearchResult:
    """archs.json."""
    path = run_dir / ARCHS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast search --out {run_dir}` first")
    try:
        return load_candidates(path, space)
    except ConfigError as error:
        raise ConfigError(f"{error}: run `nasfast search --out {run_dir}` again") from error


def _front(found: SearchResult, run_dir: Path) -> list[Arch]:
    """Every architecture on the front against MACs or on that against a table, each once."""
    points = [*found.pareto, *(point for table in found.tables for point in table.pareto)]
    if not points:
        raise ConfigError(
            f"{run_dir / ARCHS_FILE} has no Pareto front, because the score scores whole paths: name architectures "
            "with --arch, or search with score.distill=true"
        )
    return list(dict.fromkeys(point.arch for point in points))


def _best(found: SearchResult) -> dict[str, Arch]:
    """The candidates of a search under the names of their networks."""
    return {"best" if i == 0 else f"best-{i + 1}": c.arch for i, c in enumerate(found.candidates)}


def _of_layers(cfg: RunConfig, space: SearchSpace, found: SearchResult) -> dict[str, Arch]:
    """The best architectures of a search, and random ones of the cost of the first."""
    chosen = dict(list(_best(found).items())[: cfg.retrain.top_k])
    limits = read_limits(cfg.search, space)
    if cfg.retrain.random_architectures:
        limits.check(space, allow_identity=cfg.search.allow_identity)
    peers = equal_cost_peers(
        space,
        random.Random(cfg.seed),
        found.candidates[0].arch,
        cfg.retrain.random_architectures,
        limits=limits,
        allow_identity=cfg.search.allow_identity,
    )
    if len(chosen) < cfg.retrain.top_k:
        path = cfg.run_dir / ARCHS_FILE
        _LOG.warning("retrain.top_k=%d, but %s has %d architectures", cfg.retrain.top_k, path, len(chosen))
    return chosen | {"random" if i == 0 else f"random-{i + 1}": arch for i, arch in enumerate(peers)}


def _retrained(run_dir: Path, space: ArchSpace) -> dict[str, Arch]:
    """The architectures of the retrained networks of a space by name, `best` first."""
    paths = sorted(run_dir.glob(f"retrain/*/{FORM_FILE}"), key=lambda p: (p.parent.name != "best", p.parent.name))
    found = {}
    for path in paths:
        try:
            of_network, arch, _ = read_form(path)
            if of_network.fingerprint == space.fingerprint:
                found[path.parent.name] = arch
        except ValueError as error:
            _LOG.warning("%s is left out: %s", path.parent, error)
    return found


def to_export(run_dir: Path, *, arch: Arch | str | None = None, pareto: bool = False) -> list[str]:
    """The names of the retrained networks of an architecture, or of the Pareto fronts.

    Raises:
        FileNotFoundError: none of them was retrained; the text has the command that does, and what there is.
        ConfigError: space.yaml or archs.json is damaged, or the latter has no front.
        ArchError: the architecture is not in the space of the run.
    """
    space = read_space(run_dir / SPACE_FILE)
    names: dict[Arch, str] = {}
    for name, value in _retrained(run_dir, space).items():
        names.setdefault(value, name)
    if arch is not None:
        wanted = [_read(arch, space)]
        flags = f'--arch "{format_arch(wanted[0])}"'
    else:
        if not isinstance(space, SearchSpace):
            raise ConfigError("a search of cells computes no Pareto front: give --name or --arch")
        wanted, flags = _front(_result(run_dir, space), run_dir), "--pareto"
    found = [names[value] for value in wanted if value in names]
    command = f"`nasfast retrain --out {run_dir} {flags}`"
    if not found:
        there = ", ".join(f"{name} [{format_arch(value)}]" for value, name in names.items()) or "nothing"
        which = "this architecture" if arch is not None else f"any of the {len(wanted)} points of the Pareto fronts"
        raise FileNotFoundError(f"no network of {which} was retrained: run {command}. Retrained: {there}")
    if len(found) < len(wanted):
        _LOG.warning("%d of %d points were not retrained: %s", len(wanted) - len(found), len(wanted), command)
    return found


def warn_if_superseded(run_dir: Path, name: str, network: ArchNetwork) -> None:
    """Say if a retrained network is not what the last search found.

    Args:
        run_dir: the run directory; nothing is checked if it has no result of a search.
        name: name of the network; one of the search (`best`, `best-2`, `darts`) is compared with the result of that
            name, and any other with all results. Random architectures are not compared.
        network: the network.

    Raises:
        ConfigError, ArchError: what the search wrote is damaged, or of another space.
    """
    space, path, others = network.space, run_dir / ARCHS_FILE, []
    result = name.partition(SEED)[0]
    if not isinstance(space, SearchSpace):
        if not (run_dir / f"arch_{result}.json").exists():
            return
        searched = _of_cells(run_dir, space)
    elif path.exists():
        found = load_candidates(path, space)
        searched = _best(found)
        others = [point.arch for point in (*found.pareto, *(p for table in found.tables for p in table.pareto))]
    else:
        return
    if result in searched and searched[result] != network.arch:
        _LOG.warning(
            "%s: this network is %s, and a later search found %s: `nasfast retrain` trains that one",
            name,
            format_arch(network.arch),
            format_arch(searched[result]),
        )
    elif not name.startswith("random") and network.arch not in (*searched.values(), *others):
        _LOG.warning(
            "%s: this network is %s, which is neither a result nor on a Pareto front of the last search",
            name,
            format_arch(network.arch),
        )


def warn_if_unnamed(name: str, network: ArchNetwork, folder: Path) -> None:
    """Say if it is not known what the outputs of a retrained network mean.

    Args:
        name: name of the network.
        network: the network.
        folder: the folder of its files.
    """
    if network.images is None:
        _LOG.warning(
            "%s: its classes, and how an image becomes its input, are not known, because its images did not come from "
            "a loader of nasfast. To add them, set `images` of nasfast.load_model(%r) to a nasfast.retrain.ImageInfo, "
            "save the network with nasfast.retrain.save_model, and export again",
            name,
            str(folder),
        )
