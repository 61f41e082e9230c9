"""Settings of the score stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nasfast.config import ConfigBase
from nasfast.indicators.scores import get_score
from nasfast.train.supernet import METHODS


@dataclass(frozen=True)
class ScoreConfig(ConfigBase):
    """How architectures are scored; null takes the method's preset.

    Attributes:
        name: of a score: `path_loss`, `gamma`, ...; docs/ranking.md lists them.
        distill: make a table of a score of paths, which the exact search takes; otherwise the search by evolution asks
            for it architecture by architecture.
        structure: weight of the baseline `sqrt_size` beside any score, both in units of standard deviations; 0 leaves
            the score alone, in its own units.
        paths: sampled paths; null takes 300, or more for a space of many candidates.
        images: that paths are scored on.
    """

    name: str | None = None
    distill: bool | None = None
    structure: float | None = None
    paths: int | None = None
    images: int = 1000

    def __post_init__(self) -> None:
        if self.name is not None:
            get_score(self.name)
        if self.structure is not None and not 0 <= self.structure < math.inf:
            raise ValueError(f"structure must not be negative, got {self.structure}")
        if (self.paths is not None and self.paths < 1) or self.images < 2:
            raise ValueError(f"paths must be at least 1 and images at least 2, got {self.paths} and {self.images}")

    def resolved(self, method: str) -> ScoreConfig:
        """Name, distill and structure made explicit."""
        preset = METHODS[method]
        names = ("distill", "structure")
        chosen = {name: getattr(preset, name) for name in names if getattr(self, name) is None}
        return self.replace(name=self.name or preset.score, **chosen)

    @property
    def gives_table(self) -> bool:
        """Whether a resolved config makes a table, so that the exact search applies."""
        return get_score(self.name).additive or self.distill
