"""The lock of a run directory: one thread of one process writes there at a time, and removes what killed ones left.

It needs no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from nasfast.runtime.files import NO_ROOM

_LOG = logging.getLogger(__name__)

_LOCK_FILE = ".lock"

_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.tmp")
"""Pattern of the names that `nasfast.runtime.files.temporary_beside` gives."""

_FOLDERS = (".", "checkpoints", "report", "retrain/*")
"""Folders that a run writes to. Others are not searched, because a user may keep images below a run directory."""

_ATTEMPTS = 100
"""How often a directory or lock file may vanish before it is locked; after that it is taken to be impossible there."""

_held: dict[str, tuple[threading.Thread, int | None]] = {}
"""Real path of each directory that this process has locked -> its thread, and the lock file's descriptor, if any."""

_guard = threading.Lock()
"""Held while a thread looks into `_held` and locks."""


class RunDirectoryError(RuntimeError):
    """A run directory cannot be used: another process or thread writes to it, or nothing can be written there."""


@contextlib.contextmanager
def run_lock(run_dir: str | Path, *, create: bool = True) -> Iterator[None]:
    """Keep other processes and threads from writing to a run directory, for the length of a `with` block.

    The lock is the kernel's (`flock` on a hidden file, which names the holder), so it ends with the process, however
    the process ends. Blocks of one thread on one directory may be nested; the outermost takes the lock and removes
    temporary files that killed processes left. Where the file system has no locks, a warning says so.

    If a run has several processes, the leading one holds the lock for all (`nasfast.runtime.distributed.World.leads`).

    `nasfast report` and `nasfast rank` take no lock, so that they can report on a run that is going on. No other
    command writes their files, and they replace them atomically. `nasfast rank --train` trains, and takes the lock.

    Args:
        run_dir: the directory.
        create: whether to create an absent directory, and to remove it at the end if nothing was written. Otherwise an
            absent directory is not locked, and the caller raises because its files are missing.

    Raises:
        RunDirectoryError: another process or thread holds the lock, or the directory cannot be written; nothing was
            changed.
    """
    folder = Path(run_dir)
    key = os.path.realpath(folder)
    with _guard:
        holder, _ = _held.get(key, (None, None))
        if holder not in (None, threading.current_thread()):
            raise _in_use(folder, f"another thread of this process ({holder.name})")
        outermost = holder is None and (create or folder.is_dir())
        if outermost:
            is_new, descriptor = not folder.exists(), _acquire(folder)
            _held[key] = threading.current_thread(), descriptor
    if not outermost:
        yield
        return
    try:
        if descriptor is not None:
            _write_holder(folder, descriptor)
            _remove_temporaries(folder)
        yield
    finally:
        # a forked child, which has no lock any more, may come here too
        if _held.pop(key, None) is not None and descriptor is not None:
            (folder / _LOCK_FILE).unlink(missing_ok=True)
            os.close(descriptor)
            if is_new:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def check_free(run_dir: str | Path, *, create: bool = False) -> None:
    """Refuse a directory that another process or thread has locked, or that cannot be written; see `run_lock`."""
    with run_lock(run_dir, create=create):
        pass


def holds_lock(run_dir: str | Path) -> bool:
    """Whether this thread is in a block of `run_lock` on the directory."""
    return _held.get(os.path.realpath(run_dir), (None, None))[0] is threading.current_thread()


def _acquire(folder: Path) -> int | None:
    """Lock the directory; the descriptor of the lock file, or None if the file system has no locks."""
    path = folder / _LOCK_FILE
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # another process created the directory and has removed it again
        except OSError as error:
            raise RunDirectoryError(_not_writable(folder, error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            data = os.read(descriptor, 4096)
            os.close(descriptor)
            raise _in_use(folder, _describe_holder(data)) from None
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            _LOG.warning(
                "the file system of %s has no locks (%s): make sure that no other process writes there",
                folder,
                error.strerror,
            )
            return None
        # the previous holder may have removed the file meanwhile, and the lock of a removed file keeps nobody out
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
    raise RunDirectoryError(f"cannot create run directory {folder}: choose another --out")


def _write_holder(folder: Path, descriptor: int) -> None:
    """Write the holder into the lock file, which also checks that the directory can be written."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200],
        # only people read this time
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, (json.dumps(holder) + "\n").encode())
        os.fsync(descriptor)
    except OSError as error:
        raise RunDirectoryError(_not_writable(folder, error)) from error


def _describe_holder(data: bytes) -> str:
    """The holder of a lock, from the content of the lock file."""
    try:
        holder = json.loads(data)
        return f"`{holder['command']}`, process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, LookupError, TypeError):
        return "another process"  # it has not written its name yet


def _in_use(folder: Path, holder: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"run directory {folder} is in use by {holder}: wait until it ends, stop it, or choose another --out. Nothing "
        "was changed"
    )


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


def _release_in_child() -> None:
    """Close a forked child's descriptors, so that a loader worker does not keep the lock of its killed parent."""
    global _guard
    _guard = threading.Lock()  # another thread may have held it at the fork
    for _, descriptor in _held.values():
        if descriptor is not None:
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
