"""Which limits a search has, and where each comes from: the command line, a file, a recipe, or config.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nasfast.cli.flags import RECIPES, config_file
from nasfast.config import ConfigError, flatten, load_yaml
from nasfast.settings import CONFIG_FILE, LIMITS, RunConfig, SearchConfig

_COMMAND_LINE = "command line"


def limits_line(cfg: RunConfig, argv: Sequence[str]) -> str:
    """The limits of the search of a command, each with its origin and what removes it, and those that it leaves out."""
    origins, file = _find_origins(argv), cfg.run_dir / CONFIG_FILE
    limits = cfg.search.limits
    parts = [f"{_limit_text(name, value)} ({_origin(name, origins, file)})" for name, value in limits.items()]
    line = f"limits of the search: {', '.join(parts) or 'none (--max_macs 60M sets one)'}"
    if argv[0] == "search" and limits and file.exists():
        saved = SearchConfig.from_dict(load_yaml(file).get("search", {})).limits
        if left_out := [_limit_text(name, value) for name, value in saved.items() if name not in limits]:
            line += f"; without {' and '.join(left_out)} of {file}, which --add_limits keeps"
    return line


def refuse_limits(cfg: RunConfig, argv: Sequence[str]) -> None:
    """Refuse a limit on the command line of a stage behind the search, where it would have no effect."""
    for name, source in _find_origins(argv).items():
        if source == _COMMAND_LINE:
            raise ConfigError(
                f"--{name} is a limit of the search, and `nasfast retrain` trains what that found: run "
                f"`nasfast search --out {cfg.out} --{name} ...` first"
            )


def _find_origins(argv: Sequence[str]) -> dict[str, str]:
    """Where a command line gives each setting that may be a limit; of files and flags, later ones win."""
    origins: dict[str, str] = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        flag, sign, value = word.partition("=")
        given, source = [flag.rstrip("+")], _COMMAND_LINE
        if flag == "--config":
            name = value if sign else after
            path = config_file(name)
            given = [f"--{key}" for key in flatten(load_yaml(path))]
            source = f"recipe {name}" if path.parent == RECIPES else name
        origins |= {key: source for key in (*LIMITS, "tables") if {f"--search.{key}", "--search"} & set(given)}
    return origins


def _limit_text(name: str, value: float) -> str:
    return f"{name}{'=' if name in LIMITS else ' <= '}{value:,.10g}"


def _origin(name: str, origins: Mapping[str, str], file: Path) -> str:
    source = origins.get(name if name in LIMITS else "tables", str(file))
    if source == _COMMAND_LINE:
        return source
    return f"{source}; {f'--{name} null' if name in LIMITS else '--tables without it'} removes it"
