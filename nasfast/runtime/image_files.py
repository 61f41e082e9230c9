"""Which folders hold images, and lists of images as text files: what is known before one is read. No torch."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

_OF_SYSTEMS = {
    *("__MACOSX", "@eaDir", "@Recycle", "@Recently-Snapshot", "#recycle", "#snapshot"),
    *("$RECYCLE.BIN", "System Volume Information", "lost+found"),
}
"""Folders that systems, archives and network storage put beside images, with thumbnails, copies or deleted files."""

_LINE = re.compile(r"(.*[^ \t])[ \t]+([^ \t]+)")
"""An image and its label. Only spaces and tabs separate them, because names may contain other white space."""


IMAGE_ENDINGS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"))
"""Endings of the files that count as images, in small letters."""

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is one that users do not see as theirs."""
    return name.startswith(".") or name in _OF_SYSTEMS


def class_folders(root: Path) -> list[str]:
    """The names of the classes in a folder of images `root/CLASS/IMAGE`, sorted.

    Raises:
        ValueError: there are fewer than two, or they are the folders of training and validation; the text says what the
            folder should look like.
    """
    entries = [entry for entry in root.iterdir() if not is_hidden(entry.name)]
    names = sorted(entry.name for entry in entries if entry.is_dir())
    form = f"{root}/CLASS/IMAGE.jpg"
    if not names:
        flat = sum(entry.suffix.lower() in IMAGE_ENDINGS for entry in entries)
        has = f"has {flat:,} {'image' if flat == 1 else 'images'} and" if flat else "has"
        raise ValueError(f"{root} {has} no class folder: put each image into a folder named like its class, {form}")
    if set(names) <= _SPLITS:
        raise ValueError(
            f"{root} has the folders {', '.join(names)}, which are no classes: give one of them, {root / names[0]}"
        )
    if len(names) == 1:
        raise ValueError(f"{root} has one class only ({names[0]!r}): a classifier needs two or more, as {form}")
    return names


def read_image_list(path: str | Path) -> list[tuple[str, str]]:
    """The lines `IMAGE LABEL` of a text file, without empty ones and those that begin with #.

    It is UTF-8, or UTF-16 with a byte order mark, with line ends of any system. If all labels are numbers, they have no
    zeros in front.

    Raises:
        ValueError: the file cannot be read or is not text, a line has no label, or there is no line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
        if "\0" in text:
            raise ValueError("it has bytes of value 0: save it as text in UTF-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the list of images {path}: {error}") from error
    images = []
    # str.splitlines would split at separators that names may contain, too
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = line.strip(" \t")
        if not line or line.startswith("#"):
            continue
        if (match := _LINE.fullmatch(line)) is None:
            raise ValueError(f"{path}, line {number}: expected 'IMAGE LABEL', got {line!r}")
        images.append((match[1], match[2]))
    if not images:
        raise ValueError(f"{path} lists no image: expected lines 'IMAGE LABEL'")
    if all(label.isdecimal() for _, label in images):
        images = [(image, str(int(label))) for image, label in images]
    return images
