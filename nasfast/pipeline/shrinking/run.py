"""A run of `nasfast shrink`: its settings, and its directory, locked. No torch.

`ShrinkRun.open` locks the directory and compares config.yaml where a run goes on; `shrinking` has the stages.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nasfast.config import ConfigBase, ConfigError, Number, load_yaml, marked, merge, to_number
from nasfast.pipeline.run import refuse_changes
from nasfast.runtime.files import CheckpointError, write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.settings import CONFIG_FILE, LIMITS, MACHINE, RESUMED, DataConfig, check_common, check_counts

_LOG = logging.getLogger(__name__)

SIZE_STEP = 16
"""Sides of images that are searched are multiples of it, before those of a large stride are raised; none is smaller."""

# Powers of the limit, as a share of the full network's cost, by which the side is multiplied. Costs grow with the
# square of the side: with the first, the side makes a third of the cut, and widths and depth two thirds
# (docs/shrink.md); with the last, the side makes all of it.
_FIRST, _LAST = 1 / 6, 1 / 2


@dataclass(frozen=True)
class ShrinkConfig(ConfigBase):
    """All settings of `nasfast shrink`; the resolved form is saved as config.yaml in the run directory.

    Attributes:
        out: run directory, the folder that the command writes.
        model: the network: `torchvision:NAME`, `timm:NAME`, `FILE.py:FUNCTION`, which returns it, or the folder of a
            network that nasfast trained, as RUN/retrain/best.
        weights: file of its state dict (.pth or .safetensors); null takes the published weights of torchvision and
            timm, which may be downloaded, what the function returns, or those of the folder.
        peer: another network, named as `model`, that is adapted and measured beside the result; null is none.
        data: the images and how they are fed; `data.mean` and `data.std` are those of the network where it has some.
        resolution: height and width of the images in pixels; null takes the network's own.
        sizes: heights and widths that are searched; empty takes one by the limits.
        max_macs: largest MACs per image, or as a percentage of the full network's, as in 50%; null is no limit.
        max_params: largest number of parameters, or as a percentage; null is no limit.
        max_latency_ms: largest latency in ms, or as a percentage; null is no limit.
        latency_device: what is timed: `onnx` (onnxruntime), `cpu` or `cuda` (PyTorch).
        latency_dtype: what is timed runs in `fp32`, or quantised by onnxruntime in `int8`, which is fast on processors
            with instructions for 8 bits.
        latency_threads: number of CPU threads of what is timed.
        epochs: epochs of adaptation of each network after the cut. Half of them have views of their own, which then
            come again.
        teacher_epochs: epochs of adaptation of the full network, at each size.
        finetune: what trains in the result: `affine` is scale and shift of BatchNorms and the classifier, as in all
            networks; with `all`, all weights of a copy train after that, too.
        finetune_epochs: epochs in which all weights train.
        finetune_lr: highest learning rate of all weights.
        images: most training images that are kept in memory and used.
        measure_images: training images, without labels, that channels are measured with.
        score_images: those of them that candidates are scored with.
        held_out: other training images on which whole networks are compared by the search, at most a quarter of all.
        top_k: networks that each round of the search measures at each size.
        rounds: most rounds of the search at each size, unless none has a network within the limit as measured.
        comparison: whether the result is compared with other networks of equal cost, which are adapted, too.
        random_networks: number of random allocations in the comparison.
        export: whether to write the result as ONNX and as PyTorch's program.
        int8: whether to write it in 8-bit integers, too, by onnxruntime, and to compare with the full network in them.
        seed: seed of what is drawn.
        threads: number of CPU threads of every stage, besides one that prepares images; 0 takes torch's choice.
            Bit-identical repeats need the same.
    """

    out: str = marked(RESUMED, "runs/small")
    model: str | None = None
    weights: str | None = None
    peer: str | None = marked(RESUMED, None)
    data: DataConfig = field(default=DataConfig(batch_size=32, loader="torchvision", workers=0))
    resolution: int | None = None
    sizes: tuple[int, ...] = marked(RESUMED, ())
    max_macs: float | Number | str | None = marked(RESUMED, None)
    max_params: float | Number | str | None = marked(RESUMED, None)
    max_latency_ms: float | str | None = marked(RESUMED, None)
    latency_device: Literal["onnx", "cpu", "cuda"] = "onnx"
    latency_dtype: Literal["fp32", "int8"] = "fp32"
    latency_threads: int = 1
    epochs: int = 4
    teacher_epochs: int = 2
    finetune: Literal["affine", "all"] = marked(RESUMED, "affine")
    finetune_epochs: int = marked(RESUMED, 3)
    finetune_lr: float = marked(RESUMED, 1e-4)
    images: int = 20_000
    measure_images: int = 400
    score_images: int = 128
    held_out: int = 256
    top_k: int = marked(RESUMED, 8)
    rounds: int = marked(RESUMED, 4)
    comparison: bool = marked(RESUMED, True)
    random_networks: int = marked(RESUMED, 1)
    export: bool = marked(RESUMED, True)
    int8: bool = marked(RESUMED, True)
    seed: int = 0
    threads: int = marked(MACHINE, 0)

    def _check_values(self) -> None:
        check_common(self.threads, self.seed)
        names = "epochs teacher_epochs finetune_epochs images measure_images score_images held_out top_k rounds".split()
        check_counts(**{name: getattr(self, name) for name in (*names, "latency_threads")})
        if not 0 < self.finetune_lr < math.inf:
            raise ValueError(f"finetune_lr must be positive, got {self.finetune_lr}")
        if self.random_networks < 0:
            raise ValueError(f"random_networks must not be negative, got {self.random_networks}")
        if self.resolution is not None and self.resolution < SIZE_STEP:
            raise ValueError(f"resolution must be at least {SIZE_STEP} pixels, got {self.resolution}")
        if self.sizes and min(self.sizes) < SIZE_STEP:
            raise ValueError(f"sizes must be at least {SIZE_STEP} pixels, got {self.sizes}")
        if self.latency_dtype == "int8" and self.latency_device != "onnx":
            raise ValueError(
                f"latency_dtype int8 is onnxruntime's: give latency_device onnx, got {self.latency_device}"
            )
        for name in LIMITS:
            if (text := getattr(self, name)) is not None:
                Bound.read(name, text)

    @property
    def bounds(self) -> dict[str, Bound]:
        """The limits that are not null, by the name of their setting."""
        return {name: Bound.read(name, value) for name in LIMITS if (value := getattr(self, name)) is not None}

    def check_begins(self) -> None:
        """Refuse what a run cannot begin with, before torch is imported."""
        if self.model is None:
            raise ConfigError(
                "model is not set: give the network, as --model torchvision:mobilenet_v2, timm:mobilenetv2_100, "
                "FILE.py:FUNCTION or RUN/retrain/best"
            )
        for name in filter(None, (self.model, self.peer)):
            parse_model_name(name)
        if not self.bounds:
            raise ConfigError("no limit is set: give one, as --max_latency_ms 8, --max_macs 50% or --max_params 2M")
        if self.weights is not None and not Path(self.weights).is_file():
            raise ConfigError(f"weights {self.weights} is no file: give a state dict as .pth or .safetensors")
        self.data.check_paths()


@dataclass(frozen=True)
class Bound:
    """A limit: a number, or a share of the full network's cost."""

    value: float
    share: bool

    @classmethod
    def read(cls, name: str, value: float | str) -> Bound:
        """The limit that a setting of this name gives; ValueError says what is allowed."""
        number = math.nan
        share = isinstance(value, str) and value.strip().endswith("%")
        with contextlib.suppress(ValueError):
            number = float(value.strip()[:-1]) / 100 if share and isinstance(value, str) else to_number(value)
        if not 0 < number < math.inf or (share and number > 1):
            raise ValueError(f"{name} must be a positive number or a percentage of at most 100%, as 50%, got {value!r}")
        return cls(number, share)

    def absolute(self, full: float) -> float:
        """The limit where the full network has this cost."""
        return self.value * full if self.share else self.value


