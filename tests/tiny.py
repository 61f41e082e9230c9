"""Spaces, batches and image folders small enough for tests of whole stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nasfast.spaces import Block, FairSampler, FixedLayer, Sampler, SearchSpace, SqueezeExcite, Stage, nas_bench_macro
from nasfast.supernet import Supernet

CHOICES = (Block("mbconv", 3, 2), Block("mbconv", 5, 1), Block("mbconv", 3, 3))


def tiny_space(*, num_classes: int = 4, resolution: int = 16, **changes) -> SearchSpace:
    """Four mbconv layers of three choices; layers 0 and 2 are reductions, 1 and 3 are normal."""
    form = {
        "name": "tiny",
        "resolution": resolution,
        "num_classes": num_classes,
        "stem": (FixedLayer(Block("conv", 3), 8, stride=2),),
        "stages": (Stage(8, 2, 2, CHOICES), Stage(12, 2, 1, CHOICES)),
        "head": (FixedLayer(Block("conv", 1), 16),),
    }
    return SearchSpace(**{**form, **changes})


def tiny_excited_space(**changes) -> SearchSpace:
    """`tiny_space` with forms of squeeze-and-excitation, activations per stage, and a hidden layer in the head."""
    every = SqueezeExcite(0.5, activation="silu", gate="sigmoid")
    choices = (Block("mbconv", 3, 2), Block("mbconv", 3, 2, SqueezeExcite()), Block("mbconv", 5, 2.5, every))
    form = {
        "name": "tiny_excited",
        "stages": (Stage(8, 2, 2, choices, activation="relu"), Stage(12, 2, 1, choices)),
        "head": (FixedLayer(Block("conv", 1), 16), FixedLayer(Block("hidden"), 20, activation="silu")),
        "activation": "hswish",
    }
    return tiny_space(**{**form, **changes})


def tiny_macro_space() -> SearchSpace:
    """Two reductions and two normal layers with the choices of NAS-Bench-Macro, the identity among them."""
    stages = tuple(Stage(c, 2, 2, nas_bench_macro().stages[0].choices) for c in (8, 12))
    stem = (FixedLayer(Block("conv", 3), 6),)
    return nas_bench_macro(num_classes=4, resolution=12).replace(name="small_macro", stem=stem, stages=stages, head=())


def batches(count: int, *, size: int = 8, num_classes: int = 4, resolution: int = 16, seed: int = 0) -> list:
    """`count` batches of (images, labels): noise on a colour that distinguishes up to four labels."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        labels = torch.randint(num_classes, (size,), generator=generator)
        images = torch.randn(size, 3, resolution, resolution, generator=generator) * 0.5
        for image, label in zip(images, labels.tolist(), strict=True):
            image[0] += 2 * (label % 2)
            image[1] += 2 * (label // 2 % 2)
        result.append((images.contiguous(memory_format=torch.channels_last), labels))
    return result


class Fixed(Sampler):
    """A sampler that gives the same paths at every step."""

    def __init__(self, space, *paths) -> None:
        super().__init__(space, layer_indicators=True)
        self.paths = list(paths)

    def step(self):
        return self.paths


def net_and_sampler(*paths, trainable: str = "indicators", seed: int = 0):
    space = tiny_space()
    net = Supernet(space, seed=seed)
    net.freeze(trainable)
    return net, Fixed(space, *paths) if paths else FairSampler(space, seed=seed)


def write_folder(
    root: Path, counts: dict[str, int], *, side: int = 12, ending: str = ".png", mode: str = "RGB"
) -> Path:
    """Write `root/CLASS/NUMBER.ending`; every image has its own colours."""
    number = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(root / name / f"{number:03d}{ending}")
            number += 1
    return root
