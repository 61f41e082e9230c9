"""NASI in layer-wise spaces: the layers' candidates mixed by gates, and the logits it finds as an `IndicatorTable`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nasfast.cells.gates import Columns
from nasfast.cells.nasi import NasiResult, Output
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import Arch, SearchSpace
from nasfast.supernet import Init, InitScheme, Supernet

METHOD = "nasi"
"""Of a table's meta."""


class LayerMixture(nn.Module):
    """The supernet of a layer-wise space whose layers add up all their candidates, times gates.

    It is of plain PyTorch modules, which have second derivatives. A layer's candidates are the options a search has;
    an identity candidate is the input itself.

    Args:
        space: layer-wise.
        init: `default` (PyTorch's), or one of the schemes of `nasfast.supernet.initialize`.
        seed: of the weights.
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
        """Logits (N, num_classes); see `nasfast.cells.nasi.Mixture`. There is one kind of layer."""
        net, x = self.net, self.net.stem(x)
        nodes = [] if nodes is None else nodes
        nodes.append(x)
        for i, (layer, module) in enumerate(zip(self.space.layers, net.layers, strict=True)):
            runs = range(len(layer.options)) if columns is None else columns[0][i]
            x = sum(gates[0, i, k] * module(x, layer.options[k]) for k in runs)
            nodes.append(x)
        return net.classifier(net.head(x).mean((2, 3)))

    def outputs(self, nodes: Sequence[Tensor], columns: Columns) -> Iterator[Output]:
        """See `nasfast.cells.nasi.Mixture`."""
        for i, (layer, module) in enumerate(zip(self.space.layers, self.net.layers, strict=True)):
            for k in columns[0][i]:
                yield Output(0, i, k, i, i + 1, module(nodes[i], layer.options[k]))


def nasi_table(space: SearchSpace, result: NasiResult, *, meta: dict[str, Any] | None = None) -> IndicatorTable:
    """The logits of a search as a table, whose sum over layers is log p(arch) up to a constant.

    The score of an identity candidate is 0 in a table without layer indicators, so the other logits of its layer are
    given minus its own.

    Args:
        space: that was searched, with a `LayerMixture`.
        result: of the search.
        meta: kept in the table besides the method.

    Raises:
        ValueError: a result of another shape.
    """
    if result.logits.shape[:2] != (1, len(space)):
        raise ValueError(f"logits must be (1, {len(space)}, ...) for {space.name!r}, got {tuple(result.logits.shape)}")
    block = []
    for layer, row in zip(space.layers, result.logits[0].tolist(), strict=True):
        logits = dict(zip(layer.options, row, strict=False))
        # a pinned layer has one option, which needs no score
        shift = logits.pop(layer.options[0] if not layer.choices else layer.indicator_choice, 0.0)
        block.append({choice: value - shift for choice, value in logits.items()})
    return IndicatorTable(space, tuple(block), (None,) * len(space), {"method": METHOD, **(meta or {})})


def layer_arch(space: SearchSpace, result: NasiResult) -> Arch:
    """The architecture of the highest logits, ties to the lower option."""
    return nasi_table(space, result).argmax()
