"""One process at a time writes to a run directory; what a killed one left half-written is removed. No torch."""

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
from collections.abc import Iterator
from pathlib import Path

from nasfast.runtime.files import NO_ROOM

_LOG = logging.getLogger(__name__)

_LOCK_FILE = ".lock"

_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.tmp")
"""Names that `nasfast.runtime.files.temporary_beside` gives."""

_FOLDERS = (".", "checkpoints", "report", "retrain/*")
"""Where a run writes files of its own; a user may keep images below a run directory, which are not looked through."""

_ATTEMPTS = 100
"""How often a directory or lock file may vanish before it is used; more often means that it cannot be made there."""

_held: dict[str, int | None] = {}
"""Real path of every directory locked by this process -> descriptor of its lock file; None where there are no locks."""


class RunDirectoryError(RuntimeError):
    """A run directory that cannot be used: another process writes to it, or nothing can be written there."""


@contextlib.contextmanager
def run_lock(run_dir: str | Path, *, create: bool = True) -> Iterator[None]:
    """Keep other processes from writing to a run directory, for the duration of a `with` block.

    The lock is the kernel's (`flock` on a hidden file, which says who holds it), so it ends with the process, however
    that dies. A block within a block of the same process and directory changes nothing. Left-over temporary files of
    killed processes are removed at the outermost. Where the file system cannot lock, a warning says so.

    Of several processes of one run, the one that leads holds it for all (`nasfast.runtime.distributed.World.leads`).

    `nasfast report` and `nasfast rank` take no lock: what they write is theirs alone and replaced atomically, and a
    report of a run that is going on is worth having.

    Args:
        run_dir: the directory.
        create: make it when absent, and remove it at the end if nothing was written; otherwise an absent directory is
            not locked: the caller will miss its files.

    Raises:
        RunDirectoryError: another process holds the lock, or the directory cannot be written; nothing was changed.
    """
    folder = Path(run_dir)
    key = os.path.realpath(folder)
    if key in _held or not (create or folder.is_dir()):
        yield
        return
    made = not folder.exists()
    descriptor = _held[key] = _acquire(folder)
    try:
        if descriptor is not None:
            _state_holder(folder, descriptor)
            _remove_temporaries(folder)
        yield
    finally:
        # a forked child may come here too, which has given the lock up
        if key in _held and _held.pop(key) is not None:
            (folder / _LOCK_FILE).unlink(missing_ok=True)
            os.close(descriptor)
            if made:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def _acquire(folder: Path) -> int | None:
    """Descriptor of the locked file, or None where the file system has no locks."""
    path = folder / _LOCK_FILE
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # another process made the directory and has removed it again
        except OSError as error:
            raise RunDirectoryError(_not_writable(folder, error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 4096)
            os.close(descriptor)
            raise RunDirectoryError(
                f"run directory {folder} is in use by {_holder(holder)}: wait until it is done, stop it, or choose "
                "another --out. Nothing was changed"
            ) from None
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            _LOG.warning(
                "the file system of %s has no locks (%s): see to it that no other process writes there",
                folder,
                error.strerror,
            )
            return None
        # who held it before removes the file at its end: the lock of a removed file keeps nobody out
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
    raise RunDirectoryError(f"cannot make run directory {folder}: choose another --out")


def _state_holder(folder: Path, descriptor: int) -> None:
    """Write who holds the lock into its file, which also shows whether anything can be written at all."""
    form = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200],
        # for people: nothing depends on this clock
        "since": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, (json.dumps(form) + "\n").encode())
        os.fsync(descriptor)
    except OSError as error:
        raise RunDirectoryError(_not_writable(folder, error)) from error


def _holder(data: bytes) -> str:
    try:
        form = json.loads(data)
        return f"`{form['command']}`, process {form['pid']} on {form['host']}, since {form['since']}"
    except (ValueError, LookupError, TypeError):
        return "another process"  # it has only just begun


def _not_writable(folder: Path, error: OSError) -> str:
    remedy = "free some space" if error.errno in NO_ROOM else "make it writable, or choose another --out"
    return f"cannot write to run directory {folder}: {error.strerror}; {remedy}. Nothing was changed"


def _remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left of an atomic write."""
    for pattern in _FOLDERS:
        for path in folder.glob(f"{pattern}/.*.tmp"):
            found = _TEMPORARY.fullmatch(path.name)
            # our own number is that of a predecessor: containers number their processes from 1
            if found and path.is_file() and (int(found[1]) == os.getpid() or not _alive(int(found[1]))):
                with contextlib.suppress(OSError):
                    path.unlink()
                    _LOG.info("removed %s, which a killed process left", path)


def _alive(pid: int) -> bool:
    """Whether there is a process of this number here, such as a report being written."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        pass
    return pid > 0


def _give_up() -> None:
    """Close a forked child's copies: a loader worker that outlives its killed parent must not keep its lock."""
    for descriptor in filter(None, _held.values()):
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_give_up)
