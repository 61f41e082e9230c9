"""The baselines as scores, which this module registers, and the table of any score."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nasfast import extensions
from nasfast.indicators.distill import distill, z_sum
from nasfast.indicators.evidence import Evidence, NetworkEvidence, layer_space
from nasfast.indicators.registry import (
    Score,
    ScoreError,
    all_scores,
    check_network_score,
    check_score,
    get_score,
    register,
)
from nasfast.indicators.structure import BASELINES, structure_scores, structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.runtime.progress import Progress
from nasfast.spaces import Arch, ArchSpace, LayerSpace, format_arch


def _register_baseline(name: str) -> None:
    """A baseline of docs/ranking_zero_cost.md, which depends only on the space."""

    @register(name, additive=True, trained=False, images=False, networks=True)
    def table(evidence: NetworkEvidence) -> IndicatorTable:
        return structure_table(layer_space(evidence), name)


for _name in BASELINES:
    _register_baseline(_name)


def default_score(space: ArchSpace) -> str:
    """The score that ranks the architectures of a space without training: docs/ranking.md says how it was chosen."""
    return "sqrt_size" if isinstance(space, LayerSpace) else extensions.CELL_SCORE


def score_table(
    name: str,
    evidence: Evidence,
    *,
    structure: float = 0.0,
    meta: dict[str, Any] | None = None,
    known: Mapping[Arch, float] = MappingProxyType({}),
    keep: Callable[[Arch, float], None] = lambda arch, value: None,
) -> IndicatorTable:
    """The table of a score: its own if it is additive, otherwise the table distilled from the scores of sampled paths.

    Args:
        name: one of `all_scores()`.
        evidence: what the score is computed from.
        structure: weight of the baseline `sqrt_size`, which is added to the score; both are divided by their standard
            deviations over the space (`z_sum`). 0 adds nothing and leaves the score in its own unit.
        meta: what the table says about its origin, besides the score's name and the quality of the fit (`distill`).
        known: scores of paths that are not computed again.
        keep: is called with each path and its score, once it is computed.

    Raises:
        ScoreError: the score is unknown or not finite, or the supernet cannot have it.
        TableError: a score of a candidate is not finite.
    """
    score, space = get_score(name), evidence.net.space
    check_score(score, evidence.net)
    meta = {**(meta or {}), "score": name}
    if score.additive:
        table = score.function(evidence)
        table = replace(table, meta={**meta, **table.meta})
    else:
        scores = _score_each(score, evidence, dict.fromkeys(evidence.sample()), known, keep)
        table = distill(space, scores, evidence.values, meta=meta)
    return with_structure(table, structure)


def untrained_table(
    name: str, space: LayerSpace, *, structure: float = 0.0, seed: int = 0, meta: dict[str, Any] | None = None
) -> IndicatorTable:
    """The table of a score that needs neither training nor images (`Score.untrained`); see `score_table`."""
    score = get_score(name)
    if not score.untrained:
        names = ", ".join(sorted(other.name for other in all_scores().values() if other.untrained))
        raise ScoreError(
            f"the score {name!r} needs training or images, and here are none: train, or take one of {names}"
        )
    table = score.function(NetworkEvidence(space, (), seed=seed))
    return with_structure(replace(table, meta={**(meta or {}), "score": name, **table.meta}), structure)


def with_structure(table: IndicatorTable, weight: float) -> IndicatorTable:
    """A table beside the baseline `sqrt_size`, both in units of their standard deviation over the space (`z_sum`).

    The baseline has the given weight; 0 gives the table itself, in its own unit.
    """
    if not weight:
        return table
    parts = [(table, 1.0), (structure_table(table.space, "sqrt_size"), weight)]
    return z_sum(parts, meta={**table.meta, "structure": weight})


def score_paths(name: str, evidence: Evidence, archs: Iterable[Arch]) -> dict[Arch, float]:
    """The score of each architecture; a score of paths is computed for every architecture and not distilled."""
    score = get_score(name)
    check_score(score, evidence.net)
    if score.additive:
        table = score.function(evidence)
        return {arch: table.score(arch) for arch in archs}
    scores = _score_each(score, evidence, list(archs))
    if bad := [arch for arch, value in scores.items() if not math.isfinite(value)]:
        remedy = ": the supernet diverged; train it with a lower train.lr" if score.trained else ""
        raise ScoreError(
            f"{len(bad)} of {len(scores)} paths have no finite {name}, the first is [{format_arch(bad[0])}]{remedy}"
        )
    return scores


def _score_each(
    score: Score,
    evidence: Evidence,
    archs: Collection[Arch],
    known: Mapping[Arch, float] = MappingProxyType({}),
    keep: Callable[[Arch, float], None] = lambda arch, value: None,
) -> dict[Arch, float]:
    """The score of each path, with signs of life; see `score_table`."""
    scores = {arch: known[arch] for arch in archs if arch in known}
    with Progress("score", len(archs)) as progress:
        for arch in archs:
            if arch not in scores:
                scores[arch] = score.function(evidence, arch)
                keep(arch, scores[arch])
            progress.update(len(scores))
    return {arch: scores[arch] for arch in archs}


def parse_sum(name: str) -> list[tuple[float, str]]:
    """The signs and the names in a sum such as `jacov+synflow-ntk_q`; a single score is a sum of one."""
    first, *rest = re.split(r"([+-])", name)
    parts = [] if rest and not first else [(1.0, first)]
    return parts + [(-1.0 if sign == "-" else 1.0, part) for sign, part in zip(rest[::2], rest[1::2], strict=True)]


def rank_sum(
    scores: Iterable[Mapping[Arch, float]], signs: Iterable[float] = itertools.repeat(1.0)
) -> dict[Arch, float]:
    """The sum of the logarithms of the ranks of several scores of the same architectures, each multiplied by its sign.

    The rank is the share of the architectures that are lower, with half of those that tie. So units and outliers have
    no influence, and all scores weigh the same. An architecture that one score ranks low has a low sum, whatever the
    others say (AZ-NAS, arXiv 2403.19232, section 3.5).
    """
    from scipy.stats import rankdata  # half a second

    total: dict[Arch, float] = {}
    for part, sign in zip(scores, signs, strict=False):
        ranks = rankdata([sign * value for value in part.values()]) - 0.5
        for arch, rank in zip(part, ranks, strict=True):
            total[arch] = total.get(arch, 0.0) + math.log(float(rank) / len(part))
    return total


def combine_scores(name: str, scores: Sequence[dict[Arch, float]], failed: Collection[Arch] = ()) -> dict[Arch, float]:
    """The score of a name such as `jacov+synflow-ntk_q`, which is one score itself, or the `rank_sum` of several.

    `scores` are those of its parts, in the order of `parse_sum`. The architectures `failed`, which lack one of them,
    are lower than all others.
    """
    signs = [sign for sign, _ in parse_sum(name)]
    total = scores[0] if signs == [1.0] else rank_sum(scores, signs)
    lowest = min(total.values(), default=0.0)
    return {**total, **dict.fromkeys(failed, lowest - abs(lowest) - 1)}


def score_networks(
    name: str, evidence: NetworkEvidence, archs: Iterable[Arch]
) -> tuple[dict[Arch, float], dict[Arch, ScoreError]]:
    """The score of the untrained network of each architecture, and why some have none.

    An architecture without a score, such as a cell through which nothing reaches the output, counts as lower than all
    others.
    """
    score = get_score(name)
    check_network_score(score, evidence.space)
    if name in BASELINES:  # of cells, too
        archs = list(archs)
        return dict(zip(archs, structure_scores(evidence.space, name, archs), strict=True)), {}
    if score.additive:
        table = score.function(evidence)
        return {arch: table.score(arch) for arch in archs}, {}
    scores: dict[Arch, float] = {}
    failed: dict[Arch, ScoreError] = {}
    archs = list(archs)
    with Progress("score", len(archs)) as progress:
        for done, arch in enumerate(archs, 1):
            try:
                scores[arch] = score.function(evidence, arch)
            except ScoreError as error:
                failed[arch] = error
            progress.update(done)
    if failed and not scores:
        raise next(iter(failed.values()))
    return combine_scores(name, [scores], failed), failed
