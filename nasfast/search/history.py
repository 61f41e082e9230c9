"""The record of an evolutionary search: one JSON line per evaluated architecture, so that a killed search resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nasfast.config import ConfigError
from nasfast.spaces import Arch, SearchSpace

_FORMAT = "nasfast.history/1"


class History:
    """Scores already known, and the file they are appended to.

    The first line says which space and which scorer the scores belong to; a last line torn by a kill is dropped.

    Args:
        path: JSONL file; created if absent.
        space: the space searched.
        scorer: names what computes the scores (a checkpoint, a table), so that scores of another one are not reused.

    Raises:
        ConfigError: the file belongs to another space or scorer, or is damaged before its last line.
    """

    def __init__(self, path: str | Path, space: SearchSpace, *, scorer: str) -> None:
        self.path = Path(path)
        self.scores: dict[Arch, float] = {}
        header = {"format": _FORMAT, "space": space.name, "fingerprint": space.fingerprint, "scorer": scorer}
        lines = self._complete_lines()
        if not lines:
            self._append(header)
            return
        found = lines[0]
        for key in ("format", "fingerprint", "scorer"):
            if found.get(key) != header[key]:
                raise ConfigError(
                    f"{self.path} has {key} {found.get(key)!r}, this search has {header[key]!r}: "
                    "delete the file to start afresh, or give another path"
                )
        for line in lines[1:]:
            self.scores[tuple(line["arch"])] = line["score"]

    def add(self, arch: Arch, score: float, **details: Any) -> None:
        """Remember a score; `details` (cost, generation, origin) are written for the reader of the file."""
        self.scores[arch] = score
        self._append({"arch": list(arch), "score": score, **details})

    def _append(self, form: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(form) + "\n")

    def _complete_lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        lines = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{self.path}, line {number} is not JSON: delete the file to start afresh") from error
        return lines
