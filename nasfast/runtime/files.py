"""Files of a run directory: atomic writes, JSON with a digest, and the reader of metrics.jsonl. It needs no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

METRICS_FILE = "metrics.jsonl"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, and of a user or process that may not write more."""

_DIGEST = "digest"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; what was already on disk is intact."""


def temporary_beside(path: Path) -> Path:
    """A hidden name in the folder of `path` that only this process uses, so that two writers do not share a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file `path` such that a crash or a full disk leaves either the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # tempfile is not used: its files are readable by their owner only, and the new file would be so too
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def link_atomic(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, or a copy if the file system has no hard links."""
    temporary = temporary_beside(target)
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError:
        write_atomic(target, source.read_bytes())
    finally:
        temporary.unlink(missing_ok=True)  # `os.replace` leaves it if both were names of one file already


def check_room(folder: Path, size: int) -> None:
    """Check that `size` bytes can be written to `folder`, by reserving and releasing them; OSError if they cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder / "room")
    try:
        with open(temporary, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    finally:
        temporary.unlink(missing_ok=True)


def seal(data: dict[str, Any], *, indent: int | None = 1) -> str:
    """A mapping as JSON that ends with a digest of its content, by which `unseal` detects damage."""
    return json.dumps({**data, _DIGEST: _digest(data)}, indent=indent) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """The mapping in a text that `seal` made; a text without a digest, written by hand, is accepted unchecked."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping, got {type(data).__name__}")
    digest = data.pop(_DIGEST, None)
    if digest is not None and digest != _digest(data):
        raise ValueError(
            f"its content does not match its digest: it is damaged, or was edited without deleting {_DIGEST!r}"
        )
    return data


def _digest(data: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[IO[bytes]]:
    """Open the file `path` to append, locked against other processes that call this; create it if absent.

    On a file system without locks the file is not locked.
    """
    with open(path, "ab+") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def locked_lines(path: Path) -> Iterator[IO[bytes]]:
    """As `locked_file`, to append whole lines to a file whose folder may be absent.

    If the file is replaced meanwhile (`write_atomic`), waiting processes take the new file. A line that a killed
    process left incomplete is ended with a newline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with locked_file(path) as file:
            try:
                current = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                current = False
            if not current:
                continue
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            yield file
            return


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none if it is absent. Lines that are incomplete or damaged are left out."""
    path, metrics = Path(run_dir) / METRICS_FILE, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"stage", "step"} <= row.keys():
            metrics.append(row)
    return metrics


def checkpoint_state(path: Path) -> dict[str, Any]:
    """The state that a checkpoint of nasfast (`nasfast.train.checkpoint`) has in its head; no tensor is read."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} is no checkpoint of nasfast, or truncated")
        head = file.read(length)
    try:
        state = json.loads(json.loads(head)["__metadata__"]["nasfast"])["state"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no checkpoint of nasfast ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: expected a mapping as state, got {type(state).__name__}")
    return state


def answers_to_hex(right: bytes) -> str:
    """One byte 0 or 1 per image as hexadecimal digits, whose bits say in order on which images a network is right."""
    digits = "".join(map(str, right))
    return f"{int(padded, 2):0{len(padded) // 4}x}" if (padded := digits + "0" * (-len(digits) % 8)) else ""


def answers_from_hex(text: str, images: int) -> list[bool]:
    """The inverse of `answers_to_hex`; images without a digit count as wrong."""
    digits = "".join(f"{byte:08b}" for byte in bytes.fromhex(text))
    return [digit == "1" for digit in digits[:images].ljust(images, "0")]
