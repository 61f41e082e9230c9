"""Settings of the random networks whose moments are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase

Padding = Literal["periodic", "shifted", "zero", "reflective"]
Act = Literal["relu", "relu6", "tanh", "identity"]
Norm = Literal["none", "batch", "layer"]


@dataclass(frozen=True)
class NetConfig(ConfigBase):
    """A random network, and which of its layers are measured.

    Attributes:
        norm: normalisation before the activation: `none` (vanilla), `batch`, `layer`.
        residual: feed-forward units per residual (H); 0 for a feed-forward network.
        act: activation: `relu`, `relu6`, `tanh`, `identity`.
        kernel: kernel size of the convolutions; 0 for fully connected layers.
        width: number of channels.
        depth: number of layers, or of residuals in a residual network.
        batch: number of samples, B.
        every: number of layers between records.
        sigma_w, sigma_b: Var(omega) = sigma_w^2 / fan-in and Var(beta) = sigma_b^2; sigma_w null takes sqrt(2) for ReLU
            and ReLU6, otherwise 1.
        padding: `periodic`, `zero`, `reflective`, or `shifted`, which is periodic with the whole border above and left,
            as in the paper's code. It shifts every output by a pixel, which matters only to residual networks, because
            their skip connections are not shifted.
        eps: epsilon of the normalisations.
        dtype: dtype of signal and noise; moments are float64.
    """

    norm: Norm = "none"
    residual: int = 0
    act: Act = "relu"
    kernel: int = 0
    width: int = 128
    depth: int = 200
    batch: int = 64
    every: int = 4
    sigma_w: float | None = None
    sigma_b: float = 0.0
    padding: Padding = "periodic"
    eps: float = 1e-3
    dtype: Literal["float32", "float64"] = "float32"

    def _check_values(self) -> None:
        for name, least in (("width", 1), ("depth", 1), ("batch", 2), ("every", 1), ("residual", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.kernel < 0 or (self.kernel and self.kernel % 2 == 0):
            raise ValueError(f"kernel must be odd, or 0 for fully connected, got {self.kernel}")
        if self.every > self.depth:
            raise ValueError(f"every must be at most depth, got {self.every} and {self.depth}")

    @property
    def records(self) -> list[int]:
        """The layers that are measured, counted from 1."""
        return list(range(self.every, self.depth + 1, self.every))

    @property
    def std(self) -> float:
        """sigma_w, also where it is null."""
        if self.sigma_w is not None:
            return self.sigma_w
        return math.sqrt(2) if self.act in ("relu", "relu6") else 1.0
