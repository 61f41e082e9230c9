"""What a study returns: its findings as text, as a JSON file and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nasfast.config import ConfigBase
from nasfast.research.studies.page import write_study_page
from nasfast.research.studies.parts import Check, Claim, Figure, Table, Verdict, plain
from nasfast.runtime.files import write_atomic


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """Everything that a study measured; `str` of it is tables.

    A study gives the fields from `subject` to `files`, and `run.carry_out` fills in the rest.

    Attributes:
        subject: what was measured.
        explanation: what the words and symbols of the page mean.
        notes: one sentence each.
        tables: the tables, in order.
        figures: what `page` draws.
        verdicts: the verdicts, by the name of what was judged.
        checks: pass marks.
        claims: sentences of a paper beside what was measured.
        data: further numbers by name, which the JSON has too, and from which figures may be drawn.
        files: paths that were written besides the report's own.
        name: stem of the report's files, such as `moments`.
        config: the settings that were asked for.
        seconds: that the study took.
        machine: the device, the threads and the processor.
        environment: versions, as `nasfast doctor` shows them.
    """

    subject: str
    explanation: str = ""
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    claims: tuple[Claim, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    name: str = ""
    config: ConfigBase = field(default_factory=ConfigBase)
    seconds: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def missed(self) -> list[Check]:
        """The pass marks that are not met."""
        return [check for check in self.checks if not check.passed]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON; what is not finite becomes null."""
        form = {
            "name": self.name,
            "config": self.config.to_dict(),
            "subject": self.subject,
            "explanation": self.explanation,
            "notes": self.notes,
            **self.data,
            "tables": self.tables,
            "figures": self.figures,
            "verdicts": self.verdicts,
            "checks": self.checks,
            "seconds": self.seconds,
            "machine": self.machine,
            "environment": self.environment,
        }
        return plain({**form, **({"claims": self.claims} if self.claims else {})})

    def save(self, folder: str | Path) -> Path:
        """Write NAME.json, NAME.html and its figures into a directory; returns the page's path."""
        write_atomic(Path(folder) / f"{self.name}.json", (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return write_study_page(folder, self.name)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.subject}", *self.notes, *(f"\n{table}" for table in self.tables), ""]
        if self.verdicts:
            width = max(map(len, self.verdicts))
            parts += [*(f"{name:{width}}  {', '.join(v.names)}" for name, v in self.verdicts.items()), ""]
        if self.checks:
            parts += _marks(self.checks)
        for claim in self.claims:
            parts += ["", f"claim:    {claim.claim}", f"measured: {claim.measured}", f"verdict:  {claim.verdict}"]
        return "\n".join([*parts, "", f"{self.seconds:.0f} s"])


def _marks(checks: tuple[Check, ...]) -> list[str]:
    """The pass marks as lines of text, given as intervals or by expected values and tolerances."""
    width = max(len(check.name) for check in checks)
    around = checks[0].around is not None
    ends, digits = (("expected", "within"), ".4f") if around else (("from", "to"), ".4g")
    lines = [f"{'pass marks':{width}} {ends[0]:>9} {ends[1]:>9} {'measured':>9}"]
    for check in checks:
        numbers = (*(check.around or (check.low, check.high)), check.measured)
        text = " ".join(f"{number:9{digits}}" for number in numbers)
        lines.append(f"{check.name:{width}} {text}  {'ok' if check.passed else 'MISSED'}")
    return lines
