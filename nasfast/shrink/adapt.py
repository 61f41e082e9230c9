"""Training of what a cut network needs most: scale and shift of its BatchNorms, and its classifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from nasfast.fusion import fuse, unfuse
from nasfast.fusion.modules import batch_norms
from nasfast.shrink.graph import ShrinkError


class Batches(Protocol):
    """Batches that every iteration gives, as a DataLoader or a list of them."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


def affine_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Scale and shift of a network's BatchNorms, and the parameters of its classifier, its last linear layer.

    Raises:
        ShrinkError: it has no BatchNorm with statistics, or no linear layer.
    """
    norms: list[Any] = [norm for norm in batch_norms(model).values() if norm.running_mean is not None]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    scales = [p for norm in norms for p in (norm.weight, norm.bias) if p is not None]
    if not scales or not linear:
        raise ShrinkError(
            f"{type(model).__name__} has {len(norms)} BatchNorms with statistics and {len(linear)} linear layers: "
            "give a network with BatchNorms, whose classifier is an nn.Linear"
        )
    return scales, list(linear[-1].parameters())


def adapt(
    model: nn.Module,
    data: Batches,
    *,
    teacher: Callable[[Tensor], Tensor] | None = None,
    size: int | None = None,
    epochs: int = 3,
    lr: float | None = None,
    lr_classifier: float | None = None,
    fused: bool = True,
) -> list[float]:
    """Train scale and shift of a network's BatchNorms and its classifier, in place; all else is frozen meanwhile.

    The network is in evaluation mode throughout, and stays so: its BatchNorms use the statistics that they have. With
    the statistics of a batch, a pretrained network may lose more than a cut costs (docs/shrink.md), so there is no
    option for it. The loss is the KL divergence to the teacher plus the cross entropy of the labels, or one of them.
    The optimiser is AdamW without weight decay; its learning rates fall to 0 as a cosine.

    Args:
        model: the network.
        data: has a length and gives, at every iteration over it, that many batches of images (N, channels, height,
            width), or all of them pairs of images and labels (N,); a DataLoader or a list.
        teacher: gives logits (N, classes) of the images; the larger network in evaluation mode. None for labels alone.
        size: side in pixels to which the network's images are resized, antialiased; the teacher gets them as they are.
        epochs: iterations over `data`.
        lr: highest learning rate of scale and shift; by default 2e-3 where there are labels, and 4e-4 for a teacher
            alone, where the network knows its classes.
        lr_classifier: that of the classifier; by default 1e-2 and 4e-4.
        fused: whether the network is fused for the training (`nasfast.fuse`), if it is not already.

    Returns:
        The mean loss of each epoch.

    Raises:
        TypeError: data has no length, as a generator, which gives its batches once.
        ShrinkError: the network has no BatchNorms or no linear layer; there is neither a teacher nor labels; the loss
            is not finite.
    """
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"data must have a length and give its batches in every epoch, got {type(data).__name__}: give a "
            "DataLoader or a list of batches"
        )
    if not len(data) or epochs < 1:
        raise ShrinkError(f"data has {len(data)} batches and epochs is {epochs}: give at least one of each")
    scales, classifier = affine_parameters(model)
    flags = [(p, p.requires_grad) for p in model.parameters()]
    trained = {id(p) for p in (*scales, *classifier)}
    own = fused and not any("forward" in vars(module) for module in model.modules())
    model.eval()
    try:
        for p, _ in flags:
            p.requires_grad_(id(p) in trained)
        if own:
            fuse(model)
        return _train(partial(_loss, model, teacher, size), data, epochs, (scales, classifier), (lr, lr_classifier))
    finally:
        if own:
            unfuse(model)
        for p, flag in flags:
            p.requires_grad_(flag)
            p.grad = None


def _train(
    loss_of: Callable[[Tensor, Tensor | None], Tensor],
    data: Batches,
    epochs: int,
    groups: tuple[list[nn.Parameter], ...],
    rates: tuple[float | None, ...],
) -> list[float]:
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], weight_decay=0.0)
    steps, step, means = epochs * len(data), 0, []
    for epoch in range(epochs):
        total = images_seen = 0.0
        for batch in data:
            images, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
            usual = (4e-4, 4e-4) if labels is None else (2e-3, 1e-2)
            for group, given, rate in zip(optimizer.param_groups, rates, usual, strict=True):
                group["lr"] = (rate if given is None else given) * (1 + math.cos(math.pi * step / steps)) / 2
            loss = loss_of(images, labels)
            value = loss.item()
            if not torch.isfinite(loss):
                raise ShrinkError(f"the loss is {value} in epoch {epoch + 1}: lower lr, or look at the images")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            total, images_seen = total + value * len(images), images_seen + len(images)
        means.append(total / images_seen)
    return means


def _loss(
    model: nn.Module,
    teacher: Callable[[Tensor], Tensor] | None,
    size: int | None,
    images: Tensor,
    labels: Tensor | None,
) -> Tensor:
    if teacher is None and labels is None:
        raise ShrinkError("there is neither a teacher nor a label: give teacher=, or batches of images and labels")
    small = images
    if size is not None and images.shape[-1] != size:
        small = functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    logits = model(small)
    loss = logits.new_zeros(())
    if teacher is not None:
        with torch.no_grad():
            target = teacher(images).log_softmax(1)
        loss = loss + functional.kl_div(logits.log_softmax(1), target, reduction="batchmean", log_target=True)
    if labels is not None:
        loss = loss + functional.cross_entropy(logits, labels)
    return loss
