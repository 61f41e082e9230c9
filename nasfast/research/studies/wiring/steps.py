"""One step of a network of cells, from which the theorems are checked: networks, gates, batches and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.research.cells.costs import SKIP_CONNECT
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.operations import NormLayer, Operation
from nasfast.research.cells.space import Cell, CellSpace

STATISTICS = {"batch": (0, 2, 3), "layer": (1, 2, 3), "instance": (2, 3)}
"""Dimensions of (N, C, H, W) that each kind of norm averages over."""


@dataclass(frozen=True)
class Step:
    """A network after the backward pass of one batch.

    Attributes:
        net: the network.
        gates: (cells, edges, ops).
        costs: (cells, edges, ops) gradients of the gates.
        nodes: for every cell, its nodes in order and its output.
        gradients: gradients of `nodes`; 0 where no gradient arrives.
        logits: (N, classes).
        labels: (N,).
    """

    net: CellSupernet
    gates: Tensor
    costs: Tensor
    nodes: list[list[Tensor]]
    gradients: list[list[Tensor]]
    logits: Tensor
    labels: Tensor

    @property
    def cell(self) -> Cell:
        return self.net.space.cell

    @property
    def scale(self) -> float:
        """The largest cost of an edge; residuals are relative to it."""
        return float((self.gates * self.costs).sum(-1).abs().max())

    def output_cost(self, cell: int) -> Tensor:
        """<dL/dX, X> of a cell's output."""
        return (self.gradients[cell][-1] * self.nodes[cell][-1]).sum()

    def output_gradient(self, cell: int, node: int) -> Tensor:
        """The part of a node's gradient that comes through the cell's output alone."""
        outputs = self.cell.outputs
        if node not in outputs:
            return torch.zeros_like(self.nodes[cell][node])
        return self.gradients[cell][-1].chunk(len(outputs), 1)[outputs.index(node)]

    def skip_costs(self, cell: int, source: int | None = None) -> Tensor:
        """Sum of Z C over the identity skips on intermediate edges, or over those of them that leave one node."""
        ops = self.net.space.ops
        if SKIP_CONNECT not in ops:
            return self.costs.new_zeros(())
        chosen = [
            self.cell.is_intermediate(edge) and (source is None or edge.source == source) for edge in self.cell.edges
        ]
        return (self.gates * self.costs)[cell, torch.tensor(chosen), ops.index(SKIP_CONNECT)].sum()

    def path_total(self, cell: int, node: int) -> float:
        """<g, X>, with g the part of a node's gradient that comes through the edges that leave it, skips excepted."""
        gradient = self.gradients[cell][node] - self.output_gradient(cell, node)
        return float((gradient * self.nodes[cell][node]).sum() - self.skip_costs(cell, node))


def set_eps(net: nn.Module, eps: float) -> None:
    """Change eps of every norm."""
    for module in net.modules():
        if isinstance(module, NormLayer):
            module.eps = eps


def make_net(space: CellSpace, *, eps: float = 1e-5, seed: int = 0) -> CellSupernet:
    """A float64 network in training mode; scales and shifts of its norms are random instead of 1 and 0."""
    net = CellSupernet(space, fused=False, seed=seed).double().train()
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, NormLayer) and module.weight is not None:
            for parameter in (module.weight, module.bias):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data += 0.5 * noise
    set_eps(net, eps)
    return net


def make_batch(space: CellSpace, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Normal images and uniform labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, space.in_channels, space.resolution, space.resolution)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    return images, torch.randint(space.num_classes, (batch,), generator=generator)


def mixed_gates(space: CellSpace, seed: int) -> Tensor:
    """(cells, edges, ops) random weights of every candidate; they add up to 1."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(space.cells, len(space.cell.edges), len(space.ops), generator=generator, dtype=torch.float64)
    allowed = torch.zeros(noise.shape[1:], dtype=torch.bool)
    for e, columns in enumerate(space.candidates):
        allowed[e, list(columns)] = True
    return noise.masked_fill(~allowed, -torch.inf).softmax(-1)


def one_hot_gates(space: CellSpace, seed: int) -> Tensor:
    """(cells, edges, ops) one random candidate per cell and edge."""
    weights = (mixed_gates(space, seed) > 0).double()
    generator = torch.Generator().manual_seed(seed)
    index = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(weights.shape[:2])
    return F.one_hot(index, weights.shape[-1]).double()


def chosen_gates(space: CellSpace, ops: Sequence[str]) -> Tensor:
    """(cells, edges, ops) the named operation on each edge of every cell."""
    index = torch.tensor([space.ops.index(op) for op in ops]).expand(space.cells, -1)
    return F.one_hot(index, len(space.ops)).double()


def take_step(net: CellSupernet, gates: Tensor, images: Tensor, labels: Tensor) -> Step:
    """Forward and backward pass; only operations whose gate is not 0 in some cell run."""
    space = net.space
    gates = gates.clone().requires_grad_()
    alive = [(gates[[space.type_of(i) == t for i in range(space.cells)]] != 0).any(0) for t in range(len(space.types))]
    runs = [[tuple(torch.nonzero(row).flatten().tolist()) for row in kind] for kind in alive]
    nodes: list[list[Tensor]] = []
    logits = net(images, gates, runs, nodes=nodes)
    flat = [x for values in nodes for x in values]
    reached = [x for x in flat if x.requires_grad]
    found = torch.autograd.grad(F.cross_entropy(logits, labels), [gates, *reached], allow_unused=True)
    costs = torch.zeros_like(gates) if found[0] is None else found[0]
    by_node = {id(x): g for x, g in zip(reached, found[1:], strict=True) if g is not None}
    gradients = [[by_node.get(id(x), torch.zeros_like(x)) for x in values] for values in nodes]
    detached = [[x.detach() for x in values] for values in nodes]
    return Step(net, gates.detach(), costs, detached, gradients, logits.detach(), labels)


def norm_residual(norm: NormLayer, kind: str, x: Tensor, out: Tensor, gradient: Tensor) -> Tensor:
    """<dL/dx, x> of a norm, from the gradient of its output; it would be 0 without eps.

    Args:
        norm: the norm, with eps and perhaps a shift.
        kind: a key of STATISTICS.
        x, out, gradient: (N, C, H, W).
    """
    variance = x.var(STATISTICS[kind], unbiased=False, keepdim=True)
    shift = 0.0 if norm.bias is None else norm.bias.detach().view(1, -1, 1, 1)
    return (norm.eps / (variance + norm.eps) * gradient * (out - shift)).sum()


def path_gradient(operation: Operation, x: Tensor, gradient: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Gradient that reaches x through an operation, and `norm_residual` of the operation's first norm.

    Args:
        operation: an operation with a norm.
        x: its input.
        gradient: the gradient of its output.
        kind: the kind of its norms.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    norm = next(module for module in operation.modules() if isinstance(module, NormLayer))
    handle = norm.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    try:
        x = x.detach().requires_grad_()
        y = operation(x)
    finally:
        handle.remove()
    ((before, behind),) = seen
    of_x, of_norm = torch.autograd.grad(y, [x, behind], gradient)
    return of_x, norm_residual(norm, kind, before.detach(), behind.detach(), of_norm)
