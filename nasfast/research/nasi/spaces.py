"""NASI in each kind of space: the supernet it samples, the architecture it chooses, its table and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.research.cells.config import Rule
from nasfast.research.cells.derive import derive
from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.network import CellSupernet, Shared, true_columns
from nasfast.research.cells.space import CellSpace
from nasfast.research.nasi.search import Mixture, NasiResult, Output
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace, SearchSpace, arch_to_json
from nasfast.supernet import Supernet


class LayerMixture(Mixture):
    """The supernet of a layer-wise space, whose layers add up all their candidates times gates.

    It has one kind of layer, and consists of plain PyTorch modules, which have second derivatives. A layer's candidates
    are the options of a search; an identity candidate is the input itself.

    Args:
        space: the layer-wise space.
        seed: seed of the weights, which PyTorch's modules initialise.
    """

    net: Supernet

    def __init__(self, space: SearchSpace, *, seed: int = 0) -> None:
        net = Supernet(space, init="he", layer_indicators=False, fused=False, seed=seed)
        net.freeze("all")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            for module in net.modules():
                if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
                    module.reset_parameters()
        counts = torch.tensor([len(layer.options) for layer in space.layers])
        super().__init__(net, (torch.arange(int(counts.max())) < counts[:, None])[None], space.num_classes)
        self.space = space

    def forward(
        self, x: Tensor, gates: Tensor, runs: Tensor | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        """Logits (N, num_classes); see `Mixture`."""
        net, x = self.net, self.net.stem(x)
        nodes = [] if nodes is None else nodes
        nodes.append(x)
        (columns,) = true_columns(self.allowed if runs is None else runs)
        for i, (layer, module) in enumerate(zip(self.space.layers, net.layers, strict=True)):
            x = sum(gates[0, i, k] * module(x, layer.options[k]) for k in columns[i])
            nodes.append(x)
        return net.classifier(net.head(x).mean((2, 3)))

    def outputs(self, nodes: Sequence[Tensor], which: Tensor) -> Iterator[Output]:
        (columns,) = true_columns(which)
        for i, (layer, module) in enumerate(zip(self.space.layers, self.net.layers, strict=True)):
            for k in columns[i]:
                yield (0, i, k), i, i + 1, module(nodes[i], layer.options[k])


class CellMixture(Mixture):
    """The supernet of a space of cells, of which those of one type share their gates.

    Args:
        seed: seed of the weights, which PyTorch's modules initialise.
    """

    net: CellSupernet

    def __init__(self, space: CellSpace, *, seed: int = 0) -> None:
        super().__init__(CellSupernet(space, fused=False, seed=seed), uniform_logits(space) == 0, space.num_classes)
        self._types = list(space.cell_types)

    def forward(
        self, x: Tensor, gates: Tensor, runs: Tensor | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        """Logits (N, num_classes); see `Mixture`."""
        by_cell: list[list[Tensor]] = []
        logits = self.net(x, gates[self._types], runs, nodes=None if nodes is None else by_cell)
        if nodes is not None:
            # the last value is the cell's output, which is its last node or joins some of its nodes
            nodes += [value for cell in by_cell for value in cell[:-1]]
        return logits

    def outputs(self, nodes: Sequence[Tensor], which: Tensor) -> Iterator[Output]:
        start, columns = 0, true_columns(which)
        for kind, module in zip(self._types, self.net.cells, strict=True):
            cell = module.cell
            states = nodes[start : start + cell.inputs + cell.nodes]
            shared: Shared = {}
            for node in cell.inner:
                for e, k, y in module.outputs(node, states, columns[kind], shared):
                    yield (kind, e, k), start + cell.edges[e].source, start + node, y
            start += len(states)


METHOD = "nasi"
"""The `method` in the meta of a table that NASI made."""


@dataclass(frozen=True)
class LogitTable:
    """The logits of cells as scores of candidates; that of an architecture is their sum, log p up to a constant.

    Attributes:
        logits: (choices, candidates), by the values of an architecture.
    """

    logits: Tensor

    def score(self, arch: Arch) -> float:
        """The sum over the values of an architecture."""
        return float(sum(row[k] for row, k in zip(self.logits, arch, strict=True)))


def nasi_table(space: ArchSpace, result: NasiResult, *, meta: dict[str, Any] | None = None) -> IndicatorTable:
    """The logits of a search as a table, whose sum over layers is log p(arch) up to a constant.

    A table without layer indicators gives an identity candidate the score 0. So the logits of its layer are written
    minus the logit of the identity.

    Args:
        space: the space that was searched, with a `LayerMixture`.
        result: the result of the search.
        meta: kept in the table besides the method.
    """
    assert isinstance(space, SearchSpace), "the table has a row for each layer"
    if result.logits.shape[:2] != (1, len(space)):
        raise ValueError(f"logits must be (1, {len(space)}, ...) for {space.name!r}, got {tuple(result.logits.shape)}")
    block = []
    for layer, row in zip(space.layers, result.logits[0].tolist(), strict=True):
        logits = dict(zip(layer.options, row, strict=False))
        # a pinned layer has one option, which needs no score
        identity = layer.indicator_choice if layer.choices else layer.options[0]
        shift = 0.0 if identity is None else logits.pop(identity, 0.0)
        block.append({choice: value - shift for choice, value in logits.items()})
    return IndicatorTable(space, tuple(block), (None,) * len(space), {"method": METHOD, **(meta or {})})


def make_mixture(space: ArchSpace, *, seed: int = 0) -> Mixture:
    """The untrained supernet of a space, as PyTorch initialises its modules."""
    if isinstance(space, CellSpace):
        return CellMixture(space, seed=seed)
    if not isinstance(space, SearchSpace):
        raise TypeError(f"NASI searches spaces of layers and of cells, got a {type(space).__name__}")
    return LayerMixture(space, seed=seed)


def chosen_arch(space: ArchSpace, result: NasiResult, *, rule: Rule | None = None) -> Arch:
    """The architecture that a search prefers.

    Args:
        space: the space that was searched.
        result: the result of the search.
        rule: how the logits of cells become an architecture, see `cells.derive`; None takes `darts` for cells
            with two inputs, whose nodes keep two edges, and else `argmax`. Layers take the highest logits, and of equal
            ones the lower option.
    """
    if isinstance(space, CellSpace):
        return derive(space, result.logits, rule or ("darts" if space.cell.inputs == 2 else "argmax"))
    return nasi_table(space, result).argmax()


def make_table(space: ArchSpace, result: NasiResult) -> IndicatorTable | LogitTable:
    """The logits of a search as a table, whose `score` of an architecture is log p(arch) up to a constant."""
    if isinstance(space, CellSpace):
        return LogitTable(result.logits.flatten(0, 1))
    return nasi_table(space, result)


def write_answer(space: ArchSpace, result: NasiResult, arch: Arch, folder: Path, *, meta: dict[str, Any]) -> Path:
    """Write what a search found where the next stage looks for it, and return the file.

    In a layer-wise space that is `indicators.json` for `nasfast search`; in a space of cells it is `arch_nasi.json` for
    `nasfast retrain`.

    Args:
        space, result: the space, and the result of its search.
        arch: the architecture that the search prefers.
        folder: gets the file.
        meta: what a table says about its making.
    """
    if isinstance(space, CellSpace):
        path = folder / f"arch_{METHOD}.json"
        write_atomic(path, (arch_to_json(arch, space) + "\n").encode())
        return path
    path = folder / TABLE_FILE
    nasi_table(space, result, meta=meta).save(path)
    return path
