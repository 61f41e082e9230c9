"""What surrounds a run: damaged bytes, small and read-only file systems, locales."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on a file system with pages of 4096 bytes."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def damage(path: Path, rng: random.Random) -> None:
    """Change some bytes of a file, as a failing disk does."""
    data = bytearray(path.read_bytes())
    place, length = rng.randrange(len(data)), rng.randrange(1, 1 + max(1, len(data) // 4))
    kind = rng.choice(["bit", "cut", "empty", "zeros", "noise"])
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "empty":
        data.clear()
    else:
        fill = bytes(length) if kind == "zeros" else rng.randbytes(length)
        if data[place : place + length] == fill[: len(data) - place]:
            fill = b"\xff" * length
        data[place : place + length] = fill[: len(data) - place]
    path.write_bytes(data)


def damage_line(path: Path, rng: random.Random) -> None:
    """Damage one line that is neither the first nor the last."""
    lines = path.read_bytes().split(b"\n")
    number = rng.randrange(1, len(lines) - 2)
    line = bytearray(lines[number])
    line[rng.randrange(len(line))] ^= 2
    lines[number] = bytes(line)
    path.write_bytes(b"\n".join(lines))


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[Callable[[str], None]]:
    """Mount a file system of `size` bytes at `folder`; yields a function that changes its mount options."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(folder))
    try:
        yield lambda options: _mount("-o", f"remount,{options}", os.fspath(folder))
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(folder)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def can_mount(folder: Path) -> bool:
    """Whether this user may mount file systems."""
    try:
        with mounted(folder / "mount", 4096):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


_KEEP_LOCALE: dict[str, str | None] = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": None, "LANGUAGE": None}


def usable_locales(folder: Path) -> list[dict[str, str | None]]:
    """Environments with the C locale, with UTF-8 and, where `localedef` can make it, with German in Latin-1.

    German has a decimal comma.
    """
    environments = [{**_KEEP_LOCALE, "LC_ALL": "C"}, {**_KEEP_LOCALE, "LC_ALL": "C.UTF-8"}]
    name = "de_DE.ISO-8859-1"
    (folder / "locales").mkdir()
    with contextlib.suppress(OSError):
        command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", os.fspath(folder / "locales" / name)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            environments.append({**_KEEP_LOCALE, "LC_ALL": name, "LOCPATH": os.fspath(folder / "locales")})
    return environments
