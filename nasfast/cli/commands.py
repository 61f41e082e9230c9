"""What the commands of `nasfast` do, one short function each; `nasfast.cli.flags` declares and reads their flags."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nasfast.cli.flags import FlagError, Parser, is_verbose, with_defaults
from nasfast.config import ConfigError
from nasfast.display import counted, text_table
from nasfast.indicators.accuracies import read_scores
from nasfast.indicators.table import TABLE_FILE
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.measure.doctor import doctor
from nasfast.measure.latency import latency, table_head
from nasfast.measure.measured import check_replaceable, fit_measured
from nasfast.measure.step_times import step_times
from nasfast.pipeline.estimate import plan_run, warn_of_memory
from nasfast.pipeline.exporting import export
from nasfast.pipeline.networks import retrain_best
from nasfast.pipeline.run import Run, read_layers
from nasfast.pipeline.stages import every_stage, score, supernet
from nasfast.report.findings import Top1, advise, compare, is_peer, other_seeds, trainings
from nasfast.retrain import RetrainResult
from nasfast.runtime.distributed import start
from nasfast.runtime.files import write_atomic
from nasfast.runtime.launcher import environment_size
from nasfast.runtime.termination import Terminated, stopped_at
from nasfast.settings import STABILITY_FILE, RunConfig, TaskSettings
from nasfast.spaces import format_arch, named_space


def _show_retrained(run: Run, results: dict[str, RetrainResult]) -> None:
    """A line per architecture with all its seeds, one for all random ones, and what was gained over these."""
    records = {name: result.to_dict() for name, result in results.items()}
    repeats = {name: other_seeds(name, records) for name in records}
    repeated = {id(record) for group in repeats.values() for record in group}
    peers = [record for name, record in records.items() if is_peer(name)]
    rows = [["network", "top-1", "MACs", "params", *(["architecture"] if is_verbose() else [])]]
    for name, record in records.items():
        if not is_peer(name) and id(record) not in repeated:
            rows.append([*_mean_cells(name, "seeds", [record, *repeats[name]]), format_arch(record["arch"])])
    if peers:
        rows.append([*_mean_cells("random", "architectures", peers), ""])
    print("\n".join(text_table([row[: len(rows[0])] for row in rows])))
    if "best" in results:
        best = results["best"]
        top1 = Top1.of(trainings("best", records))
        images = counted(best.images, "image")
        print(f"best: top-1 {top1.mean:.1%} ({top1.spread} {top1.low:.1%} to {top1.high:.1%}, {images})")
        space = read_layers(run)
        print(f"  {space.words(best.arch)}")
        if (comparison := compare(records["best"], peers, repeats["best"])) is not None:
            print(comparison.headline)
            print(f"next: {advise(comparison, records, run.cfg.out, space.num_classes)}")
    print(f"written: {run.dir / 'retrain'}")


def _mean_cells(name: str, kind: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name, accuracy, MACs and parameters of trainings that share a line: their means, and the range of accuracies."""
    top1 = [record["top1"] for record in records]
    accuracy, macs, params = (statistics.mean(record[key] for record in records) for key in ("top1", "macs", "params"))
    costs = [f"{macs:,.0f}", f"{params:,.0f}"]
    if len(records) == 1:
        return [name, f"{accuracy:.2%}", *costs]
    spread = f"({100 * min(top1):.2f} to {100 * max(top1):.2f})"
    return [f"{name}, {len(records)} {kind}", f"{accuracy:.2%} {spread}", *costs]


@contextlib.contextmanager
def time_limit(hours: float | None) -> Iterator[None]:
    """Stop what runs within the block after this time, as SIGTERM does."""
    if hours is not None and environment_size() > 1:
        raise ConfigError(
            "--max_hours stops one process, and torchrun would start its ranks again: leave it out, and stop torchrun "
            "by SIGTERM"
        )
    deadline = None if hours is None else time.monotonic() + 3600 * hours
    try:
        with stopped_at(deadline):
            yield
    except Terminated as stopped:
        if deadline is not None and time.monotonic() >= deadline:
            # the reason may also name an error
            stopped.reason = stopped.reason.replace(Terminated().reason, f"--max_hours {hours:g} is over")
        raise


@contextlib.contextmanager
def _open_run(cfg: RunConfig, tasks: TaskSettings, *, begins: bool) -> Iterator[Run]:
    """The run of a command, in each of the processes that torchrun started, until the time of the command is over."""
    with time_limit(tasks.max_hours), start(cfg.torch_device) as world:
        with Run.open(cfg, begins=begins, world=world, tasks=tasks.executor_settings) as run:
            yield run


