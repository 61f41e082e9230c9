"""A run that has ended: finished.json has digests of its files, by which `--resume` sees that nothing is left to do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from nasfast.indicators.table import TABLE_FILE
from nasfast.pipeline.run import load_settings
from nasfast.retrain.retrain import RESULT_FILE, RetrainResult
from nasfast.runtime.files import seal, unseal, write_atomic
from nasfast.search import Candidate, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig

_FILE = "finished.json"


def save_finished(run_dir: Path, networks: Iterable[str]) -> None:
    """Write that a run has ended, with the names of its retrained networks."""
    record = {"networks": list(networks), "files": _digests(run_dir)}
    write_atomic(run_dir / _FILE, seal(record).encode())


def read_finished(cfg: RunConfig) -> tuple[list[Candidate], dict[str, RetrainResult]] | None:
    """What the search of a run that has ended found, and the results of its networks by name.

    None if it has not ended, or if settings or files differ now.
    """
    folder = cfg.run_dir
    try:
        record = unseal((folder / _FILE).read_text(encoding="utf-8"))
        if load_settings(cfg.out) != cfg or record["files"] != _digests(folder):
            return None
        names = record["networks"]
        retrained = {name: RetrainResult.load(folder / "retrain" / name / RESULT_FILE) for name in names}
        return list(load_candidates(folder / ARCHS_FILE).candidates), retrained
    except (OSError, ValueError, LookupError):
        return None


def _digests(folder: Path) -> dict[str, str]:
    """The digest of each file that the stages wrote, by its name."""
    names = [CONFIG_FILE, SPACE_FILE, TABLE_FILE, ARCHS_FILE, "report.html"]
    paths = [
        *(folder / name for name in names),
        *folder.glob("checkpoints/*"),
        *folder.glob(f"retrain/*/{RESULT_FILE}"),
    ]
    digests = {}
    for path in sorted(path for path in paths if path.is_file()):
        with open(path, "rb") as file:
            digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "blake2b").hexdigest()
    return digests
