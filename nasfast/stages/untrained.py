"""Untrained networks of a space and images to score them on, by the names that a command is given."""

from __future__ import annotations

from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.scores import NetworkEvidence
from nasfast.spaces import named_space


def untrained_networks(
    name: str, images: str, *, batch: int, seed: int = 0, cells: int | None = None, channels: int | None = None
) -> NetworkEvidence:
    """What scores of untrained networks are computed from: a space and a loader of augmented training images.

    Args:
        name: built-in name or YAML file of a space of layers or of cells.
        images: folder with one sub-folder per class, which says how many classes the networks have.
        batch: images of a batch.
        seed: seed of the weights, the order of images and their augmentation.
        cells, channels: size of the networks in a space of cells; None keeps the space's.

    Raises:
        ConfigError: unknown space, sizes of cells for a space of layers, or fewer images than a batch.
        DataError: the folder cannot be used.
    """
    sizes = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    if sizes and named_space(name).LAYERWISE:
        raise ConfigError(f"{' and '.join(sizes)} belong to spaces of cells, and {name} is a space of layers")
    source = FolderSource(images)
    space = named_space(name, **sizes, num_classes=len(source.classes))
    if len(source) < batch:
        raise ConfigError(f"a batch must have at most {len(source)} images, as many as {images} has, got {batch}")
    data = DataConfig(train=images, batch_size=batch)
    loader = make_loader(data, source, resolution=space.resolution, in_channels=space.in_channels, seed=seed)
    return NetworkEvidence(space, loader, seed=seed)
