"""What the commands of `nasfast` do, one short function each; `nasfast.cli.flags` gives their arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nasfast import extensions, pipeline
from nasfast.config import ConfigError
from nasfast.indicators.accuracies import read_accuracies, read_scores
from nasfast.indicators.rank import rank
from nasfast.indicators.scores import check_network_score, get_score, parts_of, score_networks, score_paths, summed
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.measure.doctor import doctor
from nasfast.measure.latency import check_replaceable, head_of, latency
from nasfast.measure.step_times import step_times
from nasfast.report import write_comparison, write_report
from nasfast.report.evidence import PROVEN, PROVEN_NEXT, compare, is_peer, repeats_of, worth_of_score
from nasfast.runtime.distributed import World, start
from nasfast.runtime.launcher import environment_size
from nasfast.runtime.termination import Terminated, stopped_at
from nasfast.search import load_candidates
from nasfast.settings import CONFIG_FILE, RunConfig, TaskSettings
from nasfast.spaces import Arch, ArchSpace, format_arch, named_space
from nasfast.stability.estimate import plan_seeds
from nasfast.stability.page import STABILITY_FILE, sentences, write_stability_page
from nasfast.stability.run import run_seeds
from nasfast.stability.trained import (
    ACCURACIES_FILE,
    REPORT_FILE,
    check_names,
    compare_trained,
    estimate_sample,
    train_sample,
)
from nasfast.stages.checks import check_one_process, without_supernet
from nasfast.stages.estimate import plan_run
from nasfast.stages.inputs import evidence_to_rank
from nasfast.stages.untrained import untrained_networks


def _show_candidates(cfg: RunConfig, found: list[Any]) -> None:
    tables = load_candidates(cfg.run_dir / pipeline.ARCHS_FILE).tables
    for place, c in enumerate(found, start=1):
        costs = [f"{c.macs:,} MACs", f"{c.params:,} params"]
        costs += [f"{value:.4g} {t.unit} {t.quantity}" for t, value in zip(tables, c.values, strict=True)]
        proof = (PROVEN if place == 1 else PROVEN_NEXT) if c.optimal else c.status
        print(f"{place}. [{format_arch(c.arch)}]  score {c.score:.6g}  {'  '.join(costs)}  ({proof})")
    for table in tables:
        print(f"{table.quantity}: {table.about or 'a table of your own'}")
    if any(c.optimal for c in found):
        print(worth_of_score(cfg.run_dir))
    print(f"written: {cfg.run_dir / pipeline.ARCHS_FILE}")


def _show_retrained(cfg: RunConfig, results: dict[str, Any]) -> None:
    """A line per architecture with all its seeds, one for all random ones, and what was gained over these."""
    forms = {name: result.to_dict() for name, result in results.items()}
    repeats = {name: repeats_of(name, forms) for name in forms}
    repeated = {id(form) for again in repeats.values() for form in again}
    peers = [form for name, form in forms.items() if is_peer(name)]
    rows = [["network", "top-1", "MACs", "params", "architecture"]]
    for name, form in forms.items():
        if not is_peer(name) and id(form) not in repeated:
            rows.append([*_cells(name, "seeds", [form, *repeats[name]]), format_arch(form["arch"])])
    if peers:
        rows.append([*_cells("random", "architectures", peers), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    comparison = compare(forms["best"], peers, repeats["best"]) if "best" in forms else None
    if comparison is not None:
        print(comparison.headline)
    print(f"written: {cfg.run_dir / 'retrain'}")


def _cells(name: str, of: str, forms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name, accuracy, MACs and parameters of trainings that share a line: their means, and the range of accuracies."""
    top1 = [form["top1"] for form in forms]
    accuracy, macs, params = (statistics.mean(form[key] for form in forms) for key in ("top1", "macs", "params"))
    costs = [f"{macs:,.0f}", f"{params:,.0f}"]
    if len(forms) == 1:
        return [name, f"{accuracy:.2%}", *costs]
    return [f"{name}, {len(forms)} {of}", f"{accuracy:.2%} ({100 * min(top1):.2f} to {100 * max(top1):.2f})", *costs]


@contextlib.contextmanager
def _joined(cfg: RunConfig) -> Iterator[tuple[RunConfig, World]]:
    """Join the processes that torchrun started; all take the settings of rank 0, whose files others may not see."""
    with start(cfg.torch_device) as world:
        yield RunConfig.from_dict(json.loads(world.broadcast(json.dumps(cfg.to_dict()).encode()))), world


