"""Local costs of operations at initialisation and after training (Xie et al., arXiv 2009.01272, section 4.3).

Claimed: operations cost more than None (0) at first, and less once the weights have learnt (figure 4), in cells of
any order of convolution, norm and ReLU and with other norms (figures 29 to 31); the cells before the last one cost
nothing without identity skips on intermediate edges (figure 19). Operations are drawn uniformly in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.report.plots import draw_cells, new_figure
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import NONE, SKIP_CONNECT
from nasfast.research.cells.gates import draw_gates, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs
from nasfast.research.cells.search import endless
from nasfast.research.cells.space import CellSpace, minimal_cell
from nasfast.research.studies.commands import WiringConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.research.studies.wiring import Setup, batches, edge_figure, live_operations, one_cell, searches
from nasfast.runtime.device import torch_device
from nasfast.train.batches import to_learn_from

SETUP = Setup(channels=8, samples=1000, noise=3.0, lr=0.1, steps=600, records=75)
NETS, BATCHES = 10, 60
VARIANTS: dict[str, dict[str, Any]] = {
    "as above": {},
    "order conv_relu_norm": {"order": "conv_relu_norm"},
    "order conv_norm_relu": {"order": "conv_norm_relu"},
    "norm layer": {"norm": "layer"},
    "norm instance": {"norm": "instance"},
}
"""Figures 29 to 31 -> what they change."""


def cost(cfg: WiringConfig, notes: Notebook) -> None:
    """Local costs of one minimal cell."""
    space = one_cell(minimal_cell(), SETUP)
    live = live_operations(space)
    notes.say(
        f"Local costs of one minimal cell, operations drawn uniformly: {NETS} networks at initialisation, one trained "
        f"for {SETUP.steps} steps for each seed; {BATCHES} batches each."
    )
    initial, mean_cost = initial_costs(cfg, space, range(cfg.seed, cfg.seed + NETS))
    how = CellSearchConfig(method="uniform", records=SETUP.records)
    runs = searches("uniform", cfg, SETUP, space, how, notes.out)
    trained = [
        monte_carlo_costs(run.net, next(batches(SETUP, seed)), seed=seed + 1, device=cfg.device)[0]
        for seed, run in runs.items()
    ]
    share = last_cell(initial).positive(live)
    notes.mark("initialisation: mean C", mean_cost, at_least=0)
    notes.mark("initialisation: share of costs > 0", share, at_least=0.6, at_most=1)

    rows = []
    for label, tables in (("initialisation", initial), ("trained", trained)):
        joined = last_cell(tables)
        shares = [last_cell([table]).positive(live) for table in tables]
        mean, error = (v[0][:, live].numpy() for v in (joined.mean, joined.error))
        clear = np.abs(mean) > 2 * error
        signs = f"{(clear & (mean > 0)).sum()} / {(clear & (mean < 0)).sum()}"
        share = joined.positive(live)
        rows.append((label, len(tables), share, np.mean(shares), np.nanmean(mean), np.nanmean(error), signs))
    columns = {"last cell": "", "networks": "", "costs > 0": ".2f", "of single networks": ".2f"}
    columns |= {"mean cost": "+.4f", "error over batches": ".4f", "clearly + / -": ""}
    notes.table("local costs", columns, rows)

    two = space.replace(cells=2, cell=space.cell.without_on_intermediate(SKIP_CONNECT))
    sums = initial_costs(cfg, two, [cfg.seed])[0][0].total.sum((1, 2)) / BATCHES
    title = "sum of the edges' costs, two cells without skip on intermediate edges (figure 19)"
    names = ("second last cell", "last cell")
    notes.table(title, {"": "", "C": "+.2e"}, list(zip(names, sums.tolist(), strict=True)))

    variants = []
    for name, changes in VARIANTS.items():
        seeds = range(cfg.seed, cfg.seed + max(1, NETS // 3))
        tables, mean_cost = initial_costs(cfg, space.replace(**changes), seeds)
        joined = last_cell(tables)
        variants.append((name, mean_cost, joined.positive(live), float(np.nanmean(joined.mean[0][:, live]))))
    columns = {"": "", "C": "+.4f", "costs > 0": ".2f", "mean cost": "+.5f"}
    notes.table("at initialisation, figures 29 to 31", columns, variants)
    _heat_maps(space, {"initialisation": initial, "trained": trained}, notes)
    edge_figure(f"seed {cfg.seed}: operations drawn uniformly", runs[cfg.seed], notes)


def monte_carlo_costs(
    net: CellSupernet, loader: object, *, count: int | None = None, seed: int = 0, device: str = "cpu"
) -> tuple[LocalCosts, Tensor]:
    """Local costs of a network that does not learn; every batch draws its operations uniformly.

    Args:
        net: a network on the device.
        loader: gives (images, labels), and is started again as often as needed.
        count: number of batches; None takes `BATCHES`.
        seed: seed of the draws.
        device: where to compute.

    Returns:
        The costs, (cells, edges, ops), and (groups, quantities) sums over samples, see `nasfast.research.cells.probe`.
    """
    cfg, space = CellSearchConfig(method="uniform", seed=seed), net.space
    table, outputs = LocalCosts.empty(net.gate_shape), torch.zeros(len(GROUPS), len(QUANTITIES), dtype=torch.float64)
    cell_types, logits = torch.tensor(space.cell_types), uniform_logits(space)
    stream = endless(to_learn_from(loader), torch_device(device))
    for step, (x, y) in enumerate(islice(stream, count or BATCHES)):
        draw = draw_gates(space, cfg, logits, step=step, progress=0.0)
        gates = draw.gates[cell_types].to(x.device, next(net.parameters()).dtype).requires_grad_()
        predicted = net(x, gates, draw.runs)
        # the gradient is zeros if every edge has drawn the operation none
        (gradient,) = torch.autograd.grad(F.cross_entropy(predicted, y), gates, materialize_grads=True)
        table.add(gradient, draw.gates[cell_types] > 0)
        outputs += grouped_costs(predicted, y)
    return table, outputs


def initial_costs(cfg: WiringConfig, space: CellSpace, seeds: Iterable[int]) -> tuple[list[LocalCosts], float]:
    """Costs of fresh networks, one for each seed, and their mean output cost."""
    tables, total, count = [], 0.0, 0.0
    for seed in seeds:
        net = CellSupernet(space, seed=seed).to(torch_device(cfg.device)).to(memory_format=torch.channels_last)
        table, outputs = monte_carlo_costs(net, next(batches(SETUP, seed)), seed=seed, device=cfg.device)
        tables.append(table)
        total, count = total + float(outputs[0, 0]), count + float(outputs[0, 3])
    return tables, total / count


def last_cell(tables: Sequence[LocalCosts]) -> LocalCosts:
    """(1, edges, ops): costs of the last cell, all networks together."""
    return LocalCosts(*(sum(getattr(t, name)[-1:] for t in tables) for name in ("total", "squares", "count")))


def _heat_maps(space: CellSpace, costs: dict[str, list[LocalCosts]], notes: Notebook) -> None:
    """Figure 4: mean costs (edges, ops) of the last cell."""
    figure, axes = new_figure(11, 3.4, columns=len(costs))
    for ax, (label, tables) in zip(axes, costs.items(), strict=True):
        mean = last_cell(tables).mean[0].numpy()
        mean[:, space.ops.index(NONE)] = np.nan  # costs nothing, by definition
        limit = float(np.nanmax(np.abs(mean)))
        image = draw_cells(ax, mean, "RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(image, ax=ax)
        ax.set_xticks(range(len(space.ops)), space.ops, rotation=45, ha="right", fontsize=8)
        ax.set_yticks(range(len(space.cell.edges)), [edge.name for edge in space.cell.edges])
        ax.set_title(f"{label}: {(mean[np.isfinite(mean)] > 0).mean():.0%} of the costs > 0")
    notes.figure("local costs (figure 4)", "Mean cost of every operation on every edge. Grey: not measured.", figure)
