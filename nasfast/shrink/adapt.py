"""Training of what a cut network needs most: scale and shift of its BatchNorms, and its classifier; or of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from nasfast.fusion import fuse, unfuse
from nasfast.fusion.modules import batch_norms
from nasfast.shrink.features import gives_features, last_linear, split
from nasfast.shrink.graph import ShrinkError

Trained = Literal["affine", "all"]
"""What trains: scale and shift of BatchNorms and the classifier, or all weights."""

# highest learning rates of scale and shift, and of the classifier, by what teaches. A cut network, taught by both, has
# more to repair than a teacher; with larger rates of the classifier, which was fitted before, accuracy falls
_BY_LABELS, _BY_TEACHER, _BY_BOTH = (2e-3, 1e-3), (4e-4, 4e-4), (8e-3, 2e-3)
_ALL_WEIGHTS = (1e-4, 1e-4)

_FEATURES = 10.0
"""Factor of the features' difference in the loss: with 0 EfficientNet-Lite0 ends about a point lower (Imagenette)."""


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
    scales = [p for norm in norms for p in (norm.weight, norm.bias) if p is not None]
    if not scales:
        raise ShrinkError(
            f"{type(model).__name__} has {len(norms)} BatchNorms with statistics: give a network with BatchNorms"
        )
    return scales, list(last_linear(model)[1].parameters())


def adapt(
    model: nn.Module,
    data: Batches,
    *,
    teacher: Callable[[Tensor], Any] | None = None,
    features: bool = False,
    size: int | None = None,
    train: Trained = "affine",
    epochs: int = 3,
    lr: float | None = None,
    lr_classifier: float | None = None,
    fused: bool = True,
) -> list[float]:
    """Train scale and shift of a network's BatchNorms and its classifier, or all weights, in place.

    The network is in evaluation mode throughout, and stays so: its BatchNorms use the statistics that they have. With
    the statistics of a batch, a pretrained network may lose more than a cut costs (docs/shrink.md), so there is no
    option for it. The loss is the KL divergence to the teacher plus the cross entropy of the labels, or one of them;
    with features, also ten times their mean squared difference to the teacher's, in units of the variance of these. The
    optimiser is AdamW without weight decay; its learning rates fall to 0 as a cosine.

    Args:
        model: the network.
        data: has a length and gives, at every iteration over it, that many batches of images (N, channels, height,
            width), or all of them pairs of images and labels (N,); a DataLoader or a list.
        teacher: gives logits (N, classes) of the images; the larger network in evaluation mode. None for labels alone.
        features: whether the teacher gives a pair: logits, and what the inputs (N, features) of the network's
            classifier shall be like; `nasfast.shrink.with_features` makes such a teacher. A network keeps more with
            it, because a few classes say little of an image.
        size: side in pixels to which the network's images are resized, antialiased; the teacher gets them as they are.
        train: `affine`, or `all` for all weights, which takes longer; all else is frozen meanwhile.
        epochs: iterations over `data`.
        lr: highest learning rate of what trains besides the classifier; by default 8e-3 with a teacher and labels,
            2e-3 with labels alone, and 4e-4 with a teacher alone; 1e-4 for all weights.
        lr_classifier: that of the classifier; by default 2e-3, 1e-3 and 4e-4; 1e-4 with all weights. One whose weights
            are random needs more, as 1e-2.
        fused: whether the network is fused for the training (`nasfast.fuse`), if it is not already; with all weights,
            which chains are not made for, it is not.

    Returns:
        The mean loss of each epoch.

    Raises:
        TypeError: data has no length, as a generator, which gives its batches once.
        ShrinkError: the network has no BatchNorms or no linear layer; `train` is another word; there is neither a
            teacher nor labels; features are asked for, and the network's outputs are not those of its classifier; the
            loss is not finite.
    """
    if train not in get_args(Trained):
        raise ShrinkError(f"train is {train!r}: give affine or all")
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"data must have a length and give its batches in every epoch, got {type(data).__name__}: give a "
            "DataLoader or a list of batches"
        )
    if not len(data) or epochs < 1:
        raise ShrinkError(f"data has {len(data)} batches and epochs is {epochs}: give at least one of each")
    others, classifier = affine_parameters(model)
    flags = [(p, p.requires_grad) for p in model.parameters()]
    if train == "all":
        others = [p for p, _ in flags if all(p is not q for q in classifier)]
    trained = {id(p) for p in (*others, *classifier)}
    own = fused and train == "affine" and not any("forward" in vars(module) for module in model.modules())
    model.eval()
    body, head = split(model) if features else (model, None)
    try:
        for p, _ in flags:
            p.requires_grad_(id(p) in trained)
        if own:
            fuse(body)
        rates = _rates(train, teacher is not None, (lr, lr_classifier))
        return _train(_Loss(model, body, head, teacher, size), data, epochs, (others, classifier), rates)
    finally:
        if own:
            unfuse(body)
        for p, flag in flags:
            p.requires_grad_(flag)
            p.grad = None


