"""The commands of `nasfast`, one short function each; flags and YAML keys are the fields of `RunConfig`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jsonargparse

from nasfast import pipeline
from nasfast.config import ConfigBase, ConfigError, load_yaml, local, nearest
from nasfast.indicators.accuracies import read_accuracies, read_scores
from nasfast.indicators.rank import rank
from nasfast.indicators.scores import score_paths
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.measure.doctor import doctor
from nasfast.measure.latency import LatencyConfig, latency
from nasfast.measure.profile import ProfileConfig, profile
from nasfast.pipeline import CONFIG_FILE, RunConfig
from nasfast.report import write_report
from nasfast.report.evidence import PROVEN, PROVEN_NEXT, compare, is_peer, worth_of_score
from nasfast.runtime.distributed import World, environment_rank, start
from nasfast.spaces import Arch, ArchSpace, format_arch, named_space
from nasfast.studies import registry
from nasfast.studies.run import run_study

Config = TypeVar("Config", bound=ConfigBase)


class _Parser(jsonargparse.ArgumentParser):
    """A command's argument parser, without abbreviations; its error for an unknown flag names the nearest one."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"nasfast {command}", description=description, default_env=False, allow_abbrev=False)
        self.command = command

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        match = re.search(r"unrecognized arguments: --([\w.]+)", message, re.IGNORECASE)
        if match:
            flags = [s[2:] for action in self._actions for s in action.option_strings if s.startswith("--")]
            close = difflib.get_close_matches(match[1], flags, n=1, cutoff=0.5)
            message += f"; did you mean --{close[0]}?" if close else ""
        print(f"{self.prog}: {message}\nall flags: {self.prog} --help", file=sys.stderr)
        sys.exit(2)


_RECIPES = Path(__file__).parents[1] / "recipes"


def _recipe(name: str) -> Path:
    """The file of a --config argument, which is a path or the name of a recipe of this package."""
    recipe = _RECIPES / f"{name}.yaml"
    if not Path(name).exists() and Path(name).suffix == "":
        names = [path.stem for path in _RECIPES.glob("*.yaml")]
        if name not in names:
            raise ConfigError(f"--config {name!r} is neither a file nor a recipe; {nearest(name, names)}")
        return recipe
    return Path(name)


def _flatten(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Write the values of `changes` into `base`, into nested mappings too."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _run_config(parser: _Parser, argv: Sequence[str], *, resumable: bool) -> tuple[RunConfig, bool]:
    """The config of a stage command, and whether to resume.

    Values come from RunConfig, then from the run directory's config.yaml if the command continues a run, then from the
    --config files in their order, then from flags; later ones replace earlier ones.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--out")
    early.add_argument("--config", action="append", default=[])
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(argv)
    files = [_recipe(name) for name in known.config]
    out = known.out or next((o for f in reversed(files) if (o := local(load_yaml(f)).get("out"))), RunConfig.out)
    saved = Path(out) / CONFIG_FILE
    if (known.resume or parser.command not in ("run", "supernet")) and saved.exists():
        files.insert(0, saved)

    recipes = ", ".join(sorted(path.stem for path in _RECIPES.glob("*.yaml")))
    text = f"YAML file with any of the settings below, or a recipe ({recipes}); may be repeated, later files win"
    parser.add_argument("--config", action="append", metavar="FILE", help=text)
    if resumable:
        parser.add_argument("--resume", action="store_true", help="continue from the newest good checkpoints in --out")
    parser.add_class_arguments(RunConfig)
    given: dict[str, Any] = {}
    for file in files:
        _merge(given, local(load_yaml(file)))
    try:
        checked = _flatten(RunConfig.from_dict(given).to_dict())
    except ConfigError as error:
        raise ConfigError(f"{', '.join(map(str, files))}: {error}") from error
    parser.set_defaults({key: checked[key] for key in _flatten(given)})
    parsed = parser.parse_args(list(argv)).as_dict()
    parsed.pop("config")
    resume = parsed.pop("resume", False)
    return RunConfig.from_dict(parsed), resume


def _study_config(parser: _Parser, argv: Sequence[str], kind: type[Config]) -> tuple[Config, str | None]:
    """The settings of a study, from defaults, then --config files, then flags; and its --out."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", action="append", default=[])
    files = early.parse_known_args(argv)[0].config
    parser.add_argument("--config", action="append", metavar="FILE", help="YAML file with any of the settings below")
    parser.add_class_arguments(kind)
    given: dict[str, Any] = {}
    for file in files:
        given |= load_yaml(file)
    try:
        checked = kind.from_dict(given).to_dict()
    except ConfigError as error:
        raise ConfigError(f"{', '.join(files)}: {error}") from error
    parser.set_defaults({key: checked[key] for key in given})
    parsed = parser.parse_args(list(argv)).as_dict()
    parsed.pop("config")
    out = parsed.pop("out")
    return kind.from_dict(parsed), out