def _run(cfg: RunConfig, tasks: TaskSettings, *, resume: bool = False, seeds: int = 1, dry_run: bool = False) -> None:
    if seeds != 1:
        _run_seeds(cfg, seeds, tasks, resume=resume, dry_run=dry_run)
        return
    if dry_run:
        if environment_size() > 1:
            raise ConfigError("--dry_run times the steps of one process: run it without torchrun")
        print(plan_run(Run.look(cfg, tasks=tasks.executor_settings), max_hours=tasks.max_hours))
        return
    if not resume and environment_size() == 1:
        warn_of_memory(Run.look(cfg, tasks=tasks.executor_settings))
    with _open_run(cfg, tasks, begins=True) as run:
        if run.world.is_main and ((run.dir / STABILITY_FILE).exists() or (run.dir / "seed-0").exists()):
            raise FileExistsError(f"{run.dir} has a run of --seeds: add --seeds N, or choose another --out")
        result = every_stage(run, resume=resume)
        if run.world.is_main:
            _show_retrained(run, result.retrained)
            print(f"report: {result.report}")


def _run_seeds(cfg: RunConfig, seeds: int, tasks: TaskSettings, *, resume: bool, dry_run: bool) -> None:
    from nasfast.pipeline.seeds import plan_seeds, run_seeds  # imports matplotlib, as below
    from nasfast.report.seeds import sentences

    if dry_run:
        print(plan_seeds(cfg, seeds, tasks))
        return
    page = run_seeds(cfg, seeds, tasks, resume=resume)
    print("\n".join(sentences(cfg.run_dir)))
    print(f"report: {page}")


def _supernet(cfg: RunConfig, tasks: TaskSettings, *, resume: bool = False) -> None:
    with _open_run(cfg, tasks, begins=True) as run:
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
    with _open_run(cfg, tasks, begins=False) as run:
        results = retrain_best(run, archs=arch, pareto=pareto, resume=resume)
        if run.world.is_main:
            _show_retrained(run, results)


def _export(values: dict[str, Any], parser: Parser) -> None:
    args = with_defaults(values, parser)
    if (args.name is not None) + (args.arch is not None) + args.pareto > 1:
        raise FlagError("--name, --arch and --pareto each say what to export: give one of them")
    for file in export(args.out, name=args.name or "best", arch=args.arch, pareto=args.pareto, onnx=args.onnx):
        print(file)


def _report(values: dict[str, Any], parser: Parser) -> None:
    from nasfast.report import write_comparison, write_report
    from nasfast.report.run_files import RunFiles
    from nasfast.report.seeds import write_stability_page

    args = with_defaults(values, parser)
    runs = [Path(run) for run in [*(args.runs or ()), *([] if args.out is None else [args.out])]]
    if not runs or (args.out is not None and args.runs):
        raise FlagError("give one run directory (--out RUN) or the names of several to compare: nasfast report A B")
    if args.page is not None and len(runs) == 1:
        raise FlagError("--page is about several runs: the page of one run is report.html in its directory")
    if len(runs) > 1:
        # the page of one run lies in its folder, and this one where the command runs
        print(f"written: {write_comparison(runs, Path(args.page or 'comparison.html')).absolute()}")
        return
    write_page = write_stability_page if (runs[0] / STABILITY_FILE).exists() else write_report
    print(f"written: {write_page(runs[0])}")
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
    check_replaceable(out, table_head(cfg, cfg.resolve()))
    kept = Path(f"{out}.rounds")
    report = latency(cfg, rounds_file=kept)
    print(report)
    report.save(out)
    kept.unlink(missing_ok=True)
    print(f"written: {out}")


def _fit_latency(settings: dict[str, Any], measured: str, column: str | None, out: str) -> None:
    if wrong := set(settings) - {"space", "num_classes", "resolution", "device", "batch"}:
        raise FlagError(f"--measured fits what another device measured, and takes no --{' or --'.join(sorted(wrong))}")
    sizes = {key: settings[key] for key in ("num_classes", "resolution") if key in settings}
    space = named_space(settings.get("space", LatencyConfig.space), **sizes)
    report = fit_measured(
        space,
        read_scores(measured, space, column=column or "latency"),
        source=Path(measured).name,
        device=settings.get("device") or column,
        batch=settings.get("batch"),
    )
    print(report)
    report.save(out)
    print(f"written: {out}")


def _step(settings: dict[str, Any], parser: Parser) -> None:
    out = settings.pop("out", None)
    first_steps: list[dict[str, Any]] = []

    def save_first(row: dict[str, Any]) -> None:
        first_steps.append(row)
        if out is not None:  # until the report is there, which has them too
            write_atomic(Path(out), (json.dumps({"first_steps": first_steps}, indent=1) + "\n").encode())

    report = step_times(StepTimesConfig.from_dict(settings), callback=save_first)
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
    "report": _report,
    "latency": _latency,
    "step": _step,
    "doctor": lambda values, parser: print(doctor()),
}
"""Those of `flags.STAGES` take a RunConfig, the settings of tasks and other flags; the others flags and parser."""
