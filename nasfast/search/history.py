"""The record of an evolutionary search: one JSON line per evaluated architecture; a killed search resumes from it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from nasfast.config import ConfigError
from nasfast.runtime.files import seal, unseal
from nasfast.spaces import Arch, LayerSpace

_LOG = logging.getLogger(__name__)

_FORMAT = "nasfast.history/1"


class History:
    """The known scores, and the file to which new ones are appended.

    The first line of the file names the space and the scorer. Lines that are damaged are left out, and a last line that
    a kill left incomplete is cut off; their architectures are evaluated again.

    Args:
        path: JSONL file; created if absent.
        scorer: names what computes the scores (a checkpoint, a table), so that another scorer's scores are not reused.

    Attributes:
        scores: the known scores by architecture.

    Raises:
        ConfigError: the file belongs to another space or scorer, or its first line is damaged.
    """

    def __init__(self, path: str | Path, space: LayerSpace, *, scorer: str) -> None:
        self.path = Path(path)
        self.scores: dict[Arch, float] = {}
        header = {"format": _FORMAT, "space": space.name, "fingerprint": space.fingerprint, "scorer": scorer}
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        cut_off = bool(lines) and not lines[-1].endswith(b"\n")  # by the end of a process that was killed
        if cut_off:
            lines.pop()
        if not lines:
            if cut_off:
                os.truncate(self.path, 0)
            self._append(header)
            return
        try:
            saved = unseal(lines[0].decode())
        except ValueError as error:
            raise ConfigError(
                f"{self.path}: the first line, which names the space and the score, is damaged ({error}): delete the "
                "file and search again"
            ) from error
        for key in ("format", "fingerprint", "scorer"):
            if saved.get(key) != header[key]:
                raise ConfigError(
                    f"{self.path} has {key} {saved.get(key)!r}, this search has {header[key]!r}: "
                    "delete the file to start again, or give another path"
                )
        if cut_off:
            os.truncate(self.path, sum(map(len, lines)))
        for number, line in enumerate(lines[1:], 2):
            try:
                entry = unseal(line.decode())
                self.scores[space.check(entry["arch"])] = float(entry["score"])
            except (ValueError, KeyError, TypeError) as error:
                _LOG.warning("%s: line %d is damaged and left out: %s", path, number, error)

    def add(self, arch: Arch, score: float, **details: Any) -> None:
        """Add a score; `details` (cost, generation, origin) are written for people who read the file."""
        self.scores[arch] = score
        self._append({"arch": list(arch), "score": score, **details})

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(seal(entry, indent=None).encode())
