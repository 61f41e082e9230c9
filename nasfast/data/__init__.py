"""Images to batches: sources, augmentation, decoding backends and the loader.

May import `ops` and all before it. Begin with `make_loader` in `loader`: a batch depends only on
the seed, the epoch and its place in the epoch.
"""

from nasfast.data.augment import Augmentation
from nasfast.data.backends import TorchvisionBackend
from nasfast.data.datasets import (
    DataError,
    DatasetSource,
    FolderSource,
    ImageSource,
    ListSource,
    random_subset,
)
from nasfast.data.digits import ClutteredDigitsSource, DigitsSource
from nasfast.data.loader import Loader, make_loader, make_loaders
from nasfast.data.preprocess import preprocess
from nasfast.settings import DataConfig, ImageInfo

__all__ = [
    "Augmentation",
    "ClutteredDigitsSource",
    "DataConfig",
    "DataError",
    "DatasetSource",
    "DigitsSource",
    "FolderSource",
    "ImageInfo",
    "ImageSource",
    "ListSource",
    "Loader",
    "TorchvisionBackend",
    "make_loader",
    "make_loaders",
    "preprocess",
    "random_subset",
]
