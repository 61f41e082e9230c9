"""The processes of one run, as torchrun starts them: who this one is, and the few things they say to each other.

A process that no launcher started is a world of one, without a process group: nothing here does anything then.

The state of a run (weights, optimiser, sampler, position in the data) is the same on every rank. So rank 0 writes all
files, in the form that a single process gives them, and a run may go on with another number of ranks. There is no
sharded state of which every rank would have to write its part (`torch.distributed.checkpoint`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

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
        restarted: whether torchrun started the processes again after one of them died: what has a checkpoint resumes.
    """

    rank: int = 0
    size: int = 1
    leads: bool = True
    restarted: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

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


@contextlib.contextmanager
def _saying_who() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split(". ")[0]  # gloo goes on with advice
        raise RankError(f"another process of this run is gone; its own message says why ({reason})") from error


def environment_rank() -> int:
    """Number of this process among those that a launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def start(device: str) -> Iterator[World]:
    """Join the other processes that torchrun started, for the duration of a `with` block.

    Reads RANK, WORLD_SIZE, LOCAL_RANK and TORCHELASTIC_RESTART_COUNT, and what `torch.distributed` reads besides
    (MASTER_ADDR, MASTER_PORT). Without a launcher, or with one process, there is no process group.

    Args:
        device: `cpu` (gloo), or `cuda` (NCCL, one GPU per process): the current GPU is then this process's.

    Raises:
        RankError: more processes on this machine than GPUs, or a device that names one GPU for all of them.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), environment_rank()
    if size == 1:
        yield World(restarted=attempt > 0)
        return
    if device.startswith("cuda"):
        _take_gpu(device)
    store, *_ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    # torchrun's store outlives the processes, and those started again must not find the addresses of the dead ones
    store = dist.PrefixStore(f"nasfast {attempt} {size}", store)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    yield World(rank, size, leads=rank == 0, restarted=attempt > 0)
    # not after an error: the process is about to end, and NCCL may wait here for the others
    dist.destroy_process_group()


def _take_gpu(device: str) -> None:
    if ":" in device:
        raise RankError(f"device={device!r} names one GPU for every process: use --device cuda")
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if here > (count := torch.cuda.device_count()):
        raise RankError(
            f"{here} processes but {count} GPUs on this machine: start torchrun --nproc-per-node {count}, or use "
            "--device cpu"
        )
    torch.cuda.set_device(local)
