"""Local costs of a network that does not learn, by Monte Carlo over architectures."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs
from nasfast.research.cells.steps import draw_gates
from nasfast.train.batches import to_learn_from


def monte_carlo(
    net: CellSupernet,
    loader: object,
    *,
    batches: int,
    seed: int = 0,
    redraw: bool = False,
    device: str = "cpu",
) -> tuple[LocalCosts, Tensor]:
    """Local costs of a network that does not learn; every batch draws its operations uniformly (section 4.3).

    Args:
        net: a network on `device`.
        loader: gives (images, labels), and is started again as often as needed.
        batches: how many batches are measured.
        seed: seed of the draws.
        redraw: see `CellSearchConfig`.
        device: where to compute.

    Returns:
        The costs, (cells, edges, ops), and (groups, quantities) sums over samples, see `nasfast.research.cells.probe`.

    Raises:
        ValueError: the loader has no batch.
    """
    cfg = CellSearchConfig(method="uniform", redraw=redraw, seed=seed)
    loader, space = to_learn_from(loader), net.space
    table, outputs = LocalCosts.empty(net.gate_shape), torch.zeros(len(GROUPS), len(QUANTITIES), dtype=torch.float64)
    of_type = torch.tensor([space.type_of(i) for i in range(space.cells)])
    logits = uniform_logits(space)
    for i in range(batches):
        epoch, at = divmod(i, len(loader))
        if at == 0:
            stream = loader.epoch(epoch, device=device)
        x, y = next(stream)
        draw = draw_gates(space, cfg, logits, step=i, progress=0.0)
        gates = draw.gates[of_type].to(device, next(net.parameters()).dtype).requires_grad_()
        predicted = net(x, gates, draw.runs)
        # the gradient is zeros if every edge has drawn the operation none
        (cost,) = torch.autograd.grad(F.cross_entropy(predicted, y), gates, materialize_grads=True)
        table.add(cost, draw.gates[of_type] > 0)
        outputs += grouped_costs(predicted, y)
    return table, outputs
