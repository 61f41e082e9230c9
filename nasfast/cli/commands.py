"""What the commands of `nasfast` do, one short function each; `nasfast.cli.flags` declares and reads their flags."""

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

from nasfast.cli.flags import FlagError, Parser, take_tasks, with_defaults
from nasfast.config import ConfigError
from nasfast.display import text_table
from nasfast.indicators.accuracies import read_accuracies, read_scores, top1_interval
from nasfast.indicators.rank import rank
from nasfast.indicators.registry import check_network_score, get_score
from nasfast.indicators.scores import parts_of, score_networks, summed
from nasfast.indicators.table import TABLE_FILE, IndicatorTable, TableError
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.measure.doctor import doctor
from nasfast.measure.latency import check_replaceable, head_of, latency
from nasfast.measure.measured import fit_measured
from nasfast.measure.step_times import step_times
from nasfast.pipeline.estimate import plan_run
from nasfast.pipeline.exporting import export
from nasfast.pipeline.inputs import scores_of, space_of, untrained_networks
from nasfast.pipeline.networks import retrain_best
from nasfast.pipeline.run import Run, result_of
from nasfast.pipeline.stages import every_stage, score, supernet
from nasfast.pipeline.trained import (
    ACCURACIES_FILE,
    REPORT_FILE,
    check_names,
    compare_trained,
    estimate_sample,
    train_sample,
)
from nasfast.report.findings import compare, is_peer, other_seeds
from nasfast.runtime.distributed import start
from nasfast.runtime.files import write_atomic
from nasfast.runtime.launcher import environment_size
from nasfast.runtime.termination import Terminated, stopped_at
from nasfast.settings import STABILITY_FILE, RunConfig, TaskSettings
from nasfast.spaces import Arch, ArchSpace, format_arch, named_space


def _show_retrained(run: Run, results: dict[str, Any]) -> None:
    """A line per architecture with all its seeds, one for all random ones, and what was gained over these."""
    forms = {name: result.to_dict() for name, result in results.items()}
    repeats = {name: other_seeds(name, forms) for name in forms}
    repeated = {id(form) for again in repeats.values() for form in again}
    peers = [form for name, form in forms.items() if is_peer(name)]
    rows = [["network", "top-1", "MACs", "params", "architecture"]]
    for name, form in forms.items():
        if not is_peer(name) and id(form) not in repeated:
            rows.append([*_cells(name, "seeds", [form, *repeats[name]]), format_arch(form["arch"])])
    if peers:
        rows.append([*_cells("random", "architectures", peers), ""])
    print("\n".join(text_table(rows)))
    comparison = compare(forms["best"], peers, repeats["best"]) if "best" in forms else None
    if "best" in results:
        best = results["best"]
        low, high = top1_interval(best.top1, best.images)
        print(f"best: top-1 {best.top1:.1%} (95 % interval {low:.1%} to {high:.1%}, {best.images:,} images)")
        print(f"  {run.space.words(best.arch)}")
    if comparison is not None:
        print(comparison.headline)
        print(f"next: {comparison.next_step(run.cfg.out)}")
    print(f"written: {run.dir / 'retrain'}")


