"""Files of a run directory that several stages share: the atomic write, and the reader of metrics.jsonl. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def temporary_beside(path: Path) -> Path:
    """A hidden name in the folder of `path`, of this process alone, so that two writers do not share a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a crash or a full disk leaves either the old file or the new one.

    Raises:
        OSError: the write failed; the old file is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # not tempfile's: those are readable by their owner only, and the new file would inherit that
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, none if it is absent; those torn by a kill or otherwise unreadable are left out."""
    path, metrics = Path(run_dir) / METRICS_FILE, []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            form = json.loads(line)
        except ValueError:
            continue
        if isinstance(form, dict) and {"stage", "step"} <= form.keys():
            metrics.append(form)
    return metrics
