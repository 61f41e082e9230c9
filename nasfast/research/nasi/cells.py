"""NASI in spaces of cells: the supernet whose edges mix their candidates by gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from nasfast.research.cells.gates import Columns
from nasfast.research.cells.network import CellSupernet, Shared
from nasfast.research.cells.space import CellSpace
from nasfast.research.nasi.search import Output


class CellMixture(nn.Module):
    """The supernet of a space of cells; a `nasfast.research.nasi.search.Mixture`. Cells of one type share their gates.

    Args:
        space: the space of cells.
        seed: seed of the weights, which PyTorch's modules initialise.
    """

    def __init__(self, space: CellSpace, *, seed: int = 0) -> None:
        super().__init__()
        self.net, self.num_classes = CellSupernet(space, fused=False, seed=seed), space.num_classes
        allowed = torch.zeros(len(space.types), len(space.cell.edges), len(space.ops), dtype=torch.bool)
        for e, columns in enumerate(space.candidates):
            allowed[:, e, list(columns)] = True
        self.allowed = allowed
        self._types = [space.type_of(i) for i in range(space.cells)]

    def forward(
        self, x: Tensor, gates: Tensor, columns: Columns | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        """Logits (N, num_classes); see `Mixture`."""
        by_cell: list[list[Tensor]] = []
        logits = self.net(x, gates[self._types], columns, nodes=None if nodes is None else by_cell)
        if nodes is not None:
            # the last value is the cell's output, which is its last node or joins some of its nodes
            nodes += [value for cell in by_cell for value in cell[:-1]]
        return logits

    def outputs(self, nodes: Sequence[Tensor], columns: Columns) -> Iterator[Output]:
        """See `Mixture`."""
        start = 0
        for kind, module in zip(self._types, self.net.cells, strict=True):
            cell = module.cell
            states = nodes[start : start + cell.inputs + cell.nodes]
            shared: Shared = {}
            for node in range(cell.inputs, len(states)):
                for e, k, y in module.outputs(node, states, columns[kind], shared):
                    yield Output(kind, e, k, start + cell.edges[e].source, start + node, y)
            start += len(states)
