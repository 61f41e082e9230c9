"""Settings of the measurements of one training step, and of latencies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase, ConfigError
from nasfast.settings import check_common, check_device
from nasfast.spaces import Arch, SearchSpace, get_space, mean_path, parse_arch
from nasfast.spaces.cost import output_size


@dataclass(frozen=True)
class StepTimesConfig(ConfigBase):
    """Which training step `step` measures, and how often.

    Attributes:
        space: a built-in name (`nasfast spaces` lists them), or the path of a YAML file.
        path: the path through the supernet, such as "0 3 4 1"; null takes `nasfast.spaces.mean_path`.
        batch: images per step.
        resolution: height and width of the images in pixels; null takes the space's.
        dtype: `fp32`, `bf16` autocast, or `auto`: what `precision: auto` of a run takes on the device.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: number of CPU threads; 0 takes torch's choice.
        seed: seed of the weights and images.
        rounds: timed steps per row, after two that are not timed.
    """

    space: str = "mobilenet_v2"
    path: str | None = None
    batch: int = 32
    resolution: int | None = None
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    device: str = "auto"
    threads: int = 0
    seed: int = 0
    rounds: int = 10

    def _check_values(self) -> None:
        check_common(self.threads, self.seed, batch=self.batch, rounds=self.rounds)
        check_device(self.device)

    def resolve(self) -> tuple[SearchSpace, Arch]:
        """The space and the path."""
        space = get_space(self.space, resolution=self.resolution)
        last = [*space.stem_layers, *space.layers, *space.head_layers][-1]
        side = output_size(last.size, last.stride)
        if self.batch * side**2 < 2:
            raise ConfigError(
                f"batch {self.batch} of {space.resolution} x {space.resolution} images gives the last BatchNorm one "
                "value per channel, and it needs two: raise batch or resolution"
            )
        return space, mean_path(space) if self.path is None else space.check(parse_arch(self.path))


@dataclass(frozen=True)
class LatencyConfig(ConfigBase):
    """Which latencies are measured, and how.

    Attributes:
        space: a layer-wise space: `mobilenet_v2`, ..., or the path of a YAML file, such as the space.yaml of a run.
        num_classes: outputs of the classifier; null takes the space's.
        resolution: height and width of the images in pixels; null takes the space's.
        device: `cpu`, `cuda` or `cuda:N` (PyTorch), or `onnx` (onnxruntime).
        compiled: whether PyTorch runs the networks through `torch.compile`.
        provider: execution provider of onnxruntime.
        dtype: `fp32` or `bf16`, the type of weights and images, or `auto`: what `precision: auto` of a run takes on the
            device. onnxruntime runs fp32, or `int8`, to which it quantises the network.
        batch: images per run.
        threads: number of CPU threads; 0 takes the runtime's choice.
        rounds: timed runs of every candidate and network, after two that are not timed.
        calibrate: number of whole networks to which the sums over layers are fitted: the two with fewest and most MACs,
            and random ones. 0 leaves the times of single layers as they are.
        validate: number of other random architectures whose networks are timed and compared with the table.
        clock: `wall`, or `cpu`, which is the processor time of one thread: on a busy machine it leaves out the time in
            which other programs ran.
        seed: seed of weights, images and random architectures.
    """

    space: str = "mobilenet_v2"
    num_classes: int | None = None
    resolution: int | None = None
    device: str = "cpu"
    compiled: bool = False
    provider: str = "CPUExecutionProvider"
    dtype: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    batch: int = 1
    threads: int = 0
    rounds: int = 30
    calibrate: int = 8
    validate: int = 0
    clock: Literal["wall", "cpu"] = "wall"
    seed: int = 0

    def _check_values(self) -> None:
        check_common(self.threads, self.seed, batch=self.batch, rounds=self.rounds)
        if not re.fullmatch(r"cpu|cuda(:\d+)?|onnx", self.device):
            raise ValueError(
                f"device must be cpu, cuda, cuda:N or onnx, because a table is of one device; got {self.device!r}"
            )
        if self.device == "onnx" and (self.compiled or self.dtype == "bf16"):
            raise ValueError("device='onnx' runs fp32 or int8 files of onnxruntime: leave out compiled and bf16")
        if self.device != "onnx" and self.dtype == "int8":
            raise ValueError(f"dtype='int8' is onnxruntime's: give device='onnx', got {self.device!r}")
        if self.calibrate != 0 and self.calibrate < 4:
            raise ValueError(f"calibrate must be 0 or at least 4, because two numbers are fitted, got {self.calibrate}")
        if self.validate < 0:
            raise ValueError(f"validate must not be negative, got {self.validate}")
        if self.clock == "cpu" and (self.threads != 1 or self.device.startswith("cuda")):
            raise ValueError(
                f"clock='cpu' needs threads=1 and a CPU, got threads={self.threads} and device={self.device!r}: the "
                "processor time of several threads is not a latency"
            )

    def resolve(self) -> SearchSpace:
        """The space."""
        return get_space(self.space, num_classes=self.num_classes, resolution=self.resolution)
