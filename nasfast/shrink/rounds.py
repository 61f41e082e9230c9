"""The best network within limits over the tables of one or several sizes, which measured networks correct."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nasfast.indicators.table import IndicatorTable
from nasfast.search import Candidate, InfeasibleConstraintError, Limits, top_k
from nasfast.search.limits import read_limits
from nasfast.settings import SearchConfig
from nasfast.shrink.cut import cut
from nasfast.shrink.find import Found
from nasfast.shrink.graph import ShrinkError, channels_last
from nasfast.shrink.measure import Measured, check_images, divergence
from nasfast.shrink.uniform import uniform_widths
from nasfast.spaces import Arch

# standard deviations of the factor that all candidates of a table share and of each candidate's own, and the relative
# error of a measurement; cuts of a half measure 1.1 to 2.2 times the sum of their parts
_COMMON, _OWN, _ERROR = 1.0, 0.3, 0.05


@dataclass(frozen=True)
class Shrunk:
    """A network that was measured as a whole.

    Attributes:
        measured: the table and the weights that it is of.
        arch: its architecture; `nasfast.shrink.cut(measured, arch)` makes the network.
        macs: MACs for one image.
        params: number of parameters.
        predicted: KL divergence by the table, in nats per image, before it was corrected.
        divergence: its measured `nasfast.shrink.divergence` on the held-out images.
        round: the round that measured it, from 1; 0 for uniform widths.
        predicted_ms: its latency by the table of latencies; None without one.
        latency_ms: its measured latency; None if it was not measured.
    """

    measured: Measured
    arch: Arch
    macs: int
    params: int
    predicted: float
    divergence: float
    round: int
    predicted_ms: float | None = None
    latency_ms: float | None = None


class Searched(list[Shrunk]):
    """The result of `search_measured`, best first.

    Attributes:
        latency_factors: for each table, by what its latencies are multiplied to be as measured, by all networks that
            were timed; 1 where none was.
    """

    def __init__(self, results: Iterable[Shrunk], latency_factors: Sequence[float]) -> None:
        super().__init__(results)
        self.latency_factors = tuple(latency_factors)


def search_measured(
    measured: Sequence[Measured],
    images: Sequence[Tensor],
    reference: Tensor,
    *,
    top_k: int = 8,
    rounds: int = 4,
    batch: int = 32,
    latency_tables: Sequence[str | Path] | None = None,
    latency: Callable[[Found, Arch], float] | None = None,
    **limits: Any,
) -> Searched:
    """The networks within limits that are nearest to a reference, by measurement, best first.

    At each size, uniform widths are measured first, so that no result is worse than these. Each round takes the `top_k`
    best networks of the integer program over the size's table, measures those that are new as whole networks, and
    corrects the table by them: of the factors on its candidates, one common and one for each, it takes the most likely
    ones by ridge regression. A size ends when the best network by its corrected table has been measured, or after
    `rounds`. What is proven is the best sum of a table; the order of the result is measured.

    A program under a table of latencies finds the networks that this table makes too fast. So `latency` measures them,
    the table is corrected by the median of what they take to what it says, and results are within the limit as
    measured.

    Args:
        measured: from `measure`, one for each size of the images.
        images: for each, held-out images of its size; the same ones at each size.
        reference: (N, classes) logits on these images of the network that the results shall be like, or of the labels
            (`label_logits`), where networks of different sizes are compared: a network with other errors than the
            reference may be as right.
        top_k: networks that each round takes from each table.
        rounds: most rounds of a size, unless all their networks are above a limit of latency as measured.
        batch: images at a time.
        latency_tables: for each, the file of its latencies, for `max_latency_ms`.
        latency: milliseconds of the network of an architecture; None takes those of the tables as they are.
        limits: `max_macs`, `max_params` and `max_latency_ms` of `nasfast.search_table`.

    Raises:
        InfeasibleConstraintError: no network of any table meets the limits, or none that was measured.
        ShrinkError: the numbers of tables, images or logits differ.
    """
    if not measured or len(measured) != len(images) or any(len(x) != len(reference) for x in images):
        raise ShrinkError(
            f"got {len(measured)} tables, {len(images)} sets of images and {len(reference)} rows of logits: give each "
            "table its images, and each image a row"
        )
    for m, x in zip(measured, images, strict=True):
        check_images(m.found, x)
    paths = [None] * len(measured) if latency_tables is None else latency_tables
    asked = _Asked(reference, latency, batch, limits)
    sizes = [_Size(*parts, asked) for parts in zip(measured, images, paths, strict=True)]
    for size in sizes:
        size.search_rounds(top_k, rounds)
    results = [r for size in sizes for r in size.results.values()]
    if not results:
        nearest = min((ms for size in sizes for ms, _ in size.times.values()), default=None)
        if nearest is None:
            raise next(size.error for size in sizes if size.error)
        raise InfeasibleConstraintError(
            f"no network takes at most max_latency_ms={limits['max_latency_ms']:.4g} as measured; the nearest takes "
            f"{nearest:.4g} ms: give a larger limit"
        )
    return Searched(sorted(results, key=lambda r: r.divergence), [size.latency_factor for size in sizes])


def narrowed(
    choose: Callable[[float], Arch | None],
    time: Callable[[Arch], tuple[float, float]],
    limit: float,
    factor: float = 1.0,
) -> Arch | None:
    """An architecture within a limit of latency as measured; None where `choose` gives none.

    Args:
        choose: gives one within a limit by a table of latencies; the limit is lowered until the network is within.
        time: measured and predicted milliseconds of a network.
        limit: the largest latency in ms.
        factor: what is known of measured latencies, as a multiple of the table's.
    """
    while (arch := choose(limit / factor)) is not None:
        ms, predicted = time(arch)
        if ms <= limit:
            return arch
        factor = ms / predicted
    return None


@dataclass(frozen=True)
class _Asked:
    """What networks are measured by; see `search_measured`."""

    reference: Tensor
    latency: Callable[[Found, Arch], float] | None
    batch: int
    limits: Mapping[str, Any]


class _Size:
    """What is known at a size of the images: a corrected table, and the networks that were measured.

    Attributes:
        measured: the table as it was measured.
        limits: the limits in its space, with its table of latencies.
        results: the networks within limits.
        times: measured and predicted milliseconds of all, where latencies are measured.
        error: why the integer program had no network in a round.
    """

    def __init__(self, measured: Measured, images: Tensor, latency_table: str | Path | None, asked: _Asked) -> None:
        self.measured = measured
        path = None if latency_table is None else str(latency_table)
        self.limits = read_limits(SearchConfig(latency_table=path, **asked.limits), measured.found.space)
        self.results: dict[Arch, Shrunk] = {}
        self.times: dict[Arch, tuple[float, float]] = {}
        self.error: InfeasibleConstraintError | None = None
        self._images, self._asked, self._table = images, asked, measured.table
        self._base = self._divergence(measured.found.full)
        self._most = self.limits.maxima.get("max_latency_ms", math.inf)

    @property
    def latency_factor(self) -> float:
        """By what the latencies of the table are multiplied to be as measured: the median; 1 without measured ones."""
        return statistics.median([ms / predicted for ms, predicted in self.times.values()] or [1.0])

    def search_rounds(self, count: int, rounds: int) -> None:
        """Measure uniform widths, and the networks of rounds with `count` each, until the best one was measured."""
        self.measure_uniform()
        number = 0
        # networks above the limit are no results: until the program has one, they correct the table
        while number < rounds or not any(r.round for r in self.results.values()):
            number += 1
            try:
                best = self.search(count)
            except InfeasibleConstraintError as error:
                self.error = error
                break
            if not best or best[0].arch in self.results:
                break
            for candidate in best:
                self.measure(candidate.arch, number)
            self.correct()

    def search(self, count: int) -> list[Candidate]:
        """The best networks within limits by the corrected tables, without those that are above them as measured."""
        slow = {arch for arch, (ms, _) in self.times.items() if ms > self._most}
        limits = self._by_table(self._most / self.latency_factor)
        return top_k(self._table, self.measured.found.space, limits, k=count, without=slow)

    def measure_uniform(self) -> None:
        """Measure uniform widths, which meet a limit of latency as measured."""

        def choose(ms: float) -> Arch | None:
            return uniform_widths(self.measured.found, self._by_table(ms))

        first = arch = choose(self._most)
        if first is not None and self._is_timed:
            # they have a factor of their own
            ms, predicted = self._time(first)
            arch = narrowed(choose, self._time, self._most, ms / predicted)
        if arch is not None:
            self.measure(arch, 0)

    def measure(self, arch: Arch, number: int) -> None:
        """Measure a network in a round: its latency, and its divergence if it is within the limit."""
        if arch in self.results:
            return
        m = self.measured
        # without a table of latencies there are no values
        predicted_ms, ms = next(iter(self.limits.values(arch)), None), None
        if self._is_timed:
            ms, predicted_ms = self._time(arch)
            if ms > self._most:
                return
        cost = m.found.space.cost(arch)
        loss = self._divergence(arch)
        self.results[arch] = Shrunk(
            m, arch, cost.macs, cost.params, self._base - m.table.score(arch), loss, number, predicted_ms, ms
        )

    def _divergence(self, arch: Arch) -> float:
        """The divergence of the network of an architecture, as a whole, on the held-out images."""
        small = cut(self.measured, arch).to(memory_format=torch.channels_last)
        with torch.no_grad():
            parts = [small(channels_last(part)) for part in self._images.split(self._asked.batch)]
            return divergence(self._asked.reference, torch.cat(parts))

    @property
    def _is_timed(self) -> bool:
        """Whether latencies are measured."""
        return self._asked.latency is not None and bool(self.limits.tables)

    def _time(self, arch: Arch) -> tuple[float, float]:
        """Measured and predicted milliseconds of a network."""
        assert self._asked.latency is not None, "asked for where latencies are measured"
        if arch not in self.times:
            self.times[arch] = self._asked.latency(self.measured.found, arch), self.limits.values(arch)[0]
        return self.times[arch]

    def _by_table(self, ms: float) -> Limits:
        """The limits, with so many milliseconds by the table."""
        tables = tuple((table, None if math.isinf(ms) else ms) for table, _ in self.limits.tables)
        return replace(self.limits, tables=tables)

    def correct(self) -> None:
        """Correct the table by the networks that were measured."""
        divergences = [(r.arch, r.divergence) for r in self.results.values()]
        self._table = correct(self.measured, [pair for pair in divergences if math.isfinite(pair[1])], self._base)


def correct(measured: Measured, networks: Sequence[tuple[Arch, float]], base: float = 0.0) -> IndicatorTable:
    """The table of `measure`, corrected by divergences of whole networks.

    With t_c the table's loss of candidate c and d_n the divergence of network n beyond that of the full one, it is
    t_c (1 + g + e_c), where g and e are the most likely ones under Gaussian priors, given that
    d_n (1 + noise) = sum_c t_c (1 + g + e_c).
    """
    if not networks:
        return measured.table
    rows = measured.table.scores
    columns = {pair: i for i, pair in enumerate((layer, v) for layer, row in enumerate(rows) for v in row)}
    terms = np.zeros((len(networks), len(columns)))
    for line, (arch, _) in zip(terms, networks, strict=True):
        for layer, value in enumerate(arch):
            # a candidate that lowers the divergence, by chance, is not scaled up
            line[columns[layer, value]] = max(-rows[layer][value], 0.0)
    sums = np.array([-measured.table.score(arch) for arch, _ in networks])
    targets = np.array([loss for _, loss in networks]) - base - sums
    spread = np.full(len(columns), _OWN**2)
    prior = _COMMON**2 * np.outer(terms.sum(1), terms.sum(1)) + (terms * spread) @ terms.T
    noise = np.diag((_ERROR * np.maximum(sums, np.abs(targets + sums))) ** 2)
    # of networks that lose nothing, rows are zero: these say nothing
    dual = np.linalg.lstsq(prior + noise, targets, rcond=None)[0]
    factors = 1 + _COMMON**2 * float(terms.sum(1) @ dual) + spread * (terms.T @ dual)
    corrected = [
        {v: score * max(float(factors[columns[layer, v]]), 0.1) if score < 0 else score for v, score in row.items()}
        for layer, row in enumerate(rows)
    ]
    meta = {**measured.table.meta, "measured_networks": len(networks)}
    return IndicatorTable.from_rows(measured.found.space, corrected, meta)
