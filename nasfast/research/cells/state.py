"""The settings of a differentiable search, everything that it changes, and what it records."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.gates import Draw, estimator_of, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import GROUPS, QUANTITIES, grouped_costs
from nasfast.research.cells.space import CellSpace
from nasfast.runtime.files import write_atomic
from nasfast.seeds import CELL_LOGITS, derive_seed
from nasfast.spaces import arch_to_json

TRAIN, SEARCH = 0, 1
"""In a record: the index of the batch that weights learn from, and that of the held-out batch."""


@dataclass(frozen=True)
class CellSearchResult:
    """The records of a search. A dimension of 2 has the training images at `TRAIN` and the held-out ones at `SEARCH`.

    Attributes:
        net: the supernet as the search left it.
        cfg: the settings of the search.
        steps: (records,) the step that ends each record.
        logits: (types, edges, ops) at the end, -inf where an edge has no such candidate.
        probabilities: (records + 1, types, edges, ops), the first before the search.
        costs: (records, 2, 3, cells, edges, ops) sums of C and of C^2, and the number of batches.
        edge_costs: (records, 2, cells, edges) mean of sum_k Z_k c_k.
        outputs: (records, 2, groups, quantities) sums over samples, see `nasfast.research.cells.probe`.
    """

    net: CellSupernet
    cfg: CellSearchConfig
    steps: np.ndarray
    logits: np.ndarray
    probabilities: np.ndarray
    costs: np.ndarray
    edge_costs: np.ndarray
    outputs: np.ndarray

    @property
    def space(self) -> CellSpace:
        return self.net.space

    def means(self, which: int = TRAIN, group: str = "all", quantity: str = "C") -> np.ndarray:
        """(records,) mean over samples of C, L or H."""
        sums = self.outputs[:, which, GROUPS.index(group)]
        with np.errstate(invalid="ignore"):
            return sums[:, QUANTITIES.index(quantity)] / sums[:, QUANTITIES.index("count")]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that `save` writes as .npz."""
        names = ("steps", "logits", "probabilities", "costs", "edge_costs", "outputs")
        return {name: getattr(self, name) for name in names}

    def save(self, folder: str | Path) -> None:
        """Write search.npz (`arrays`), space.yaml, and one arch_RULE.json per rule of `derivations`."""
        folder, arrays = Path(folder), io.BytesIO()
        # numpy's types take the arrays for its argument allow_pickle
        np.savez_compressed(arrays, **self.arrays())  # type: ignore[arg-type]
        write_atomic(folder / "search.npz", arrays.getvalue())
        write_atomic(folder / "space.yaml", self.space.to_yaml().encode())
        for rule, arch in derivations(self.space, self.logits).items():
            write_atomic(folder / f"arch_{rule}.json", (arch_to_json(arch, self.space) + "\n").encode())


