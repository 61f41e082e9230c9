"""Scores beside counts on several tables of trained accuracies: one row per score, one column per benchmark."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nasfast.display import text_table
from nasfast.indicators.evidence import NetworkEvidence
from nasfast.indicators.learned import learned_score
from nasfast.indicators.rank import Estimate, bootstrap_weights, kendall_tau, merge_rounding
from nasfast.indicators.registry import ScoreError, get_score
from nasfast.indicators.scores import combine_scores, default_score, parse_sum, score_networks
from nasfast.indicators.structure import baselines, structure_scores
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch

DRAWS = 5
"""Random choices of the trained architectures in the rows of few trainings."""

_LEAST_LEFT = 20
"""Architectures that must remain to judge a learned score."""


@dataclass(frozen=True)
class Benchmark:
    """Trained accuracies of a space, and the untrained networks of which scores are computed.

    Attributes:
        name: the column of the table.
        evidence: space, images and seed of the networks; benchmarks with the same evidence share scores.
        accuracies: architecture -> trained accuracy.
    """

    name: str
    evidence: NetworkEvidence
    accuracies: Mapping[Arch, float]


@dataclass(frozen=True)
class BenchmarkCell:
    """How a row ranks the architectures of a benchmark.

    Attributes:
        kendall: tau-b with its 95 % bootstrap interval; for few trainings the mean over draws, with the lowest and the
            highest.
        above: `kendall` minus that of the best count, from the same resamples; None for few trainings.
        cpu_s: CPU seconds per architecture of this score; None for what costs nothing or shares all scores.
        note: which count is the best.
    """

    kendall: Estimate
    above: Estimate | None = None
    cpu_s: float | None = None
    note: str = ""

    def __str__(self) -> str:
        sign = "" if self.above is None else "+" * self.above.positive + "-" * ((self.above.high or 0.0) < 0)
        cost = "" if self.cpu_s is None else f" {self.cpu_s:.2f} s"
        return " ".join(filter(None, (f"{self.kendall}{sign}{cost}", self.note)))


@dataclass(frozen=True)
class BenchmarkReport:
    """Rows of scores by benchmark; `counts` has the number of architectures of each benchmark."""

    counts: dict[str, int]
    rows: dict[str, dict[str, BenchmarkCell]]

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        write_atomic(Path(path), (json.dumps(asdict(self), indent=1) + "\n").encode())

    def __str__(self) -> str:
        header = ["", *(f"{name} ({count})" for name, count in self.counts.items())]
        table = [[name, *(str(row.get(b, "-")) for b in self.counts)] for name, row in self.rows.items()]
        return "\n".join(
            [
                "Kendall's tau-b with 95 % intervals; + and - mark scores that are significantly above and below the "
                "best count; CPU seconds per architecture",
                *text_table([header, *table], right=1),
            ]
        )


def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    names: Sequence[str],
    *,
    trainings: Sequence[int] = (32, 128),
    resamples: int = 1000,
    seed: int = 0,
) -> BenchmarkReport:
    """Rank the accuracies of all benchmarks by counts, by scores, and by scores learned from few trainings.

    Args:
        benchmarks: the columns.
        names: scores, or sums such as `jacov+synflow-ntk_q`; spaces that cannot have one get no entry.
        trainings: numbers of accuracies from which scores are learned; the others judge them, in `DRAWS` draws. The
            prior is the default score, whose parts are among the features. Beside them stand scores that are learned
            from the features of the architecture alone.
        resamples, seed: of the bootstrap, and of the draws.

    Raises:
        ScoreError: a name is unknown.
    """
    for part in [part for name in names for _, part in parse_sum(name)]:
        get_score(part)  # an unknown name is an error, and no empty row
    rows: dict[str, dict[str, BenchmarkCell]] = {}
    cache = _ScoreCache()
    for benchmark in benchmarks:
        for name, cell in _column(benchmark, names, trainings, cache, (resamples, seed)):
            rows.setdefault(name, {})[benchmark.name] = cell
    return BenchmarkReport({benchmark.name: len(benchmark.accuracies) for benchmark in benchmarks}, rows)


class _ScoreCache:
    """Scores of networks with their CPU seconds, each computed once."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, str], dict[Arch, tuple[float | None, float]]] = {}

    def scores(
        self, evidence: NetworkEvidence, name: str, archs: Sequence[Arch]
    ) -> dict[Arch, tuple[float | None, float]]:
        """Score, None where there is none, and CPU seconds of each architecture."""
        cache = self._cache.setdefault((id(evidence), name), {})
        missing = [arch for arch in archs if arch not in cache]
        # a table of all candidates costs the same for one architecture as for all
        for group in [missing] if get_score(name).additive else [[arch] for arch in missing]:
            start, values = time.process_time(), dict.fromkeys(group)
            with contextlib.suppress(ScoreError):
                values |= score_networks(name, evidence, group)[0]
            cost = (time.process_time() - start) / max(len(group), 1)
            cache |= {arch: (value, cost) for arch, value in values.items()}
        if all(cache[arch][0] is None for arch in archs):
            raise ScoreError(f"no architecture of {evidence.space.name} has a score {name!r}")
        return {arch: cache[arch] for arch in archs}

    def total(self, evidence: NetworkEvidence, name: str, archs: Sequence[Arch]) -> tuple[dict[Arch, float], float]:
        """A sum of scores, and its CPU seconds per architecture."""
        parts = [self.scores(evidence, part, archs) for _, part in parse_sum(name)]
        failed = {arch for part in parts for arch in archs if part[arch][0] is None}
        scores = [{arch: value for arch, (value, _) in part.items() if value is not None} for part in parts]
        seconds = sum(cost for part in parts for _, cost in part.values()) / len(archs)
        return combine_scores(name, scores, failed), seconds


