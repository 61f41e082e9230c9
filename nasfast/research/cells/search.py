"""A differentiable search: weights and architecture logits learn together, on one set of images or on two."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adam import adam

from nasfast.engine import StepResult
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.gates import (
    FOR_LOGITS,
    FOR_WEIGHTS,
    Draw,
    draw_gates,
    keep_pair_share,
    logits_gradient,
    uniform_logits,
)
from nasfast.research.cells.network import CellSupernet, true_columns
from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs
from nasfast.research.cells.space import CellSpace
from nasfast.runtime.files import write_atomic
from nasfast.seeds import derive_seed
from nasfast.spaces import arch_to_json
from nasfast.spaces.arch import Arch
from nasfast.train import TrainConfig, TrainStage
from nasfast.train.batches import EpochLoader, to_learn_from
from nasfast.train.loop import train

_LOGITS = 1  # random stream (`nasfast.seeds`) of the logits at the start
_BETAS = (0.5, 0.999)  # of Adam, which updates the logits, in all published searches
TRAIN, SEARCH = 0, 1
"""In a record: the index of the batch that weights learn from, and that of the held-out batch."""


@dataclass(frozen=True)
class CellSearchResult:
    """The records of a search. A dimension of 2 has the training images at `TRAIN` and the held-out ones at `SEARCH`.

    Attributes:
        net: the supernet as the search left it.
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
    cell_types: Tensor

    def __init__(self, space: CellSpace, cfg: CellSearchConfig, steps: int, *, fused: bool = True) -> None:
        super().__init__()
        self.space, self.cfg, self.total = space, cfg, steps
        self.net = CellSupernet(space, fused=fused, seed=cfg.seed)
        shape = (len(space.types), len(space.cell.edges), len(space.ops))
        generator = torch.Generator().manual_seed(derive_seed(cfg.seed, _LOGITS))
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
        self.register_buffer("cell_types", torch.tensor(space.cell_types), persistent=False)

    @property
    def logits(self) -> Tensor:
        """(types, edges, ops), -inf where an edge has no such candidate."""
        return self.alpha.masked_fill(~self.allowed, -torch.inf)

    def record_index(self) -> int:
        """Index of the record that the current step belongs to."""
        records = len(self.costs)
        return min(int(self.done) * records // self.total, records - 1)

    def spread(self, gates: Tensor) -> Tensor:
        """Repeat (types, ...) values for every cell, as a leaf that autograd follows."""
        return gates[self.cell_types].to(next(self.net.parameters()).dtype).requires_grad_()

    def collect(self, cost: Tensor) -> Tensor:
        """Sum (cells, edges, ops) costs over the cells of each type: (types, edges, ops), float64."""
        total = cost.new_zeros(len(self.space.types), *cost.shape[1:], dtype=torch.float64)
        return total.index_add_(0, self.cell_types, cost.double())

    def update(self, gradient: Tensor, draw: Draw) -> None:
        """Take one step of Adam on the logits, from their gradient."""
        if not self.cfg.alpha_lr or self.cfg.method == "uniform":
            return
        before = self.logits
        # the state is in buffers, which come back from a checkpoint
        adam(
            [self.alpha], [gradient], [self.adam_mean], [self.adam_square], [], [self.adam_step],
            foreach=False, amsgrad=False, beta1=_BETAS[0], beta2=_BETAS[1], lr=self.cfg.alpha_lr,
            weight_decay=self.cfg.alpha_weight_decay, eps=1e-8, maximize=False,
        )  # fmt: skip
        after = keep_pair_share(before, self.logits, draw) if self.cfg.two_path else self.logits
        self.alpha.copy_(torch.where(self.allowed, after, self.alpha))

    def record(self, which: int, draw: Draw, cost: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the current record."""
        index = self.record_index()
        # the sums are views of the buffer
        LocalCosts(*self.costs[index, which]).add(cost, (draw.runs | draw.measures)[self.cell_types])
        self.edge_costs[index, which] += (draw.gates[self.cell_types] * cost.double()).sum(-1)
        self.outputs[index, which] += grouped_costs(logits, labels).to(cost.device)

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


def endless(
    loader: EpochLoader, device: str | torch.device = "cpu", *, step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch after batch, epoch after epoch, from a step on; `loader` has at least one batch."""
    epoch, start = divmod(step, len(loader))
    while True:
        yield from loader.epoch(epoch, start=start, device=device)
        epoch, start = epoch + 1, 0


class CellSearchEngine:
    """The engine of the training loop that carries out the steps of a search.

    Args:
        search: what the steps change.
        optimizer: optimiser of the weights.
        held_out: batches that the logits learn from, or None if they learn from the training batches.
        progress: called after every step with the number of steps done.
    """

    def __init__(
        self,
        search: CellSearch,
        optimizer: torch.optim.SGD,
        held_out: EpochLoader | None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._search, self._optimizer, self._held_out, self._progress = search, optimizer, held_out, progress
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def forward_backward(self, x: Tensor, y: Tensor, paths: Sequence[Arch] | None = None) -> StepResult:
        """Update the logits, and leave the gradients of the weights in their `grad`."""
        search, cfg = self._search, self._search.cfg
        for parameter in search.net.parameters():
            parameter.grad = None
        if self._held_out is not None:
            draw = self._draw(FOR_LOGITS)
            if self._batches is None:
                self._batches = endless(self._held_out, x.device, step=int(search.done))
            xs, ys = next(self._batches)
            if cfg.second_order:
                cost, logits, gradient = self._second_order(draw, (x, y), (xs, ys))
            else:
                cost, logits, _ = self._costs(draw, xs, ys)
                gradient = cost
            search.record(SEARCH, draw, cost, logits, ys)
            search.update(logits_gradient(cfg, draw, search.collect(gradient)), draw)
        draw = self._draw(FOR_WEIGHTS)
        cost, logits, loss = self._costs(draw, x, y, weights=True)
        search.record(TRAIN, draw, cost, logits, y)
        if self._held_out is None:
            search.update(logits_gradient(cfg, draw, search.collect(cost)), draw)
        index = search.record_index()
        search.done += 1
        if int(search.done) == search.total or search.record_index() != index:
            search.probabilities[index + 1] = search.logits.softmax(-1)
        if self._progress is not None:
            self._progress(int(search.done))
        return StepResult(loss, (logits.argmax(1) == y).sum())

    def _draw(self, purpose: int) -> Draw:
        search, step = self._search, int(self._search.done)
        progress = step / search.total
        return draw_gates(search.space, search.cfg, search.logits, step=step, progress=progress, purpose=purpose)

    def _costs(self, draw: Draw, x: Tensor, y: Tensor, *, weights: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(cells, edges, ops) local costs, logits and loss of a batch; `weights` also leaves the weights' gradients."""
        net, gates = self._search.net, self._search.spread(draw.gates)
        nodes: list[list[Tensor]] = []
        logits = net(x, gates, draw.runs, nodes=nodes if draw.measures.any() else None)
        loss = F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, y)
        gradients: dict[tuple[int, int], Tensor] = {}
        for i, states in enumerate(nodes):
            for node in range(net.space.cell.inputs, len(states) - 1):
                states[node].register_hook(partial(gradients.__setitem__, (i, node)))
        loss.backward(inputs=None if weights else [gates])
        cost, measures = gates.grad, true_columns(draw.measures)
        assert cost is not None, "the value of every node depends on a gate"
        with torch.no_grad():
            for (i, node), gradient in gradients.items():
                for e, k, value in net.cells[i].outputs(node, nodes[i], measures[net.space.cell_type(i)], {}):
                    cost[i, e, k] += (gradient * value).sum()
        return cost, logits.detach(), loss.detach()

    def _second_order(
        self, draw: Draw, train_batch: tuple[Tensor, Tensor], search_batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Costs and logits of the held-out batch with the weights one step ahead, and the gradient of the gates.

        The gradient is the costs minus the part of that step that the gates caused (DARTS, section 2.3):

        g = dL_val(w')/dZ - xi (dL_train(w+)/dZ - dL_train(w-)/dZ) / (2 e), w' = w - xi (momentum + decay + gradient),
        w+- = w +- e v, v = dL_val(w')/dw', e = 0.01 / |v|.
        """
        net, groups = self._search.net, self._optimizer.param_groups
        decays = {weight: group["weight_decay"] for group in groups for weight in group["params"]}
        weights = list(decays)
        names = {weight: name for name, weight in net.named_parameters()}
        xi, momentum = groups[0]["lr"], groups[0]["momentum"]

        def gradients(at: Sequence[Tensor], batch: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
            gates = self._search.spread(draw.gates)
            at = [weight.detach().requires_grad_() for weight in at]
            values = {names[weight]: value for weight, value in zip(weights, at, strict=True)}
            logits = torch.func.functional_call(net, values, (batch[0], gates, draw.runs))
            # the preprocessing of an input that no edge leaves has no gradient, and gets zeros
            loss = F.cross_entropy(logits, batch[1])
            *by_weights, by_gates = torch.autograd.grad(loss, [*at, gates], materialize_grads=True)
            return by_weights, by_gates, logits.detach()

        @torch.no_grad()
        def move(direction: Sequence[Tensor], factor: float) -> list[Tensor]:
            return [weight.add(t, alpha=factor) for weight, t in zip(weights, direction, strict=True)]

        direction, _, _ = gradients(weights, train_batch)
        with torch.no_grad():
            for i, weight in enumerate(weights):
                direction[i] = direction[i] + decays[weight] * weight
                buffer = self._optimizer.state.get(weight, {}).get("momentum_buffer")
                if buffer is not None:
                    direction[i] = direction[i] + momentum * buffer
        v, cost, logits = gradients(move(direction, -xi), search_batch)
        e = float(0.01 / torch.stack([t.norm() for t in v]).norm().clamp(min=1e-12))
        _, plus, _ = gradients(move(v, e), train_batch)
        _, minus, _ = gradients(move(v, -e), train_batch)
        return cost, logits, cost - xi * (plus - minus) / (2 * e)


WEIGHTS = TrainConfig(
    epochs=150, lr=0.025, lr_end=1e-3, weight_decay=3e-4, label_smoothing=0.0, clip_norm=5.0, checkpoint_every=0
)
"""How weights learn in the published settings (arXiv 2009.01272, section 7): 150 epochs, SGD from 0.025 to 0.001."""


def search_cells(
    space: CellSpace,
    loader: object,
    cfg: CellSearchConfig = CellSearchConfig(),
    train_cfg: TrainConfig = WEIGHTS,
    *,
    held_out: object | None = None,
    run_dir: str | Path,
    resume: bool = False,
    device: str = "cpu",
    settings: dict[str, Any] | None = None,
    fused: bool = True,
    progress: Callable[[int], None] | None = None,
) -> CellSearchResult:
    """Search an architecture of cells, with the package's training loop, logs and checkpoints.

    Args:
        loader: loader of the training images; see `nasfast.train.train`.
        cfg: how the architecture learns.
        train_cfg: how the weights learn.
        held_out: loader of the held-out images. With `cfg.bilevel` the architecture learns from them; without, it must
            be None.
        run_dir: gets checkpoints, metrics.jsonl, tensorboard events, and the files of `CellSearchResult.save`.
        resume: continue from the newest good checkpoint.
        device: where to search.
        settings: whatever else the result depends on, such as the data, as JSON; a checkpoint with others is refused.
        fused: use the operators of `nasfast.ops`; otherwise plain PyTorch, for comparison.
        progress: called with the number of steps done, instead of progress on the screen.

    Raises:
        TrainingDivergedError, CheckpointError, RunDirectoryError, FileExistsError, Terminated: see
            `nasfast.train.train`.
    """
    if cfg.bilevel != (held_out is not None):
        raise ValueError(f"bilevel={cfg.bilevel} needs {'a' if cfg.bilevel else 'no'} held_out loader")
    if train_cfg.label_smoothing or train_cfg.precision == "bf16":
        raise ValueError(
            "a search of cells needs label_smoothing=0 and precision='fp32', in which local costs are defined, got "
            f"{train_cfg.label_smoothing} and {train_cfg.precision!r}"
        )
    train_cfg = train_cfg.replace(precision="fp32")
    loader = to_learn_from(loader)
    held = None if held_out is None else to_learn_from(held_out)
    search = CellSearch(space, cfg, train_cfg.epochs * len(loader), fused=fused)
    train(
        search,
        loader,
        train_cfg,
        TrainStage(
            "cells",
            run_dir,
            space.fingerprint,
            settings={"search": cfg.to_dict(), **(settings or {})},
            resume=resume,
            quiet=progress is not None,
        ),
        device=device,
        engine=lambda optimizer: CellSearchEngine(search, optimizer, held, progress),
    )
    result = search.result()
    result.save(run_dir)
    return result
