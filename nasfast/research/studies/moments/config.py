"""The settings of the moments study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nasfast.research.analysis.moments.config import NetConfig, Padding
from nasfast.research.studies.config import StudyConfig, SubjectConfig
from nasfast.settings import check_common, check_device


@dataclass(frozen=True)
class QuickConfig(StudyConfig):
    """The quick experiment. Its sizes are fixed, because its pass marks belong to them."""


@dataclass(frozen=True)
class FiguresConfig(StudyConfig):
    """The published experiments, figures 2 to 5; the defaults are the paper's but for the number of networks.

    Attributes:
        figures: numbers of the figures to make.
        kernel: kernel size: 0 for fully connected layers, 3 for the paper's convolutions (hours on a CPU).
        width: number of channels in figures 3 to 5.
        batch: number of samples in figures 3 to 5.
        histogram_width: number of channels in figure 2.
        histogram_batch: number of samples in figure 2.
        depth: number of layers; null takes the paper's: 200, and 500 residuals in figure 5. A smaller depth is compared
            as far as it goes.
        every: number of layers between records; null takes a hundredth of the depth (figure 2: a quarter).
        padding: padding of convolutions. `shifted` is that of the paper's code: periodic, with the whole border on one
            side.
        realisations: number of networks in figures 3 to 5.
        histogram_realisations: number of networks in figure 2.
        images: folder with one sub-folder per class, such as CIFAR-10's training images; null takes synthetic inputs.
        reference: folder of the published summaries (`vanilla_fc.npz` and so on) to compare with and draw.
        dtype: type of signal and noise.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

    figures: tuple[int, ...] = (2, 3, 4, 5)
    kernel: int = 0
    width: int = 512
    batch: int = 64
    histogram_width: int = 128
    histogram_batch: int = 1024
    depth: int | None = None
    every: int | None = None
    padding: Padding = "shifted"
    realisations: int = 10
    histogram_realisations: int = 200
    images: str | None = None
    reference: str | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"

    def _check_values(self) -> None:
        check_device(self.device)
        counts = {"realisations": self.realisations, "histogram_realisations": self.histogram_realisations}
        check_common(self.threads, self.seed, **counts)
        if not self.figures or not set(self.figures) <= {2, 3, 4, 5}:
            raise ValueError(f"figures must be some of 2, 3, 4 and 5, got {list(self.figures)}")
        if self.reference is not None and not Path(self.reference).is_dir():
            raise ValueError(f"reference must be a folder of .npz files, got {self.reference!r}")

    def network(self, figure: int) -> NetConfig:
        """The network of a figure."""
        residual = 2 if figure == 5 else 0
        depth = self.depth or (500 if residual else 200)
        # 100 records of a curve, 4 of a histogram
        every = self.every or max(1, depth // (4 if figure == 2 else 100))
        width, batch = (self.histogram_width, self.histogram_batch) if figure == 2 else (self.width, self.batch)
        return NetConfig(
            norm="batch" if figure > 3 else "none",
            residual=residual,
            kernel=self.kernel,
            width=width,
            depth=depth,
            batch=batch,
            every=every,
            padding=self.padding,
            dtype=self.dtype,
        )

    def published(self, figure: int) -> str | None:
        """Name of the published arrays of these settings; None where there are none."""
        kind = "conv" if self.kernel else "fc"
        if self.kernel not in (0, 3):
            return None
        if figure == 2:
            return f"vanilla_histo_{kind}_w{self.histogram_width}"
        if self.width != 512 or (self.batch != 64 and (self.kernel or figure != 4)):
            return None
        name = {3: "vanilla", 4: "bn_ff", 5: "bn_res"}[figure] + f"_{kind}"
        if not self.kernel:
            return f"{name}_b{self.batch}" if figure == 4 else name
        # without skip connections the shift changes nothing
        if self.padding == "shifted" or (self.padding == "periodic" and figure != 5):
            return name
        return f"{name}_{self.padding}pad"


@dataclass(frozen=True)
class ModuleConfig(SubjectConfig):
    """What `moments module` measures.

    Attributes:
        probes: submodules behind which the module is measured, such as "layer1,layer2"; null takes its children.
        batch: number of samples, which give BatchNorms their statistics.
        images: folder with one sub-folder per class; null takes synthetic fields of amplitude 1/f (white noise for
            inputs that are no images).
        paths: number of random paths through a space.
        candidate_paths: number of these paths along which every candidate of every layer is measured.
        draws: number of draws of the noise in a module.
    """

    probes: str | None = None
    batch: int = 32
    images: str | None = None
    paths: int = 16
    candidate_paths: int = 4
    draws: int = 4

    def _check_values(self) -> None:
        super()._check_values()
        check_common(self.threads, self.seed, paths=self.paths, candidate_paths=self.candidate_paths, draws=self.draws)
        if self.batch < 2 or self.paths < 2:
            raise ValueError(f"batch and paths must be at least 2, got {self.batch} and {self.paths}")
        if self.candidate_paths > self.paths:
            raise ValueError(f"candidate_paths must be at most paths, got {self.candidate_paths} and {self.paths}")
