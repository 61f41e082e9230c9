"""What scores are computed from: `NetworkEvidence` has single untrained networks, `Evidence` a supernet."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.indicators.registry import ScoreError
from nasfast.spaces import Arch, ArchSpace, FairSampler, LayerSpace
from nasfast.supernet import Supernet, inherit, untrained
from nasfast.train.batches import as_epochs
from nasfast.train.evaluate import in_mode

_LEAST_PATHS = 300
"""Number of sampled paths where none is given; spaces with more candidates take more, see `Evidence`."""


class NetworkEvidence:
    """Untrained networks of any space, and images, from which scores of single networks are computed.

    Args:
        space: a space of layers or of cells.
        images: any sized iterable of (images, labels), or an epoch loader; a score of a network takes the first batch.
        seed: seed of the weights; all networks are initialised from the same seed.
    """

    def __init__(self, space: ArchSpace, images: object, *, seed: int = 0) -> None:
        self.space, self.images, self.seed = space, images, seed

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The first batch: images (N, C, H, W) and labels (N,)."""
        return _require_batches(islice(as_epochs(self.images).epoch(0), 1))

    def network(self, arch: Arch) -> nn.Module:
        """The network of an architecture as PyTorch initialises its modules, in training mode."""
        return untrained(self.space, arch, seed=self.seed)


class Evidence(NetworkEvidence):
    """A supernet, whose networks have its weights, with the images and the sampled paths of its scores.

    Args:
        net: the supernet, on its device.
        images: a `nasfast.data.Loader`, or any sized iterable of (images, labels); all of it is kept in memory.
            BatchNorms use the statistics of its batches, so each batch should have a mixture of classes. Scores of
            paths need images that the supernet was not trained on.
        loaders: the training loader and the held-out loader, for scores that recalibrate BatchNorms; None for none.
        paths: number of sampled paths. None takes 300, or if that is more, four for each candidate beyond one per
            layer.
        recalibration_batches: number of training batches that recalibrate a path.
        seed: seed of the paths.
        bf16: whether to run the supernet under bfloat16 autocast.
    """

    def __init__(
        self,
        net: Supernet,
        images: object,
        *,
        loaders: tuple[object, object] | None = None,
        paths: int | None = None,
        recalibration_batches: int = 20,
        seed: int = 0,
        bf16: bool = False,
    ) -> None:
        super().__init__(net.space, images, seed=seed)
        self.net, self.loaders = net, loaders
        self.recalibration_batches, self.bf16 = recalibration_batches, bf16
        self._outcomes: dict[Arch, tuple[float, float]] = {}
        free = sum(len(values) - 1 for values in self.values)
        self.paths = max(_LEAST_PATHS, 4 * free) if paths is None else paths

    def on(self, images: object, *, loaders: tuple[object, object] | None = None) -> Evidence:
        """The same supernet and paths with other images; arguments as those of the class."""
        return Evidence(
            self.net,
            images,
            loaders=loaders,
            paths=self.paths,
            recalibration_batches=self.recalibration_batches,
            seed=self.seed,
            bf16=self.bf16,
        )

    def network(self, arch: Arch) -> nn.Module:
        """The standalone network of an architecture, with the supernet's weights."""
        return inherit(self.net, arch)

    @property
    def device(self) -> torch.device:
        """The supernet's device."""
        return next(self.net.parameters()).device

    @property
    def values(self) -> list[tuple[int, ...]]:
        """For each layer the values that a sampled path may take: candidates, and the skip if the net trained it."""
        trained = self.net.layer_indicators
        return [layer.legal if trained else layer.options for layer in self.net.space.layers]

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Images (N, C, H, W) and labels (N,) on the supernet's device."""
        return _require_batches(as_epochs(self.images).epoch(0, device=str(self.device)))

    def sample(self, count: int | None = None) -> list[Arch]:
        """Fair random paths, the same for the same seed; None takes `paths` of them."""
        sampler = FairSampler(self.net.space, seed=self.seed, layer_indicators=self.net.layer_indicators)
        return [sampler.step()[0] for _ in range(self.paths if count is None else count)]

    def logits(self, x: Tensor, path: Arch) -> Tensor:
        """Logits (N, classes) in float32 of one path; its BatchNorms use the statistics of the batch."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.net(x, path).float()

    @cached_property
    def _modules(self) -> list[nn.Module]:
        """All modules of the supernet: to walk through thousands takes milliseconds."""
        return list(self.net.modules())

    @torch.no_grad()
    def outcome(self, path: Arch) -> tuple[float, float]:
        """Mean cross-entropy (nats) and top-1 in [0, 1] of one path over all images.

        A path runs once, because several scores ask for it; train the supernet further only with new evidence. It runs
        in evaluation mode. A supernet that is in this mode already saves the time to change it, which is up to a sixth
        of a path's.
        """
        if path not in self._outcomes:
            loss, correct, images = 0.0, 0, 0
            trains = any(module.training for module in self._modules)
            with in_mode(self.net, training=False) if trains else nullcontext():  # a user's module may have dropout
                for x, y in self.batches:
                    logits = self.logits(x, path)
                    loss += F.cross_entropy(logits, y, reduction="sum").item()
                    correct += int((logits.argmax(1) == y).sum())
                    images += len(y)
            self._outcomes[path] = (loss / images, correct / images)
        return self._outcomes[path]


def _require_batches(epoch: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    batches = list(epoch)
    if not batches:
        raise ScoreError("the loader gave no image to score on: give a loader with at least one batch")
    return batches


def layer_space(evidence: NetworkEvidence) -> LayerSpace:
    """The space of a score that is a table of (layer, candidate); ScoreError for one of cells."""
    if not isinstance(evidence.space, LayerSpace):
        raise ScoreError(
            f"{evidence.space.name} is a space of cells, and this score is a table of layers: take another"
        )
    return evidence.space
