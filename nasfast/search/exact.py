"""The K best architectures under cost limits, exactly: a multiple-choice knapsack as an integer program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.search.candidate import Candidate
from nasfast.search.limits import Limits, arch_sum, layer_costs
from nasfast.search.milp import ChoiceProgram
from nasfast.spaces import SKIP, Arch, LayerSpace

# Scores closer than this fraction of the span of the sum are a tie; it is a hundred times the solver's resolution.
_TIE = 1e-8


def option_scores(table: IndicatorTable, *, allow_identity: bool = False) -> tuple[dict[int, float], ...]:
    """For each layer a dict from value to combined score, values ascending.

    With `allow_identity` a normal layer may also be skipped; it then scores its layer indicator (docs/method.md 2).

    Raises:
        TableError: `allow_identity` is set, and the table has no layer indicators.
    """
    scores = []
    for i, (row, layer) in enumerate(zip(table.scores, table.space.layers, strict=True)):
        if allow_identity and layer.indicator_choice == SKIP:
            identity = table.layer[i]
            if identity is None:
                raise TableError(
                    f"allow_identity: layer {i} has no layer indicator, which is the score of the identity; train with "
                    "layer_indicators=True, or leave allow_identity off"
                )
            row = {SKIP: identity, **row}
        scores.append(row)
    return tuple(scores)


def top_k(
    table: IndicatorTable, space: LayerSpace, limits: Limits, *, k: int = 5, without: Collection[Arch] = ()
) -> list[Candidate]:
    """The `k` architectures with the highest scores within the limits, best first, each with its proof.

    Scores within 1e-8 of the span of the scores are a tie; ties are ordered by MACs, then lexicographically. Each
    result is checked against the limits in integer arithmetic. There are fewer than `k` if no more exist.

    Args:
        table: the scores.
        space: the space that they are of.
        limits: what the architectures may cost.
        k: how many are wanted.
        without: architectures that are left out; where these are all that meet the limits, the list is empty.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
    """
    limits.check(space)
    scores = option_scores(table, allow_identity=limits.allow_identity)
    macs = layer_costs(space, "macs", allow_identity=limits.allow_identity).rows
    losses = [{v: -score for v, score in row.items()} for row in scores]
    tie = _TIE * sum(max(row.values()) - min(row.values()) for row in scores)
    program = limits.program(space)
    for arch in sorted(without):
        program.exclude(arch)
    candidates: list[Candidate] = []
    best = program.minimise(losses)
    while best is not None and len(candidates) < k:
        rest = program.copy()
        rest.exclude(best.arch)
        second = rest.minimise(losses)
        arch = best.arch
        if second is not None and arch_sum(scores, second.arch) >= arch_sum(scores, arch) - tie:
            arch = _first_of_tie(program, losses, arch_sum(losses, arch) + tie, macs)
        cost, score = space.cost(arch), arch_sum(scores, arch)
        # the two sums round differently in the last bit
        bound = max(-best.bound, score)
        candidates.append(
            Candidate(
                arch,
                score,
                cost.macs,
                cost.params,
                bound - score <= 2 * tie,
                bound,
                bound - score,
                best.status,
                limits.values(arch),
            )
        )
        program.exclude(arch)
        # if another architecture of the tie was taken, `best` is the best of the rest
        best = second if arch == best.arch else best
    return candidates


def _first_of_tie(
    program: ChoiceProgram,
    losses: Sequence[Mapping[int, float]],
    highest_loss: float,
    macs: Sequence[Mapping[int, int]],
) -> Arch:
    """The feasible architecture with at most `highest_loss` that has fewest MACs, then is lexicographically first."""
    program = program.copy()
    program.at_most(losses, highest_loss)
    arch = program.minimiser(macs)
    program.limit(macs, sum(row[v] for row, v in zip(macs, arch, strict=True)))
    for layer, values in enumerate(program.options):
        if arch[layer] != values[0]:
            weights = [dict.fromkeys(row, 0) for row in program.options]
            weights[layer] = {v: place for place, v in enumerate(values)}
            arch = program.minimiser(weights)
        program.fix(layer, arch[layer])
    return arch