def _column(
    benchmark: Benchmark,
    names: Sequence[str],
    trainings: Sequence[int],
    cache: _ScoreCache,
    bootstrap: tuple[int, int],
) -> Iterator[tuple[str, BenchmarkCell]]:
    """Names of rows and their entries in the column of one benchmark."""
    archs, space = list(benchmark.accuracies), benchmark.evidence.space
    truth = np.array([benchmark.accuracies[arch] for arch in archs])
    weights = bootstrap_weights(len(archs), *bootstrap)
    counts = {
        name: kendall_tau(merge_rounding(np.array(structure_scores(space, name, archs))), truth, weights)
        for name in baselines(space)
    }
    best = max(counts, key=lambda name: float(np.nan_to_num(counts[name][0], nan=-1)))
    yield "best count", BenchmarkCell(Estimate.from_samples(counts[best]), note=best)
    for name in names:
        try:
            scores, seconds = cache.total(benchmark.evidence, name, archs)
        except ScoreError:
            continue
        taus = kendall_tau(np.array([scores[arch] for arch in archs]), truth, weights)
        yield name, BenchmarkCell(Estimate.from_samples(taus), Estimate.from_samples(taus - counts[best]), seconds)
    default = default_score(space)
    prior, _ = cache.total(benchmark.evidence, default, archs)
    parts = [cache.total(benchmark.evidence, part, archs)[0] for _, part in parse_sum(default)]
    flat = dict.fromkeys(archs, 0.0)
    for count in trainings:
        if count + _LEAST_LEFT <= len(archs):
            yield f"learned from features alone, {count} trainings", _learned(benchmark, flat, [], count, bootstrap[1])
            yield f"learned, {count} trainings", _learned(benchmark, prior, parts, count, bootstrap[1])


def _learned(
    benchmark: Benchmark, prior: Mapping[Arch, float], parts: Sequence[Mapping[Arch, float]], count: int, seed: int
) -> BenchmarkCell:
    """Mean, lowest and highest tau of learned scores over draws of the trained architectures."""
    archs, taus = sorted(benchmark.accuracies), []
    for draw in range(DRAWS):
        order = np.random.default_rng((seed, draw)).permutation(len(archs))
        trained = {archs[i]: benchmark.accuracies[archs[i]] for i in order[:count]}
        scores = learned_score(benchmark.evidence.space, trained, prior, parts, seed=draw)
        rest = [archs[i] for i in order[count:]]
        learned, truth = ([values[arch] for arch in rest] for values in (scores, benchmark.accuracies))
        taus.append(float(kendall_tau(learned, truth, np.ones((1, len(rest))))[0]))
    return BenchmarkCell(Estimate(float(np.mean(taus)), min(taus), max(taus)))
