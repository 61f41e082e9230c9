"""Images to batches."""

from nasfast.data.augment import Augmentation
from nasfast.data.backends import TorchvisionBackend
from nasfast.data.datasets import DataError, DatasetSource, DigitsSource, FolderSource, ImageSource, ListSource
from nasfast.data.loader import DataConfig, Loader, make_loader, make_loaders

__all__ = [
    "Augmentation", "DataConfig", "DataError", "DatasetSource", "DigitsSource", "FolderSource", "ImageSource",
    "ListSource", "Loader", "TorchvisionBackend", "make_loader", "make_loaders",
]  # fmt: skip
