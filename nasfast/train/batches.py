"""The interface of loaders that the training loop uses, and the adapter from any iterable of batches to it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class EpochLoader(Protocol):
    """Gives batches from any position of any epoch; `nasfast.data.Loader` is one."""

    def __len__(self) -> int: ...

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]: ...


class _IterableLoader:
    """Adapter for e.g. a `torch.utils.data.DataLoader`; to skip to a position it iterates over all batches before.

    The random numbers of an epoch depend on (seed, epoch). The seed is what `torch.manual_seed` was given before the
    adapter was made. A `generator` of the DataLoader or of its sampler keeps its own seed.
    """

    def __init__(self, batches: Any, classes: int | None) -> None:
        self._batches, self._classes = batches, classes
        owners = (batches, getattr(batches, "sampler", None))
        own = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
        # a dict removes duplicates: a DataLoader that shuffles gives its generator to its sampler
        self._seeds = {generator: generator.initial_seed() for generator in (torch.default_generator, *own)}

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in islice(self._batches_of(epoch), start, None):
            x, y = _images_and_labels(batch, self._classes)
            yield x.to(device, memory_format=torch.channels_last), y.to(device, torch.long)

    def _batches_of(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch; each is made while the generators are in states that only this epoch uses.

        A DataLoader shuffles with these generators, and its data set augments with them, when a batch is asked for. So
        an epoch repeats from any position, whatever else draws numbers. Between batches the generators have the states
        that they had before.
        """
        iterator, states = None, []
        while True:
            before = [generator.get_state() for generator in self._seeds]
            try:
                if iterator is None:
                    for generator, seed in self._seeds.items():
                        # Random hashes a string to the same number in every process
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


def _images_and_labels(batch: object, classes: int | None) -> tuple[Tensor, Tensor]:
    """The two tensors of a batch of the user's, checked here because a GPU names no cause for labels out of range."""
    if not isinstance(batch, (list, tuple)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
        types = f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
        raise TypeError(
            f"loader: each batch must be a pair of tensors (images, labels), got {type(batch).__name__}{types}: give "
            "e.g. a torch.utils.data.DataLoader with a collate_fn that returns such a pair"
        )
    x, y = batch
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"loader: images must be floating and of shape (N, C, H, W), got {x.dtype} of shape {tuple(x.shape)}"
        )
    if y.shape != x.shape[:1] or y.is_floating_point():
        raise ValueError(
            f"loader: labels must be integers of shape ({len(x)},), one for each image, got {y.dtype} of shape "
            f"{tuple(y.shape)}"
        )
    # labels that are on a GPU already are not read, because the read would wait for it
    if len(y) and not y.is_cuda and (y.min() < 0 or (classes is not None and y.max() >= classes)):
        allowed = "at least 0" if classes is None else f"from 0 to {classes - 1}, as the network has {classes} classes"
        raise ValueError(f"loader: labels must be {allowed}, got {int(y.min())} to {int(y.max())}")
    return x, y


def _set_states(generators: Iterable[torch.Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def as_epochs(loader: object, *, classes: int | None = None) -> EpochLoader:
    """`loader` itself if it is an EpochLoader, or an adapter for an iterable of (images, labels) with a length.

    The adapter raises TypeError or ValueError for a batch that is no such pair, or where a label is not below
    `classes`, the network's number of classes; None if that is not known.
    """
    if isinstance(loader, EpochLoader):
        return loader
    if isinstance(loader, Iterable) and isinstance(loader, Sized):
        return _IterableLoader(loader, classes)
    raise TypeError(
        f"loader must be a nasfast Loader or a sized iterable of (images, labels), got {type(loader).__name__}"
    )


def to_learn_from(loader: object, *, classes: int | None = None) -> EpochLoader:
    """`as_epochs(loader, classes=classes)`, which has at least one batch."""
    epochs = as_epochs(loader, classes=classes)
    if len(epochs) == 0:
        raise ValueError(
            "a loader has no batch: a DataLoader with drop_last=True has none if batch_size is above the "
            "number of images; give more images, or smaller batches"
        )
    return epochs
