"""Evolutionary search with the operators and settings of Single Path One-Shot and BN-NAS.

It works for any score, also for one that is not a sum over layers, such as the validation accuracy of a path.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

from nasfast.search.candidate import Candidate
from nasfast.search.history import History
from nasfast.search.limits import Limits, read_limits
from nasfast.search.sampling import sample_under
from nasfast.settings import SearchConfig
from nasfast.spaces import Arch, LayerSpace

_LOG = logging.getLogger(__name__)

# An operator may propose this many architectures for each that it shall give.
_TRIES = 10


def mutate(arch: Arch, options: list[tuple[int, ...]], rng: random.Random, *, prob: float) -> Arch:
    """Redraw each layer with probability `prob`, uniformly over its options including the present one."""
    return tuple(rng.choice(values) if rng.random() < prob else v for v, values in zip(arch, options, strict=True))


def crossover(a: Arch, b: Arch, rng: random.Random) -> Arch:
    """Take each layer from either parent with equal probability."""
    return tuple(rng.choice(pair) for pair in zip(a, b, strict=True))


def evolve(
    space: LayerSpace, score: Callable[[Arch], float], config: SearchConfig, *, history: History | None = None
) -> list[Candidate]:
    """The `config.top_k` best of the architectures that an evolution evaluates, best first.

    Each generation evaluates a population: at first random architectures within the limits, later mutations and
    crossovers of the `parents` best so far. A child that was evaluated before or is above a limit is rejected. After
    ten proposals per child wanted, random architectures complete the population. The evolution ends early when it draws
    no new architecture within the limits. Ties go to fewer MACs, then to the lexicographically first.

    Args:
        score: called once per architecture; higher is better.
        config: settings; the same seed and scores give the same result.
        history: gives the scores that are known, and gets the new ones. A search that was killed resumes when it is run
            again with the same history.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
        ValueError: `score` returned NaN.
    """
    limits = read_limits(config, space)
    limits.check(space)
    evolution = _Evolution(space, config, limits)
    for generation in range(config.generations):
        population = evolution.next_population()
        if not population:
            break
        for arch, origin in population:
            cost = space.cost(arch)
            value = None if history is None else history.scores.get(arch)
            if value is None:
                value = float(score(arch))
                if math.isnan(value):
                    raise ValueError(
                        f"architecture {arch} scores NaN: check that the supernet did not diverge and that there are "
                        "validation images"
                    )
                if history is not None:
                    history.add(arch, value, macs=cost.macs, params=cost.params, generation=generation, origin=origin)
            evolution.evaluated[arch] = Candidate(arch, value, cost.macs, cost.params, values=limits.values(arch))
        _LOG.info(
            "evolution: generation %d of %d, %d architectures evaluated, best score %.6g",
            generation + 1,
            config.generations,
            len(evolution.evaluated),
            evolution.best(1)[0].score,
        )
    status = f"evolution, {len(evolution.evaluated)} architectures evaluated"
    return [candidate.replace(status=status) for candidate in evolution.best(config.top_k)]


class _Evolution:
    """The architectures evaluated so far, and the next population made from them."""

    def __init__(self, space: LayerSpace, config: SearchConfig, limits: Limits) -> None:
        self.space, self.config, self.limits, self.rng = space, config, limits, random.Random(config.seed or 0)
        self.options = [tuple(row) for row in space.option_costs(allow_identity=limits.allow_identity)]
        self.evaluated: dict[Arch, Candidate] = {}

    def best(self, count: int) -> list[Candidate]:
        """The best architectures so far, best first."""
        return sorted(self.evaluated.values(), key=lambda c: (-c.score, c.macs, c.arch))[:count]

    def next_population(self) -> list[tuple[Arch, str]]:
        """New architectures within the limits, each with the name of the operator that made it."""
        config, rng = self.config, self.rng
        population: dict[Arch, str] = {}
        if self.evaluated:
            parents = [candidate.arch for candidate in self.best(config.parents)]

            def mutant() -> Arch:
                return mutate(rng.choice(parents), self.options, rng, prob=config.mutation_prob)

            def child() -> Arch:
                return crossover(rng.choice(parents), rng.choice(parents), rng)

            self._extend(population, "mutation", config.mutations, mutant)
            self._extend(population, "crossover", config.crossovers, child)

        def stranger() -> Arch:
            return sample_under(self.space, rng, self.limits)

        self._extend(population, "random", config.population - len(population), stranger)
        return list(population.items())

    def _extend(self, population: dict[Arch, str], origin: str, count: int, propose: Callable[[], Arch]) -> None:
        """Add up to `count` proposals that are new and within the limits."""
        target = len(population) + count
        for _ in range(_TRIES * count):
            if len(population) == target:
                return
            arch = propose()
            new = arch not in self.evaluated and arch not in population
            if new and self.limits.admits(self.space.cost(arch), arch):
                population[arch] = origin
