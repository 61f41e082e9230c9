"""One step of a network of cells in float64, and what the theorems read from it: costs of edges, outputs and paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.research.cells.costs import SKIP_CONNECT
from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.operations import NormLayer, Operation
from nasfast.research.cells.space import CellSpace

STATISTICS = {"batch": (0, 2, 3), "layer": (1, 2, 3), "instance": (2, 3)}
"""Dimensions of (N, C, H, W) that each kind of norm averages over."""


@dataclass(frozen=True)
class Step:
    """A network after the backward pass of one batch.

    Attributes:
        gates, costs: (cells, edges, ops) gates and their gradients.
        nodes, gradients: of every cell, its nodes in order and its output; 0 where no gradient arrives.
        logits, labels: (N, classes) and (N,).
    """

    net: CellSupernet
    gates: Tensor
    costs: Tensor
    nodes: list[list[Tensor]]
    gradients: list[list[Tensor]]
    logits: Tensor
    labels: Tensor

    @property
    def scale(self) -> float:
        """The largest cost of an edge; residuals are relative to it."""
        return float((self.gates * self.costs).sum(-1).abs().max())

    def output_cost(self, cell: int) -> Tensor:
        """<dL/dX, X> of a cell's output."""
        return (self.gradients[cell][-1] * self.nodes[cell][-1]).sum()

    def output_gradient(self, cell: int, node: int) -> Tensor:
        """The part of a node's gradient that comes through the cell's output alone."""
        outputs = self.net.space.cell.outputs
        if node not in outputs:
            return torch.zeros_like(self.nodes[cell][node])
        return self.gradients[cell][-1].chunk(len(outputs), 1)[outputs.index(node)]

    def edge_costs(self, cell: int) -> Tensor:
        """Sum of Z C over the edges of a cell."""
        return (self.gates * self.costs)[cell].sum()

    def skip_costs(self, cell: int, source: int | None = None) -> Tensor:
        """Sum of Z C over the identity skips on intermediate edges, or over those of them that leave one node."""
        ops = self.net.space.ops
        if SKIP_CONNECT not in ops:
            return self.costs.new_zeros(())
        edges = [
            self.net.space.cell.is_intermediate(edge) and source in (None, edge.source)
            for edge in self.net.space.cell.edges
        ]
        return (self.gates * self.costs)[cell, torch.tensor(edges), ops.index(SKIP_CONNECT)].sum()

    def path_total(self, cell: int, node: int) -> float:
        """<g, X>, with g the part of a node's gradient that comes through the edges that leave it, skips excepted."""
        gradient = self.gradients[cell][node] - self.output_gradient(cell, node)
        return float((gradient * self.nodes[cell][node]).sum() - self.skip_costs(cell, node))


def set_eps(net: nn.Module, eps: float) -> None:
    """Change eps of every norm."""
    for norm in (module for module in net.modules() if isinstance(module, NormLayer)):
        norm.eps = eps


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
    return (noise + uniform_logits(space)[0]).softmax(-1)


def one_hot_gates(space: CellSpace, seed: int) -> Tensor:
    """(cells, edges, ops) one random candidate per cell and edge."""
    weights = uniform_logits(space)[:1].exp().expand(space.cells, -1, -1)
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
    alive = [(gates[[kind == t for kind in space.cell_types]] != 0).any(0) for t in range(len(space.types))]
    nodes: list[list[Tensor]] = []
    logits = net(images, gates, torch.stack(alive), nodes=nodes)
    differentiable = [x for values in nodes for x in values if x.requires_grad]
    loss = F.cross_entropy(logits, labels)
    costs, *arrived = torch.autograd.grad(loss, [gates, *differentiable], allow_unused=True)
    by_node = {id(x): g for x, g in zip(differentiable, arrived, strict=True) if g is not None}
    gradients = [[by_node.get(id(x), torch.zeros_like(x)) for x in values] for values in nodes]
    costs = torch.zeros_like(gates) if costs is None else costs
    return Step(
        net,
        gates.detach(),
        costs,
        [[x.detach() for x in values] for values in nodes],
        gradients,
        logits.detach(),
        labels,
    )


def norm_residual(norm: NormLayer, kind: str, x: Tensor, out: Tensor, gradient: Tensor) -> Tensor:
    """<dL/dx, x> of a norm of a kind of STATISTICS at x (N, C, H, W); it would be 0 without eps."""
    variance = x.var(STATISTICS[kind], unbiased=False, keepdim=True)
    shift = 0.0 if norm.bias is None else norm.bias.detach().view(1, -1, 1, 1)
    return (norm.eps / (variance + norm.eps) * gradient * (out - shift)).sum()


def path_gradient(operation: Operation, x: Tensor, gradient: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Gradient that reaches x through an operation from that of its output, and `norm_residual` of its first norm."""
    calls: list[tuple[Tensor, Tensor]] = []
    norm = next(module for module in operation.modules() if isinstance(module, NormLayer))
    handle = norm.register_forward_hook(lambda module, args, out: calls.append((args[0], out)))
    x = x.detach().requires_grad_()
    y = operation(x)
    handle.remove()
    ((before, behind),) = calls
    x_gradient, norm_gradient = torch.autograd.grad(y, [x, behind], gradient)
    return x_gradient, norm_residual(norm, kind, before.detach(), behind.detach(), norm_gradient)
