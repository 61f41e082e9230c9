"""What the ranks exchange in a step: gradients averaged over all images, loss and counts, and whether to stop.

Ranks may have different numbers of images (a batch that does not divide evenly, unreadable files). So each rank's
gradients are multiplied by its number of images, added, and divided by the number of all images. BatchNorm in training
mode normalises by the images of its own rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nasfast.engine import StepResult
from nasfast.runtime.distributed import World


class Outcome(NamedTuple):
    """The outcome of one step over all ranks; with several ranks, images and stop are tensors on the device.

    Attributes:
        loss: mean loss.
        correct: number of correct predictions.
        images: number of images in the whole batch.
        stop: above zero if a rank was asked to stop.
    """

    loss: Tensor
    correct: Tensor
    images: Tensor | int
    stop: Tensor | bool


class FlatExchange:
    """One all-reduce per step of one buffer, which has the step's gradients followed by the loss and the counts.

    It serves supernets: every rank takes the same path, so the same parameters have gradients. A single process
    exchanges nothing.

    Attributes:
        module: the module that an engine calls.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.module, self._world = model, world
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def begin(self, x: Tensor) -> None:
        """Called before forward and backward with (N, C, H, W) images of this rank."""

    def finish(self, result: StepResult, images: int, *, stop: bool) -> Outcome:
        """Add up over the ranks what one step gave; the sums replace the gradients in `grad`.

        Args:
            result: of this rank.
            images: number of images of this rank.
            stop: whether this rank was asked to stop.
        """
        if self._world.size == 1:
            return Outcome(*result, images, stop)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        flat = torch.cat([*((g * images).reshape(-1) for g in gradients), _row(result, images, stop)])
        self._world.add(flat)
        *sums, row = flat.split([*(g.numel() for g in gradients), _ROW])
        if gradients:
            torch._foreach_copy_(gradients, [s.view(g.shape) for s, g in zip(sums, gradients, strict=True)])
        return _outcome(row, gradients)


class OverlappedExchange:
    """DistributedDataParallel, which adds gradients while backward computes others.

    A small all-reduce of the counts ends the step. It serves networks of which every step uses every parameter. Each
    rank keeps its own buffers; those of rank 0 count as the network's.

    Attributes:
        module: the module that an engine calls.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        devices = None if next(model.parameters()).device.type == "cpu" else [torch.cuda.current_device()]
        self.module = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        self.module.broadcast_buffers = False  # set here because the argument is deprecated from torch 2.15 on
        self.module.register_comm_hook(self, _add_weighted)
        self._images, self._settled = 0, False

    def begin(self, x: Tensor) -> None:
        """See `FlatExchange.begin`."""
        if not self._settled:
            self._settle(x)
        self._images = len(x)

    def finish(self, result: StepResult, images: int, *, stop: bool) -> Outcome:
        """See `FlatExchange.finish`."""
        row = _row(result, images, stop)
        self._world.add(row)
        return _outcome(row, [p.grad for p in self._model.parameters() if p.grad is not None])

    def _settle(self, x: Tensor) -> None:
        """Run a forward and a backward whose results are dropped.

        After its first backward, DDP rearranges the gradients in its buckets, and sums over more than two ranks depend
        on the arrangement. Without this call the first step of a resumed run would differ.
        """
        kept = [buffer.clone() for buffer in self._model.buffers()]
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if x.is_cuda else []):
            self.module(x).sum().backward()
        for buffer, before in zip(self._model.buffers(), kept, strict=True):
            buffer.copy_(before)
        self._settled = True


Exchange = FlatExchange | OverlappedExchange


def _add_weighted(exchange, bucket):
    """DDP's communication hook: (OverlappedExchange, dist.GradBucket) -> Future[Tensor].

    The types stand only here, because DDP refuses annotations that are strings.
    """
    work = dist.all_reduce(bucket.buffer().mul_(exchange._images), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_ROW = 4


def _row(result: StepResult, images: int, stop: bool) -> Tensor:
    """(4,) float32 or wider: summed loss of this rank's images, correct, images, stop; counts are exact up to 2^24."""
    loss = result.loss * images
    return torch.stack((loss, result.correct.to(loss), torch.full_like(loss, images), torch.full_like(loss, stop)))


def _outcome(row: Tensor, gradients: list[Tensor]) -> Outcome:
    """Divide the sums over all ranks by the number of images."""
    loss, correct, images, stop = row
    if gradients:
        torch._foreach_div_(gradients, images)
    return Outcome(loss / images, correct, images, stop)
