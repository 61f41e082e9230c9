"""The settings of the isometry study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase
from nasfast.settings import check_common
from nasfast.spaces import SearchSpace, get_space

# Larger inputs change nothing but the borders, and cost in proportion to their area.
_DEFAULT_RESOLUTION = 64


@dataclass(frozen=True)
class Effort:
    """How much to spend on one candidate: arguments of `isometry`."""

    samples: int = 4
    probes: int = 32
    lanczos_steps: int = 8
    seed: int = 0


@dataclass(frozen=True)
class IsometryConfig(ConfigBase):
    """What `isometry` measures.

    Attributes:
        space: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
        module: instead of a space: `package.module:factory`, a function without arguments that returns an nn.Module, or
            an nn.Module.
        input: shape of one sample of the module, such as "3,224,224".
        resolution: height and width of the images of a space in pixels; null takes 64, or the space's if that is
            smaller.
        batch: number of samples, which give BatchNorms their statistics and fairness its pairs.
        samples: number of Jacobians averaged per candidate.
        probes: number of random vectors per candidate if its Jacobian is too large to be formed.
        lanczos_steps: number of Lanczos steps for the singular value densities from probes.
        inputs: inputs of the candidates: `white` noise, or white images `propagated` along the mean path.
        paths: number of random paths that are compared by depth.
        threads: CPU threads, 0 for torch's choice.
        seed: seed of weights, inputs, probes and paths.
    """

    space: str = "mobilenet_v2"
    module: str | None = None
    input: str = "3,224,224"
    resolution: int | None = None
    batch: int = 64
    samples: int = 4
    probes: int = 32
    lanczos_steps: int = 8
    inputs: Literal["white", "propagated"] = "white"
    paths: int = 64
    threads: int = 0
    seed: int = 0

    def _check_values(self) -> None:
        for name, least in (("batch", 4), ("samples", 1), ("probes", 2), ("lanczos_steps", 1), ("paths", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.samples > self.batch:
            raise ValueError(f"samples must be at most batch, got {self.samples} and {self.batch}")
        check_common(self.threads, self.seed)
        if self.resolution is not None and self.resolution < 1:
            raise ValueError(f"resolution must be positive, got {self.resolution}")

    def resolve(self) -> SearchSpace:
        """The space at its resolution.

        Raises:
            ConfigError: unknown space, unreadable YAML, or layers with activations of their own.
        """
        space = get_space(self.space)
        space.require_one_activation("the study of isometry")
        return get_space(self.space, resolution=self.resolution or min(_DEFAULT_RESOLUTION, space.resolution))

    @property
    def effort(self) -> Effort:
        """How much to spend on one candidate."""
        return Effort(self.samples, self.probes, self.lanczos_steps, self.seed)
