"""How an image becomes the input of a network, and what the outputs are called: what a trained network is kept with."""

from __future__ import annotations

from dataclasses import dataclass

from nasfast.config import ConfigBase


@dataclass(frozen=True)
class ImageInfo(ConfigBase):
    """Preprocessing at evaluation, and the classes.

    Attributes:
        classes: name of every output, in order.
        short_side: pixels of the short side to which an image is resized, bilinear with antialiasing.
        resolution: height and width in pixels of the centre that is then cropped.
        mean, std: of every channel of images scaled to [0, 1]: (x - mean) / std. Three channels are red, green and
            blue, one is grey.
    """

    classes: tuple[str, ...]
    short_side: int
    resolution: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def _check_values(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean and std must have 1 or 3 values each, got {self.mean} and {self.std}")
        if not 0 < self.resolution <= self.short_side:
            raise ValueError(f"resolution must be 1 to short_side ({self.short_side}), got {self.resolution}")
