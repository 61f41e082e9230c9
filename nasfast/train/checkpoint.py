"""Checkpoints: one safetensors file each, replaced atomically, checked by digest, the previous good one as fallback."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from nasfast.runtime.files import check_room, link_atomic, write_atomic

_LOG = logging.getLogger(__name__)

_KEY = "nasfast"
_DIGITS = 8
SUFFIX = ".safetensors"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; what was already on disk is intact."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and everything else as JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, the prefix cut off."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def digest(self) -> str:
        """Changes with any byte of the content; of contiguous CPU tensors, as `storable` makes and loading gives."""
        hasher = hashlib.blake2b(json.dumps(self.state, sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
        return hasher.hexdigest()


def storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, names sorted; where two share memory (a module with two names) the later is a copy."""
    result, seen = {}, set()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel() and tensor.data_ptr() in seen:
            tensor = tensor.clone()  # safetensors refuses shared memory
        seen.add(tensor.data_ptr())
        result[name] = tensor
    return result


def encode(checkpoint: Checkpoint) -> bytes:
    """A checkpoint as a safetensors file; equal content gives equal bytes."""
    stored = Checkpoint(storable(checkpoint.tensors), checkpoint.state)
    header = json.dumps({"digest": stored.digest, "state": stored.state}, sort_keys=True)
    # one metadata key: safetensors writes several in no fixed order
    return save_bytes(stored.tensors, metadata={_KEY: header})


def decode(data: bytes, name: str) -> Checkpoint:
    """The checkpoint in the bytes that `encode` made, its digest checked.

    Args:
        name: where they are from, for errors.

    Raises:
        CheckpointError: not ours, truncated or altered.
    """
    try:
        tensors = load_bytes(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        checkpoint, digest = Checkpoint(tensors, header["state"]), header["digest"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} is not a readable checkpoint ({type(error).__name__}: {error})") from error
    if checkpoint.digest != digest:
        raise CheckpointError(f"{name} is corrupt: its content does not match its digest")
    return checkpoint


def save_checkpoint(path: Path, checkpoint: Checkpoint, *, also: Path | None = None) -> None:
    """Write one checkpoint.

    Args:
        also: a second name for the file, which it gets afterwards.

    Raises:
        CheckpointError: the disk is full or the folder not writable; older checkpoints are intact.
    """
    try:
        write_atomic(path, encode(checkpoint))
        if also is not None:
            link_atomic(path, also)
    except OSError as error:
        raise CheckpointError(
            f"could not save {path}: {error.strerror}; the checkpoints already in {path.parent} are intact. "
            "Free some space and run again with --resume"
        ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint and check its digest.

    Raises:
        CheckpointError: unreadable, not ours, truncated or altered.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({type(error).__name__}: {error})") from error
    return decode(data, str(path))


class CheckpointFolder:
    """The checkpoints of one stage: `PREFIX-STEP.safetensors`, and `PREFIX-best.safetensors`, the best evaluated one.

    Args:
        folder: where they live; made when the first is saved.
        prefix: of the file names, e.g. `supernet`.
        keep: how many to keep, besides the best; older ones are deleted after a newer one is safely on disk.
    """

    def __init__(self, folder: Path, prefix: str, *, keep: int = 2) -> None:
        self.folder, self.prefix, self.keep = Path(folder), prefix, keep
        self.best = self.folder / f"{prefix}-best{SUFFIX}"

    @property
    def stem(self) -> Path:
        """What the paths of all its files begin with."""
        return self.folder / self.prefix

    def path(self, step: int) -> Path:
        """Of the checkpoint of a step, whether it exists or not."""
        return self.folder / f"{self.prefix}-{step:0{_DIGITS}d}{SUFFIX}"

    def paths(self) -> list[Path]:
        """Existing checkpoints, oldest first, without the best."""
        pattern = f"{self.prefix}-{'[0-9]' * _DIGITS}{SUFFIX}"
        return sorted(self.folder.glob(pattern))

    def check_room(self, size: int, *, evaluates: bool) -> None:
        """Refuse to begin a training whose checkpoints could not be saved.

        Args:
            size: of one, in bytes.
            evaluates: the best is kept besides.

        Raises:
            CheckpointError: there is no room for one more than are kept at the end, or the folder cannot be written.
        """
        count = self.keep + 1 + evaluates
        try:
            check_room(self.folder, size)
            found = [path.stat() for path in (*self.paths(), self.best) if path.exists()]
            there = sum({f.st_ino: f.st_size for f in found}.values())  # the best may be another name of one
            needed, free = count * size - there, shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{free / 1e6:,.0f} MB are free")
        except OSError as error:
            raise CheckpointError(
                f"no room for {count} checkpoints of {size / 1e6:,.1f} MB in {self.folder}: {error.strerror}. "
                "Free some space, or choose another --out; nothing was trained yet"
            ) from error

    def save(self, step: int, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Write one, and delete those that are too many.

        Args:
            best: it is the best so far.

        Raises:
            CheckpointError: see `save_checkpoint`.
        """
        if best:
            # first under this name: whoever resumes from the other one takes the best as saved
            save_checkpoint(self.best, checkpoint, also=self.path(step))
        else:
            save_checkpoint(self.path(step), checkpoint)
        for old in self.paths()[: -self.keep]:
            old.unlink()

    def latest(self, *, fingerprint: str) -> tuple[Path, Checkpoint] | None:
        """The newest usable checkpoint, in the end the best; unusable ones are named in a warning and passed over.

        Args:
            fingerprint: the checkpoint's `state["fingerprint"]` must equal it (a space's, or a space's and an Arch's).

        Returns:
            None when there is no checkpoint at all.

        Raises:
            CheckpointError: there are some, but none is usable.
        """
        refused = []
        for path in [*reversed(self.paths()), *([self.best] if self.best.exists() else [])]:
            try:
                checkpoint = load_checkpoint(path)
                found = checkpoint.state.get("fingerprint")
                if found != fingerprint:
                    raise CheckpointError(
                        f"{path} belongs to another search space ({found}, this one is {fingerprint})"
                    )
                return path, checkpoint
            except CheckpointError as error:
                refused.append(str(error))
                _LOG.warning("%s; trying the one before", error)
        if refused:
            raise CheckpointError(
                f"no usable {self.prefix} checkpoint in {self.folder}: {'; '.join(refused)}. "
                "Start again in another --out folder, or delete these files"
            )
        return None


class CheckpointWriter:
    """Saves into a CheckpointFolder while training goes on: one thread, at most one checkpoint in flight.

    A context; leaving it waits for the last one.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nasfast-checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Begin to save one, once the one before is saved.

        Args:
            step, best: see `CheckpointFolder.save`.
            checkpoint: nothing may write to its tensors any more.

        Raises:
            CheckpointError: the one before could not be saved.
        """
        self.wait()
        self._pending = self._thread.submit(self._folder.save, step, checkpoint, best=best)

    def wait(self) -> None:
        """Until everything is on disk.

        Raises:
            CheckpointError: it could not be saved.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            _LOG.warning("%s", error)  # what ended the training matters more
        finally:
            self._thread.shutdown()
