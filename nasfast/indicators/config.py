"""Settings of the score stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nasfast.config import ConfigBase
from nasfast.indicators.registry import Score
from nasfast.settings.supernet import METHODS, MethodName

_STRUCTURE = {"isometry": 5.0}
"""Weight of `sqrt_size` beside a score that is not a method's preset, by score: 5 is the 0.2 of `isometry` beside
`sqrt_size`, which was chosen on NAS-Bench-Macro (docs/ranking.md). Other scores stand alone."""


@dataclass(frozen=True)
class ScoreConfig(ConfigBase):
    """How architectures are scored; null takes the method's preset.

    Attributes:
        name: name of a score: `path_loss`, `gamma`, ...; docs/ranking.md lists them.
        distill: whether to fit a table to a score of paths, for the exact search; otherwise the search by evolution
            computes it for each architecture.
        structure: weight of the baseline `sqrt_size`, which is added to the score, both divided by their standard
            deviations; 0 leaves the score in its own unit. Null takes the preset's for the preset's score, 5 for
            `isometry`, and 0 for others.
        paths: number of sampled paths; null takes 300, or more for a space of many candidates.
        images: number of images on which paths are scored.
        table: file of the user's own values by layer and choice, which are the score instead of `name`; docs/latency.md
            has its format.
    """

    name: str | None = None
    distill: bool | None = None
    structure: float | None = None
    paths: int | None = None
    images: int = 1000
    table: str | None = None

    def _check_values(self) -> None:
        if self.name is not None:
            _get_score(self.name)
        if self.structure is not None and not 0 <= self.structure < math.inf:
            raise ValueError(f"structure must not be negative, got {self.structure}")
        if (self.paths is not None and self.paths < 1) or self.images < 2:
            raise ValueError(f"paths must be at least 1 and images at least 2, got {self.paths} and {self.images}")

    def resolved(self, method: MethodName) -> ScoreConfig:
        """The same settings, with name, distill and structure of the method's preset where they are null.

        The preset's weight of structure belongs to the preset's score: another score has its own, or none.
        """
        preset = METHODS[method]
        name = self.name or preset.score
        weight = preset.structure if name == preset.score else _STRUCTURE.get(name, 0.0)
        return self.replace(
            name=name,
            distill=preset.distill if self.distill is None else self.distill,
            structure=weight if self.structure is None else self.structure,
        )

    @property
    def score(self) -> Score:
        """The score of a resolved config.

        Raises:
            ValueError: the config has no name.
        """
        if self.name is None:
            raise ValueError("the name of the score is null: call resolved(method), which takes that of the method")
        return _get_score(self.name)

    @property
    def gives_table(self) -> bool:
        """Whether a resolved config makes a table, which the exact search needs."""
        return self.table is not None or self.score.additive or bool(self.distill)

    @property
    def label(self) -> str:
        """What a table of this score of a resolved config says about its origin."""
        return self.score.name if self.table is None else f"table {self.table}"


def _get_score(name: str) -> Score:
    # imported here, because it imports torch, and help must not wait for that
    from nasfast.indicators.scores import get_score

    return get_score(name)