def parse_model_name(name: str) -> tuple[str, str]:
    """Where a network comes from, `torchvision`, `timm`, a Python file or `folder`, and its name there."""
    if Path(name).is_dir():
        return "folder", name
    match = re.fullmatch(r"(torchvision|timm|.+\.py):(.+)", name)
    if match is None:
        raise ConfigError(
            f"model {name!r} names no network: give torchvision:NAME, timm:NAME, FILE.py:FUNCTION of a function "
            "without arguments that returns it, or the folder of a network that nasfast trained"
        )
    if match[1].endswith(".py") and not Path(match[1]).is_file():
        raise ConfigError(f"model {name!r}: there is no file {match[1]}: give its path")
    return match[1], match[2]


def choose_sizes(resolution: int, share: float, stride: int = 1) -> tuple[int, ...]:
    """Sides of images for a limit that is this share of the full network's cost: the one to search, and then smaller
    ones, to take where no network meets the limit at it.

    A multiple of a large stride is raised by a quarter of it, which gives the smallest maps a pixel more: at half the
    milliseconds EfficientNet-Lite0 is 1.4 points better with 132 or 136 pixels than with 128 (docs/shrink.md).

    Args:
        resolution: side of the full network's images.
        share: of its cost.
        stride: pixels of the image for a pixel of the network's smallest maps.
    """
    first, last = (max(1, round(resolution * share**power / SIZE_STEP)) for power in (_FIRST, _LAST))
    sides = [SIZE_STEP * number for number in range(first, last - 1, -1)]
    if stride > SIZE_STEP:
        sides = [side + stride // 4 if side % stride == 0 else side for side in sides]
    return tuple(min(side, resolution) for side in sides)


@dataclass(frozen=True)
class ShrinkRun:
    """The settings and the directory of a run; `open` gives the one that stages write, `look` one to read."""

    cfg: ShrinkConfig
    is_open: bool = False

    @property
    def dir(self) -> Path:
        """The run directory."""
        return Path(self.cfg.out)

    @classmethod
    @contextlib.contextmanager
    def open(cls, cfg: ShrinkConfig, *, resume: bool = False) -> Iterator[ShrinkRun]:
        """Within this block, the directory is locked; a config.yaml in it has these settings but for what may change.

        Raises:
            FileExistsError: the directory has a run, and `resume` is false.
            CheckpointError: it has one with other settings.
            RunDirectoryError: another process has the lock, or the directory cannot be written.
        """
        run = cls(cfg, is_open=True)
        path = run.dir / CONFIG_FILE
        with run_lock(run.dir):
            if path.exists():
                if not resume:
                    raise FileExistsError(f"{run.dir} has a run already: add --resume, or choose another --out")
                run._check_settings(path)
            elif resume:
                _LOG.warning("nothing to resume in %s: starting from the beginning", run.dir)
            yield run

    @classmethod
    def look(cls, out: str | Path) -> ShrinkRun:
        """The run in a directory."""
        return cls(ShrinkConfig.load(Path(out) / CONFIG_FILE).replace(out=str(out)))

    def _check_settings(self, path: Path) -> None:
        try:
            before = ShrinkConfig.load(path)
        except ConfigError as error:
            raise CheckpointError(f"{path} is not that of a run of `nasfast shrink`: choose another --out") from error
        (saved, _), (new, _) = before.parted(MACHINE, RESUMED), self.cfg.parted(MACHINE, RESUMED)
        refuse_changes(path, saved, new)

    def network(self, name: str) -> Path:
        """The folder of a network."""
        return self.dir / "networks" / name

    def begin_writing(self) -> None:
        """Write config.yaml before a stage writes; a run that is refused leaves no directory.

        Raises:
            RuntimeError: nothing keeps other processes out of the directory.
        """
        if not self.is_open:
            raise RuntimeError(f"a stage writes to {self.dir}: open the run, `with ShrinkRun.open(cfg) as run:`")
        text, path = self.cfg.to_yaml().encode(), self.dir / CONFIG_FILE
        if not path.exists() or path.read_bytes() != text:
            write_atomic(path, text)


def saved_settings(out: str | Path) -> dict[str, Any]:
    """The settings in the directory of a run that goes on; none where there is no run."""
    path = Path(out) / CONFIG_FILE
    return load_yaml(path) if path.exists() else {}


def is_shrink_run(out: str | Path) -> bool:
    """Whether a directory is of `nasfast shrink`: its settings name a pretrained network."""
    try:
        return "model" in saved_settings(out)
    except (ConfigError, OSError):
        return False


def settings_of(values: dict[str, Any], *, resume: bool) -> ShrinkConfig:
    """The settings that files and flags give, over those of the run that goes on."""
    saved = saved_settings(values.get("out", ShrinkConfig.out)) if resume else {}
    if any(name in values for name in LIMITS):  # limits of the command line stand alone
        saved = {name: value for name, value in saved.items() if name not in LIMITS}
    return ShrinkConfig.from_dict(merge(saved, values))