def _rates(train: Trained, has_teacher: bool, given: tuple[float | None, ...]) -> dict[bool, tuple[float, ...]]:
    """The highest learning rates with labels (True) and without: those given, or the usual ones."""
    usual = {True: _BY_BOTH if has_teacher else _BY_LABELS, False: _BY_TEACHER}
    if train == "all":
        usual = dict.fromkeys(usual, _ALL_WEIGHTS)
    return {
        labelled: tuple(rate if own is None else own for own, rate in zip(given, rates, strict=True))
        for labelled, rates in usual.items()
    }


def _train(
    loss_of: Callable[[Tensor, Tensor | None], Tensor],
    data: Batches,
    epochs: int,
    groups: tuple[list[nn.Parameter], ...],
    rates: dict[bool, tuple[float, ...]],
) -> list[float]:
    """Train groups of parameters, by the highest learning rate of each with labels and without."""
    # The fused optimiser saves 3 % of a step on a CPU. It ignores strides, so that parameters must be contiguous.
    fused = all(p.device.type == "cpu" and p.is_contiguous() for group in groups for p in group) or None
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], weight_decay=0.0, fused=fused)
    steps, step, means = epochs * len(data), 0, []
    for epoch in range(epochs):
        total = images_seen = 0.0
        for batch in data:
            images, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
            for group, rate in zip(optimizer.param_groups, rates[labels is not None], strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
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


@dataclass
class _Loss:
    """The loss of a batch.

    Attributes:
        model: the network.
        body: what runs of it; with a head, it gives the features, and the teacher a pair.
        head: the classifier, where features teach.
        teacher: gives logits, or the pair; None for labels alone.
        size: side of the network's images; None leaves them as they are.
    """

    model: nn.Module
    body: nn.Module
    head: nn.Linear | None
    teacher: Callable[[Tensor], Any] | None
    size: int | None
    _is_checked: bool = False

    def __call__(self, images: Tensor, labels: Tensor | None) -> Tensor:
        if self.teacher is None and labels is None:
            raise ShrinkError("there is neither a teacher nor a label: give teacher=, or batches of images and labels")
        small = images
        if self.size is not None and images.shape[-1] != self.size:
            small = functional.interpolate(images, size=(self.size, self.size), mode="bilinear", antialias=True)
        if self.head is not None and not self._is_checked:
            self._check(small)
        seen = self.body(small)
        logits = seen if self.head is None else self.head(seen)
        loss = logits.new_zeros(())
        if self.teacher is not None:
            with torch.no_grad():
                target, wanted = (self.teacher(images), None) if self.head is None else self.teacher(images)
            divergence = functional.kl_div(
                logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True
            )
            loss = loss + divergence
            if wanted is not None:
                loss = loss + _FEATURES * functional.mse_loss(seen, wanted) / wanted.var(correction=0).clamp_min(1e-12)
        if labels is not None:
            loss = loss + functional.cross_entropy(logits, labels)
        return loss

    def _check(self, images: Tensor) -> None:
        """Refuse features of a network whose logits are others than those of its classifier, which it would lose."""
        if not gives_features(self.model, images):
            raise ShrinkError(
                f"the outputs of {type(self.model).__name__} are not those of its last linear layer: leave features out"
            )
        self._is_checked = True
