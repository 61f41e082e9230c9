"""Several scores beside the baselines on the same accuracies, and how many accuracies a narrower interval needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nasfast.display import text_table
from nasfast.indicators.rank import Estimate, rank
from nasfast.indicators.structure import BASELINES, structure_scores
from nasfast.indicators.table import IndicatorTable
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace

_REFERENCE = "sqrt_size"


@dataclass(frozen=True)
class ScoreRow:
    """How one score or baseline ranks.

    `above` is its tau-b minus that of `sqrt_size`, from the same resamples. `wanted` is about how many accuracies give
    tau the wanted interval; None if tau is undefined.
    """

    name: str
    kendall: Estimate
    spearman: Estimate
    above: Estimate
    wanted: int | None


@dataclass(frozen=True)
class ScoreComparison:
    """Rank correlations of scores and baselines with trained accuracies.

    `rows` are the scores, then the baselines; `half_width` is half the width of the interval that `ScoreRow.wanted` is
    about; `refused` says of a score why it has no row; `attainable` is the `attainable_tau` of the accuracies, None if
    single images were not recorded.
    """

    architectures: int
    half_width: float
    rows: tuple[ScoreRow, ...]
    refused: dict[str, str]
    attainable: float | None = None

    def save(self, path: str | Path) -> None:
        """Write the comparison as JSON."""
        write_atomic(Path(path), (json.dumps(asdict(self), indent=1) + "\n").encode())

    def __str__(self) -> str:
        """The comparison as a text table."""
        half = f"architectures for +-{self.half_width:g}"
        table = [["", "Kendall tau-b", "minus sqrt_size", "Spearman rho", half]]
        table += [
            [row.name, str(row.kendall), str(row.above), str(row.spearman), str(row.wanted or "-")] for row in self.rows
        ]
        lines = [
            f"{self.architectures} trained architectures, 95 % bootstrap intervals",
            *text_table(table, right=1),
        ]
        lines += [f"not computed: {name}: {why}" for name, why in self.refused.items()]
        more = (self.rows[0].wanted or 0) - self.architectures
        if more > 0:
            lines.append(f"The tau of {self.rows[0].name} within +-{self.half_width:g} needs about {more} more.")
        if self.attainable is not None:
            lines.append(
                "The accuracies have the noise of their validation images: the order on endless images would have "
                f"a tau of about {self.attainable:.2f} with theirs. The noise of training comes on top."
            )
        return "\n".join(lines)


def compare_scores(
    accuracies: Mapping[Arch, float],
    scores: Mapping[str, IndicatorTable | Mapping[Arch, float]],
    space: ArchSpace,
    *,
    half_width: float = 0.1,
    refused: Mapping[str, str] | None = None,
    attainable: float | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> ScoreComparison:
    """Rank accuracies by several scores and by the baselines of `nasfast.indicators.structure`.

    The width of a bootstrap interval falls like one over the root of the number of architectures n, so an interval of
    half width h' instead of h needs about n (h / h')^2 of them. `refused` and `attainable` are kept in the comparison;
    `resamples` and `seed` are those of `rank`.
    """
    if not 0 < half_width < math.inf:
        raise ValueError(f"the half width of the interval must be positive, got {half_width}")
    predictors: dict[str, IndicatorTable | Mapping[Arch, float]] = {
        **scores,
        **{n: dict(zip(accuracies, structure_scores(space, n, accuracies), strict=True)) for n in BASELINES},
    }
    rows = []
    for name, values in predictors.items():
        report = rank(accuracies, values, space, resamples=resamples, seed=seed)
        tau, needed = report.predictor.kendall, None
        if tau.low is not None and tau.high is not None:
            needed = math.ceil(report.architectures * ((tau.high - tau.low) / (2 * half_width)) ** 2)
        rows.append(ScoreRow(name, tau, report.predictor.spearman, report.above[_REFERENCE], needed))
    return ScoreComparison(len(accuracies), half_width, tuple(rows), dict(refused or {}), attainable)


def attainable_tau(right: NDArray[np.bool_]) -> float:
    """Kendall's tau to expect between accuracies on some images and those of the same networks on endless images.

    All networks are judged by the same images, so the noise is what remains of the single answers without the means of
    networks and of images (two-way analysis of variance). With a share r of the variance between accuracies that is not
    noise, they correlate by sqrt(r) with those on endless images, which for normal distributions is a tau of
    2 / pi arcsin(sqrt(r)).

    Args:
        right: (networks, images), at least 2 of both; whether each network is right.

    Returns:
        From 0, where the accuracies differ no more than by noise, to 1.
    """
    networks, images = right.shape
    accuracies = right.mean(axis=1)
    noise = right - right.mean(axis=0) - accuracies[:, None] + right.mean()
    variance = float((noise**2).sum()) / ((networks - 1) * (images - 1) * images)
    total = float(accuracies.var(ddof=1))
    return 2 / math.pi * math.asin(math.sqrt(max(0.0, 1 - variance / total))) if total > 0 else 0.0
