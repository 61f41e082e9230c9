"""The steps of a differentiable search: draw gates, measure local costs, update the logits, leave weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.engine import StepResult
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.gates import Columns, Draw, estimator_of
from nasfast.research.cells.space import CellSpace
from nasfast.research.cells.state import SEARCH, TRAIN, CellSearch
from nasfast.seeds import CELL_GATES, FOR_LOGITS, FOR_WEIGHTS, derive_seed
from nasfast.spaces.arch import Arch
from nasfast.train.batches import EpochLoader

_MAX_DRAWS = 1000


def draw_gates(
    space: CellSpace, cfg: CellSearchConfig, logits: Tensor, *, step: int, progress: float, purpose: int = FOR_LOGITS
) -> Draw:
    """The gates of a step; they depend on the seed, the step and the purpose alone.

    Args:
        space: the space of cells.
        cfg: the settings of the search.
        logits: (types, edges, ops), -inf where an edge has no such candidate.
        step: index of the step.
        progress: share of the search that is done, in [0, 1).
        purpose: `FOR_LOGITS` or `FOR_WEIGHTS` of `nasfast.seeds`.

    Raises:
        RuntimeError: with `cfg.redraw`, if in every draw some output node has only None.
    """
    generator = torch.Generator().manual_seed(derive_seed(cfg.seed, CELL_GATES, step, purpose))
    for _ in range(_MAX_DRAWS):
        draw = estimator_of(cfg).draw(logits, generator, progress)
        if not cfg.redraw or reaches_outputs(space, draw.runs):
            return draw
    raise RuntimeError(
        f"redraw: in each of {_MAX_DRAWS} draws some output node had no operation but None; the architecture has "
        "collapsed, or the cell has no such operation: search without redraw"
    )


def reaches_outputs(space: CellSpace, runs: Columns) -> bool:
    """Whether every output node has an edge into it that is not None."""
    none = space.ops.index(NONE) if NONE in space.ops else -1
    return all(
        any(k != none for e in space.cell.into(node) for k in kind[e]) for kind in runs for node in space.cell.outputs
    )


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
        self._next = -1

    def forward_backward(self, x: Tensor, y: Tensor, paths: Sequence[Arch] | None = None) -> StepResult:
        """Update the logits, and leave the gradients of the weights in their `grad`."""
        search, cfg = self._search, self._search.cfg
        estimator = estimator_of(cfg)
        for parameter in search.net.parameters():
            parameter.grad = None
        if self._held_out is not None:
            draw = self._draw(FOR_LOGITS)
            xs, ys = self._held_out_batch(self._held_out, x.device)
            if cfg.second_order:
                cost, logits, learnt_from = self._second_order(draw, (x, y), (xs, ys))
            else:
                cost, logits, _ = self._costs(draw, xs, ys)
                learnt_from = cost
            search.note(SEARCH, draw, cost, logits, ys)
            search.update(estimator.gradient(draw, search.collect(learnt_from)), draw)
        draw = self._draw(FOR_WEIGHTS)
        cost, logits, loss = self._costs(draw, x, y, weights=True)
        search.note(TRAIN, draw, cost, logits, y)
        if self._held_out is None:
            search.update(estimator.gradient(draw, search.collect(cost)), draw)
        ended = search.record()
        search.done += 1
        if int(search.done) == search.total or search.record() != ended:
            search.probabilities[ended + 1] = search.logits.softmax(-1)
        if self._progress is not None:
            self._progress(int(search.done))
        return StepResult(loss, (logits.argmax(1) == y).sum())

    def _draw(self, purpose: int) -> Draw:
        search, step = self._search, int(self._search.done)
        progress = step / search.total
        return draw_gates(search.space, search.cfg, search.logits, step=step, progress=progress, purpose=purpose)

    def _costs(self, draw: Draw, x: Tensor, y: Tensor, *, weights: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(cells, edges, ops) local costs, logits and loss of a batch; `weights` also leaves the weights' gradients."""
        net = self._search.net
        gates = self._search.spread(draw.gates)
        measured = torch.zeros_like(gates, requires_grad=False)
        logits = net(x, gates, draw.runs, measures=draw.measures, measured=measured)
        loss = F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, y)
        if weights:
            loss.backward()
            gradient = gates.grad
        else:
            (gradient,) = torch.autograd.grad(loss, gates, allow_unused=True)
        # the gradient is None if every edge has drawn the operation none
        cost = measured if gradient is None else gradient + measured
        return cost.detach(), logits.detach(), loss.detach()

    def _held_out_batch(self, held_out: EpochLoader, device: torch.device) -> tuple[Tensor, Tensor]:
        step = int(self._search.done)
        if step != self._next or self._batches is None:
            epoch, start = divmod(step, len(held_out))
            self._batches = held_out.epoch(epoch, start=start, device=device)
        self._next = step + 1
        batch = next(self._batches, None)
        if batch is None:
            self._batches = held_out.epoch(step // len(held_out), device=device)
            batch = next(self._batches)
        return batch

    def _second_order(
        self, draw: Draw, train_batch: tuple[Tensor, Tensor], search_batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Costs and logits of the held-out batch with the weights one step ahead, and the gradient of the gates.

        The gradient is the costs minus the part of that step that the gates caused (DARTS, section 2.3):

        g = dL_val(w')/dZ - xi (dL_train(w+)/dZ - dL_train(w-)/dZ) / (2 e), w' = w - xi (momentum + decay + gradient),
        w+- = w +- e v, v = dL_val(w')/dw', e = 0.01 / |v|.
        """
        net = self._search.net
        weights = [p for group in self._optimizer.param_groups for p in group["params"]]
        decays = [group["weight_decay"] for group in self._optimizer.param_groups for _ in group["params"]]
        group = self._optimizer.param_groups[0]
        xi, momentum = group["lr"], group["momentum"]

        def gradients(batch: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
            gates = self._search.spread(draw.gates)
            logits = net(batch[0], gates, draw.runs)
            # the preprocessing of an input that no edge leaves has no gradient, and gets zeros
            found = torch.autograd.grad(F.cross_entropy(logits, batch[1]), [*weights, gates], materialize_grads=True)
            return list(found[:-1]), found[-1], logits.detach()

        @torch.no_grad()
        def move(by: list[Tensor], factor: float) -> None:
            torch._foreach_copy_(weights, kept)
            torch._foreach_add_(weights, by, alpha=factor)

        kept = [w.detach().clone() for w in weights]
        try:
            ahead, _, _ = gradients(train_batch)
            with torch.no_grad():
                for i, (w, decay) in enumerate(zip(kept, decays, strict=True)):
                    ahead[i] = ahead[i] + decay * w
                    buffer = self._optimizer.state.get(weights[i], {}).get("momentum_buffer")
                    if buffer is not None:
                        ahead[i] = ahead[i] + momentum * buffer
            move(ahead, -xi)
            v, cost, logits = gradients(search_batch)
            length = torch.stack([t.norm() for t in v]).norm()
            e = float(0.01 / length.clamp(min=1e-12))
            move(v, e)
            _, plus, _ = gradients(train_batch)
            move(v, -e)
            _, minus, _ = gradients(train_batch)
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
        return cost, logits, cost - xi * (plus - minus) / (2 * e)
