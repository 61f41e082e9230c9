"""The processes of one run, as torchrun starts them: who this one is, and the few things they say to each other.

A process that no launcher started is a world of one, without a process group: nothing here does anything then.

The state of a run (weights, optimiser, sampler, position in the data) is the same on every rank. So rank 0 writes all
files, in the form that a single process gives them, and a run may go on with another number of ranks. There is no
sharded state of which every rank would have to write its part (`torch.distributed.checkpoint`).
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

# Ranks wait for rank 0 as long as a search takes, and torchrun is there to notice a dead one. In milliseconds it must
# fit into 31 bits.
_TIMEOUT = timedelta(days=14)


class RankError(RuntimeError):
    """The ranks of this run cannot be started, or one of them is gone."""


@dataclass(frozen=True)
class World:
    """The processes that do a job together, seen from one of them; as made by default, one process alone.

    All ranks must make the same calls in the same order.

    Attributes:
        rank: number of this process, 0 to size - 1.
        size: how many there are.
        leads: whether this is the first of all processes that were started, those included that work beside it: it
            shows on the screen what it does, and locks the run directory for all.
        attempt: how often torchrun has started the processes again after one of them died.
        store: what outlives the attempts, None without torchrun.
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
        """Note, for attempts to come, that this torchrun job works on `what`."""
        # the first attempt counts: one that resumes does not begin anything
        if self.store is not None and not self.store.check([str(what)]):
            self.store.set(str(what), str(self.attempt))

    def has_begun(self, what: Path) -> bool:
        """Whether an earlier attempt of this torchrun job noted that it works on `what`, which then resumes.

        What was there before the job is not its own, however often it is started again.
        """
        if self.store is None or not self.store.check([str(what)]):
            return False
        return int(self.store.get(str(what))) < self.attempt

    def alone(self) -> World:
        """This process as a world of one, for work that the ranks do side by side."""
        return replace(self, rank=0, size=1)

    def add(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks; all of them get the same bits.

        Raises:
            RankError: a rank is gone.
        """
        if self.size > 1:
            with _saying_who():
                dist.all_reduce(tensor)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by rank 0's.

        Raises:
            RankError: a rank is gone.
        """
        if self.size > 1:
            with _saying_who():
                for tensor in tensors:
                    whole = tensor.contiguous()  # as the backends want it
                    dist.broadcast(whole, 0)
                    if not tensor.is_contiguous():
                        tensor.copy_(whole)

    def broadcast(self, data: bytes, *, source: int = 0) -> bytes:
        """The bytes that rank `source` gives; those of the other ranks count for nothing.

        Raises:
            RankError: a rank is gone.
        """
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        with _saying_who():
            dist.broadcast(length, source)
            if self.rank == source:
                content = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)
            else:
                content = torch.empty(int(length), dtype=torch.uint8)
            if length:
                dist.broadcast(content, source)
        return data if self.rank == source else content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in their order, on all of them.

        Raises:
            RankError: a rank is gone.
        """
        return [self.broadcast(data, source=rank) for rank in range(self.size)]


SINGLE = World()
"""One process, whatever else runs."""


# what gloo, NCCL and torch's store say of a connection that ended; their other errors explain themselves
_GONE = re.compile(r"connection|closed|reset|timed out|refused|broken pipe|remote process exited", re.IGNORECASE)


@contextlib.contextmanager
def _saying_who() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistNetworkError) or _GONE.search(str(error))):
            raise
        reason = str(error).split(". ")[0]  # gloo goes on with advice
        raise RankError(f"another process of this run is gone; its own message says why ({reason})") from error


def environment_rank() -> int:
    """Number of this process among those that a launcher started; 0 without one, or where it started only one."""
    return int(os.environ.get("RANK", "0")) if _environment_size() > 1 else 0


def _environment_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def start(device: str) -> Iterator[World]:
    """Join the other processes that torchrun started, for the duration of a `with` block.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and torchrun's TORCHELASTIC_*, and what
    `torch.distributed` reads besides (MASTER_ADDR, MASTER_PORT). Without a launcher, or with one
    process, there is no process group.

    Args:
        device: `cpu` (gloo), or `cuda` (NCCL, one GPU per process): the current GPU is then this process's.

    Raises:
        RankError: more processes on this machine than GPUs, a device that names one GPU for all of them, or another
            kind of device than rank 0's.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    size, rank = _environment_size(), environment_rank()
    if size == 1:
        # otherwise nobody keeps a store, and this process would open one
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        yield World(attempt=attempt, store=_outliving(_join_store()) if kept else None)
        return
    kind = device.split(":")[0]
    if kind == "cuda":
        _take_gpu(device)
    store = _join_store()
    outliving = _outliving(store)
    # torchrun's store outlives the processes, and those started again must not find the addresses of the dead ones
    store = dist.PrefixStore(f"nasfast {attempt} {size}", store)
    if rank == 0:
        store.set("device", kind)
    elif (first := store.get("device").decode()) != kind:
        raise RankError(f"rank {rank} would compute on {kind}, rank 0 on {first}: use --device cpu, or GPUs for all")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    yield World(rank, size, leads=rank == 0, attempt=attempt, store=outliving)
    # not after an error: the process is about to end, and NCCL may wait here for the others
    dist.destroy_process_group()


def _join_store() -> dist.Store:
    return next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]


def _outliving(store: dist.Store) -> dist.Store:
    """The part of torchrun's store that all attempts see."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    # two jobs may have one store
    return dist.PrefixStore(f"nasfast begun {os.environ.get('TORCHELASTIC_RUN_ID')}", store)


def _take_gpu(device: str) -> None:
    if ":" in device:
        raise RankError(f"device={device!r} names one GPU for every process: use --device cuda")
    if missing := [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]:
        raise RankError(f"{' and '.join(missing)} not set, so this process has no GPU: start it with torchrun")
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if here > (count := torch.cuda.device_count()):
        raise RankError(
            f"{here} processes but {count} GPUs on this machine: start torchrun --nproc-per-node {count}, or use "
            "--device cpu"
        )
    torch.cuda.set_device(local)
