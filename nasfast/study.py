"""What the studies share: pass marks, tables, the report with its files, and how one is carried out.

A study is a function of a config that measures and returns a `StudyReport`; `nasfast.report` draws its figures.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from nasfast.config import ConfigBase, ConfigError
from nasfast.measure.doctor import environment
from nasfast.measure.timing import machine, measuring
from nasfast.report import write_study_page
from nasfast.runtime.files import write_atomic

_LOG = logging.getLogger(__name__)

_SECONDS_PER_LINE = 10.0


@dataclass(frozen=True)
class Check:
    """A pass mark: what was measured and the interval in which it must lie."""

    name: str
    low: float
    high: float
    measured: float

    @property
    def passed(self) -> bool:
        # written so that nan fails
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Table:
    """A table of text cells; the first column is a name."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        text = [
            line[0].ljust(widths[0]) + "".join(f"  {c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))
            for line in lines
        ]
        return "\n".join([self.title, *text])


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """Everything a study measured; `str` of it is tables.

    Attributes:
        name: of the study's command and files, such as `moments`.
        config: as asked for.
        subject: what was measured.
        explanation: of the words and symbols of the page.
        notes: one sentence each.
        tables: in order.
        figures: what `nasfast.report` draws: `kind`, `title` and plain data.
        verdicts: what was judged -> plain data, of which `names` are the verdicts and the rest is evidence.
        checks: pass marks.
        files: written besides the report's own.
        seconds: it took.
    """

    name: str
    config: ConfigBase
    subject: str
    explanation: str = ""
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    files: tuple[Path, ...] = ()
    seconds: float
    machine: dict[str, Any]
    environment: dict[str, list[str]]

    @property
    def missed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON; what is not finite becomes null."""
        return plain({
            "name": self.name,
            "config": self.config.to_dict(),
            "subject": self.subject,
            "explanation": self.explanation,
            "notes": self.notes,
            "tables": [asdict(table) for table in self.tables],
            "figures": self.figures,
            "verdicts": self.verdicts,
            "checks": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "seconds": self.seconds,
            "machine": self.machine,
            "environment": self.environment,
        })  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write NAME.json, NAME.html and its figures into a directory; returns the page's path."""
        write_atomic(Path(folder) / f"{self.name}.json", (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return write_study_page(folder, self.name)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.subject}", *self.notes, *(f"\n{table}" for table in self.tables), ""]
        if self.verdicts:
            width = max(map(len, self.verdicts))
            parts += [*(f"{name:{width}}  {', '.join(v['names'])}" for name, v in self.verdicts.items()), ""]
        if self.checks:
            width = max(len(check.name) for check in self.checks)
            parts.append(f"{'pass marks':{width}} {'from':>9} {'to':>9} {'measured':>9}")
            parts += [
                f"{c.name:{width}} {c.low:9.4g} {c.high:9.4g} {c.measured:9.4g}  {'ok' if c.passed else 'MISSED'}"
                for c in self.checks
            ]
        return "\n".join([*parts, "", f"{self.seconds:.0f} s"])


def plain(value: Any) -> Any:
    """Nested mappings, sequences, arrays and scalars as JSON, which has no nan and no infinity: they become None."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_common(threads: int, seed: int, **counts: int) -> None:
    """What every study's config asks of its fields.

    Raises:
        ValueError: negative threads or seed, or a count below 1.
    """
    if threads < 0 or seed < 0:
        raise ValueError(f"threads and seed must not be negative, got {threads} and {seed}")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def sample_shape(text: str) -> tuple[int, ...]:
    """Shape of one sample of a user's module.

    Args:
        text: such as "3,224,224".

    Raises:
        ConfigError: not a list of positive integers.
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"input must be positive integers such as 3,224,224, got {text!r}")
    return shape


def maker(name: str) -> Callable[[], nn.Module]:
    """What makes the user's module anew for every setting.

    Args:
        name: `package.module:factory`.

    Raises:
        ConfigError: it cannot be imported; and the maker, if it cannot be made or is no nn.Module.
    """
    package, _, attribute = name.partition(":")
    if not package or not attribute:
        raise ConfigError(f"module must be package.module:factory, got {name!r}")
    # a script's own folder is on the path, a console command's is not
    if "" not in sys.path:
        sys.path.insert(0, "")
    # a user's code may raise anything
    try:
        source = importlib.import_module(package)
    except Exception as error:
        raise ConfigError(f"module {name!r}: cannot import {package}: {type(error).__name__}: {error}") from error
    found = getattr(source, attribute, None)
    if not callable(found):
        raise ConfigError(f"module {name!r}: {package} has no function {attribute!r}")

    def make() -> nn.Module:
        try:
            module = copy.deepcopy(found) if isinstance(found, nn.Module) else found()
        except Exception as error:
            raise ConfigError(
                f"module {name!r}: making it without arguments failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module {name!r} must return an nn.Module, got {type(module).__name__}")
        return module

    return make


Task = Callable[[str, int], Callable[[int], None]]
"""Given the name of a part of a study and its size, something to call with how much of it is done."""


@contextmanager
def progress() -> Iterator[Task]:
    """A bar for every task; a plain line at most every ten seconds where standard error is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _plain_lines
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:

        def task(name: str, total: int) -> Callable[[int], None]:
            bar = bars.add_task(name, total=total)
            return lambda done: bars.update(bar, completed=done)

        yield task


def _plain_lines(name: str, total: int) -> Callable[[int], None]:
    said, last = -math.inf, -1

    def tell(done: int) -> None:
        nonlocal said, last
        if done != last and (done == total or time.monotonic() - said >= _SECONDS_PER_LINE):
            said, last = time.monotonic(), done
            _LOG.info("%s: %d of %d", name, done, total)

    return tell


def carry_out(cfg: Any, study: Callable[[], dict[str, Any]], *, device: str = "cpu") -> dict[str, Any]:
    """Run a study with the threads of its config, and note what every report says of that.

    Args:
        cfg: with `threads`.
        study: measures and returns fields of the report.
        device: it runs on, to be named.

    Returns:
        The study's fields with `config`, `seconds`, `machine` and `environment`.
    """
    start = time.perf_counter()
    with measuring(cfg.threads):
        found = study()
        where = {"device": device, **machine()}
    seconds = time.perf_counter() - start
    return {**found, "config": cfg, "seconds": seconds, "machine": where, "environment": environment()}


def run_study(name: str, cfg: Any, study: Callable[[Task], dict[str, Any]], *, device: str = "cpu") -> StudyReport:
    """Carry out a study with progress on standard error.

    Args:
        name: as in `StudyReport`.
        cfg: with `threads`.
        study: measures, telling its progress by tasks, and returns `subject` and other fields of `StudyReport`.
        device: it runs on, to be named.
    """

    def measured() -> dict[str, Any]:
        with progress() as task:
            return study(task)

    return StudyReport(name=name, **carry_out(cfg, measured, device=device))
