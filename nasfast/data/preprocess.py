"""One image as the input of a network, by the same steps as at evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nasfast.data.augment import Augmentation, render
from nasfast.data.datasets import DataError, open_image, to_rgb
from nasfast.settings import ImageInfo


def scale_and_offset(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The factors and terms that make x * scale + offset of (x / 255 - mean) / std, one per channel, in float32."""
    scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
    return scale.float(), (-255 * scale * torch.tensor(mean, dtype=torch.float64)).float()


def normalise(images: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """uint8 (N, C, H, W) in channels_last to fp32 `images * scale + offset`, one value of each per channel."""
    rows = images.permute(0, 2, 3, 1).flatten(2).float()
    # the factors are repeated for a whole row of pixels: an inner loop over three channels would be ten times as slow
    scale, offset = scale.repeat(images.shape[3]), offset.repeat(images.shape[3])
    torch.addcmul(offset, rows, scale, out=rows)  # in place, because fresh memory costs as much as the arithmetic
    return rows.unflatten(2, (images.shape[3], images.shape[1])).permute(0, 3, 1, 2)


def preprocess(image: Image.Image | str | Path, info: ImageInfo) -> Tensor:
    """The input that a network expects of one image.

    Args:
        image: an image, or the path of a file.
        info: of the network, e.g. `nasfast.load_model(...).images`.

    Returns:
        (C, resolution, resolution) in float32.

    Raises:
        DataError: the file is missing or is no image.
    """
    if isinstance(image, (str, Path)) and not Path(image).exists():
        raise DataError(f"{image} does not exist: give the path of an image")
    try:
        picture = open_image(str(image)) if isinstance(image, (str, Path)) else to_rgb(image)
    except (OSError, ValueError) as error:
        raise DataError(f"not an image that can be read: {error}") from error
    grey = len(info.mean) == 1
    picture = picture.convert("L") if grey else picture
    augmentation = Augmentation("eval", info.resolution, grey=grey)
    if augmentation.short_side != info.short_side:
        raise DataError(
            f"this version resizes images to a short side of {augmentation.short_side} pixels, the network was "
            f"evaluated with {info.short_side}: use the version of nasfast that trained it"
        )
    views = augmentation.views(np.array([[picture.height, picture.width]]), epoch=0, start=0)
    pixels = render(picture, views, 0, augmentation)[None].contiguous(memory_format=torch.channels_last)
    return normalise(pixels, *scale_and_offset(info.mean, info.std))[0]
