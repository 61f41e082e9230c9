"""The processes of one run, as torchrun starts them: the rank of this process, and what ranks send to each other.

A process that no launcher started is a world of size 1 without a process group; the functions here then do nothing.

The state of a run (weights, optimiser, sampler, position in the data) is the same on every rank. So rank 0 writes all
files, in the same form as a single process, and a run may continue with another number of ranks. No state is sharded,
so ranks need not write parts of it (as with `torch.distributed.checkpoint`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nasfast.runtime.launcher import environment_rank, environment_size
from nasfast.runtime.lock import run_lock

# Ranks wait for rank 0 as long as a search takes, and torchrun detects a dead one. The number of milliseconds must fit
# into 31 bits.
_TIMEOUT = timedelta(days=14)


class RankError(RuntimeError):
    """The ranks of this run cannot be started, or one of them has ended."""


@dataclass(frozen=True)
class World:
    """The processes that work together, seen from one of them; the defaults are a single process.

    All ranks must make the same calls in the same order. An exchange raises RankError if a rank has ended.

    Attributes:
        rank: number of this process, 0 to size - 1.
        size: number of processes.
        leads: whether this is the first of all processes of the job, including those that work separately. The leading
            process shows progress on the screen and locks the run directory for all.
        attempt: number of times that torchrun has started the processes again after one of them died.
        store: key-value store that outlives the attempts; None without torchrun.
    """

    rank: int = 0
    size: int = 1
    leads: bool = True
    attempt: int = 0
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def note_begun(self, what: Path) -> None:
        """Record for later attempts that this torchrun job works on `what`."""
        # only the first attempt that works on it is recorded; later ones resume
        if self.store is not None and not self.store.check([str(what)]):
            self.store.set(str(what), str(self.attempt))

    def has_begun(self, what: Path) -> bool:
        """Whether an earlier attempt of this torchrun job recorded that it works on `what`; this one then resumes it.

        Files that were there before the job never count as its own, however often torchrun restarts it.
        """
        if self.store is None or not self.store.check([str(what)]):
            return False
        return int(self.store.get(str(what))) < self.attempt

    def lock(self, run_dir: str | Path) -> contextlib.AbstractContextManager[None]:
        """The lock of a run directory (`run_lock`), which the leading process holds for all."""
        return run_lock(run_dir) if self.leads else contextlib.nullcontext()

    def single(self) -> World:
        """This process as a world of size 1, for work that each rank does separately."""
        return replace(self, rank=0, size=1)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks; all ranks get the same bits."""
        if self.size > 1:
            with _as_rank_error():
                dist.all_reduce(tensor)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by that of rank 0."""
        if self.size > 1:
            with _as_rank_error():
                for tensor in tensors:
                    whole = tensor.contiguous()  # the backends need contiguous tensors
                    dist.broadcast(whole, 0)
                    if not tensor.is_contiguous():
                        tensor.copy_(whole)

    def broadcast_bytes(self, data: bytes) -> bytes:
        """The bytes that rank 0 gives; those of the other ranks are ignored."""
        shared = [data]
        if self.size > 1:
            with _as_rank_error():
                dist.broadcast_object_list(shared, 0)
        return shared[0]

    def all_gather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks in the order of the ranks, on every rank."""
        parts = [data] * self.size
        if self.size > 1:
            with _as_rank_error():
                dist.all_gather_object(parts, data)
        return parts


SINGLE = World()
"""A single process."""


# words in the errors of gloo, NCCL and torch's store about an ended connection; their other errors explain themselves
_GONE = re.compile(r"connection|closed|reset|timed out|refused|broken pipe|remote process exited", re.IGNORECASE)


@contextlib.contextmanager
def _as_rank_error() -> Iterator[None]:
    """Raise RankError where an error means that a connection to another rank ended."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistNetworkError) or _GONE.search(str(error))):
            raise
        reason = str(error).split(". ")[0]  # gloo's advice follows in further sentences
        raise RankError(f"another process of this run has ended; see its message for the reason ({reason})") from error


@contextlib.contextmanager
def start(device: str) -> Iterator[World]:
    """Join the other processes that torchrun started, for the length of a `with` block.

    It reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and torchrun's TORCHELASTIC_*; `torch.distributed` reads
    MASTER_ADDR and MASTER_PORT besides. Without a launcher, or with one process, there is no process group.

    Args:
        device: `cpu` (gloo), or `cuda` (NCCL, one GPU per process, which becomes the current GPU).
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    size, rank = environment_size(), environment_rank()
    if size == 1:
        # without the agent's store, joining would open a store in this process
        has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        yield World(attempt=attempt, store=_job_store(_join_store()) if has_store else None)
        return
    kind = device.split(":")[0]
    if kind == "cuda":
        _use_own_gpu(device)
    store = _join_store()
    job_store = _job_store(store)
    # torchrun's store outlives the processes; restarted ones must not read the addresses of the dead ones
    store = dist.PrefixStore(f"nasfast {attempt} {size}", store)
    if rank == 0:
        store.set("device", kind)
    elif (first := store.get("device").decode()) != kind:
        raise RankError(
            f"rank {rank} would compute on {kind}, rank 0 on {first}: use --device cpu, or give every rank a GPU"
        )
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    yield World(rank, size, leads=rank == 0, attempt=attempt, store=job_store)
    # this is skipped after an error: the process ends anyway, and NCCL might wait here for the others
    dist.destroy_process_group()


def _join_store() -> dist.Store:
    return next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]


def _job_store(store: dist.Store) -> dist.Store:
    """The part of torchrun's store that all attempts of this job see."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    # the job's name is in the prefix because two jobs may share a store
    return dist.PrefixStore(f"nasfast begun {os.environ.get('TORCHELASTIC_RUN_ID')}", store)


def _use_own_gpu(device: str) -> None:
    """Make this process's GPU the current one; errors as in `start`."""
    if ":" in device:
        raise RankError(f"device={device!r} names one GPU for every process: use --device cuda")
    if missing := [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]:
        raise RankError(f"{' and '.join(missing)} is not set, so this process has no GPU: start it with torchrun")
    local_rank, processes = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if processes > (count := torch.cuda.device_count()):
        raise RankError(
            f"{processes} processes but {count} GPUs on this machine: start torchrun --nproc-per-node {count}, or use "
            "--device cpu"
        )
    torch.cuda.set_device(local_rank)
