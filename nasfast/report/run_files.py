"""The files of a run directory, as its pages read them."""

from __future__ import annotations

import contextlib
import json
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

from nasfast.config import ConfigError, load_yaml
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE, IndicatorTable
from nasfast.report.page import NotRun, escape, html_details, millions
from nasfast.runtime.files import read_metrics
from nasfast.search import SearchResult, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.settings import CONFIG_FILE, LIMITS, SPACE_FILE, SearchConfig
from nasfast.spaces import SearchSpace, get_space


class RunFiles:
    """The files of a run directory; each is read once, when a section asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_text(self, name: str, command: str) -> str:
        """A file that `command` writes; ValueError where it cannot be read."""
        path = self.folder / name
        if not path.exists():
            raise NotRun(f"`{command}` writes {name}")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {name}: {error}") from error

    def read_json(self, name: str, command: str) -> dict[str, Any]:
        """The mapping in a file that `command` writes; ValueError where it has none."""
        text = self.read_text(name, command)
        try:
            mapping = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if not isinstance(mapping, dict):
            raise ValueError(f"expected a mapping in {name}, got {type(mapping).__name__}")
        return mapping

    @cached_property
    def space(self) -> SearchSpace:
        self.read_text(SPACE_FILE, "nasfast supernet")
        return get_space(str(self.folder / SPACE_FILE))

    @cached_property
    def result(self) -> SearchResult:
        self.read_text(ARCHS_FILE, "nasfast search")
        space = self.space if (self.folder / SPACE_FILE).exists() else None
        return load_candidates(self.folder / ARCHS_FILE, space)

    @cached_property
    def table(self) -> IndicatorTable:
        """The table that was searched."""
        refined = (self.folder / REFINED_FILE).exists()
        return IndicatorTable.from_json(self.read_text(REFINED_FILE if refined else TABLE_FILE, "nasfast score"))

    def check(self) -> None:
        """Refuse a file that is there and cannot be read; ValueError names it."""
        for part in ("space", "result", "table", "retrained"):
            try:
                getattr(self, part)
            except NotRun:
                continue
            except (OSError, LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{self.folder}: {error}; the page says so in its place") from error

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    @cached_property
    def retrained(self) -> dict[str, dict[str, Any]]:
        """Name -> result.json of every retrained network, `best` first."""
        names = sorted(
            (path.parent.name for path in self.folder.glob("retrain/*/result.json")), key=lambda n: (n != "best", n)
        )
        return {name: self.read_json(f"retrain/{name}/result.json", "nasfast retrain") for name in names}


def format_limits(result: SearchResult) -> str:
    """The limits of a search, such as `475.00 M MACs and 7.5 ms of latency`."""
    limits = [f"{millions(v)} {u}" for v, u in ((result.max_macs, "MACs"), (result.max_params, "parameters")) if v]
    limits += [f"{t.maximum:g} {t.unit} of {t.quantity}" for t in result.tables if t.maximum is not None]
    return " and ".join(limits) or "none"


def limits_origin(run: RunFiles) -> str:
    """Where the limits of a search come from, and the command that searches without them; empty where it has none."""
    if run.result.settings is None or not (limits := run.result.settings.limits):
        return ""
    own: dict[str, float] = {}
    with contextlib.suppress(ConfigError):
        own = SearchConfig.from_dict(load_yaml(run.folder / CONFIG_FILE).get("search", {})).limits
    origins = [
        f"{name} from {CONFIG_FILE if own.get(name) == value else 'the command line of the search'}"
        for name, value in limits.items()
    ]
    flags = [word for name in limits for word in ((f"--{name}", "null") if name in LIMITS else ("--tables", "[]"))]
    command = shlex.join(["nasfast", "search", "--out", str(run.folder), *flags])
    return f"{', '.join(origins)}; `{command}` searches without"


def config_section(run: RunFiles) -> str:
    """The HTML of config.yaml."""
    return html_details("All settings", f"<pre>{escape(run.read_text(CONFIG_FILE, 'nasfast run'))}</pre>")
