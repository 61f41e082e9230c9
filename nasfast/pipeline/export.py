"""The export stage: retrain/NAME/ -> the files that leave the house, ONNX included."""

from __future__ import annotations

import logging
from pathlib import Path

from nasfast.pipeline.chosen import to_export, warn_if_superseded, warn_if_unnamed
from nasfast.retrain import export_onnx, export_program, load_model
from nasfast.retrain.card import write_card
from nasfast.retrain.export import FORM_FILE, MODEL_FILE, ONNX_FILE, PROGRAM_FILE, model_folder
from nasfast.runtime.lock import run_lock
from nasfast.runtime.onnx import require_onnx
from nasfast.spaces import Arch

_LOG = logging.getLogger(__name__)


def export(
    run_dir: str | Path,
    *,
    name: str = "best",
    arch: Arch | str | None = None,
    pareto: bool = False,
    onnx: bool = True,
) -> list[Path]:
    """The files of retrained networks, with a model card; a warning says if one is not what the last search found.

    Args:
        run_dir: the run directory.
        name: which network: `best`, `best-2`, ..., `random`, ...
        arch: the network of this architecture instead, whatever its name.
        pareto: the networks of all points of the Pareto fronts in archs.json instead; a warning says if some of them
            were not retrained.
        onnx: whether to write model.onnx beside model.safetensors.

    Raises:
        FileNotFoundError: the run directory does not exist, or no such network was retrained.
        RuntimeError: the extra `onnx` is missing, or an exported program disagrees with PyTorch.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} does not exist or is no directory: give the directory of a run (--out)")
    if onnx:
        try:
            require_onnx()
        except RuntimeError as error:
            raise RuntimeError(f"{error}, or export without model.onnx (--onnx false)") from error
    names = to_export(run_dir, arch=arch, pareto=pareto) if arch is not None or pareto else [name]
    files = []
    for one in names:
        folder = model_folder(run_dir / "retrain", one)
        network = load_model(folder)
        warn_if_superseded(run_dir, one, network)
        warn_if_unnamed(one, network, folder)
        files += [folder / MODEL_FILE, folder / FORM_FILE]
        writers = {PROGRAM_FILE: export_program} | ({ONNX_FILE: export_onnx} if onnx else {})
        with run_lock(run_dir):
            files.append(write_card(network, folder, run_dir=run_dir))
            for file, write in writers.items():
                difference = write(network, folder / file)
                _LOG.info("%s: %s agrees with PyTorch to %.1e of the largest logit", one, file, difference)
                files.append(folder / file)
    return files
