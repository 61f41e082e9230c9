"""The standalone network of one architecture: a plain `nn.Module` that needs no nasfast operator to run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nasfast import extensions
from nasfast.settings import ImageInfo, Init
from nasfast.spaces import SKIP, Arch, ArchSpace, ModuleSpace, SearchSpace
from nasfast.supernet.blocks import UnitFactory, build_block
from nasfast.supernet.init import InitScheme, initialize
from nasfast.supernet.supernet import ModuleSupernet, Supernet


class ArchNetwork(nn.Module):
    """The standalone network of one architecture, of any kind of space; its methods are those of a timm model.

    Its input is (N, in_channels, resolution, resolution), its output logits (N, num_classes).

    Attributes:
        space, arch: what it is the network of.
        activation: activation of the blocks of layers that have none of their own.
        classifier: its last layer; `nn.Identity` after `reset_classifier(0)`.
        num_features: channels that reach the classifier.
        images: how images become its input, and its classes; None where that is not known.
    """

    space: ArchSpace
    arch: Arch
    activation: str
    classifier: nn.Linear
    num_features: int
    images: ImageInfo | None = None

    @property
    def num_classes(self) -> int:
        """Outputs of the classifier; 0 without one."""
        return self.classifier.out_features if isinstance(self.classifier, nn.Linear) else 0

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The last map of each size before the head, as timm's `features_only` gives it; none in a network of cells.

        Each has its channels `num_chs`, the `reduction` of the image's height and width, and its `module`.
        """
        return []

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one; 0 classes are none, and the output is then (N, num_features).

        Raises:
            ValueError: `global_pool` is another one than the mean, `avg`.
        """
        if global_pool not in (None, "avg"):
            raise ValueError(f"global_pool must be 'avg', got {global_pool!r}: forward_features gives the maps")
        biased = getattr(self.classifier, "bias", True) is not None
        new = nn.Linear(self.num_features, num_classes, bias=biased) if num_classes else nn.Identity()
        # only a caller who asks for no classes gets something else than a linear layer
        self.classifier = new.to(next(self.parameters()))  # type: ignore[assignment]

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) images -> (N, num_features, H', W'), which is pooled for the classifier."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, num_features, H', W') -> logits (N, num_classes), or with `pre_logits` the pooled (N, num_features)."""
        pooled = x.mean((2, 3))
        return pooled if pre_logits else self.classifier(pooled)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class StandaloneNetwork(ArchNetwork):
    """The network of an architecture of layers, without layer indicators; skipped layers are `nn.Identity`."""

    space: SearchSpace

    def __init__(self, space: SearchSpace, arch: Iterable[int], *, activation: str | None = None) -> None:
        super().__init__()
        self.arch = space.check(arch)
        self.space, self.num_features = space, space.features
        self.activation = activation or space.activation
        units = UnitFactory(act=self.activation, fused=False, track_running_stats=True)
        self.stem = nn.Sequential(*(build_block(layer.choices[0], layer, units) for layer in space.stem_layers))
        self.blocks = nn.Sequential(
            *(
                nn.Identity() if choice == SKIP else build_block(layer.choices[choice], layer, units)
                for layer, choice in zip(space.layers, self.arch, strict=True)
            )
        )
        self.head = nn.Sequential(*(build_block(layer.choices[0], layer, units) for layer in space.head_layers))
        self.classifier = nn.Linear(space.features, space.num_classes, bias=space.classifier_bias)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """See `ArchNetwork`."""
        layers = [(f"stem.{i}", layer) for i, layer in enumerate(self.space.stem_layers)]
        layers += [(f"blocks.{i}", layer) for i, layer in enumerate(self.space.layers)]
        maps, reduction = {}, 1
        for module, layer in layers:
            reduction *= layer.stride
            maps[reduction] = {"num_chs": layer.out_channels, "reduction": reduction, "module": module}
        return list(maps.values())

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) images -> (N, num_features, H', W')."""
        return self.head(self.blocks(self.stem(x)))


def standalone_network(space: ArchSpace, arch: Iterable[int], *, activation: str | None = None) -> ArchNetwork:
    """The standalone network of an architecture; its class is the `NETWORK` of the kind of space.

    Raises:
        TypeError: `space` is not a search space, or is one of a module, from which alone its networks can be made.
        ArchError: `arch` does not belong to `space`.
    """
    if not isinstance(space, ArchSpace):
        raise TypeError(f"expected a search space, got {type(space).__name__}")
    if isinstance(space, ModuleSpace):
        raise TypeError(
            f"space {space.name!r} is of a module, whose supernet gives its networks: nasfast.inherit(net, arch)"
        )
    return extensions.load(space.NETWORK)(space, arch, activation=activation)


def untrained(space: ArchSpace, arch: Iterable[int], *, seed: int = 0) -> ArchNetwork:
    """The network of an architecture as PyTorch initialises its modules by a seed, in training mode.

    Raises:
        ArchError: `arch` does not belong to `space`.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return standalone_network(space, arch).train()


def build(
    space: ArchSpace,
    arch: Iterable[int],
    *,
    activation: str | None = None,
    init: Init | InitScheme = "orthogonal",
    seed: int = 0,
) -> ArchNetwork:
    """The standalone network of `arch` with fresh weights, all of which train.

    Args:
        space: a `SearchSpace`, or a `nasfast.research.cells.space.CellSpace`.
        arch: an architecture of the space.
        activation: activation of the blocks of layers that have none of their own; None takes the space's.
        init: initialisation of the weights.
        seed: seed of the weights.

    Raises:
        ArchError: `arch` does not belong to `space`.
        ValueError: `init` is unknown.
    """
    network = standalone_network(space, arch, activation=activation)
    initialize(network, init, seed=seed)
    return network


@torch.no_grad()
def inherit(net: Supernet, arch: Iterable[int]) -> nn.Module:
    """The standalone network of `arch` with a copy of the supernet's weights.

    For a supernet of a module it is that module without choices, otherwise a `StandaloneNetwork`. Its running
    statistics are not set: recalibrate them (`nasfast.train.recalibrate_bn`) before an evaluation.

    Raises:
        ArchError: `arch` does not belong to the supernet's space.
    """
    if isinstance(net, ModuleSupernet):
        return net.network(arch)
    network = StandaloneNetwork(net.space, arch, activation=net.activation)
    device = next(net.parameters()).device
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (net.stem, network.stem),
        (net.head, network.head),
        (net.classifier, network.classifier),
    ]
    pairs += [
        (layer.candidates[choice], block)
        for layer, choice, block in zip(net.layers, network.arch, network.blocks, strict=True)
        if choice != SKIP
    ]
    for source, target in pairs:
        absent = target.load_state_dict(source.state_dict(), strict=False)
        # only running statistics may be missing, because the supernet's BatchNorms have none
        assert not absent.unexpected_keys and not set(absent.missing_keys) & dict(target.named_parameters()).keys()
    return network.to(device)