def _show_candidates(cfg: RunConfig, found: list[Any]) -> None:
    for place, c in enumerate(found, start=1):
        proof = (PROVEN if place == 1 else PROVEN_NEXT) if c.optimal else c.status
        print(f"{place}. [{format_arch(c.arch)}]  score {c.score:.6g}  {c.macs:,} MACs  {c.params:,} params  ({proof})")
    if any(c.optimal for c in found):
        print(worth_of_score(cfg.run_dir))
    print(f"written: {cfg.run_dir / pipeline.ARCHS_FILE}")


def _show_retrained(cfg: RunConfig, results: dict[str, Any]) -> None:
    width = max(map(len, results))
    for name, result in results.items():
        print(
            f"{name:>{width}}: top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  {result.macs:,} MACs  "
            f"{result.params:,} params  [{format_arch(result.arch)}]"
        )
    peers = [result.to_dict() for name, result in results.items() if is_peer(name)]
    comparison = compare(results["best"].to_dict(), peers) if "best" in results else None
    if comparison is not None:
        print(comparison.sentence.replace("it is", "the best is", 1))
    print(f"written: {cfg.run_dir / 'retrain'}")


@contextlib.contextmanager
def _joined(cfg: RunConfig) -> Iterator[tuple[RunConfig, World]]:
    """Join the processes that torchrun started; all take the settings of rank 0, whose files others may not see."""
    with start(cfg.torch_device) as world:
        yield RunConfig.from_dict(json.loads(world.broadcast(json.dumps(cfg.to_dict()).encode()))), world


def _run(parser: _Parser, argv: Sequence[str]) -> None:
    cfg, resume = _run_config(parser, argv, resumable=True)
    with _joined(cfg) as (cfg, world):
        result = pipeline.run(cfg, resume=resume, world=world)
        if world.is_main:
            _show_candidates(cfg, result.candidates)
            _show_retrained(cfg, result.retrained)
            print(f"report: {result.report}")


def _supernet(parser: _Parser, argv: Sequence[str]) -> None:
    cfg, resume = _run_config(parser, argv, resumable=True)
    with _joined(cfg) as (cfg, world):
        final = pipeline.supernet(cfg, resume=resume, world=world)
        if world.is_main:
            print(f"checkpoint: {final}")


def _score(parser: _Parser, argv: Sequence[str]) -> None:
    cfg, _ = _run_config(parser, argv, resumable=False)
    if pipeline.score(cfg) is not None:
        print(f"written: {cfg.run_dir / pipeline.TABLE_FILE}")


def _search(parser: _Parser, argv: Sequence[str]) -> None:
    cfg, _ = _run_config(parser, argv, resumable=False)
    _show_candidates(cfg, pipeline.search(cfg))


def _retrain(parser: _Parser, argv: Sequence[str]) -> None:
    cfg, resume = _run_config(parser, argv, resumable=True)
    with _joined(cfg) as (cfg, world):
        results = pipeline.retrain_best(cfg, resume=resume, world=world)
        if world.is_main:
            _show_retrained(cfg, results)


def _export(parser: _Parser, argv: Sequence[str]) -> None:
    parser.add_argument("--out", required=True, help="run directory")
    parser.add_argument(
        "--name", default="best", help="which retrained network: best, best-2, ..., random, random-2, ..."
    )
    parser.add_argument("--onnx", type=bool, default=True, help="also write model.onnx, checked with onnxruntime")
    args = parser.parse_args(list(argv))
    for file in pipeline.export(args.out, name=args.name, onnx=args.onnx):
        print(file)


def _rank(parser: _Parser, argv: Sequence[str]) -> None:
    parser.add_argument("--table", required=True, help="trained accuracies, at least 10: JSON or CSV (arch,accuracy)")
    parser.add_argument("--column", help="which accuracy, where the table has several per architecture")
    parser.add_argument("--out", help="run directory: ranks its indicators.json and writes rank.json for the report")
    parser.add_argument("--score", help="with --out: ranks this score, computed for each architecture of the table")
    parser.add_argument("--sample", type=int, help="with --score: only this many random architectures")
    parser.add_argument("--predictor", help="instead of --out: an indicators.json, or scores as JSON or CSV")
    parser.add_argument("--space", default="nas_bench_macro", help="space of a file of scores: a name or a YAML file")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples of the intervals")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap and of --sample")
    args = parser.parse_args(list(argv))
    if (args.out is None) == (args.predictor is None):
        parser.error("give either --out RUN or --predictor FILE")
    if args.score is not None and args.out is None or args.sample is not None and args.score is None:
        parser.error("--score needs --out, and --sample needs --score")
    name = "rank" if args.score is None else f"rank-{args.score}"
    if args.score is None:
        predictor, space = _predictor(args)
        accuracies = read_accuracies(args.table, space, column=args.column)
    else:
        accuracies, predictor, space = _ranked_by_score(args)
    report = rank(accuracies, predictor, space, resamples=args.resamples, seed=args.seed)
    print(report)
    if args.out is not None:
        report.save(Path(args.out) / f"{name}.json")
        print(f"written: {Path(args.out) / name}.json")


