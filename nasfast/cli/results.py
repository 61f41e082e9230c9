"""The commands about results: `export`, `rank` and `report`; of each its flags, what it refuses, and what it does."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from nasfast.cli.flags import Command, CommandLine, FlagError, Parser, check_run_dirs, take_tasks, with_defaults
from nasfast.settings import STABILITY_FILE, TaskSettings
from nasfast.spaces import named_space


def export_flags(parser: Parser) -> None:
    parser.add_argument("--out", required=True, help="run directory")
    parser.add_argument("--name", help="which retrained network: best (default), best-2, ..., random, random-2, ...")
    parser.add_argument("--arch", metavar="ARCH", help='instead of --name: the network of this architecture, "1 0 2 1"')
    parser.add_argument("--pareto", action="store_true", help="instead of --name: all retrained points of the fronts")
    text = "also write model.onnx, checked with onnxruntime; default: where the extra onnx is installed"
    parser.add_argument("--onnx", type=bool, help=text)


def export(line: CommandLine) -> None:
    """Write the files of retrained networks."""
    args = with_defaults(line.values, line.parser)
    check_run_dirs(args.out)
    if (args.name is not None) + (args.arch is not None) + args.pareto > 1:
        raise FlagError("--name, --arch and --pareto each say what to export: give one of them")
    from nasfast.pipeline import exporting  # imports torch

    files = exporting.export(args.out, name=args.name or "best", arch=args.arch, pareto=args.pareto, onnx=args.onnx)
    for file in files:
        print(file)


def rank_flags(parser: Parser) -> None:
    parser.add_argument("--table", help="trained accuracies, at least 10: JSON or CSV (arch,accuracy)")
    parser.add_argument("--column", help="which accuracy, where the table has several per architecture")
    parser.add_argument("--out", help="run directory: ranks its indicators.json and writes rank.json for the report")
    parser.add_argument("--predictor", help="instead of --out: an indicators.json, or scores as JSON or CSV")
    parser.add_argument("--images", help="instead of --out: folder of images for untrained networks")
    parser.add_argument(
        "--score", help="ranks this score of every architecture, or a sum A+B-C; default with --images: the space's"
    )
    parser.add_argument("--sample", type=int, help="with --score or --images: only this many random architectures")
    parser.add_argument("--space", help="space without --out: a name or a YAML file; default: nas_bench_macro")
    parser.add_argument("--batch", type=int, help="with --images: images of the batch that is scored; default: 64")
    parser.add_argument("--cells", type=int, help="with --images: cells of a network of cells; default: the space's")
    parser.add_argument("--channels", type=int, help="with --images: channels of its first cell; default: the space's")
    text = "with --images, instead of --table: tables of accuracies as SPACE=FILE or SPACE=FILE:COLUMN; ranks each by "
    text += "counts, by the scores of --score (separated by commas), and by what few trainings teach"
    parser.add_argument("--benchmark", nargs="+", metavar="SPACE=FILE", help=text)
    parser.add_argument("--save", metavar="FILE", help="also write the report as JSON to this file")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples of the intervals")
    text = "seed of bootstrap and --sample, and of weights with --images; default: 0. --train takes the run's"
    parser.add_argument("--seed", type=int, help=text)
    parser.add_argument(
        "--train",
        type=int,
        metavar="N",
        help="instead of --table, with --out: trains until N architectures have an accuracy (RUN/accuracies.json), and "
        "ranks all scores, or that of --score; trainings of earlier calls count, and those that were stopped continue",
    )
    text = "with --train: epochs of each training, the same in all calls; its recipe is short and not that of retrain"
    parser.add_argument("--epochs", type=int, help=text)
    text = "with --train: half width of the interval of tau for which the number of architectures is estimated"
    parser.add_argument("--interval", type=float, help=f"{text}; default: 0.1")
    parser.add_argument("--dry_run", action="store_true", help="with --train: only print how long the trainings take")
    parser.add_class_arguments(TaskSettings)


def rank(line: CommandLine) -> None:
    """Refuse what needs no torch, then rank."""
    tasks, args = take_tasks(line.values), with_defaults(line.values, line.parser)
    _check_rank(args, tasks)
    if args.space is not None:
        named_space(args.space)
    check_run_dirs(args.out)
    from nasfast.cli import ranking  # imports torch

    if args.benchmark:
        ranking.rank_benchmarks(args)
    elif args.train is not None:
        ranking.rank_trained(ranking.filled(args), tasks)
    else:
        ranking.rank_table(ranking.filled(args))


def _check_rank(args: argparse.Namespace, tasks: TaskSettings) -> None:
    """Refuse flags of `rank` that contradict each other or need another one."""
    from nasfast.indicators.rank import MIN_RESAMPLES  # imports numpy

    def has(*names: str) -> bool:
        return any(getattr(args, name) is not None for name in names)

    trains = has("train")
    if args.benchmark:
        names = ("table", "out", "predictor", "train", "space", "column", "epochs", "interval")
        if wrong := [f"--{name}" for name in names if has(name)]:
            raise FlagError(f"--benchmark takes no {' or '.join(wrong)}: SPACE=FILE:COLUMN names all tables")
        if not has("images"):
            raise FlagError("--benchmark needs --images, a folder of images for untrained networks")
    elif has("table") == trains:
        raise FlagError("give either --table FILE or --train N")
    if trains and (not has("out") or has("sample", "column", "seed")):
        raise FlagError("--train needs --out RUN, and takes neither --sample nor --column nor --seed")
    if has("epochs", "interval") and not trains:
        raise FlagError("--epochs and --interval need --train")
    if not trains and (tasks != TaskSettings() or args.dry_run):
        raise FlagError("--executor, --workers, --attempts, --max_hours and --dry_run are about --train N")
    if has("interval") and not 0 < args.interval < math.inf:
        raise FlagError(f"--interval must be positive and finite, got {args.interval}")
    if args.resamples < MIN_RESAMPLES:
        raise FlagError(f"--resamples must be at least {MIN_RESAMPLES}, got {args.resamples}; 1000 is usual")
    if has("out") + has("predictor") + has("images") != 1:
        raise FlagError("give one of --out RUN, --predictor FILE, and --images FOLDER")
    if has("sample") and not has("score", "images"):
        raise FlagError("--sample needs --score or --images")
    if has("score") and has("predictor"):
        raise FlagError("--score needs --out or --images: a file has its scores already")
    if has("cells", "channels", "batch") and not has("images"):
        raise FlagError("--cells, --channels and --batch need --images")
    if has("out") and has("space"):
        raise FlagError("--space needs --predictor or --images: --out has the space of the run")
    for name in ("sample", "cells", "channels", "batch", "epochs"):
        if has(name) and getattr(args, name) < 1:
            raise FlagError(f"--{name} must be at least 1, got {getattr(args, name)}")


def report_flags(parser: Parser) -> None:
    parser.usage = "%(prog)s [RUN ...] [FLAGS]"
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories; two or more are compared on one page")
    parser.add_argument("--out", help="instead of RUN: one run directory")
    text = "with several runs: the page that compares them; default: comparison.html"
    parser.add_argument("--page", metavar="FILE", help=text)


def report(line: CommandLine) -> None:
    """Write the page of a run, or one that compares several."""
    args = with_defaults(line.values, line.parser)
    check_run_dirs(*(args.runs or ()), args.out)
    runs = [Path(run) for run in [*(args.runs or ()), *([] if args.out is None else [args.out])]]
    if not runs or (args.out is not None and args.runs):
        raise FlagError("give one run directory (--out RUN) or the names of several to compare: nasfast report A B")
    if args.page is not None and len(runs) == 1:
        raise FlagError("--page is about several runs: the page of one run is report.html in its directory")
    from nasfast.pipeline.shrinking.run import is_shrink_run
    from nasfast.report.comparison import write_comparison  # imports matplotlib, as all of them
    from nasfast.report.html import write_report
    from nasfast.report.run_files import RunFiles
    from nasfast.report.seeds import write_stability_page
    from nasfast.report.shrinking import write_shrink_report
    from nasfast.report.shrinking_seeds import write_shrink_seeds_page

    if len(runs) > 1:
        # the page of one run lies in its folder, and this one where the command runs
        print(f"written: {write_comparison(runs, Path(args.page or 'comparison.html')).absolute()}")
        return
    seeds = (runs[0] / STABILITY_FILE).exists()
    if is_shrink_run(runs[0]):
        print(f"written: {(write_shrink_seeds_page if seeds else write_shrink_report)(runs[0])}")
        return
    print(f"written: {(write_stability_page if seeds else write_report)(runs[0])}")
    RunFiles(runs[0]).check()


COMMANDS = {
    "export": Command("files of a retrained network, ONNX included", export_flags, export),
    "rank": Command(
        "rank correlation of a predictor with trained accuracies, beside trivial baselines", rank_flags, rank
    ),
    "report": Command("write report.html of a run directory, or one page that compares several", report_flags, report),
}
