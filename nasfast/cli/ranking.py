"""`nasfast rank`: how well a table, scores of a run or of untrained networks, or those of a trained sample rank.

Or, with --benchmark, how all scores rank several tables of trained accuracies.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from nasfast import extensions
from nasfast.cli.flags import FlagError
from nasfast.indicators.accuracies import read_accuracies, read_scores
from nasfast.indicators.benchmark import Benchmark, run_benchmarks
from nasfast.indicators.rank import rank
from nasfast.indicators.registry import check_network_score, get_score
from nasfast.indicators.scores import combine_scores, default_score, parse_sum, score_networks
from nasfast.indicators.table import TABLE_FILE, IndicatorTable, TableError
from nasfast.pipeline.evidence import compute_scores, find_space, untrained_networks
from nasfast.pipeline.run import Run, load_settings, read_result
from nasfast.pipeline.sample import (
    ACCURACIES_FILE,
    REPORT_FILE,
    check_names,
    compare_trained,
    estimate_sample,
    sample_inputs,
    train_sample,
)
from nasfast.settings import TaskSettings
from nasfast.spaces import Arch, ArchSpace, named_space


def filled(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with the defaults that the others decide."""
    defaults: dict[str, Any] = {"space": "nas_bench_macro", "batch": 64, "seed": 0, "interval": 0.1}
    if args.images is not None and args.score is None:  # the score of a space that needs no training
        space = named_space(args.space or defaults["space"])
        defaults |= {"score": default_score(space), **_cell_sizes(space)}
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def rank_table(args: argparse.Namespace) -> None:
    """Rank the accuracies of a table by a file of scores, or by a score that is computed now."""
    if args.score is None:
        predictor, space = _read_predictor(args)
        accuracies = read_accuracies(args.table, space, column=args.column)
    elif args.images is None:
        cfg = load_settings(args.out)
        space = find_space(cfg)
        accuracies = _read_sample(args, space)
        predictor = compute_scores(cfg, space, args.score, accuracies)
    else:
        accuracies, predictor, space = _score_untrained(args)
    report = rank(accuracies, predictor, space, resamples=args.resamples, seed=args.seed)
    print(report)
    name = "rank" if args.score is None else f"rank-{args.score}"
    files = [] if args.out is None else [Path(args.out) / f"{name}.json"]
    for file in [*files, *([] if args.save is None else [Path(args.save)])]:
        report.save(file)
        print(f"written: {file}")


def _read_predictor(args: argparse.Namespace) -> tuple[IndicatorTable | dict[Arch, float], ArchSpace]:
    if args.out is not None:
        table = read_result(Path(args.out) / TABLE_FILE, IndicatorTable.load, f"nasfast score --out {args.out}")
        return table, table.space
    try:
        table = IndicatorTable.load(args.predictor)
    except (TableError, OSError):  # the error about scores says both forms of such a file
        space = named_space(args.space)
        return read_scores(args.predictor, space), space
    return table, table.space


def _score_untrained(args: argparse.Namespace) -> tuple[dict[Arch, float], dict[Arch, float], ArchSpace]:
    """Accuracies and scores of untrained networks, and their space; says how many networks have no score."""
    names = [name for _, name in parse_sum(args.score)]
    for name in names:
        check_network_score(get_score(name), named_space(args.space))
    networks = untrained_networks(
        args.space, args.images, batch=args.batch, seed=args.seed, cells=args.cells, channels=args.channels
    )
    accuracies = _read_sample(args, networks.space)
    parts: list[dict[Arch, float]] = []
    unscored: set[Arch] = set()
    for name in names:
        scores, failed = score_networks(name, networks, accuracies)
        parts.append(scores)
        unscored |= failed.keys()
        if failed:
            first = next(iter(failed.values()))
            print(f"{len(failed)} of {len(scores)} architectures have no {name} and count as the lowest. {first}")
    return accuracies, combine_scores(args.score, parts, unscored), networks.space


def _read_sample(args: argparse.Namespace, space: ArchSpace) -> dict[Arch, float]:
    """The accuracies of the table, or of a random sample of it."""
    accuracies = read_accuracies(args.table, space, column=args.column)
    return {arch: accuracies[arch] for arch in _sample(sorted(accuracies), args.sample, args.seed)}


def _sample(archs: list[Arch], count: int | None, seed: int) -> list[Arch]:
    return archs if count is None else random.Random(seed).sample(archs, min(count, len(archs)))


def rank_trained(args: argparse.Namespace, settings: TaskSettings) -> None:
    cfg = load_settings(args.out)
    names = () if args.score is None else (args.score,)
    inputs = sample_inputs(cfg)
    check_names(cfg, inputs.space, names)
    if args.dry_run:
        print(estimate_sample(cfg, inputs, args.train, settings, epochs=args.epochs))
        return
    with Run.open(cfg, threads=False) as open_run:
        accuracies = train_sample(open_run, inputs, args.train, epochs=args.epochs, settings=settings)
    comparison = compare_trained(
        cfg, inputs.space, accuracies, names=names, half_width=args.interval, resamples=args.resamples
    )
    print(comparison)
    print("Trainings accumulate: the same command with a larger --train keeps these and adds to them.")
    files = [cfg.run_dir / ACCURACIES_FILE, cfg.run_dir / REPORT_FILE]
    if args.save is not None:
        comparison.save(args.save)
        files.append(Path(args.save))
    print(f"written: {', '.join(map(str, files))}")


def rank_benchmarks(args: argparse.Namespace) -> None:
    """Print and save the table of scores by benchmark; benchmarks of one space are ranked on the same architectures."""
    seed = args.seed or 0
    tables = [_parse_benchmark(text) for text in args.benchmark]
    networks = {}
    for space in dict.fromkeys(space for space, _, _ in tables):
        sizes = _cell_sizes(named_space(space))
        networks[space] = untrained_networks(
            space,
            args.images,
            batch=args.batch or 64,
            seed=seed,
            cells=args.cells or sizes.get("cells"),
            channels=args.channels or sizes.get("channels"),
        )
    accuracies = [read_accuracies(file, networks[space].space, column=column) for space, file, column in tables]
    samples = {}
    for name in networks:
        common = [set(table) for (space, _, _), table in zip(tables, accuracies, strict=True) if space == name]
        samples[name] = _sample(sorted(set.intersection(*common)), args.sample, seed)
    benchmarks = [
        Benchmark(
            f"{space} {column or Path(file).stem}", networks[space], {arch: table[arch] for arch in samples[space]}
        )
        for (space, file, column), table in zip(tables, accuracies, strict=True)
    ]
    scores = args.score.split(",") if args.score else extensions.load(extensions.BENCHMARK_SCORES)
    report = run_benchmarks(benchmarks, scores, resamples=args.resamples, seed=seed)
    print(report)
    if args.save is not None:
        report.save(args.save)
        print(f"written: {args.save}")


def _parse_benchmark(text: str) -> tuple[str, str, str | None]:
    """Space, file and column of `SPACE=FILE:COLUMN`."""
    space, equals, file = text.partition("=")
    file, _, column = file.partition(":")
    if not (space and equals and file):
        raise FlagError(f"--benchmark {text!r}: expected SPACE=FILE or SPACE=FILE:COLUMN")
    return space, file, column or None


def _cell_sizes(space: ArchSpace) -> dict[str, int]:
    """The size of the networks of cells that scores without training are computed on."""
    return {} if space.LAYERWISE else extensions.CELL_SIZE
