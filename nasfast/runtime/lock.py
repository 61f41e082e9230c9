"""The lock of a run directory: one process at a time writes there, and removes temporary files of killed ones.

It needs no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from nasfast.runtime.files import NO_ROOM

_LOG = logging.getLogger(__name__)

_LOCK_FILE = ".lock"

_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.tmp")
"""Pattern of the names that `nasfast.runtime.files.temporary_beside` gives."""

_FOLDERS = (".", "checkpoints", "report", "retrain/*")
"""Folders that a run writes to. Others are not searched, because a user may keep images below a run directory."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of a file system without locks."""

_held: set[tuple[str, int]] = set()
"""Real path of each directory that is locked, with the process that locked it: a forked child has no lock."""


class RunDirectoryError(RuntimeError):
    """A run directory cannot be used: another process writes to it, or nothing can be written there."""


@contextlib.contextmanager
def run_lock(run_dir: str | Path, *, create: bool = True) -> Iterator[None]:
    """Keep other processes from writing to a run directory, for the length of a `with` block.

    The lock is the kernel's (`filelock`, on a hidden file, which names the holder), so it ends with the process,
    however the process ends. Blocks of one process on one directory may be nested; the outermost takes the lock and
    removes temporary files that killed processes left. Where the file system has no locks, a warning says so.

    If a run has several processes, the leading one holds the lock for all (`nasfast.runtime.distributed.World.leads`).

    `nasfast report` and `nasfast rank` take no lock, so that they can report on a run that is going on. No other
    command writes their files, and they replace them atomically. `nasfast rank --train` trains, and takes the lock.

    Args:
        run_dir: the directory.
        create: whether to create an absent directory, and to remove it at the end if nothing was written. Otherwise an
            absent directory is not locked, and the caller raises because its files are missing.

    Raises:
        RunDirectoryError: another process holds the lock, or the directory cannot be written; nothing was changed.
    """
    # torch requires filelock; importing it takes a tenth of a second, which only commands that write need
    from filelock import FileLock, Timeout

    folder = Path(run_dir)
    key = os.path.realpath(folder), os.getpid()
    if key in _held or not (create or folder.is_dir()):
        yield
        return
    made, path = not folder.exists(), folder / _LOCK_FILE
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunDirectoryError(
            f"run directory {folder} is in use by {_holder(path)}: wait until it ends, stop it, or choose another "
            "--out. Nothing was changed"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter from filelock 3
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise RunDirectoryError(_not_writable(folder, error)) from error
        _LOG.warning(
            "the file system of %s has no locks (%s): make sure that no other process writes there", folder, error
        )
    try:
        _write_holder(folder, path)
        _remove_temporaries(folder)
        _held.add(key)
        yield
    finally:
        _held.discard(key)
        if key[1] == os.getpid():  # a forked child may come here too
            path.unlink(missing_ok=True)
            lock.release()
            if made:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def _write_holder(folder: Path, path: Path) -> None:
    """Write the holder into the lock file, which also checks that the directory can be written."""
    command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200]
    since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    try:
        path.write_text(
            f"`{command}`, process {os.getpid()} on {socket.gethostname()}, since {since}", encoding="utf-8"
        )
    except OSError as error:
        raise RunDirectoryError(_not_writable(folder, error)) from error


def _holder(path: Path) -> str:
    """The holder of a lock; `another process` as long as it has not written its name."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    except OSError:
        return "another process"


def _not_writable(folder: Path, error: OSError) -> str:
    remedy = "free some space" if error.errno in NO_ROOM else "make it writable, or choose another --out"
    return f"cannot write to run directory {folder}: {error.strerror}; {remedy}. Nothing was changed"


def _remove_temporaries(folder: Path) -> None:
    """Remove the temporary files of atomic writes that killed processes left."""
    for pattern in _FOLDERS:
        for path in folder.glob(f"{pattern}/.*.tmp"):
            match = _TEMPORARY.fullmatch(path.name)
            # a file with this process's number is from a predecessor, because containers number processes from 1
            if match and path.is_file() and (int(match[1]) == os.getpid() or not _alive(int(match[1]))):
                with contextlib.suppress(OSError):
                    path.unlink()
                    _LOG.info("removed %s, which a killed process left", path)


def _alive(pid: int) -> bool:
    """Whether a process of this number runs on this machine, such as one that writes a report."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        pass
    return pid > 0
