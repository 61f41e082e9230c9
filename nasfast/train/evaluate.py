"""Accuracy of a network on a loader, and recalibration of its BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.runtime.distributed import SINGLE, World
from nasfast.train.batches import as_epochs


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation over all ranks.

    Attributes:
        top1: share of images, from 0 to 1, whose label has the largest logit.
        top5: share of images, from 0 to 1, whose label is among the five largest logits.
        loss: mean cross-entropy in nats.
        images: number of images.
        correct: for each image of this rank, in the loader's order, whether its label has the largest logit.
    """

    top1: float
    top5: float
    loss: float
    images: int
    correct: tuple[bool, ...] = field(default=(), repr=False)


@contextmanager
def in_mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Context in which all modules of a network are in one mode; its end gives each module its own mode back."""
    before = {module: module.training for module in network.modules()}
    try:
        network.train(training)
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


@torch.no_grad()
def evaluate(
    forward: nn.Module | Callable[[Tensor], Tensor], loader: object, *, device: str = "cpu", world: World = SINGLE
) -> Evaluation:
    """Top-1, top-5 and loss over a whole loader.

    Args:
        forward: a module, or any function from (N, C, H, W) images to logits. A module is in eval mode meanwhile, with
            all its parts; each part is then in the mode that it had before.
        loader: a `nasfast.data.Loader`, or any iterable of (images, labels) with a length.
        device: where the images are put.
        world: the ranks that share the images, each image on one rank; every rank gets the result over all images.

    Raises:
        ValueError: the loader is empty.
        TypeError: the loader has no length or is not an iterable.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    correct: list[bool] = []
    with in_mode(forward, training=False) if isinstance(forward, nn.Module) else nullcontext():
        for x, y in as_epochs(loader).epoch(0, device=device):
            logits = forward(x).float()
            loss = F.cross_entropy(logits, y, reduction="sum")
            # all are in the top five of fewer classes
            top5 = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
            right = logits.topk(1, dim=1).indices[:, 0] == y
            totals[:3] += torch.stack([right.sum(), top5.sum(), loss]).double().cpu()
            correct += right.tolist()
            totals[3] += len(y)
    world.all_reduce(totals)
    images = int(totals[3])
    if not images:
        raise ValueError("evaluate: the loader gave no image: give a loader with at least one")
    top1, top5, loss, _ = (totals / images).tolist()
    return Evaluation(top1, top5, loss, images, tuple(correct))


@torch.no_grad()
def recalibrate_bn(network: nn.Module, loader: object, *, batches: int = 50, device: str = "cpu") -> None:
    """Replace every running statistic by its average over `batches` training batches (SPOS, section 3.4).

    Weights inherited from a supernet come without the statistics of this path, and its accuracy means nothing without
    them.

    Args:
        network: changed in place; BatchNorms without running statistics are not changed.
        loader: training batches; see `evaluate`.
        batches: number of batches.
        device: where the images are put.

    Raises:
        ValueError: there is no batch; the statistics are as they were.
    """
    images = islice(as_epochs(loader).epoch(0, device=device), batches)
    first = next(images, None)
    if first is None:
        raise ValueError(f"recalibrate_bn: no batch to average over: the loader gave none, or batches={batches}")
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [bn.momentum for bn in norms]
    try:
        for bn in norms:
            bn.reset_running_stats()
            bn.momentum = None  # None makes BatchNorm compute the cumulative average
        with in_mode(network, training=True):
            for x, _ in chain([first], images):
                network(x)
    finally:
        for bn, momentum in zip(norms, momenta, strict=True):
            bn.momentum = momentum
