"""Export: which retrained networks of a run are written as files for others, and what these say of them."""

from __future__ import annotations

import logging
from pathlib import Path

from nasfast.config import ConfigError
from nasfast.pipeline.architectures import (
    SEED,
    front_points,
    load_cell_results,
    load_search_result,
    name_candidates,
    read_arch,
    require_front,
)
from nasfast.retrain import export_onnx, export_program, load_model
from nasfast.retrain.card import write_card
from nasfast.retrain.export import FORM_FILE, MODEL_FILE, ONNX_FILE, PROGRAM_FILE, model_folder, read_form
from nasfast.runtime.lock import run_lock
from nasfast.runtime.onnx import require_onnx
from nasfast.search import load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.settings import SPACE_FILE
from nasfast.spaces import Arch, ArchSpace, SearchSpace, format_arch, read_space
from nasfast.supernet import ArchNetwork

_LOG = logging.getLogger(__name__)


def export(
    run_dir: str | Path,
    *,
    name: str = "best",
    arch: Arch | str | None = None,
    pareto: bool = False,
    onnx: bool | None = None,
) -> list[Path]:
    """The files of retrained networks, with a model card; warnings say which could not be written, and why.

    Another warning says if a network is not what the last search found.

    Args:
        run_dir: the run directory.
        name: which network: `best`, `best-2`, ..., `random`, ...
        arch: the network of this architecture instead, whatever its name.
        pareto: the networks of all points of the Pareto fronts in archs.json instead; a warning says if some of them
            were not retrained.
        onnx: whether to write model.onnx, too; None does so where the extra `onnx` is installed.

    Raises:
        FileNotFoundError: the run directory does not exist, or no such network was retrained.
        RuntimeError: `onnx` is true, and its extra is missing.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is no directory: give the directory of a run (--out)")
    if onnx is not False:
        try:
            require_onnx()
        except RuntimeError as error:
            if onnx:
                raise RuntimeError(f"{error}, or export without {ONNX_FILE} (--onnx false)") from error
            onnx = False
            _LOG.warning("%s is left out: %s", ONNX_FILE, error)
    names = _choose_names(run_dir, arch) if arch is not None or pareto else [name]
    files = []
    for one in names:
        folder = model_folder(run_dir / "retrain", one)
        network = load_model(folder)
        _warn_if_superseded(run_dir, one, network)
        if network.images is None:
            _LOG.warning(
                "%s: its classes, and how an image becomes its input, are not known, because its images did not come "
                "from a loader of nasfast. To add them, set `images` of nasfast.load_model(%r) to a "
                "nasfast.retrain.ImageInfo, save the network with nasfast.retrain.save_model, and export again",
                one,
                str(folder),
            )
        files += [folder / MODEL_FILE, folder / FORM_FILE]
        writers = {PROGRAM_FILE: export_program} | ({ONNX_FILE: export_onnx} if onnx is not False else {})
        with run_lock(run_dir):
            files.append(write_card(network, folder, run_dir=run_dir))
            for file, write in writers.items():
                try:
                    difference = write(network, folder / file)
                except RuntimeError as error:
                    _LOG.warning("%s: %s is left out: %s", one, file, error)
                    continue
                _LOG.info("%s: %s agrees with PyTorch to %.1e of the largest logit", one, file, difference)
                files.append(folder / file)
    return files


def _read_names(run_dir: Path, space: ArchSpace) -> dict[Arch, str]:
    """The name of a retrained network of each architecture of a space: `best`, or the first in order."""
    paths = sorted(run_dir.glob(f"retrain/*/{FORM_FILE}"), key=lambda p: (p.parent.name != "best", p.parent.name))
    names: dict[Arch, str] = {}
    for path in paths:
        try:
            network_space, arch, _ = read_form(path)
            if network_space.fingerprint == space.fingerprint:
                names.setdefault(arch, path.parent.name)
        except ValueError as error:
            _LOG.warning("%s is left out: %s", path.parent, error)
    return names


def _choose_names(run_dir: Path, arch: Arch | str | None) -> list[str]:
    """The names of the retrained networks of an architecture, or where there is none, of the Pareto fronts."""
    space = read_space(run_dir / SPACE_FILE)
    names = _read_names(run_dir, space)
    if arch is not None:
        archs = [read_arch(arch, space)]
        which, flags = "this architecture", f'--arch "{format_arch(archs[0])}"'
    else:
        if not isinstance(space, SearchSpace):
            raise ConfigError("a search of cells computes no Pareto front: give --name or --arch")
        archs = require_front(load_search_result(run_dir, space), run_dir)
        which, flags = f"any of the {len(archs)} points of the Pareto fronts", "--pareto"
    chosen = [names[value] for value in archs if value in names]
    command = f"`nasfast retrain --out {run_dir} {flags}`"
    if not chosen:
        retrained = ", ".join(f"{name} [{format_arch(value)}]" for value, name in names.items()) or "nothing"
        raise FileNotFoundError(f"no network of {which} was retrained: run {command}. Retrained: {retrained}")
    if len(chosen) < len(archs):
        _LOG.warning("%d of %d points were not retrained: %s", len(archs) - len(chosen), len(archs), command)
    return chosen


def _warn_if_superseded(run_dir: Path, name: str, network: ArchNetwork) -> None:
    """Say if a retrained network is not what the last search found.

    One of the search (`best`, `best-2`, `darts`) is compared with the result of that name, and any other with all
    results. Random architectures are not compared.
    """
    space, path, front = network.space, run_dir / ARCHS_FILE, []
    base = name.partition(SEED)[0]
    if isinstance(space, SearchSpace) and path.exists():
        result = load_candidates(path, space)
        archs, front = name_candidates(result), front_points(result)
    elif not isinstance(space, SearchSpace) and (run_dir / f"arch_{base}.json").exists():
        archs = load_cell_results(run_dir, space)
    else:
        return
    head = f"{name}: this network is {format_arch(network.arch)}"
    if base in archs and archs[base] != network.arch:
        later = format_arch(archs[base])
        _LOG.warning("%s, and a later search found %s: `nasfast retrain` trains that one", head, later)
    elif not name.startswith("random") and network.arch not in (*archs.values(), *front):
        _LOG.warning("%s, which is neither a result nor on a Pareto front of the last search", head)
