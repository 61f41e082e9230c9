"""Checkpoints: one safetensors file each, replaced atomically, checked by digest, the previous good one as fallback."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from nasfast.files import write_atomic

_LOG = logging.getLogger(__name__)

_KEY = "nasfast"
_DIGITS = 8
_SUFFIX = ".safetensors"


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


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint; equal content gives equal bytes.

    Raises:
        CheckpointError: the disk is full or the folder not writable; older checkpoints are intact.
    """
    stored = Checkpoint(storable(checkpoint.tensors), checkpoint.state)
    header = json.dumps({"digest": stored.digest, "state": stored.state}, sort_keys=True)
    try:
        # one metadata key: safetensors writes several in no fixed order
        write_atomic(path, save_bytes(stored.tensors, metadata={_KEY: header}))
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
        tensors = load_bytes(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        checkpoint, digest = Checkpoint(tensors, header["state"]), header["digest"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({type(error).__name__}: {error})") from error
    if checkpoint.digest != digest:
        raise CheckpointError(f"{path} is corrupt: its content does not match its digest")
    return checkpoint


class CheckpointFolder:
    """The checkpoints of one stage, `PREFIX-STEP.safetensors`, newest last.

    Args:
        folder: where they live; made when the first is saved.
        prefix: of the file names, e.g. `supernet`.
        keep: how many to keep; older ones are deleted after a newer one is safely on disk.
    """

    def __init__(self, folder: Path, prefix: str, *, keep: int = 2) -> None:
        self.folder, self.prefix, self.keep = Path(folder), prefix, keep

    def paths(self) -> list[Path]:
        """Existing checkpoints, oldest first."""
        pattern = f"{self.prefix}-{'[0-9]' * _DIGITS}{_SUFFIX}"
        return sorted(self.folder.glob(pattern))

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        path = self.folder / f"{self.prefix}-{step:0{_DIGITS}d}{_SUFFIX}"
        save_checkpoint(path, checkpoint)
        for old in self.paths()[: -self.keep]:
            old.unlink()
        return path

    def latest(self, *, fingerprint: str) -> tuple[Path, Checkpoint] | None:
        """The newest usable checkpoint; unusable ones are named in a warning and passed over.

        Args:
            fingerprint: the checkpoint's `state["fingerprint"]` must equal it (a space's, or a space's and an Arch's).

        Returns:
            None when there is no checkpoint at all.

        Raises:
            CheckpointError: there are some, but none is usable.
        """
        refused = []
        for path in reversed(self.paths()):
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