class CellSearch(nn.Module):
    """Everything that a search changes: the network, the logits, the state of their optimiser, and the records.

    All but the network's weights are buffers, so that the checkpoints of the training loop hold them.

    Args:
        space: the space of cells.
        cfg: the settings.
        steps: how many steps the search has.
        fused: whether the network uses the operators of `nasfast.ops`.
    """

    # buffers
    allowed: Tensor
    alpha: Tensor
    done: Tensor
    adam_step: Tensor
    adam_mean: Tensor
    adam_square: Tensor
    probabilities: Tensor
    costs: Tensor
    edge_costs: Tensor
    outputs: Tensor

    def __init__(self, space: CellSpace, cfg: CellSearchConfig, steps: int, *, fused: bool = True) -> None:
        super().__init__()
        self.space, self.cfg, self.total = space, cfg, steps
        self.net = CellSupernet(space, fused=fused, seed=cfg.seed)
        shape = (len(space.types), len(space.cell.edges), len(space.ops))
        generator = torch.Generator().manual_seed(derive_seed(cfg.seed, CELL_LOGITS))
        logits = cfg.alpha_mean + cfg.alpha_std * torch.randn(shape, generator=generator, dtype=torch.float64)
        if cfg.method == "uniform":
            logits.zero_()
        records = min(cfg.records, steps)

        def buffer(name: str, *size: int) -> None:
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64))

        self.register_buffer("allowed", uniform_logits(space) == 0)
        self.register_buffer("alpha", logits)
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))
        buffer("adam_step")
        buffer("adam_mean", *shape)
        buffer("adam_square", *shape)
        buffer("probabilities", records + 1, *shape)
        buffer("costs", records, 2, 3, *self.net.gate_shape)
        buffer("edge_costs", records, 2, *self.net.gate_shape[:2])
        buffer("outputs", records, 2, len(GROUPS), len(QUANTITIES))
        self.probabilities[0] = self.logits.softmax(-1)
        self._of_type = torch.tensor([space.type_of(i) for i in range(space.cells)])
        self._adam: torch.optim.Adam | None = None

    @property
    def logits(self) -> Tensor:
        """(types, edges, ops), -inf where an edge has no such candidate."""
        return self.alpha.masked_fill(~self.allowed, -torch.inf)

    def record(self) -> int:
        """Index of the record that the current step belongs to."""
        records = len(self.costs)
        return min(int(self.done) * records // self.total, records - 1)

    def spread(self, gates: Tensor) -> Tensor:
        """Repeat (types, ...) values for every cell, as a leaf that autograd follows."""
        cells = gates[self._of_type.to(gates.device)]
        return cells.to(next(self.net.parameters()).dtype).requires_grad_()

    def collect(self, cost: Tensor) -> Tensor:
        """Sum (cells, edges, ops) costs over the cells of each type: (types, edges, ops), float64."""
        total = cost.new_zeros(len(self.space.types), *cost.shape[1:], dtype=torch.float64)
        return total.index_add_(0, self._of_type.to(cost.device), cost.double())

    def update(self, gradient: Tensor, draw: Draw) -> None:
        """Take one step of Adam on the logits, from their gradient."""
        if not self.cfg.alpha_lr or self.cfg.method == "uniform":
            return
        if self._adam is None:
            self._adam = torch.optim.Adam(
                [self.alpha],
                lr=self.cfg.alpha_lr,
                betas=self.cfg.alpha_betas,
                weight_decay=self.cfg.alpha_weight_decay,
                foreach=False,
            )
            # Adam changes its state in place; as buffers, the tensors come back from a checkpoint
            self._adam.state[self.alpha] = {
                "step": self.adam_step,
                "exp_avg": self.adam_mean,
                "exp_avg_sq": self.adam_square,
            }
        before = self.logits
        self.alpha.grad = gradient
        self._adam.step()
        self.alpha.copy_(
            torch.where(self.allowed, estimator_of(self.cfg).updated(before, self.logits, draw), self.alpha)
        )

    def note(self, which: int, draw: Draw, cost: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the current record."""
        at = self.record()
        measured = torch.zeros(draw.gates.shape, dtype=torch.bool)
        for columns in (draw.runs, draw.measures):
            for t, kind in enumerate(columns):
                for e, ks in enumerate(kind):
                    measured[t, e, list(ks)] = True
        measured = measured.to(cost.device)[self._of_type.to(cost.device)]
        cost = cost.double()
        self.costs[at, which] += torch.stack([cost, cost**2, torch.ones_like(cost)]) * measured
        self.edge_costs[at, which] += (draw.gates[self._of_type.to(cost.device)] * cost).sum(-1)
        self.outputs[at, which] += grouped_costs(logits, labels).to(cost.device)

    def result(self) -> CellSearchResult:
        """The records so far."""
        records = len(self.costs)
        ends = [math.ceil((i + 1) * self.total / records) for i in range(records)]
        batches = np.diff([0, *ends])[:, None, None, None]
        return CellSearchResult(
            self.net,
            self.cfg,
            np.array(ends),
            self.logits.cpu().numpy(),
            self.probabilities.cpu().numpy(),
            self.costs.cpu().numpy(),
            self.edge_costs.cpu().numpy() / batches,
            self.outputs.cpu().numpy(),
        )
