"""What the settings of several studies have in common; without torch, so that help does not wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from nasfast.config import ConfigBase
from nasfast.settings import check_common


@dataclass(frozen=True)
class StudyConfig(ConfigBase):
    """What every study takes.

    Attributes:
        threads: CPU threads, 0 for torch's choice.
        seed: seed of weights, inputs and whatever else is random.
    """

    threads: int = 0
    seed: int = 0

    def _check_values(self) -> None:
        check_common(self.threads, self.seed)


@dataclass(frozen=True)
class SubjectConfig(StudyConfig):
    """A study of a search space, or of a module of the user.

    Attributes:
        space: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
        module: instead of a space: `package.module:factory`, a function without arguments that returns an nn.Module, or
            an nn.Module.
        input: shape of one sample of the module, such as "3,224,224".
        resolution: height and width of the images of a space in pixels; null takes 64, or the space's if that is
            smaller.
    """

    space: str = "mobilenet_v2"
    module: str | None = None
    input: str = "3,224,224"
    resolution: int | None = None

    def _check_values(self) -> None:
        super()._check_values()
        if self.resolution is not None and self.resolution < 1:
            raise ValueError(f"resolution must be positive, got {self.resolution}")
