"""What the training loop asks of a loader, and the adapter that lets any iterable of batches be one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class EpochLoader(Protocol):
    """Batches that can be had from any position of any epoch; `nasfast.data.Loader` is one."""

    def __len__(self) -> int: ...

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]: ...


class _IterableLoader:
    """Adapter of e.g. a `torch.utils.data.DataLoader`; skipping to a position iterates over what comes before it."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in islice(_with_own_generator(self._batches, seed=epoch), start, None):
            yield x.to(device, memory_format=torch.channels_last), y.to(device)


def _with_own_generator(batches: Iterable[Any], *, seed: int) -> Iterator[Any]:
    """`batches`, made while the global CPU generator is swapped for one that starts from `seed`.

    A DataLoader shuffles and its data set augments with the global generator, and not before a batch is asked for. So
    an epoch repeats from any position, whatever else draws numbers.
    """
    iterator, state = None, None
    while True:
        with torch.random.fork_rng(devices=[]):
            if iterator is None:
                torch.manual_seed(seed)
                iterator = iter(batches)
            else:
                torch.set_rng_state(state)
            batch = next(iterator, None)
            state = torch.get_rng_state()
        if batch is None:
            return
        yield batch


def as_epochs(loader: object) -> EpochLoader:
    """`loader` itself if it is an EpochLoader, else an adapter around an iterable of (images, labels) with a length.

    Raises:
        TypeError: neither.
    """
    if isinstance(loader, EpochLoader):
        return loader
    if isinstance(loader, Iterable) and hasattr(loader, "__len__"):
        return _IterableLoader(loader)
    raise TypeError(
        f"loader must be a nasfast Loader or a sized iterable of (images, labels), got {type(loader).__name__}"
    )
