"""Images to batches."""

from nasfast.data.datasets import DataError, DigitsSource, FolderSource, ImageSource
from nasfast.data.loader import DataConfig, Loader, make_loaders

__all__ = ["DataConfig", "DataError", "DigitsSource", "FolderSource", "ImageSource", "Loader", "make_loaders"]
