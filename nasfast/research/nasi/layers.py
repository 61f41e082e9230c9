"""NASI in layer-wise spaces: the supernet whose layers mix their candidates by gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nasfast.research.cells.gates import Columns
from nasfast.research.nasi.search import Output
from nasfast.spaces import SearchSpace
from nasfast.supernet import Init, InitScheme, Supernet


class LayerMixture(nn.Module):
    """The supernet of a layer-wise space, whose layers add up all their candidates times gates.

    It is a `nasi.search.Mixture` of one kind of layer, and consists of plain PyTorch modules, which have second
    derivatives. A layer's candidates are the options of a search; an identity candidate is the input itself.

    Args:
        space: the layer-wise space.
        init: `default` (PyTorch's), or one of the schemes of `nasfast.supernet.initialize`.
        seed: seed of the weights.
    """

    def __init__(
        self, space: SearchSpace, *, init: Literal["default"] | Init | InitScheme = "default", seed: int = 0
    ) -> None:
        super().__init__()
        self.space, self.num_classes = space, space.num_classes
        scheme = "he" if init == "default" else init
        self.net = Supernet(space, init=scheme, layer_indicators=False, fused=False, seed=seed)
        self.net.freeze("all")
        if init == "default":
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                for module in self.net.modules():
                    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
                        module.reset_parameters()
        most = max(len(layer.options) for layer in space.layers)
        allowed = torch.zeros(1, len(space), most, dtype=torch.bool)
        for i, layer in enumerate(space.layers):
            allowed[0, i, : len(layer.options)] = True
        self.allowed = allowed

    def forward(
        self, x: Tensor, gates: Tensor, columns: Columns | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        """Logits (N, num_classes); see `Mixture`."""
        net, x = self.net, self.net.stem(x)
        nodes = [] if nodes is None else nodes
        nodes.append(x)
        for i, (layer, module) in enumerate(zip(self.space.layers, net.layers, strict=True)):
            runs = range(len(layer.options)) if columns is None else columns[0][i]
            x = sum(gates[0, i, k] * module(x, layer.options[k]) for k in runs)
            nodes.append(x)
        return net.classifier(net.head(x).mean((2, 3)))

    def outputs(self, nodes: Sequence[Tensor], columns: Columns) -> Iterator[Output]:
        """See `Mixture`."""
        for i, (layer, module) in enumerate(zip(self.space.layers, self.net.layers, strict=True)):
            for k in columns[0][i]:
                yield Output(0, i, k, i, i + 1, module(nodes[i], layer.options[k]))
