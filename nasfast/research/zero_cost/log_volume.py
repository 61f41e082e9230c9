"""Log-volume: how evenly the images of a batch spread in the last maps of an untrained network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.layers import not_finite, working_copy

_FLOOR = 1e-6
"""Added to each share, because the Gram matrix of single-precision maps has no smaller eigenvalues."""


def log_volume(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Mean over i of log(1e-6 + s_i), with s the eigenvalues of the images' Gram matrix divided by their sum.

    The maps are those that enter the last BatchNorm that runs; row n of F is image n's map, minus the mean over images,
    and the Gram matrix is F F^T. Its N - 1 eigenvalues are all equal, and the score is highest, where the network keeps
    all images equally far apart, as an isometry of well spread images does. Where the maps of all images become alike
    but for a few directions, as in deep plain networks and behind repeated pooling, the score is low. Without the floor
    it would be the logarithm of the volume that the images span, up to scale. Norms use the batch's statistics. It
    needs no labels and no gradient.

    Args:
        module: images -> logits, with BatchNorms that are modules.
        images: (N, C, H, W), on the module's device, N at least 3.
        labels: not used.

    Raises:
        ScoreError: there are fewer than three images, no BatchNorm ran, its input is not finite, or it is the same for
            all images.
    """
    if len(images) < 3:
        raise ScoreError(
            f"log_volume needs at least 3 images, got {len(images)}: two have one eigenvalue, and its share is 1 for "
            "every network"
        )
    copied = working_copy(module)
    maps: list[Tensor] = []

    def keep(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        maps[:] = [inputs[0]]

    for child in copied.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.register_forward_pre_hook(keep)
    with torch.no_grad():
        copied(images)
    if not maps:
        raise ScoreError(
            f"no BatchNorm module ran in this {type(module).__name__}, and the score takes the maps that enter the "
            "last one: a network with another norm has no such score; one built with fused=True must be built without"
        )
    flat = maps[0].flatten(1).double()
    if not flat.isfinite().all():
        raise not_finite(copied, images, "input of the last BatchNorm")
    flat = flat - flat.mean(0)
    # the mean is subtracted, so the least of the N eigenvalues is 0
    values = torch.linalg.eigvalsh(flat @ flat.T)[1:].clamp(min=0)
    total = values.sum()
    if total <= _FLOOR**2 * flat.numel():
        raise ScoreError(f"all {len(images)} images have the same map before the last BatchNorm: they span no volume")
    return (values / total + _FLOOR).log().mean().item()
