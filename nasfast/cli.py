"""`nasfast COMMAND`: thin, one function per stage. Flags are fields of `RunConfig`; files are YAML of the same form."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from nasfast import pipeline
from nasfast.config import ConfigError, load_yaml, nearest
from nasfast.doctor import doctor
from nasfast.indicators.rank import rank, read_accuracies, read_scores
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.pipeline import CONFIG_FILE, RunConfig
from nasfast.report import write_report
from nasfast.spaces import format_arch, get_space


class _Parser(jsonargparse.ArgumentParser):
    """A command's argument parser: no abbreviations, and a complaint about an unknown flag names the nearest one."""

    def __init__(self, command: str) -> None:
        super().__init__(
            prog=f"nasfast {command}", description=_COMMANDS[command][1], default_env=False, allow_abbrev=False
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        match = re.search(r"unrecognized arguments: --([\w.]+)", message, re.IGNORECASE)
        if match:
            flags = [s[2:] for action in self._actions for s in action.option_strings if s.startswith("--")]
            close = difflib.get_close_matches(match[1], flags, n=1, cutoff=0.5)
            message += f"; did you mean --{close[0]}?" if close else ""
        print(f"{self.prog}: {message}\nall flags: {self.prog} --help", file=sys.stderr)
        sys.exit(2)


_RECIPES = Path(__file__).parent / "recipes"


def _recipe(name: str) -> Path:
    """The file of a --config argument: a path, or the name of a recipe of this package."""
    recipe = _RECIPES / f"{name}.yaml"
    if not Path(name).exists() and Path(name).suffix == "":
        names = [path.stem for path in _RECIPES.glob("*.yaml")]
        if name not in names:
            raise ConfigError(f"--config {name!r} is neither a file nor a recipe; {nearest(name, names)}")
        return recipe
    return Path(name)


def _flatten(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in mapping.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Overwrite `base` by `changes`, mapping by mapping."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _run_config(command: str, argv: Sequence[str], *, resumable: bool) -> tuple[RunConfig, bool]:
    """The resolved config of a stage command, and whether to resume.

    Defaults come from RunConfig, then from the run directory's config.yaml where the command continues a run, then from
    every --config file in order, then from flags.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--out")
    early.add_argument("--config", action="append", default=[])
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(argv)
    files = [_recipe(name) for name in known.config]
    out = known.out or next((o for f in reversed(files) if (o := load_yaml(f).get("out"))), RunConfig.out)
    saved = Path(out) / CONFIG_FILE
    if (known.resume or command not in ("run", "supernet")) and saved.exists():
        files.insert(0, saved)

    parser = _Parser(command)
    recipes = ", ".join(sorted(path.stem for path in _RECIPES.glob("*.yaml")))
    text = f"YAML with any of the settings below, or a recipe ({recipes}); repeatable, later ones win"
    parser.add_argument("--config", action="append", metavar="FILE", help=text)
    if resumable:
        parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoints in --out")
    parser.add_class_arguments(RunConfig)
    given: dict[str, Any] = {}
    for file in files:
        _merge(given, load_yaml(file))
    try:
        checked = _flatten(RunConfig.from_dict(given).to_dict())
    except ConfigError as error:
        raise ConfigError(f"{', '.join(map(str, files))}: {error}") from error
    parser.set_defaults({key: checked[key] for key in _flatten(given)})
    parsed = parser.parse_args(list(argv)).as_dict()
    parsed.pop("config")
    resume = parsed.pop("resume", False)
    return RunConfig.from_dict(parsed), resume


def _show_candidates(cfg: RunConfig, found: list[Any]) -> None:
    for place, c in enumerate(found, start=1):
        proof = "proven optimal" if c.optimal else c.status
        print(f"{place}. [{format_arch(c.arch)}]  score {c.score:.6g}  {c.macs:,} MACs  {c.params:,} params  ({proof})")
    print(f"written: {cfg.run_dir / pipeline.ARCHS_FILE}")


def _show_retrained(cfg: RunConfig, results: dict[str, Any]) -> None:
    for name, result in results.items():
        print(
            f"{name:>8}: top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  {result.macs:,} MACs  "
            f"{result.params:,} params  [{format_arch(result.arch)}]"
        )
    print(f"written: {cfg.run_dir / 'retrain'}")


def _run(argv: Sequence[str]) -> None:
    cfg, resume = _run_config("run", argv, resumable=True)
    result = pipeline.run(cfg, resume=resume)
    _show_candidates(cfg, result.candidates)
    _show_retrained(cfg, result.retrained)
    print(f"report: {result.report}")


def _supernet(argv: Sequence[str]) -> None:
    cfg, resume = _run_config("supernet", argv, resumable=True)
    print(f"checkpoint: {pipeline.supernet(cfg, resume=resume)}")


def _score(argv: Sequence[str]) -> None:
    cfg, _ = _run_config("score", argv, resumable=False)
    if pipeline.score(cfg) is not None:
        print(f"written: {cfg.run_dir / pipeline.TABLE_FILE}")


def _search(argv: Sequence[str]) -> None:
    cfg, _ = _run_config("search", argv, resumable=False)
    _show_candidates(cfg, pipeline.search(cfg))


def _retrain(argv: Sequence[str]) -> None:
    cfg, resume = _run_config("retrain", argv, resumable=True)
    _show_retrained(cfg, pipeline.retrain_best(cfg, resume=resume))


def _export(argv: Sequence[str]) -> None:
    parser = _parser("export")
    parser.add_argument("--out", required=True, help="run directory")
    parser.add_argument("--name", default="best", help="which retrained network: best, best-2, ..., random")
    parser.add_argument("--onnx", type=bool, default=True, help="also write model.onnx, checked with onnxruntime")
    args = parser.parse_args(list(argv))
    for file in pipeline.export(args.out, name=args.name, onnx=args.onnx):
        print(file)


def _rank(argv: Sequence[str]) -> None:
    parser = _parser("rank")
    parser.add_argument("--table", required=True, help="trained accuracies, JSON as of NAS-Bench-Macro")
    parser.add_argument("--out", help="run directory: ranks its indicators.json and writes rank.json for the report")
    parser.add_argument("--predictor", help="instead: an indicators.json, or a JSON mapping of architecture to score")
    parser.add_argument("--space", default="nas_bench_macro", help="space of a score mapping: a name or a YAML file")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples of the intervals")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    args = parser.parse_args(list(argv))
    if (args.out is None) == (args.predictor is None):
        parser.error("give either --out RUN or --predictor FILE")
    path = Path(args.predictor) if args.predictor else Path(args.out) / pipeline.TABLE_FILE
    try:
        predictor = IndicatorTable.load(path)
        space = predictor.space
    except TableError:
        if args.out is not None:
            raise
        space = get_space(args.space)
        predictor = read_scores(path, space)
    report = rank(read_accuracies(args.table, space), predictor, space, resamples=args.resamples, seed=args.seed)
    print(report)
    if args.out is not None:
        report.save(Path(args.out) / "rank.json")
        print(f"written: {Path(args.out) / 'rank.json'}")


def _report(argv: Sequence[str]) -> None:
    parser = _parser("report")
    parser.add_argument("--out", required=True, help="run directory")
    print(write_report(Path(parser.parse_args(list(argv)).out)))


def _doctor(argv: Sequence[str]) -> None:
    _parser("doctor").parse_args(list(argv))
    print(doctor())


def _parser(command: str) -> _Parser:
    return _Parser(command)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "run": (_run, "everything: train a supernet, score, search, retrain, report"),
    "supernet": (_supernet, "train the supernet"),
    "score": (_score, "read the trained supernet's BN indicators into indicators.json"),
    "search": (_search, "best architectures under MACs and parameter limits into archs.json"),
    "retrain": (_retrain, "train the chosen architectures as plain networks"),
    "export": (_export, "files of a retrained network, ONNX included"),
    "rank": (_rank, "rank correlation of a predictor with trained accuracies, beside trivial baselines"),
    "report": (_report, "write report.html of a run directory"),
    "doctor": (_doctor, "versions, CPU and GPU, and which backend every operator uses and why"),
}


def _usage() -> str:
    lines = [f"  {name:9} {text}" for name, (_, text) in _COMMANDS.items()]
    return "usage: nasfast COMMAND [FLAGS]\n\n" + "\n".join(lines) + "\n\nflags of a command: nasfast COMMAND --help"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `nasfast` script; returns the exit status.

    Errors that a user can put right are printed without a traceback and give status 1, wrong flags give 2; the
    environment variable NASFAST_TRACEBACK=1 shows the traceback too.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("nasfast").setLevel(logging.INFO)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    command, *rest = argv
    if command not in _COMMANDS:
        print(f"nasfast: unknown command {command!r}; {nearest(command, _COMMANDS)}", file=sys.stderr)
        return 2
    try:
        _COMMANDS[command][0](rest)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("NASFAST_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"nasfast {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nnasfast {command}: interrupted; the last checkpoint is kept, --resume continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
