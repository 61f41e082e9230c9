"""Checkpoints: each is one safetensors file with a digest, written atomically; the one before serves as fallback."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from nasfast.runtime.files import CheckpointError, check_room, link_atomic, write_atomic

_LOG = logging.getLogger(__name__)

_KEY = "nasfast"
_PYTORCH = {"format": "pt"}  # by this, other libraries know PyTorch's tensors
_DIGITS = 8
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and everything else as JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, by their names without it."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def digest(self) -> str:
        """Digest of the whole content. Tensors must be contiguous on the CPU, as `storable` and loading give them."""
        hasher = hashlib.blake2b(json.dumps(self.state, sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()


def storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors in the order of their names; one that shares memory with an earlier one is copied."""
    result, seen = {}, set()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel() and tensor.data_ptr() in seen:
            tensor = tensor.clone()  # safetensors refuses shared memory, which a module with two names has
        seen.add(tensor.data_ptr())
        result[name] = tensor
    return result


def encode(checkpoint: Checkpoint) -> bytes:
    """A checkpoint as a safetensors file, whose format other libraries read; equal content gives equal bytes."""
    stored = Checkpoint(storable(checkpoint.tensors), checkpoint.state)
    own = json.dumps({"digest": stored.digest, "state": stored.state}, sort_keys=True)
    data = save_bytes(stored.tensors, metadata={_KEY: own, **_PYTORCH})
    header, end = _header(data)
    return b"".join((_header_bytes(header), memoryview(data)[end:]))


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where the tensors begin."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def _header_bytes(header: dict[str, Any]) -> bytes:
    """The header with its metadata in order, which safetensors writes in no fixed order."""
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def decode(data: bytes, name: str) -> Checkpoint:
    """The checkpoint in bytes that `encode` made; errors say `name`. It raises CheckpointError for all other bytes."""
    try:
        tensors = load_bytes(data)
        header, end = _header(data)
        own = json.loads(header["__metadata__"][_KEY])
        checkpoint, digest = Checkpoint(tensors, own["state"]), own["digest"]
        header["__metadata__"] |= _PYTORCH
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} is not a readable checkpoint ({type(error).__name__}: {error})") from error
    if checkpoint.digest != digest or _header_bytes(header) != data[:end]:
        raise CheckpointError(f"{name} is damaged: its content does not match its digest")
    return checkpoint


def save_checkpoint(path: Path, checkpoint: Checkpoint, *, also: Path | None = None) -> None:
    """Write one checkpoint, and then give its file a second name, `also`.

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
        CheckpointError: the file cannot be read, or see `decode`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({type(error).__name__}: {error})") from error
    return decode(data, str(path))


class CheckpointFolder:
    """The checkpoints of one stage: `PREFIX-STEP.safetensors`, and `PREFIX-best.safetensors`, the best evaluated one.

    Args:
        folder: folder of the files; the first save creates it.
        prefix: what the file names begin with, e.g. `supernet`.
        keep: number of checkpoints to keep besides the best; older ones are deleted when a newer one is on disk.
    """

    def __init__(self, folder: Path, prefix: str, *, keep: int = 2) -> None:
        self.folder, self.prefix, self.keep = Path(folder), prefix, keep
        self.best = self.folder / f"{prefix}-best{SUFFIX}"

    @property
    def stem(self) -> Path:
        """What the paths of all files begin with."""
        return self.folder / self.prefix

    def path(self, step: int) -> Path:
        """The path of the checkpoint of a step, whether it exists or not."""
        return self.folder / f"{self.prefix}-{step:0{_DIGITS}d}{SUFFIX}"

    @staticmethod
    def step_of(path: Path) -> int:
        """The step of a checkpoint by its path; inverse of `path`."""
        return int(path.stem[-_DIGITS:])

    def paths(self) -> list[Path]:
        """The existing checkpoints, oldest first, without the best."""
        # names of stages may have characters that a pattern would interpret
        pattern = f"{glob.escape(self.prefix)}-{'[0-9]' * _DIGITS}{SUFFIX}"
        return sorted(self.folder.glob(pattern))

    def clear(self) -> None:
        """Delete all checkpoints of the stage."""
        for path in (*self.paths(), self.best):
            path.unlink(missing_ok=True)

    def check_room(self, size: int, *, evaluates: bool) -> None:
        """Refuse a training whose checkpoints of `size` bytes, and the best one if it evaluates, have no room."""
        count = self.keep + 1 + evaluates
        try:
            check_room(self.folder, size)
            stats = [path.stat() for path in (*self.paths(), self.best) if path.exists()]
            # the best may be a second name of another file
            present = sum({stat.st_ino: stat.st_size for stat in stats}.values())
            needed, free = count * size - present, shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{free / 1e6:,.0f} MB are free")
        except OSError as error:
            raise CheckpointError(
                f"no room for {count} checkpoints of {size / 1e6:,.1f} MB in {self.folder}: {error.strerror}. "
                "Free some space, or choose another --out; nothing was trained yet"
            ) from error

    def save(self, step: int, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Write the checkpoint of a step, which may be the best so far, and delete old ones that are too many."""
        if best:
            # the best gets its name first: a run that resumes from the other name takes the best as saved
            save_checkpoint(self.best, checkpoint, also=self.path(step))
        else:
            save_checkpoint(self.path(step), checkpoint)
        for old in self.paths()[: -self.keep]:
            old.unlink()

    def latest(self, *, fingerprint: str) -> tuple[Path, Checkpoint] | None:
        """The newest usable checkpoint and its path, None if there is none; the best is tried last.

        A checkpoint of another fingerprint (of a space, or of a space and an Arch) or a damaged one is skipped with a
        warning.

        Raises:
            CheckpointError: there are checkpoints, but none is usable.
        """
        refused = []
        for path in [*reversed(self.paths()), *([self.best] if self.best.exists() else [])]:
            try:
                checkpoint = load_checkpoint(path)
                saved = checkpoint.state.get("fingerprint")
                if saved != fingerprint:
                    raise CheckpointError(
                        f"{path} belongs to another search space (fingerprint {saved}, this one is {fingerprint})"
                    )
                return path, checkpoint
            except CheckpointError as error:
                refused.append(str(error))
                _LOG.warning("%s; trying the checkpoint before it", error)
        if refused:
            raise CheckpointError(
                f"no usable {self.prefix} checkpoint in {self.folder}: {'; '.join(refused)}. "
                "Start again in another --out folder, or delete these files"
            )
        return None


class CheckpointWriter(AbstractContextManager):
    """Saves into a CheckpointFolder in one thread while training goes on; at most one checkpoint is being saved.

    It is a context manager; its end waits for the last checkpoint.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nasfast-checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Begin to save a checkpoint, whose tensors must not change any more, after waiting for the one before."""
        self.wait()
        self._pending = self._thread.submit(self._folder.save, step, checkpoint, best=best)

    def wait(self) -> None:
        """Wait until the checkpoint is on disk, or raise the CheckpointError of its saving."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            _LOG.warning("%s", error)  # the error that ended the training matters more
        finally:
            self._thread.shutdown()