@contextlib.contextmanager
def at_most(hours: float | None) -> Iterator[None]:
    """Stop what runs within the block after this time, as SIGTERM does.

    Raises:
        Terminated: the time is over, or SIGTERM came.
        ConfigError: this is one process of several.
    """
    if hours is not None and environment_size() > 1:
        raise ConfigError(
            "--max-hours stops one process, and torchrun would start its ranks again: leave it out, and stop torchrun "
            "by SIGTERM"
        )
    deadline = None if hours is None else time.time() + 3600 * hours
    try:
        with stopped_at(deadline):
            yield
    except Terminated as stopped:
        if deadline is not None and time.time() >= deadline:
            # the reason may also name an error
            stopped.reason = stopped.reason.replace(Terminated().reason, f"--max-hours {hours:g} is over")
        raise


def _run(
    cfg: RunConfig, resume: bool, seeds: int, settings: TaskSettings | None, dry_run: bool, hours: float | None
) -> None:
    if seeds != 1:
        _run_seeds(cfg, resume, seeds, settings or TaskSettings(), dry_run)
        return
    check_one_process(settings, environment_size())
    if dry_run:
        if environment_size() > 1:
            raise ConfigError("--dry-run times the steps of one process: run it without torchrun")
        print(plan_run(cfg, settings, max_hours=hours))
        return
    with at_most(hours), _joined(cfg) as (cfg, world):
        if world.is_main and ((cfg.run_dir / STABILITY_FILE).exists() or (cfg.run_dir / "seed-0").exists()):
            raise FileExistsError(f"{cfg.run_dir} has a run of --seeds: add --seeds N, or choose another --out")
        result = pipeline.run(cfg, resume=resume, world=world, tasks=settings)
        if world.is_main:
            _show_retrained(cfg, result.retrained)
            print(f"report: {result.report}")


def _run_seeds(cfg: RunConfig, resume: bool, seeds: int, settings: TaskSettings, dry_run: bool) -> None:
    check_one_process(settings, environment_size())
    if dry_run:
        print(plan_seeds(cfg, seeds, settings))
        return
    page = run_seeds(cfg, seeds, settings, resume=resume)
    print("\n".join(sentences(cfg.run_dir)))
    print(f"report: {page}")


def _supernet(cfg: RunConfig, resume: bool) -> None:
    with _joined(cfg) as (cfg, world):
        final = pipeline.supernet(cfg, resume=resume, world=world)
        if world.is_main:
            print(f"checkpoint: {final}")


def _score(cfg: RunConfig) -> None:
    if pipeline.score(cfg) is not None:
        print(f"written: {cfg.run_dir / pipeline.TABLE_FILE}")


def _search(cfg: RunConfig, num_classes: int | None) -> None:
    if without_supernet(cfg):
        pipeline.score_untrained(cfg, num_classes=num_classes)
    elif num_classes is not None:
        raise ConfigError(
            f"--num_classes is for a search without a run, and {cfg.run_dir} has one, or the score needs one"
        )
    _show_candidates(cfg, pipeline.search(cfg))


def _retrain(
    cfg: RunConfig,
    resume: bool,
    archs: Sequence[str],
    pareto: bool,
    tasks: TaskSettings | None,
    hours: float | None,
) -> None:
    check_one_process(tasks, environment_size())
    with at_most(hours), _joined(cfg) as (cfg, world):
        results = pipeline.retrain_best(cfg, archs=archs, pareto=pareto, resume=resume, world=world, tasks=tasks)
        if world.is_main:
            _show_retrained(cfg, results)


def _export(args: argparse.Namespace) -> None:
    for file in pipeline.export(args.out, name=args.name or "best", arch=args.arch, pareto=args.pareto, onnx=args.onnx):
        print(file)


def _rank(args: argparse.Namespace, settings: TaskSettings | None, dry_run: bool) -> None:
    if args.train is not None:
        _rank_trained(args, settings or TaskSettings(), dry_run)
        return
    if args.score is None:
        predictor, space = _predictor(args)
        accuracies = read_accuracies(args.table, space, column=args.column)
    elif args.images is None:
        accuracies, predictor, space = _ranked_by_score(args)
    else:
        accuracies, predictor, space = _ranked_networks(args)
    report = rank(accuracies, predictor, space, resamples=args.resamples, seed=args.seed)
    print(report)
    name = "rank" if args.score is None else f"rank-{args.score}"
    files = [] if args.out is None else [Path(args.out) / f"{name}.json"]
    for file in [*files, *([] if args.save is None else [Path(args.save)])]:
        report.save(file)
        print(f"written: {file}")


