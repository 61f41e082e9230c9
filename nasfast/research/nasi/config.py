"""Settings of a search by NASI."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase

Constraint = Literal["fixed", "adaptive", "quantile"]
Gates = Literal["straight_through", "soft"]
Visible = Literal["true", "random"]


@dataclass(frozen=True)
class NasiConfig(ConfigBase):
    """The settings of a search.

    T and mu are the paper's for DARTS. nu is a quantile, because the paper's values belong to another scaling of Q.

    Attributes:
        steps: T, the number of sampled architectures; each gets a batch of its own.
        mu: weight of the penalty: 0 switches it off, 1 makes R flat above nu, 2 mirrors R at nu.
        constraint: `fixed`: nu is the limit of Q. `adaptive`: the limit starts at nu and is then the mean of nu and of
            the Q so far. `quantile`: the limit is the nu-quantile of Q over the sampled architectures.
        nu: see `constraint`; None means the 0.9 quantile. The other constraints need a value of the size of Q.
        gates: `straight_through`: one operation per edge runs, and the gradients are those of the relaxation. `soft`:
            all operations run and are mixed, which needs the memory of all.
        temperature: temperature of the relaxation.
        xi: length of the step.
        labels: `true`, or `random` ones.
        images: `true`, or `random` ones from N(0, 1).
        seed: seed of gates, random labels and random images.
    """

    steps: int = 100
    mu: float = 2.0
    constraint: Constraint = "quantile"
    nu: float | None = None
    gates: Gates = "straight_through"
    temperature: float = 1.0
    xi: float = 1.0
    labels: Visible = "true"
    images: Visible = "true"
    seed: int = 0

    def _check_values(self) -> None:
        if self.steps < 1 or self.seed < 0:
            raise ValueError(f"steps must be at least 1 and seed not negative, got {self.steps} and {self.seed}")
        for name in ("temperature", "xi"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.nu is None and self.constraint != "quantile":
            raise ValueError(
                f"constraint={self.constraint!r} needs nu, a value of Q: those of a search are in its report"
            )
        if not (0 <= self.mu < math.inf and 0 <= self.limit < math.inf):
            raise ValueError(f"mu and nu must not be negative, got {self.mu} and {self.limit}")
        if self.constraint == "quantile" and self.limit > 1:
            raise ValueError(f"constraint='quantile' takes nu from 0 to 1, got {self.limit}")

    @property
    def limit(self) -> float:
        """nu, or its default."""
        return 0.9 if self.nu is None else self.nu
