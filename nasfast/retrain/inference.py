"""What a trained network says of an image."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from nasfast.data.preprocess import preprocess
from nasfast.supernet import ArchNetwork


def classify(network: ArchNetwork, image: Image.Image | str | Path, *, top_k: int = 5) -> list[tuple[str, float]]:
    """The most probable classes of an image.

    Args:
        network: from `load_model`; it is put into eval mode.
        image: an image, or the path of a file.
        top_k: number of classes, at least 1; all, if there are fewer.

    Returns:
        Class names with their probabilities from 0 to 1, the most probable first.

    Raises:
        ValueError: it is not known how images become the input of the network, or `top_k` is below 1.
        DataError: the file is missing or is no image.
    """
    if network.images is None:
        raise ValueError(
            "this network was saved without its classes and preprocessing, because its images did not come from a "
            "loader of nasfast: set network.images to a nasfast.retrain.ImageInfo"
        )
    if top_k < 1:
        raise ValueError(f"top_k must be 1 or more, got {top_k}")
    x = preprocess(image, network.images).to(next(network.parameters()))
    with torch.no_grad():
        probabilities = network.eval()(x[None]).float().softmax(1)[0]
    values, indices = probabilities.topk(min(top_k, len(probabilities)))
    return [(network.images.classes[i], p) for i, p in zip(indices.tolist(), values.tolist(), strict=True)]
