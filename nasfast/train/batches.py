"""What the training loop asks of a loader, and the adapter that lets any iterable of batches be one."""

from __future__ import annotations

import random
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
    """Adapter of e.g. a `torch.utils.data.DataLoader`; skipping to a position iterates over what comes before it.

    The numbers of an epoch depend on (seed, epoch): the seed is what `torch.manual_seed` was given before the adapter
    was made, or for a `generator` of the DataLoader or of its sampler, what that one was given.
    """

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches
        owners = (batches, getattr(batches, "sampler", None))
        own = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
        # a dict, because a DataLoader that shuffles hands its generator to its sampler
        self._seeds = {generator: generator.initial_seed() for generator in (torch.default_generator, *own)}

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in islice(self._reseeded(epoch), start, None):
            yield x.to(device, memory_format=torch.channels_last), y.to(device)

    def _reseeded(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch, made while each generator is in a state of its own.

        A DataLoader shuffles and its data set augments with these generators, and not before a batch is asked for. So
        an epoch repeats from any position, whatever else draws numbers. In between the generators are as they were.
        """
        iterator, states = None, []
        while True:
            before = [generator.get_state() for generator in self._seeds]
            try:
                if iterator is None:
                    for generator, seed in self._seeds.items():
                        # a string, which Python hashes to the same number in every process
                        generator.manual_seed(random.Random(f"{seed} {epoch}").getrandbits(63))
                    iterator = iter(self._batches)
                else:
                    _set_states(self._seeds, states)
                batch = next(iterator, None)
                states = [generator.get_state() for generator in self._seeds]
            finally:
                _set_states(self._seeds, before)
            if batch is None:
                return
            yield batch


def _set_states(generators: Iterable[torch.Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


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
