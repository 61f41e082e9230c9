"""`nasfast rank --benchmark`: several tables of trained accuracies, ranked by all scores."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from nasfast import extensions
from nasfast.cli.flags import FlagError
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.benchmark import Benchmark, run_benchmarks
from nasfast.indicators.evidence import NetworkEvidence
from nasfast.indicators.scores import default_score
from nasfast.pipeline.inputs import untrained_networks
from nasfast.spaces import Arch, ArchSpace, named_space

_SCORES = (
    extensions.CELL_SCORE,
    "jacov+synflow",
    "vkdnw+jacov+expressivity+trainability+macs",
    "isometry",
    *("jacov", "synflow", "naswot", "expressivity", "progressivity", "trainability", "vkdnw"),
)


def rank_benchmarks(args: argparse.Namespace) -> None:
    """Print and save the table of scores by benchmark; benchmarks of one space are ranked on the same architectures."""
    others = ("table", "out", "predictor", "train", "space", "column", "epochs", "interval")
    if wrong := [f"--{name}" for name in others if getattr(args, name) is not None]:
        raise FlagError(f"--benchmark takes no {' or '.join(wrong)}: SPACE=FILE:COLUMN names all tables")
    if args.images is None:
        raise FlagError("--benchmark needs --images, a folder of images for untrained networks")
    seed = args.seed or 0
    tables = [_table(text) for text in args.benchmark]
    evidence = {space: _networks(args, space, seed) for space in dict.fromkeys(space for space, _, _ in tables)}
    read = [
        (f"{space} {column or Path(file).stem}", space, read_accuracies(file, evidence[space].space, column=column))
        for space, file, column in tables
    ]
    chosen = {}
    for space in evidence:
        common = sorted(set.intersection(*(set(accuracies) for _, of, accuracies in read if of == space)))
        chosen[space] = _sample(common, args.sample, seed)
    benchmarks = [Benchmark(n, evidence[s], {arch: a[arch] for arch in chosen[s]}) for n, s, a in read]
    names = args.score.split(",") if args.score else _SCORES
    report = run_benchmarks(benchmarks, names, resamples=args.resamples, seed=seed)
    print(report)
    if args.save is not None:
        report.save(args.save)
        print(f"written: {args.save}")


def take_default_score(args: argparse.Namespace) -> None:
    """Set the score of a space that needs no training, and the size of the networks of cells that it is computed on."""
    space = named_space(args.space or "nas_bench_macro")
    args.score = default_score(space)
    for name, value in _sizes(space).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _table(text: str) -> tuple[str, str, str | None]:
    """Space, file and column of `SPACE=FILE:COLUMN`."""
    space, equals, file = text.partition("=")
    file, _, column = file.partition(":")
    if not (space and equals and file):
        raise FlagError(f"--benchmark {text!r}: expected SPACE=FILE or SPACE=FILE:COLUMN")
    return space, file, column or None


def _networks(args: argparse.Namespace, space: str, seed: int) -> NetworkEvidence:
    sizes = _sizes(named_space(space))
    return untrained_networks(
        space,
        args.images,
        batch=args.batch or 64,
        seed=seed,
        cells=args.cells or sizes.get("cells"),
        channels=args.channels or sizes.get("channels"),
    )


def _sizes(space: ArchSpace) -> dict[str, int]:
    return {} if space.LAYERWISE else extensions.CELL_SIZE


def _sample(archs: list[Arch], count: int | None, seed: int) -> list[Arch]:
    return archs if count is None else random.Random(seed).sample(archs, min(count, len(archs)))
