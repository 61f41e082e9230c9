"""What the ranks exchange in a step: gradients averaged over all images, loss and counts, and whether to stop.

Ranks may have different numbers of images (a batch that does not divide evenly, unreadable files). So each rank's
gradients are multiplied by its number of images, added, and divided by the number of all images. BatchNorm in training
mode normalises by the images of its own rank; each rank keeps its own buffers, and those of rank 0 count as the
network's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nasfast.engine import StepResult
from nasfast.runtime.distributed import World


class Outcome(NamedTuple):
    """The mean loss, correct predictions and images of one step over all ranks, and whether a rank was asked to stop.

    With several ranks, images and stop, which is then above zero, are tensors on the device.
    """

    loss: Tensor
    correct: Tensor
    images: Tensor | int
    stop: Tensor | bool


def exchange(
    parameters: Sequence[nn.Parameter],
    result: StepResult,
    images: int,
    *,
    stop: bool,
    world: World,
    same_path: bool,
) -> Outcome:
    """Average over the ranks what one step gave; the averages replace the gradients in `grad`.

    It is one all-reduce of one buffer, which has the step's gradients followed by the summed loss and the counts. A
    single process exchanges nothing.

    Args:
        parameters: those that train.
        result, images, stop: of this rank: what its step gave, its number of images, and whether it was asked to stop.
        world: the ranks.
        same_path: whether every rank took the same path through a supernet, so that the same parameters have gradients.

    Raises:
        RuntimeError: without such a path, a parameter has no gradient here, and may have one elsewhere.
    """
    if world.size == 1:
        return Outcome(*result, images, stop)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not same_path and len(gradients) < len(parameters):
        unused = len(parameters) - len(gradients)
        raise RuntimeError(
            f"{unused} of {len(parameters)} parameters that train have no gradient after a step: ranks can only add "
            "gradients of all, so freeze those that a step may leave out"
        )
    loss = result.loss * images
    # float32 or wider: counts are exact up to 2^24
    row = torch.stack((loss, result.correct.to(loss), torch.full_like(loss, images), torch.full_like(loss, stop)))
    flat = torch.cat([*((g * images).reshape(-1) for g in gradients), row])
    world.all_reduce(flat)
    *sums, row = flat.split([*(g.numel() for g in gradients), len(row)])
    loss, correct, total, stops = row
    if gradients:
        torch._foreach_copy_(gradients, [s.view(g.shape) for s, g in zip(sums, gradients, strict=True)])
        torch._foreach_div_(gradients, total)
    return Outcome(loss / total, correct, total, stops)
