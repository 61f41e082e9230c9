"""Search over a table of indicators: exact, evolutionary, Pareto front, random baselines.

May import `indicators` and all before it, and no torch. Begin with `exact`; `milp` proves.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Literal

from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.runtime.arguments import check_type
from nasfast.search.candidate import (
    Candidate,
    Candidates,
    ParetoPoint,
    SearchResult,
    TableLimit,
    load_candidates,
    save_candidates,
)
from nasfast.search.evolution import evolve
from nasfast.search.exact import option_scores, top_k
from nasfast.search.history import History
from nasfast.search.limits import InfeasibleConstraintError, Limits, arch_sum, read_limits
from nasfast.search.pareto import pareto_front
from nasfast.search.sampling import (
    equal_cost_peers,
    equal_cost_random,
    sample_distinct,
    sample_under,
    stratified_sample,
)
from nasfast.settings import SearchConfig
from nasfast.spaces import LayerSpace

__all__ = [
    "Candidate",
    "Candidates",
    "History",
    "InfeasibleConstraintError",
    "Limits",
    "ParetoPoint",
    "SearchConfig",
    "SearchResult",
    "TableLimit",
    "equal_cost_peers",
    "equal_cost_random",
    "evolve",
    "load_candidates",
    "option_scores",
    "pareto_front",
    "run_search",
    "sample_distinct",
    "sample_under",
    "save_candidates",
    "search_table",
    "stratified_sample",
    "top_k",
]


def search_table(
    table: IndicatorTable,
    space: LayerSpace,
    *,
    max_macs: float | None = None,
    max_params: float | None = None,
    max_latency_ms: float | None = None,
    latency_table: str | Path | None = None,
    top_k: int = 5,
    method: Literal["exact", "evolution"] = "exact",
    allow_identity: bool = False,
    seed: int = 0,
    history: str | Path | None = None,
) -> Candidates:
    """The architectures with the highest summed scores within the limits, best first.

    Args:
        table: scores per layer and choice.
        space: the space of the table.
        max_macs: largest MACs per image; None for no limit.
        max_params: largest number of parameters; None for no limit.
        max_latency_ms: largest latency in ms by `latency_table`; None for no limit.
        latency_table: file of latencies, which `nasfast latency` writes; each result has its latency in `values`.
        top_k: number of architectures.
        method: `exact` proves its answer; `evolution` is the papers' search, for comparison.
        allow_identity: whether normal layers may be skipped; a skipped layer scores its layer indicator.
        seed: seed of the evolution; the exact search has no randomness.
        history: JSONL file of the evolution, from which it resumes; None for none.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
        TableError: the table belongs to another space.
        ConfigError: a setting has the wrong type, or the table of latencies cannot be used.
        TypeError: `table` or `space` is something else, such as its name.
    """
    config = SearchConfig(
        method=method,
        top_k=top_k,
        max_macs=max_macs,
        max_params=max_params,
        max_latency_ms=max_latency_ms,
        latency_table=None if latency_table is None else str(latency_table),
        seed=seed,
        allow_identity=allow_identity,
    )
    return Candidates(run_search(table, space, config, history=history))


def run_search(
    table: IndicatorTable, space: LayerSpace, config: SearchConfig, *, history: str | Path | None = None
) -> list[Candidate]:
    """`search_table` with all settings in a config."""
    check_type("table", table, IndicatorTable, advice="nasfast.score(supernet) and IndicatorTable.load(FILE) make one")
    check_type("space", space, LayerSpace, advice="nasfast.spaces.get_space(NAME) makes one")
    if table.space.fingerprint != space.fingerprint:
        raise TableError(
            f"the table was scored in space {table.space.name!r} ({table.space.fingerprint}), the search is in "
            f"{space.name!r} ({space.fingerprint}): score again, or load the space of the table"
        )
    if config.method != "evolution":
        return top_k(table, space, read_limits(config, space), k=config.top_k)
    scores = option_scores(table, allow_identity=config.allow_identity)
    record = None
    if history is not None:
        digest = hashlib.sha256(json.dumps([list(row.items()) for row in scores]).encode()).hexdigest()[:16]
        record = History(history, space, scorer=f"indicator table {digest}")
    return evolve(space, functools.partial(arch_sum, scores), config, history=record)