def _cells(name: str, of: str, forms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name, accuracy, MACs and parameters of trainings that share a line: their means, and the range of accuracies."""
    top1 = [form["top1"] for form in forms]
    accuracy, macs, params = (statistics.mean(form[key] for form in forms) for key in ("top1", "macs", "params"))
    costs = [f"{macs:,.0f}", f"{params:,.0f}"]
    if len(forms) == 1:
        return [name, f"{accuracy:.2%}", *costs]
    return [f"{name}, {len(forms)} {of}", f"{accuracy:.2%} ({100 * min(top1):.2f} to {100 * max(top1):.2f})", *costs]


@contextlib.contextmanager
def at_most(hours: float | None) -> Iterator[None]:
    """Stop what runs within the block after this time, as SIGTERM does."""
    if hours is not None and environment_size() > 1:
        raise ConfigError(
            "--max_hours stops one process, and torchrun would start its ranks again: leave it out, and stop torchrun "
            "by SIGTERM"
        )
    deadline = None if hours is None else time.time() + 3600 * hours
    try:
        with stopped_at(deadline):
            yield
    except Terminated as stopped:
        if deadline is not None and time.time() >= deadline:
            # the reason may also name an error
            stopped.reason = stopped.reason.replace(Terminated().reason, f"--max_hours {hours:g} is over")
        raise


@contextlib.contextmanager
def _opened(cfg: RunConfig, tasks: TaskSettings, *, begins: bool) -> Iterator[Run]:
    """The run of a command, in each of the processes that torchrun started, until the time of the command is over."""
    with at_most(tasks.max_hours), start(cfg.torch_device) as world:
        with Run.open(cfg, begins=begins, world=world, tasks=tasks.executor_settings) as run:
            yield run


def _run(cfg: RunConfig, tasks: TaskSettings, *, resume: bool = False, seeds: int = 1, dry_run: bool = False) -> None:
    if seeds != 1:
        _run_seeds(cfg, seeds, tasks, resume=resume, dry_run=dry_run)
        return
    if dry_run:
        if environment_size() > 1:
            raise ConfigError("--dry_run times the steps of one process: run it without torchrun")
        print(plan_run(Run(cfg, tasks=tasks.executor_settings), max_hours=tasks.max_hours))
        return
    with _opened(cfg, tasks, begins=True) as run:
        if run.world.is_main and ((run.dir / STABILITY_FILE).exists() or (run.dir / "seed-0").exists()):
            raise FileExistsError(f"{run.dir} has a run of --seeds: add --seeds N, or choose another --out")
        result = every_stage(run, resume=resume)
        if run.world.is_main:
            _show_retrained(run, result.retrained)
            print(f"report: {result.report}")


def _run_seeds(cfg: RunConfig, seeds: int, tasks: TaskSettings, *, resume: bool, dry_run: bool) -> None:
    from nasfast.pipeline.seeds import plan_seeds, run_seeds  # imports matplotlib, as below
    from nasfast.pipeline.seeds_page import sentences

    if dry_run:
        print(plan_seeds(cfg, seeds, tasks))
        return
    page = run_seeds(cfg, seeds, tasks, resume=resume)
    print("\n".join(sentences(cfg.run_dir)))
    print(f"report: {page}")


def _supernet(cfg: RunConfig, tasks: TaskSettings, *, resume: bool = False) -> None:
    with _opened(cfg, tasks, begins=True) as run:
        final = supernet(run, resume=resume)
        if run.world.is_main:
            print(f"checkpoint: {final}")


def _score(cfg: RunConfig, tasks: TaskSettings) -> None:
    with Run.open(cfg) as run:
        if score(run) is not None:
            print(f"written: {run.dir / TABLE_FILE}")


def _retrain(
    cfg: RunConfig,
    tasks: TaskSettings,
    *,
    resume: bool = False,
    arch: Sequence[str] = (),
    pareto: bool = False,
) -> None:
    if arch and pareto:
        raise FlagError("--arch and --pareto both say what to retrain: give one of them")
    with _opened(cfg, tasks, begins=False) as run:
        results = retrain_best(run, archs=arch, pareto=pareto, resume=resume)
        if run.world.is_main:
            _show_retrained(run, results)


def _export(given: dict[str, Any], parser: Parser) -> None:
    args = with_defaults(given, parser)
    if (args.name is not None) + (args.arch is not None) + args.pareto > 1:
        raise FlagError("--name, --arch and --pareto each say what to export: give one of them")
    for file in export(args.out, name=args.name or "best", arch=args.arch, pareto=args.pareto, onnx=args.onnx):
        print(file)


def _rank(given: dict[str, Any], parser: Parser) -> None:
    from nasfast.cli.benchmark import rank_benchmarks, take_default_score  # imports scipy.stats: half a second

    tasks, args = take_tasks(given), with_defaults(given, parser)
    if args.benchmark:
        rank_benchmarks(args)
        return
    if args.images is not None and args.score is None:
        take_default_score(args)
    for name, default in (("space", "nas_bench_macro"), ("batch", 64), ("seed", 0), ("interval", 0.1)):
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.train is not None:
        _rank_trained(args, tasks)
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


def _rank_trained(args: argparse.Namespace, settings: TaskSettings) -> None:
    run = Run.saved(args.out)
    names = () if args.score is None else (args.score,)
    check_names(run, names)
    if args.dry_run:
        print(estimate_sample(run, args.train, settings, epochs=args.epochs))
        return
    accuracies = train_sample(run, args.train, epochs=args.epochs, settings=settings)
    found = compare_trained(run, accuracies, names=names, half_width=args.interval, resamples=args.resamples)
    print(found)
    print("Trainings accumulate: the same command with a larger --train keeps these and adds to them.")
    files = [run.dir / ACCURACIES_FILE, run.dir / REPORT_FILE]
    if args.save is not None:
        found.save(args.save)
        files.append(Path(args.save))
    print(f"written: {', '.join(map(str, files))}")


def _predictor(args: argparse.Namespace) -> tuple[IndicatorTable | dict[Arch, float], ArchSpace]:
    if args.out is not None:
        table = result_of(Path(args.out) / TABLE_FILE, IndicatorTable.load, f"nasfast score --out {args.out}")
        return table, table.space
    try:
        table = IndicatorTable.load(args.predictor)
    except TableError:
        space = named_space(args.space)
        return read_scores(args.predictor, space), space
    return table, table.space


def _ranked_by_score(args: argparse.Namespace) -> tuple[dict[Arch, float], dict[Arch, float], ArchSpace]:
    """Accuracies and scores of the same architectures; the score is computed for each and not distilled."""
    run = Run.saved(args.out)
    space = space_of(run)
    accuracies = _sampled(args, space)
    return accuracies, scores_of(run, args.score, accuracies), space


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


def _report(given: dict[str, Any], parser: Parser) -> None:
    from nasfast.pipeline.seeds_page import write_stability_page
    from nasfast.report import write_comparison, write_report
    from nasfast.report.run_files import RunFiles

    args = with_defaults(given, parser)
    runs = [Path(run) for run in [*(args.runs or ()), *([] if args.out is None else [args.out])]]
    if not runs or (args.out is not None and args.runs):
        raise FlagError("give one run directory (--out RUN) or the names of several to compare: nasfast report A B")
    if args.page is not None and len(runs) == 1:
        raise FlagError("--page is about several runs: the page of one run is report.html in its directory")
    if len(runs) > 1:
        # the page of one run lies in its folder, and this one where the command runs
        print(f"written: {write_comparison(runs, Path(args.page or 'comparison.html')).absolute()}")
        return
    of_seeds = (runs[0] / STABILITY_FILE).exists()
    print(f"written: {write_stability_page(runs[0]) if of_seeds else write_report(runs[0])}")
    RunFiles(runs[0]).check()


def _latency(settings: dict[str, Any], parser: Parser) -> None:
    out = settings.pop("out", "latency.json")
    measured, column = settings.pop("measured", None), settings.pop("column", None)
    if measured is not None:
        _fit_latency(settings, measured, column, out)
        return
    if column is not None:
        raise FlagError("--column needs --measured FILE")
    cfg = LatencyConfig.from_dict(settings)
    # a file that must not be replaced is named before minutes of measuring
    check_replaceable(out, head_of(cfg, cfg.resolve()))
    report = latency(cfg)
    print(report)
    report.save(out)
    print(f"written: {out}")


def _fit_latency(settings: dict[str, Any], measured: str, column: str | None, out: str) -> None:
    if others := set(settings) - {"space", "num_classes", "resolution", "device", "batch"}:
        raise FlagError(f"--measured fits what another device measured, and takes no --{' or --'.join(sorted(others))}")
    sizes = {key: settings[key] for key in ("num_classes", "resolution") if key in settings}
    space = named_space(settings.get("space", LatencyConfig.space), **sizes)
    found = fit_measured(
        space, read_scores(measured, space, column=column or "latency"), source=Path(measured).name,
        device=settings.get("device") or column, batch=settings.get("batch"),
    )  # fmt: skip
    print(found)
    found.save(out)
    print(f"written: {out}")


def _step(settings: dict[str, Any], parser: Parser) -> None:
    out = settings.pop("out", None)
    first_steps: list[dict[str, Any]] = []

    def seen(row: dict[str, Any]) -> None:
        first_steps.append(row)
        if out is not None:  # until the report is there, which has them too
            write_atomic(Path(out), (json.dumps({"first_steps": first_steps}, indent=1) + "\n").encode())

    report = step_times(StepTimesConfig.from_dict(settings), seen=seen)
    print(report)
    if out is not None:
        report.save(out)
        print(f"written: {out}")


COMMANDS: dict[str, Callable[..., None]] = {
    "run": _run,
    "supernet": _supernet,
    "score": _score,
    "retrain": _retrain,
    "export": _export,
    "rank": _rank,
    "report": _report,
    "latency": _latency,
    "step": _step,
    "doctor": lambda given, parser: print(doctor()),
}
"""Those of `flags.STAGES` take a RunConfig, the settings of tasks and other flags; the others flags and parser."""
