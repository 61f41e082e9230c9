"""The standalone network of one architecture: a plain `nn.Module` that needs no nasfast operator to run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nasfast import extensions
from nasfast.settings import ImageInfo, Init
from nasfast.spaces import SKIP, Arch, ArchSpace, ModuleSpace, SearchSpace
from nasfast.supernet.blocks import UnitFactory, build_block
from nasfast.supernet.init import InitScheme, initialize
from nasfast.supernet.supernet import ModuleSupernet, Supernet


class ArchNetwork(nn.Module):
    """The standalone network of one architecture, of any kind of space.

    Its input is (N, in_channels, resolution, resolution), its output logits (N, num_classes).

    Attributes:
        space, arch: what it is the network of.
        activation: activation of the blocks of layers that have none of their own.
        classifier: its last layer.
        images: how images become its input, and its classes; None where that is not known.
    """

    space: ArchSpace
    arch: Arch
    activation: str
    classifier: nn.Linear
    images: ImageInfo | None = None

    def features(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) images -> (N, features, H', W'), which is pooled for the classifier."""
        raise NotImplementedError


class StandaloneNetwork(ArchNetwork):
    """The network of an architecture of layers, without layer indicators; skipped layers are `nn.Identity`."""

    space: SearchSpace

    def __init__(self, space: SearchSpace, arch: Iterable[int], *, activation: str | None = None) -> None:
        super().__init__()
        self.arch = space.check(arch)
        self.space = space
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

    def features(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) images -> (N, space.features, H', W')."""
        return self.head(self.blocks(self.stem(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


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
    """The network of an architecture as PyTorch initialises its modules, in training mode.

    Args:
        space: a space of layers or of cells.
        arch: one of its architectures.
        seed: seed of the weights.

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
