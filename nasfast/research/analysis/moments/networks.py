"""Random networks whose weights are drawn layer by layer and not kept, so that memory does not grow with depth.

The families are those of Labatie 2019, section 2: vanilla (`norm="none"`), normalised feed-forward, and pre-activation
residual networks with `residual` feed-forward units each.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nasfast.research.analysis.moments.config import NetConfig
from nasfast.research.analysis.moments.pairs import (
    Pair,
    act,
    add,
    batch_norm,
    conv,
    energies,
    layer_norm,
    ranks,
    rescale,
    shape,
)
from nasfast.runtime.files import write_atomic

Array = NDArray[np.float64]
Source = Callable[[int, torch.Generator], Tensor]
"""(B, generator) -> raw inputs (B, C, *spatial); the same state of the generator gives the same inputs."""

# Elements of one chunk of realisations; tensors of this size stay in the processor's caches between layers.
_CHUNK_ELEMENTS = 2**20
# Share of the varying part of the signal below which rounding dominates it.
_LOST = {"float32": 1e-10, "float64": 1e-24}
# Lower limit of the deviation that inputs are divided by; a pixel that is equal in all images of a batch has 0.
_MIN_STD = 1e-6


def gaussian(features: int = 192) -> Source:
    """White Gaussian vectors, for fully connected networks."""
    return lambda batch, generator: torch.randn(batch, features, generator=generator)


def fields(channels: int = 3, size: int = 16) -> Source:
    """Random fields whose amplitude falls as 1 / frequency, like that of natural images."""
    steps = torch.fft.fftfreq(size) * size
    frequency = torch.hypot(steps[:, None], steps[None, : size // 2 + 1]).clamp_min(1)

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        white = torch.randn(batch, channels, size, size, generator=generator)
        return torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(size, size))

    return draw


def images(pixels: Tensor, *, flat: bool = False) -> Source:
    """Images drawn without replacement.

    Args:
        pixels: (count, C, H, W), uint8 or floating.
        flat: whether each pixel and channel is one feature, for fully connected networks.
    """

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        if batch > len(pixels):
            raise ValueError(f"moments: a batch of {batch} needs {batch} images, got {len(pixels)}: lower the batch")
        batch_pixels = pixels[torch.randperm(len(pixels), generator=generator)[:batch]].float()
        return batch_pixels.flatten(1) if flat else batch_pixels

    return draw


def standardise(x: Tensor) -> Tensor:
    """Scale (B, C, *spatial) to mean 0 and standard deviation 1 per channel, over samples and positions."""
    over = (0, *range(2, x.ndim))
    std, mean = torch.std_mean(x, over, correction=0, keepdim=True)
    return (x - mean) / std.clamp_min(_MIN_STD)


class Draws:
    """Random numbers of several realisations; each has its own streams for data, noise and weights.

    Args:
        seed: seed of the experiment.
        realisations: numbers of the realisations; a network does not depend on which others are drawn with it.
        dtype: dtype of the results; draws are always float32, so that dtypes can be compared.
        device: device of the results; draws are made on the CPU, so that devices can be compared.
    """

    def __init__(
        self, seed: int, realisations: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        states = [np.random.SeedSequence((seed, r)).generate_state(3, np.uint64) for r in realisations]
        data, noise, weights = zip(*([int(s) >> 1 for s in state] for state in states), strict=True)
        self.data, self.noise, self.weights = (
            [torch.Generator().manual_seed(s) for s in seeds] for seeds in (data, noise, weights)
        )
        self.dtype, self.device = dtype, device

    def inputs(self, source: Source, batch: int) -> Pair:
        """Standardised inputs and white noise."""
        x = torch.stack([standardise(source(batch, g)) for g in self.data], 1)
        dx = torch.stack([torch.randn(x[:, r].shape, generator=g) for r, g in enumerate(self.noise)], 1)
        return Pair.of(x.to(self.device, self.dtype), dx.to(self.device, self.dtype))

    def normal(self, *size: int, std: float = 1.0) -> Tensor:
        """(R, *size) numbers from N(0, std^2)."""
        values = torch.empty(len(self.weights), *size)
        for row, generator in zip(values, self.weights, strict=True):
            row.normal_(0, std, generator=generator)
        return values.to(self.device, self.dtype)

    def weight(self, cfg: NetConfig, channels: int, std: float) -> Tensor:
        """(R, width, channels, *kernel) numbers from N(0, std^2 / fan-in)."""
        kernel = (cfg.kernel,) * (2 if cfg.kernel else 0)
        return self.normal(cfg.width, channels, *kernel, std=std / (channels * max(1, cfg.kernel) ** 2) ** 0.5)

    def layer(self, cfg: NetConfig) -> tuple[Tensor, Tensor | None]:
        """Weight (R, width, width, *kernel) and bias (R, width) of a layer."""
        # the bias is drawn first
        bias = self.normal(cfg.width, std=cfg.sigma_b) if cfg.sigma_b else None
        return self.weight(cfg, cfg.width, cfg.std), bias


def propagate(cfg: NetConfig, draws: Draws, pair: Pair) -> Iterator[dict[str, Pair]]:
    """Yield the pairs at the named places of each layer of a network; only the current layer is in memory.

    A feed-forward layer has `input` x^{l-1}, `conv` y^l, `norm` z^l (y^l without a normalisation) and `act` x^l. A
    residual has `input` y^{l,0}; `norm`, `act` and `unit` (y^{l,1}) of the first unit; `branch` y^{l,H}; `sum` y^l.
    The given pair is the input of the linear layer before the network.
    """
    stride = 2 if cfg.kernel else 1
    first = draws.weight(cfg, pair.x.shape[2], std=1.0)
    pair = rescale(conv(pair, first, stride=stride, padding=cfg.padding))

    def normed(y: Pair) -> Pair:
        if cfg.norm == "none":
            return y
        return (batch_norm if cfg.norm == "batch" else layer_norm)(y, cfg.eps)

    def linear(x: Pair) -> Pair:
        return conv(x, *draws.layer(cfg), padding=cfg.padding)

    for _ in range(cfg.depth):
        places = {"input": pair}
        if cfg.residual:
            for h in range(cfg.residual):
                z = normed(pair)
                x = act(z, cfg.act)
                pair = linear(x)
                if h == 0:
                    places |= {"norm": z, "act": x, "unit": pair}
            places |= {"branch": pair, "sum": add(places["input"], pair)}
            # both branches must have the same scale, so it changes only here
            pair = rescale(places["sum"])
            places["sum"] = pair
        else:
            places["conv"] = linear(pair)
            places["norm"] = normed(places["conv"])
            pair = rescale(act(places["norm"], cfg.act))
            places["act"] = pair
        yield places


_LAYER_STATISTICS: dict[str, tuple[Callable[[Pair], dict[str, Tensor]], ...]]
_LAYER_STATISTICS = {"input": (energies,), "norm": (energies, shape), "act": (energies, ranks)}
_RESIDUAL_STATISTICS = {
    **_LAYER_STATISTICS,
    "act": (ranks,),
    "unit": (energies,),
    "branch": (energies,),
    "sum": (energies, ranks),
}
"""The statistics that are taken at each place."""


@dataclass(frozen=True)
class Run:
    """Moments of several realisations of a network.

    Attributes:
        cfg: the network.
        values: statistic_place -> (realisations, records), such as `log_mu2_signal_act`; nan from the record on where
            a signal is lost in rounding. `log_ratio_0` (realisations, 1) is log mu_2(dx) - log mu_2(x) of the inputs.
        seconds: computing time, without realisations that were read from a file.
    """

    cfg: NetConfig
    values: dict[str, Array]
    seconds: float = 0.0

    @property
    def depth(self) -> Array:
        """The measured layers."""
        return np.array(self.cfg.records, dtype=float)

    @property
    def realisations(self) -> int:
        """Number of realisations."""
        return len(self.values["log_ratio_0"])

    def log_chi(self, place: str) -> Array:
        """log chi at a place: the normalised sensitivity relative to the inputs; times 20 / ln 10, the loss in dB."""
        ratio = self.values[f"log_mu2_noise_{place}"] - self.values[f"log_mu2_signal_{place}"]
        return (ratio - self.values["log_ratio_0"]) / 2

    def curves(self) -> dict[str, Array]:
        """The curves of the paper's figures, (realisations, records) each.

        `inc` is the geometric increment of chi of a layer, or of the first unit of a residual. `inc_bn` and `inc_phi`
        are its parts before and after the normalised signal. `logchi` is log chi of the layer's output.
        """
        end, out = ("unit", "sum") if self.cfg.residual else ("act", "act")
        before, middle, after = (self.log_chi(place) for place in ("input", "norm", end))
        curves = {"inc": np.exp(after - before), "logchi": self.log_chi(out)}
        if self.cfg.norm != "none":
            curves |= {"inc_bn": np.exp(middle - before), "inc_phi": np.exp(after - middle)}
        if self.cfg.residual:
            curves["inc_residual"] = np.exp(self.log_chi("sum") - before)
        names = {"reff_signal": "reff_signal_act", "reff_noise": "reff_noise_act", "mu4_z": "mu4_signal_norm"}
        names |= {"nu1abs_z": "nu1_abs_signal_norm", "pseudo_linear": "pseudo_linear_norm"}
        names |= {"lognu2": f"log_nu2_signal_{out}", "logmu2_noise": f"log_mu2_noise_{out}"}
        curves |= {name: self.values[key] for name, key in names.items()}
        curves["variance_share"] = np.exp(self.values[f"log_mu2_signal_{out}"] - curves["lognu2"])
        return curves


@torch.inference_mode()
def run_chunk(
    cfg: NetConfig, source: Source, realisations: Sequence[int], *, seed: int = 0, device: str = "cpu"
) -> dict[str, Array]:
    """`Run.values` of these realisations, computed together."""
    draws = Draws(seed, realisations, getattr(torch, cfg.dtype), device)
    pair = draws.inputs(source, cfg.batch)
    start = energies(pair)
    ratio = start["log_mu2_noise"] - start["log_mu2_signal"]
    values: dict[str, Array] = {"log_ratio_0": ratio[:, None].cpu().numpy()}
    lost = np.zeros(len(realisations), dtype=bool)
    for layer, places in enumerate(propagate(cfg, draws, pair), 1):
        if layer % cfg.every:
            continue
        statistics = {
            f"{name}_{place}": statistic.cpu().numpy()
            for place, functions in (_RESIDUAL_STATISTICS if cfg.residual else _LAYER_STATISTICS).items()
            for function in functions
            for name, statistic in function(places[place]).items()
        }
        out = "sum" if cfg.residual else "act"
        with np.errstate(invalid="ignore"):
            share = statistics[f"log_mu2_signal_{out}"] - statistics[f"log_nu2_signal_{out}"]
        # the condition is written so that nan counts as lost
        lost |= ~(share > np.log(_LOST[cfg.dtype]))
        for key, statistic in statistics.items():
            curve = values.setdefault(key, np.full((len(realisations), len(cfg.records)), np.nan))
            curve[~lost, layer // cfg.every - 1] = statistic[~lost]
        if lost.all():
            break
    return values


def read_arrays(file: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name.

    Raises:
        OSError: it is missing or may not be read.
        ValueError: it is damaged or no .npz file.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (FileNotFoundError, PermissionError):
        raise
    # numpy's own words for what is no zip file advise to unpickle it, and zipfile raises much where bytes changed
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} is damaged or no .npz file: remove or replace it") from error


def chunk_size(cfg: NetConfig, source: Source) -> int:
    """Number of realisations that are computed together."""
    x = source(2, torch.Generator().manual_seed(0))
    # the layer before the network has stride 2
    positions = (-(-x.shape[-1] // 2)) ** 2 if cfg.kernel else 1
    return max(1, _CHUNK_ELEMENTS // (2 * cfg.batch * cfg.width * positions))


def run(
    cfg: NetConfig,
    source: Source,
    *,
    realisations: int,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Run:
    """Propagate signal and noise through random networks.

    Args:
        cfg: the networks.
        source: gives the inputs.
        realisations: number of networks, each with its own weights, inputs and noise.
        seed: seed of all random numbers.
        device: a torch device; random numbers always come from the CPU.
        folder: where every chunk of realisations has a file. Chunks that are there already are read, so a run that was
            stopped continues, and a run with more realisations adds to it.
        progress: called with the number of realisations done.
    """
    size, start = chunk_size(cfg, source), time.perf_counter()
    # sources are functions without a name, so a sample of what they draw identifies them
    inputs = source(2, torch.Generator().manual_seed(0)).numpy().tobytes()
    key = hashlib.sha256(json.dumps([cfg.to_dict(), seed, size]).encode() + inputs).hexdigest()[:16]
    parts = []
    for first in range(0, realisations, size):
        ids = range(first, min(first + size, realisations))
        file = None if folder is None else folder / f"{key}-{ids.start}-{ids.stop}.npz"
        if file is not None and file.exists():
            values = read_arrays(file)
        else:
            values = run_chunk(cfg, source, ids, seed=seed, device=device)
            if file is not None:
                buffer = io.BytesIO()
                np.savez(buffer, **cast("dict[str, Any]", values))
                write_atomic(file, buffer.getvalue())
        parts.append(values)
        progress(ids.stop)
    return Run(cfg, {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}, time.perf_counter() - start)
