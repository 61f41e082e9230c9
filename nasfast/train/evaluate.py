"""Accuracy of a network on a loader, and recalibration of its BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.runtime.distributed import SINGLE, World
from nasfast.train.batches import as_epochs


@dataclass(frozen=True)
class Evaluation:
    """Shares of images in [0, 1], mean cross-entropy in nats, and how many images were seen.

    Attributes:
        correct: of each image of this rank, in the loader's order, whether the largest logit is its label's.
    """

    top1: float
    top5: float
    loss: float
    images: int
    correct: tuple[bool, ...] = field(default=(), repr=False)


def count_correct(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """How many of (N, C) logits have their label among the k largest; all of them when k >= C."""
    k = min(k, logits.shape[1])
    return (logits.topk(k, dim=1).indices == labels[:, None]).sum()


@torch.no_grad()
def evaluate(
    forward: nn.Module | Callable[[Tensor], Tensor], loader: object, *, device: str = "cpu", world: World = SINGLE
) -> Evaluation:
    """Top-1, top-5 and loss over a whole loader.

    Args:
        forward: a module (put into eval mode for the duration) or any function of (N, C, H, W) images giving logits.
        loader: a `nasfast.data.Loader`, or any iterable of (images, labels) with a length.
        world: the ranks that share the images, every image on one of them; the result is of all, on all.

    Raises:
        ValueError: the loader is empty.
        TypeError: it has no length or is no iterable.
    """
    training = isinstance(forward, nn.Module) and forward.training
    totals, correct = torch.zeros(4, dtype=torch.float64), []
    try:
        if training:
            forward.eval()
        for x, y in as_epochs(loader).epoch(0, device=device):
            logits = forward(x).float()
            loss = F.cross_entropy(logits, y, reduction="sum")
            right = logits.topk(1, dim=1).indices[:, 0] == y
            totals[:3] += torch.stack([right.sum(), count_correct(logits, y, 5), loss]).double().cpu()
            correct += right.tolist()
            totals[3] += len(y)
    finally:
        if training:
            forward.train()
    world.add(totals)
    images = int(totals[3])
    if not images:
        raise ValueError("evaluate: the loader gave no image")
    top1, top5, loss, _ = (totals / images).tolist()
    return Evaluation(top1, top5, loss, images, tuple(correct))


@torch.no_grad()
def recalibrate_bn(network: nn.Module, loader: object, *, batches: int = 50, device: str = "cpu") -> None:
    """Replace every running statistic by its average over `batches` training batches (SPOS, section 3.4).

    Weights inherited from a supernet come without statistics of this path; its accuracy means nothing before this.

    Args:
        network: changed in place; BatchNorms without running statistics are left alone.
        loader: see `evaluate`.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d) and m.track_running_stats]
    momenta = [bn.momentum for bn in norms]
    training = network.training
    try:
        for bn in norms:
            bn.reset_running_stats()
            bn.momentum = None  # cumulative average
        network.train()
        for x, _ in islice(as_epochs(loader).epoch(0, device=device), batches):
            network(x)
    finally:
        network.train(training)
        for bn, momentum in zip(norms, momenta, strict=True):
            bn.momentum = momentum
