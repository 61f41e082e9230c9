"""The settings of the isometry study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nasfast.research.studies.config import SubjectConfig


@dataclass(frozen=True)
class IsometryConfig(SubjectConfig):
    """What `isometry` measures.

    Attributes:
        batch: number of samples, which give BatchNorms their statistics and fairness its pairs.
        samples: number of Jacobians averaged per candidate.
        probes: number of random vectors per candidate if its Jacobian is too large to be formed.
        lanczos_steps: number of Lanczos steps for the singular value densities from probes.
        inputs: inputs of the candidates: `white` noise, or white images `propagated` along the mean path.
        paths: number of random paths that are compared by depth.
    """

    batch: int = 64
    samples: int = 4
    probes: int = 32
    lanczos_steps: int = 8
    inputs: Literal["white", "propagated"] = "white"
    paths: int = 64

    def _check_values(self) -> None:
        super()._check_values()
        for name, least in (("batch", 4), ("samples", 1), ("probes", 2), ("lanczos_steps", 1), ("paths", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.samples > self.batch:
            raise ValueError(f"samples must be at most batch, got {self.samples} and {self.batch}")

    @property
    def effort(self) -> dict[str, Any]:
        """How much to spend on one candidate: arguments of `isometry`."""
        return {name: getattr(self, name) for name in ("samples", "probes", "lanczos_steps", "seed")}
