"""Settings of the search stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase
from nasfast.search.limits import Limits


@dataclass(frozen=True)
class SearchConfig(ConfigBase):
    """How architectures are searched.

    Attributes:
        method: `exact` (integer program over an indicator table), `evolution` (any score), or `auto`: exact where
            scores add up over layers.
        top_k: number of architectures in the result.
        max_macs: largest MACs per image of the standalone network; null is no limit.
        max_params: largest number of parameters of the standalone network; null is no limit.
        population: number of architectures evaluated per generation.
        generations: number of generations; 20 x 50 = 1000 evaluations, as in Single Path One-Shot and BN-NAS.
        parents: number of best architectures so far from which children are made.
        crossovers: children per generation that mix two parents; random architectures complete the population.
        mutations: children per generation that change one parent.
        mutation_prob: probability that a mutation redraws a layer.
        seed: seed of the evolution; null takes the run's, or 0.
        allow_identity: whether the result may skip normal layers; a skipped layer scores its layer indicator.
        refine: file of trained accuracies (JSON or CSV) that refine the table before the search, where cross-validation
            says that this gains; null searches the table as it is.
    """

    method: Literal["auto", "exact", "evolution"] = "auto"
    top_k: int = 5
    max_macs: float | None = None
    max_params: float | None = None
    population: int = 50
    generations: int = 20
    parents: int = 10
    crossovers: int = 25
    mutations: int = 25
    mutation_prob: float = 0.1
    seed: int | None = None
    allow_identity: bool = False
    refine: str | None = None

    def __post_init__(self) -> None:
        if self.method not in ("auto", "exact", "evolution"):
            raise ValueError(f"method must be 'auto', 'exact' or 'evolution', got {self.method!r}")
        for name in ("top_k", "population", "generations", "parents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.crossovers, self.mutations) < 0 or self.crossovers + self.mutations > self.population:
            raise ValueError(
                "crossovers and mutations must not be negative, and their sum must be at most "
                f"population={self.population}, got {self.crossovers} and {self.mutations}"
            )
        if not 0 <= self.mutation_prob <= 1:
            raise ValueError(f"mutation_prob must be in [0, 1], got {self.mutation_prob}")
        self.limits  # noqa: B018  refuses impossible limits now instead of when the search starts

    @property
    def limits(self) -> Limits:
        """The limits as one object."""
        return Limits(self.max_macs, self.max_params)
