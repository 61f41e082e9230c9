"""A file of the rounds of a measurement, so that one that was stopped goes on where it was. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nasfast.runtime.files import seal, unseal, write_atomic

Round = dict[str, dict[str, float]]
"""Variant -> phase -> milliseconds."""


class RoundsFile:
    """The whole rounds that a measurement has made.

    Args:
        path: the file; one of another subject, or that is damaged, is replaced when the first round is added.
        subject: what must be equal for old rounds to count, such as settings, machine and versions; JSON.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self.path, self._subject = path, dict(subject)
        try:
            kept = unseal(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = {}
        self.rounds: list[Round] = kept["rounds"] if kept.get("subject") == self._subject else []

    def add(self, times: Round) -> None:
        """Add a round, and write the file."""
        self.rounds.append(times)
        write_atomic(self.path, seal({"subject": self._subject, "rounds": self.rounds}, indent=None).encode())
