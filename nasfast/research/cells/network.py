"""Networks of cells: a supernet, whose edges mix their candidates by gates, and the network of one architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast import ops
from nasfast.research.cells.operations import (
    Operation,
    Style,
    is_plain_batch_norm,
    make_operation,
    make_preprocess,
    make_transition,
)
from nasfast.research.cells.space import CellSpace
from nasfast.supernet import ArchNetwork

Columns = Sequence[Sequence[Sequence[int]]]
"""Columns of `CellSpace.ops`, by type of cell and then by edge."""
Shared = dict[tuple[int, int, int] | int, Tensor]
"""What operations on one source have in common: a result by (source, stride, column), the ReLU by the source alone."""
Term = tuple[int, int, Tensor, Operation]
"""Edge, column and output of an operation, and the operation whose `finish` is still to be applied."""

_FINISHED = Operation(nn.Identity(), None)
"""Stands for an operation whose `finish` is applied already."""


def true_columns(mask: Tensor) -> Columns:
    """The columns that are true in a mask (types, edges, ops)."""
    return [[row.nonzero().flatten().tolist() for row in kind] for kind in mask.cpu()]


class CellModule(nn.Module):
    """One cell.

    Args:
        index: index of the cell in the network.
        options: per edge, the columns of `space.ops` that exist.
        style: how its operations are built.
    """

    def __init__(self, space: CellSpace, index: int, options: Sequence[Sequence[int]], style: Style) -> None:
        super().__init__()
        self.cell, self.ops = space.cell, space.ops
        channels = space.cell_channels(index)
        self.preprocess = nn.ModuleList()
        if space.preprocess:
            self.preprocess.extend(make_preprocess(c, channels, s, style) for c, s in space.cell_inputs(index))
        self.strides = [space.edge_stride(index, e) for e in range(len(options))]
        edges = nn.ModuleList()
        # the types of ModuleList and ModuleDict do not say what is in them
        self.edges: Sequence[Mapping[str, Operation]] = edges  # type: ignore[assignment]
        for e, columns in enumerate(options):
            operations = {space.ops[k]: make_operation(space.ops[k], channels, self.strides[e], style) for k in columns}
            edges.append(nn.ModuleDict({op: module for op, module in operations.items() if module is not None}))
        self.fused = style.fused

    def operation(self, edge: int, column: int) -> Operation | None:
        """The module of a candidate; None for the operation `none`."""
        name, modules = self.ops[column], self.edges[edge]
        return modules[name] if name in modules else None

    def forward(
        self, inputs: Sequence[Tensor], gates: Tensor | None, runs: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Output of the cell and the values of all its nodes.

        Args:
            inputs: outputs of earlier cells, the older one first.
            gates: (edges, ops) factors of the operations' outputs; None for 1.
            runs: per edge, the columns that are computed.
        """
        states = list(inputs)
        if self.preprocess:
            states = [module(x) for module, x in zip(self.preprocess, inputs, strict=True)]
        shared: Shared = {}
        for node in self.cell.inner:
            terms = list(self._terms(node, states, runs, shared))
            total = self._sum(terms, gates) if terms else self._zeros(states, node)
            if gates is not None and not terms:
                # a backward pass, from which local costs follow, reaches this node only if its value depends on a gate
                total = total * gates[0, 0].to(total.dtype)
            states.append(total)
        outputs = [states[i] for i in self.cell.outputs]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), states

    def _terms(
        self, node: int, states: Sequence[Tensor], columns: Sequence[Sequence[int]], shared: Shared
    ) -> Iterator[Term]:
        """Compute operations into a node, one at a time; see `outputs`."""
        for e in self.cell.into(node):
            source, stride = self.cell.edges[e].source, self.strides[e]
            for k in columns[e]:
                operation, x = self.operation(e, k), states[source]
                if operation is None:
                    continue
                if operation.shared:
                    if (source, stride, k) not in shared:
                        shared[source, stride, k] = operation(x)
                    yield e, k, shared[source, stride, k], _FINISHED
                    continue
                if operation.relu_first:
                    if source not in shared:
                        shared[source] = F.relu(x)
                    x = shared[source]
                yield e, k, operation.body(x), operation

    def _sum(self, terms: list[Term], gates: Tensor | None) -> Tensor:
        if gates is None:
            return reduce(torch.add, [operation.finish(y) for *_, y, operation in terms])
        columns = gates.shape[1]
        index = torch.tensor([e * columns + k for e, k, *_ in terms], device=gates.device)
        factors = gates.flatten()[index]
        norms = [operation.norm for *_, operation in terms]
        plain = all(norm is None or is_plain_batch_norm(norm) for norm in norms)
        if self.fused and plain and not any(operation.relu_last for *_, operation in terms):
            eps = next((norm.eps for norm in norms if norm is not None), 1e-5)
            normalize = [norm is not None for norm in norms]
            return ops.mixed_bn([y for *_, y, _ in terms], factors, normalize=normalize, eps=eps)
        values = [operation.finish(y) for *_, y, operation in terms]
        return reduce(torch.add, [z * y for z, y in zip(factors.to(values[0].dtype).unbind(), values, strict=True)])

    def _zeros(self, states: list[Tensor], node: int) -> Tensor:
        """The value of a node without any incoming operation."""
        e = self.cell.into(node)[0]
        n, c, h, w = states[self.cell.edges[e].source].shape
        stride = self.strides[e]
        zeros = states[0].new_zeros(n, c, -(-h // stride), -(-w // stride))
        return zeros.contiguous(memory_format=torch.channels_last)

    def outputs(
        self, node: int, states: Sequence[Tensor], columns: Sequence[Sequence[int]], shared: Shared
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Compute operations into a node, one at a time, and give edge, column and output of each.

        Args:
            node: target of the operations.
            states: values of the cell's nodes.
            columns: per edge, the columns of the operations.
            shared: keeps intermediate results that operations on the same source have in common.
        """
        for e, k, y, operation in self._terms(node, states, columns, shared):
            yield e, k, operation.finish(y)


class _Skeleton(nn.Module):
    """Stem, cells, head and classifier: what the supernet and the standalone network have in common."""

    def __init__(self, space: CellSpace, options: Columns, style: Style) -> None:
        super().__init__()
        self.space = space
        stem = nn.Conv2d(space.in_channels, space.stem_channels, 3, 1, 1, bias=False)
        self.stem = nn.Sequential(stem, style.make_norm(space.stem_channels, affine=True))
        cells = nn.ModuleList()
        # the type of a ModuleList does not say what is in it
        self.cells: Sequence[CellModule] = cells  # type: ignore[assignment]
        self.transitions = nn.ModuleDict()
        for i in range(space.cells):
            if i in space.reductions and space.reduce_by != "cell":
                self.transitions[str(i)] = make_transition(space.reduce_by, space.cell_channels(i), style)
            cells.append(CellModule(space, i, options[space.cell_type(i)], style))
        head = [style.make_norm(space.features, affine=True), nn.ReLU()] if space.head else []
        self.head = nn.Sequential(*head)
        self.classifier = nn.Linear(space.features, space.num_classes, bias=space.classifier_bias)

    def _features(
        self, x: Tensor, gates: Tensor | None, runs: Columns, nodes: list[list[Tensor]] | None = None
    ) -> Tensor:
        """(N, in_channels, H, W) images -> (N, features, H', W'), before the pooling."""
        x = self.stem(x)
        inputs = [x] * self.space.cell.inputs
        for i, cell in enumerate(self.cells):
            if str(i) in self.transitions:
                inputs = [self.transitions[str(i)](y) for y in inputs]
            output, states = cell(inputs, None if gates is None else gates[i], runs[self.space.cell_type(i)])
            if nodes is not None:
                nodes.append([*states, output])
            inputs = [*inputs[1:], output]
        return self.head(inputs[-1])


class CellSupernet(_Skeleton):
    """Every candidate of every edge of every cell; gates mix them.

    Norms use the statistics of the batch in training and in evaluation. They keep no running statistics, because those
    of one mixture say nothing about another.

    Args:
        fused: use the operators of `nasfast.ops`, which have no second derivatives.
        seed: seed of the weights, which PyTorch's modules initialise.
    """

    def __init__(self, space: CellSpace, *, fused: bool = True, seed: int = 0) -> None:
        style = Style(space.order, space.norm, space.affine, space.pool_norm, fused=fused)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            super().__init__(space, [space.candidates] * len(space.types), style)

    @property
    def gate_shape(self) -> tuple[int, int, int]:
        """(cells, edges, ops) of the gates."""
        return self.space.cells, len(self.space.cell.edges), len(self.space.ops)

    def forward(
        self, x: Tensor, gates: Tensor, runs: Tensor | None = None, *, nodes: list[list[Tensor]] | None = None
    ) -> Tensor:
        """Logits (N, num_classes).

        After the backward pass of a loss, the gradient of `gates[cell, edge, op]` is the local cost
        <dL/dX_target, O(X_source)> of the operation there (Unifying wiring, arXiv 2009.01272, section 4).

        Args:
            x: images (N, in_channels, resolution, resolution).
            gates: (cells, edges, ops) factors of the operations' outputs; gates of `none` and of operations that do not
                run have no influence.
            runs: (types, edges, ops) bool: the candidates that are computed; None for all.
            nodes: gets a list per cell: the values of its nodes in order, and then its output.
        """
        if tuple(gates.shape) != self.gate_shape:
            raise ValueError(f"gates must be {self.gate_shape} (cells, edges, ops), got {tuple(gates.shape)}")
        columns = [self.space.candidates] * len(self.space.types) if runs is None else true_columns(runs)
        return self.classifier(self._features(x, gates, columns, nodes).mean((2, 3)))


class CellStandalone(_Skeleton, ArchNetwork):
    """The network of one architecture; its norms have scale, shift and running statistics.

    Input (N, in_channels, resolution, resolution), output logits (N, num_classes).
    """

    space: CellSpace

    def __init__(self, space: CellSpace, arch: Iterable[int], *, activation: str | None = None) -> None:
        if activation not in (None, "relu"):
            raise ValueError(f"networks of cells have ReLU, got activation={activation!r}: leave it out")
        arch = space.check(arch)
        options = [[(k,) for k in part] for part in space.parts(arch)]
        style = Style(space.order, space.norm, True, space.pool_norm, track_running_stats=True, fused=False)
        super().__init__(space, options, style)
        self.arch, self.activation, self._runs = arch, "relu", options
        self.num_features = space.features

    def forward_features(self, x: Tensor) -> Tensor:
        """The maps before the pooling: (N, in_channels, H, W) -> (N, space.features, H', W')."""
        return self._features(x, None, self._runs)