def _predictor(args: argparse.Namespace) -> tuple[IndicatorTable | dict[Arch, float], ArchSpace]:
    path = Path(args.predictor) if args.predictor else Path(args.out) / pipeline.TABLE_FILE
    try:
        table = IndicatorTable.load(path)
    except TableError:
        if args.out is not None:
            raise
        space = named_space(args.space)
        return read_scores(path, space), space
    return table, table.space


def _ranked_by_score(args: argparse.Namespace) -> tuple[dict[Arch, float], dict[Arch, float], ArchSpace]:
    """Accuracies and scores of the same architectures; the score is computed for each and not distilled."""
    path = Path(args.out) / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run `nasfast supernet --out {args.out}` first. A score of untrained weights needs no "
            f"checkpoint, but the settings of a run in {path}"
        )
    cfg = RunConfig.load(path)
    evidence = pipeline.evidence_to_rank(cfg.replace(out=args.out, score=cfg.score.replace(name=args.score)))
    space = evidence.net.space
    accuracies = read_accuracies(args.table, space, column=args.column)
    archs = sorted(accuracies)
    if args.sample is not None:
        archs = random.Random(args.seed).sample(archs, min(args.sample, len(archs)))
    return {arch: accuracies[arch] for arch in archs}, score_paths(args.score, evidence, archs), space


def _report(parser: _Parser, argv: Sequence[str]) -> None:
    parser.add_argument("--out", required=True, help="run directory")
    print(write_report(Path(parser.parse_args(list(argv)).out)))


def _latency(parser: _Parser, argv: Sequence[str]) -> None:
    parser.add_argument("--out", metavar="FILE", help="also write the rows as JSON, with machine, versions and ISA")
    parser.add_class_arguments(LatencyConfig)
    settings = parser.parse_args(list(argv)).as_dict()
    out = settings.pop("out")
    report = latency(LatencyConfig(**settings))
    print(report)
    if out is not None:
        report.save(out)
        print(f"written: {out}")


def _study(parser: _Parser, argv: Sequence[str]) -> None:
    """Carry out the study that a command, or the kind behind it, names."""
    command = registry.COMMANDS[parser.command]
    kinds, flags = command.kinds, list(argv)
    if not kinds:
        _carry_out(parser, flags, command.studies[0])
        return
    kind, *flags = flags or [""]
    if kind in ("-h", "--help"):
        width = max(map(len, kinds))
        lines = "\n".join(f"  {name:{width}}  {study.text}" for name, study in kinds.items())
        print(
            f"usage: {parser.prog} KIND [FLAGS]\n\n{parser.description}\n\n{lines}\n\nflags: {parser.prog} KIND --help"
        )
        sys.exit(0)
    if kind not in kinds:
        raise ConfigError(f"expected one of {', '.join(kinds)} behind {parser.command}, got {kind!r}")
    _carry_out(_Parser(kinds[kind].name, kinds[kind].text), flags, kinds[kind])


def _carry_out(parser: _Parser, argv: Sequence[str], study: registry.Study) -> None:
    """Print a study's report, save it, and raise where a mark is missed."""
    more = f", {study.writes}" if study.writes else ""
    resumed = "; a run that was stopped continues from what it has there" if study.resumes else ""
    text = f"also write {study.files}.json, the page {study.files}.html{more}{resumed}"
    parser.add_argument("--out", metavar="DIR", help=text)
    cfg, out = _study_config(parser, argv, study.load("config"))
    report = run_study(study.name, cfg, out=out)
    print(report)
    if out is not None:
        print("written:", ", ".join(map(str, (report.save(out), *report.files))))
    if report.missed:
        raise RuntimeError(f"{len(report.missed)} of {len(report.checks)} pass marks missed")


def _profile(parser: _Parser, argv: Sequence[str]) -> None:
    parser.add_class_arguments(ProfileConfig)
    print(profile(ProfileConfig(**parser.parse_args(list(argv)).as_dict())))


def _doctor(parser: _Parser, argv: Sequence[str]) -> None:
    parser.parse_args(list(argv))
    print(doctor())


_COMMANDS: dict[str, Callable[[_Parser, Sequence[str]], None]] = {
    "run": _run,
    "supernet": _supernet,
    "score": _score,
    "search": _search,
    "retrain": _retrain,
    "export": _export,
    "rank": _rank,
    "report": _report,
    "latency": _latency,
    **dict.fromkeys(registry.COMMANDS, _study),
    "profile": _profile,
    "doctor": _doctor,
}


_JOINT = ("run", "supernet", "retrain")
"""Commands that several processes run together."""


def execute(command: str, description: str, argv: Sequence[str]) -> None:
    """Run one command; the caller shows its errors.

    All processes that torchrun started run the commands that train; those other than rank 0 show only warnings and
    errors. Only rank 0 runs the other commands.

    Args:
        command: `run`, `supernet`, ...
        description: first text of its help.
        argv: its flags.
    """
    if environment_rank():
        if command not in _JOINT:
            return
        logging.getLogger("nasfast").setLevel(logging.WARNING)
    _COMMANDS[command](_Parser(command, description), argv)