def _rank_trained(args: argparse.Namespace, settings: TaskSettings, dry_run: bool) -> None:
    cfg = _config_of(args.out)
    names = () if args.score is None else (args.score,)
    check_names(cfg, names)
    if dry_run:
        print(estimate_sample(cfg, args.train, settings, epochs=args.epochs))
        return
    accuracies = train_sample(cfg, args.train, epochs=args.epochs, settings=settings)
    found = compare_trained(cfg, accuracies, names=names, half_width=args.interval, resamples=args.resamples)
    print(found)
    print("Trainings accumulate: the same command with a larger --train keeps these and adds to them.")
    files = [cfg.run_dir / ACCURACIES_FILE, cfg.run_dir / REPORT_FILE]
    if args.save is not None:
        found.save(args.save)
        files.append(Path(args.save))
    print(f"written: {', '.join(map(str, files))}")


def _config_of(out: str) -> RunConfig:
    """The settings of a run directory.

    Raises:
        FileNotFoundError: it has none.
    """
    path = Path(out) / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run `nasfast supernet --out {out}` first. A score of untrained weights needs no "
            f"checkpoint, but the settings of a run in {path}"
        )
    return RunConfig.load(path).replace(out=out)


def _predictor(args: argparse.Namespace) -> tuple[IndicatorTable | dict[Arch, float], ArchSpace]:
    path = Path(args.predictor) if args.predictor else Path(args.out) / pipeline.TABLE_FILE
    if args.out is not None and not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast score --out {args.out}` first")
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
    cfg = _config_of(args.out)
    parts = []
    for _, name in parts_of(args.score):
        evidence = evidence_to_rank(cfg.replace(score=cfg.score.replace(name=name)))
        accuracies = _sampled(args, evidence.space)
        parts.append(score_paths(name, evidence, accuracies))
    return accuracies, summed(args.score, parts), evidence.space


def _ranked_networks(args: argparse.Namespace) -> tuple[dict[Arch, float], dict[Arch, float], ArchSpace]:
    """As `_ranked_by_score`, for single untrained networks of any space; says how many have no score."""
    names = [name for _, name in parts_of(args.score)]
    for name in names:
        check_network_score(get_score(name), named_space(args.space))
    evidence = untrained_networks(
        args.space, args.images, batch=args.batch, seed=args.seed, cells=args.cells, channels=args.channels
    )
    accuracies = _sampled(args, evidence.space)
    parts: list[dict[Arch, float]] = []
    without: set[Arch] = set()
    for name in names:
        scores, failed = score_networks(name, evidence, accuracies)
        parts.append(scores)
        without |= failed.keys()
        if failed:
            first = next(iter(failed.values()))
            print(f"{len(failed)} of {len(scores)} architectures have no {name} and count as the lowest. {first}")
    return accuracies, summed(args.score, parts, without), evidence.space


def _sampled(args: argparse.Namespace, space: ArchSpace) -> dict[Arch, float]:
    """The accuracies of the table, or of a random sample of it."""
    accuracies = read_accuracies(args.table, space, column=args.column)
    archs = sorted(accuracies)
    if args.sample is not None:
        archs = random.Random(args.seed).sample(archs, min(args.sample, len(archs)))
    return {arch: accuracies[arch] for arch in archs}


def _report(runs: Sequence[Path], page: Path) -> None:
    if len(runs) > 1:
        # the page of one run lies in its folder, and this one where the command runs
        print(f"written: {write_comparison(runs, page).absolute()}")
        return
    of_seeds = (runs[0] / STABILITY_FILE).exists()
    print(f"written: {write_stability_page(runs[0]) if of_seeds else write_report(runs[0])}")


def _latency(cfg: LatencyConfig, out: str) -> None:
    # a file that must not be replaced is named before minutes of measuring
    check_replaceable(out, head_of(cfg, cfg.resolve()))
    report = latency(cfg)
    print(report)
    report.save(out)
    print(f"written: {out}")


def _step(cfg: StepTimesConfig, out: str | None) -> None:
    report = step_times(cfg)
    print(report)
    if out is not None:
        report.save(out)
        print(f"written: {out}")


def _doctor() -> None:
    print(doctor())


_COMMANDS: dict[str, Callable[..., None]] = {
    "run": _run,
    "supernet": _supernet,
    "score": _score,
    "search": _search,
    "retrain": _retrain,
    "export": _export,
    "rank": _rank,
    "report": _report,
    "latency": _latency,
    "step": _step,
    "doctor": _doctor,
}


def execute(command: str, arguments: Sequence[Any]) -> None:
    """Carry out one command; the caller shows its errors.

    Args:
        command: `run`, `supernet`, ...
        arguments: what `nasfast.cli.flags.parse` made of its flags.
    """
    run = extensions.load(extensions.COMMAND_RUN) if command in extensions.COMMANDS else _COMMANDS[command]
    run(*arguments)
