"""The images of a folder, for the wiring study."""

from __future__ import annotations

from functools import cache

from nasfast.data import FolderSource


@cache
def folder_of(images: str) -> FolderSource:
    """The images of a folder, which is read once for all searches of a study."""
    return FolderSource(images)
