"""NASI: an architecture chosen at initialisation, by the trace norm of the neural tangent kernel (arXiv 2109.00817).

The trace sum_x ||J_x||_F^2 of a network is estimated by Q, the squared norm of one batch's gradient of the loss. A
search is one pass of Monte Carlo over random architectures of an untrained supernet: it averages gradients of the
penalised Q with respect to architecture logits, and nothing is trained. What differs from the paper is in docs/nasi.md.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.cells.gates import Columns, candidates_of, gumbel, one_hot, softmax_gradient
from nasfast.cells.network import CellSupernet
from nasfast.config import ConfigBase, nearest
from nasfast.data.augment import derive_seed
from nasfast.spaces import Arch
from nasfast.spaces.cell_costs import NONE
from nasfast.spaces.cells import CellSpace
from nasfast.supernet import standalone_network
from nasfast.train.batches import EpochLoader, as_epochs

Loader = EpochLoader | Collection[tuple[Tensor, Tensor]]
Score = Literal["q_batch", "q_sum", "trace_label", "trace_full"]
Constraint = Literal["fixed", "adaptive", "quantile"]

LIPSCHITZ = math.sqrt(2)
"""gamma_L of cross entropy: its gradient with respect to the logits is never longer."""

_GATES, _LABELS, _IMAGES = 1, 2, 3
"""Purposes of random numbers."""


def jacobian(values: Tensor, parameters: Sequence[Tensor], *, chunk: int = 64) -> Iterator[Tensor]:
    """Rows of d values / d parameters, (chunk, p) at a time; p counts the elements of all parameters.

    Args:
        values: (R,) that autograd follows; its graph is kept.
        parameters: some may have no influence.
        chunk: rows that are computed and held at once.
    """
    for start in range(0, len(values), chunk):
        rows = torch.zeros(min(chunk, len(values) - start), len(values), dtype=values.dtype, device=values.device)
        rows[:, start : start + len(rows)].fill_diagonal_(1)
        found = torch.autograd.grad(
            values, parameters, rows, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        yield torch.cat(
            [
                p.new_zeros(len(rows), p.numel()) if g is None else g.flatten(1)
                for g, p in zip(found, parameters, strict=True)
            ],
            1,
        )


def squared_norms(values: Tensor, parameters: Sequence[Tensor], *, chunk: int = 64) -> Tensor:
    """(R,) squared lengths of the gradients of `values`; arguments as `jacobian`."""
    return torch.cat([rows.square().sum(1) for rows in jacobian(values, parameters, chunk=chunk)])


def gradient_norm(loss: Tensor, parameters: Sequence[Tensor], *, differentiable: bool = False) -> Tensor:
    """Squared length of the gradient of a scalar: Q, if that is the mean loss of a batch.

    Args:
        loss: scalar.
        parameters: some may have no influence.
        differentiable: keep the graph, so that the result can be differentiated.
    """
    return _squared(torch.autograd.grad(loss, parameters, create_graph=differentiable, allow_unused=True), loss)


def _squared(gradients: Sequence[Tensor | None], loss: Tensor) -> Tensor:
    squares = [g.square().sum() for g in gradients if g is not None]
    return torch.stack(squares).sum() if squares else loss.new_zeros(())


def score(network: nn.Module, x: Tensor, y: Tensor, *, kind: Score = "q_batch", chunk: int = 64) -> float:
    """An untrained network's score on a batch.

    Where a norm uses the batch's statistics, a sample's output depends on the other images, and so does its row of the
    Jacobian; all four scores see the same Jacobian.

    Args:
        network: images -> logits (N, classes); its parameters that require a gradient count.
        x, y: images and labels (N,).
        kind: `q_batch`: squared norm of the mean loss's gradient, what the search uses; `q_sum`: sum over samples of
            the squared norms of their losses' gradients; `trace_label`: root of the mean squared norm of the labelled
            logit's gradient; `trace_full`: trace of the neural tangent kernel, exact, N times classes backward passes.
        chunk: backward passes done at once.

    Raises:
        ValueError: unknown kind.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    logits = network(x)
    if kind == "q_batch":
        return float(gradient_norm(F.cross_entropy(logits, y), parameters))
    if kind == "q_sum":
        return float(squared_norms(F.cross_entropy(logits, y, reduction="none"), parameters, chunk=chunk).sum())
    if kind == "trace_label":
        labelled = logits.gather(1, y[:, None])[:, 0]
        return float(squared_norms(labelled, parameters, chunk=chunk).mean().sqrt())
    if kind == "trace_full":
        return float(squared_norms(logits.flatten(), parameters, chunk=chunk).sum())
    raise ValueError(f"unknown score {kind!r}; valid: q_batch, q_sum, trace_label, trace_full")


def untrained(space: Any, arch: Sequence[int], *, seed: int = 0) -> nn.Module:
    """The network of an architecture as PyTorch initialises its modules, in training mode.

    Args:
        space: a `CellSpace` or a `SearchSpace`.
        arch: one of its architectures.
        seed: of the weights.

    Raises:
        ArchError: `arch` does not belong to `space`.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return standalone_network(space, arch).train()


def score_architecture(
    space: Any,
    arch: Sequence[int],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    kind: Score = "q_batch",
    seed: int = 0,
) -> float:
    """Mean score over batches, each with an initialisation of its own; other arguments as `untrained` and `score`."""
    found = []
    for i, (x, y) in enumerate(batches):
        network = untrained(space, arch, seed=derive_seed(seed, i)).to(x.device, x.dtype)
        found.append(score(network, x, y, kind=kind))
    return float(np.mean(found))


def penalised(q: Tensor, nu: Tensor | float, mu: float) -> Tensor:
    """R = Q - mu max(0, Q - nu)."""
    return q - mu * F.relu(q - nu)


def slope(q: Tensor, nu: Tensor | float, mu: float) -> Tensor:
    """dR/dQ: 1 up to nu, 1 - mu above. The gradient of R is that of Q times this, because nu counts as a constant."""
    return 1 - mu * (q > nu).to(q.dtype)


def one_step(gradients: Tensor, *, xi: float = 1.0) -> Tensor:
    """Delta* = (xi / T) sum_t G_t / max(|G_1|, ..., |G_t|), norms over everything but the first dimension.

    Args:
        gradients: (T, ...) in the order of the steps.
        xi: Delta* is never longer.
    """
    norms = gradients.flatten(1).norm(dim=1)
    largest = norms.cummax(0).values
    # until the first gradient that is not 0 there is nothing to divide
    scale = torch.where(largest > 0, 1 / largest.clamp(min=torch.finfo(largest.dtype).tiny), 0.0)
    return xi * torch.tensordot(scale, gradients, 1) / len(gradients)


@dataclass(frozen=True)
class NasiConfig(ConfigBase):
    """A search; T and mu are the paper's for DARTS, nu is a quantile because its values belong to another scaling.

    Attributes:
        steps: T, sampled architectures, each with a batch of its own.
        mu: weight of the penalty; 0 has none, 1 makes R flat above nu, 2 its mirror image.
        constraint: `fixed`: nu is the limit of Q; `adaptive`: nu is where it begins, then the mean of it and of the Q
            so far; `quantile`: the limit is the nu-quantile of Q over the architectures that the search samples.
        nu: see `constraint`; None is the 0.9 quantile. The other constraints need one, of the size of Q.
        gates: `straight_through`: one operation runs, and gradients are those of the relaxation; `soft`: all are mixed,
            with the memory of all.
        temperature: of the relaxation.
        xi: length of the step.
        labels: `true`, or `random` ones.
        images: `true`, or `random` ones of N(0, 1).
        seed: of gates, random labels and random images.
    """

    steps: int = 100
    mu: float = 2.0
    constraint: Constraint = "quantile"
    nu: float | None = None
    gates: Literal["straight_through", "soft"] = "straight_through"
    temperature: float = 1.0
    xi: float = 1.0
    labels: Literal["true", "random"] = "true"
    images: Literal["true", "random"] = "true"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.seed < 0:
            raise ValueError(f"steps must be at least 1 and seed not negative, got {self.steps} and {self.seed}")
        for name in ("temperature", "xi"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("gates", "labels", "images"):
            _check_choice(name, getattr(self, name), get_args(get_type_hints(NasiConfig)[name]))
        check_penalty(self.mu, self.constraint, self.nu)


def _check_choice(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"unknown {name} {value!r}; {nearest(value, valid)}")


def check_penalty(mu: float, constraint: Constraint, nu: float | None) -> float:
    """nu, or what it is if it is not given; arguments as in `NasiConfig`.

    Raises:
        ValueError: unknown constraint, negative mu or nu, no quantile, or a constraint that needs nu.
    """
    _check_choice("constraint", constraint, get_args(Constraint))
    if nu is None:
        if constraint != "quantile":
            raise ValueError(f"constraint={constraint!r} needs nu, a value of Q: those of a search are in its report")
        nu = 0.9
    if not (0 <= mu < math.inf and 0 <= nu < math.inf):
        raise ValueError(f"mu and nu must not be negative, got {mu} and {nu}")
    if constraint == "quantile" and nu > 1:
        raise ValueError(f"constraint='quantile' takes nu from 0 to 1, got {nu}")
    return nu


class Output(NamedTuple):
    """The output of a candidate.

    Attributes:
        kind, edge, column: which.
        source, target: its nodes, in the order of a forward pass.
        value: (N, C, H, W).
    """

    kind: int
    edge: int
    column: int
    source: int
    target: int
    value: Tensor


class Mixture(Protocol):
    """An untrained supernet whose candidates are mixed by gates; without operators that lack second derivatives.

    Attributes:
        allowed: (kinds, edges, ops) bool: which candidates there are.
        num_classes: outputs of the classifier.
    """

    allowed: Tensor
    num_classes: int

    def __call__(
        self, x: Tensor, gates: Tensor, columns: Columns | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        """Logits (N, num_classes).

        Args:
            x: images.
            gates: (kinds, edges, ops) factors of the candidates' outputs.
            columns: the candidates that are computed, by kind and edge; None for all.
            nodes: gets the values that edges start from and end in.
        """
        ...

    def outputs(self, nodes: Sequence[Tensor], columns: Columns) -> Iterator[Output]:
        """Outputs of candidates, one at a time.

        Args:
            nodes: as a forward pass gave them.
            columns: the candidates, by kind and edge.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class CellMixture(nn.Module):
    """The supernet of a space of cells; cells of one type share their gates.

    Args:
        space: of the cells.
        seed: of the weights, which are PyTorch's own.
    """

    def __init__(self, space: CellSpace, *, seed: int = 0) -> None:
        super().__init__()
        self.net, self.num_classes = CellSupernet(space, fused=False, seed=seed), space.num_classes
        allowed = torch.zeros(len(space.types), len(space.cell.edges), len(space.ops), dtype=torch.bool)
        for e, columns in enumerate(space.candidates):
            allowed[:, e, list(columns)] = True
        self.allowed = allowed
        self._of_type = [space.type_of(i) for i in range(space.cells)]

    def forward(
        self, x: Tensor, gates: Tensor, columns: Columns | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        of_cells: list[list[Tensor]] | None = None if nodes is None else []
        logits = self.net(x, gates[self._of_type], columns, nodes=of_cells)
        if nodes is not None:
            # a cell's output is its last node or made of its nodes
            nodes += [value for cell in of_cells for value in cell[:-1]]
        return logits

    def outputs(self, nodes: Sequence[Tensor], columns: Columns) -> Iterator[Output]:
        """See `Mixture`."""
        start = 0
        for kind, module in zip(self._of_type, self.net.cells, strict=True):
            cell = module.cell
            states, shared = nodes[start : start + cell.inputs + cell.nodes], {}
            for node in range(cell.inputs, len(states)):
                for e, k, y in module.outputs(node, states, columns[kind], shared):
                    yield Output(kind, e, k, start + cell.edges[e].source, start + node, y)
            start += len(states)


@dataclass(frozen=True)
class Record:
    """What the sampled architectures of a search gave, from which the step for any mu and nu follows.

    Attributes:
        q: (T,) Q of each; not finite where its evaluation failed.
        gradients: (T, kinds, edges, ops) of Q with respect to the logits, float64.
        picks: (T, kinds, edges) the columns that were drawn.
        start: (kinds, edges, ops) alpha_0, -inf where there is no such candidate.
        seconds, cpu_seconds: it took, and those of all threads, which other programs do not lengthen.
    """

    q: Tensor
    gradients: Tensor
    picks: Tensor
    start: Tensor
    seconds: float
    cpu_seconds: float

    @property
    def finite(self) -> Tensor:
        """(T,) whether a step counts."""
        return self.q.isfinite() & self.gradients.flatten(1).isfinite().all(1)

    def first(self, steps: int) -> Record:
        """The record of a shorter search, with the seconds of this one."""
        return replace(self, q=self.q[:steps], gradients=self.gradients[:steps], picks=self.picks[:steps])


@dataclass(frozen=True)
class NasiResult:
    """What a search found.

    Attributes:
        logits: (kinds, edges, ops) alpha* = alpha_0 + Delta*, -inf where there is no such candidate.
        delta: Delta*.
        q, r, nu, norms: (counted steps,) Q, penalised Q, its limit, and the norm of the gradient of R.
        skipped: steps left out, because something was not finite.
        record: of all steps.
    """

    logits: Tensor
    delta: Tensor
    q: Tensor
    r: Tensor
    nu: Tensor
    norms: Tensor
    skipped: int
    record: Record

    @property
    def above(self) -> float:
        """Share of the counted steps above their limit."""
        return float((self.q > self.nu).double().mean())

    def check(self) -> NasiResult:
        """Itself, if it prefers anything.

        Raises:
            ValueError: Delta* is 0.
        """
        if not self.delta.any():
            raise ValueError(
                f"no sampled architecture has a slope: {100 * self.above:.0f} % of {len(self.q)} lie above nu = "
                f"{float(self.nu[-1]):.3g} (Q from {float(self.q.min()):.3g} to {float(self.q.max()):.3g}); "
                "take a larger nu, another mu or more steps"
            )
        return self


def sample(
    mixture: Mixture,
    loader: Loader,
    cfg: NasiConfig = NasiConfig(),
    *,
    logits: Tensor | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Record:
    """Q and its gradient for T sampled architectures; no parameter changes.

    Args:
        mixture: on `device`.
        loader: of a fresh batch for every step; also a sized iterable of them, such as a DataLoader or a list.
        cfg: how many, and how gates are drawn.
        logits: (kinds, edges, ops) alpha_0; None for 0.
        device: where to compute.
        progress: called with the number of steps done.

    Raises:
        ValueError: alpha_0 of another shape, or a loader without batches.
    """
    start, cpu = time.perf_counter(), time.process_time()
    alpha = _start(mixture, logits)
    parameters = [p for p in mixture.parameters() if p.requires_grad]
    q, gradients, picks = [], [], []
    batches = endless(loader, device)
    for t in range(cfg.steps):
        x, y = _disguised(*next(batches), cfg, mixture.num_classes, t)
        x = x.to(parameters[0].dtype)
        noise = gumbel(alpha.shape, torch.Generator().manual_seed(derive_seed(cfg.seed, _GATES, t)))
        step = _soft if cfg.gates == "soft" else _straight_through
        value, gradient, pick = step(mixture, parameters, alpha, noise, x, y, cfg.temperature)
        q.append(value)
        gradients.append(gradient)
        picks.append(pick)
        if progress is not None:
            progress(t + 1)
    return Record(
        torch.stack(q), torch.stack(gradients), torch.stack(picks), alpha, time.perf_counter() - start,
        time.process_time() - cpu,
    )  # fmt: skip


def relaxed_gates(alpha: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Gumbel-softmax over the last dimension.

    Args:
        alpha: (kinds, edges, ops) logits.
        noise: the same shape of standard Gumbel numbers.
        temperature: of the softmax.
    """
    return torch.softmax((alpha + noise) / temperature, -1)


Sampled = tuple[Tensor, Tensor, Tensor]
"""Q, its gradient with respect to the logits, and the columns of the largest gates."""


def _soft(
    mixture: Mixture, parameters: list[Tensor], alpha: Tensor, noise: Tensor, x: Tensor, y: Tensor, temperature: float
) -> Sampled:
    """All candidates run, and the norm of a gradient is differentiated."""
    alpha = alpha.clone().requires_grad_()
    gates = relaxed_gates(alpha, noise, temperature=temperature)
    loss = F.cross_entropy(mixture(x, gates.to(x)), y)
    value = gradient_norm(loss, parameters, differentiable=True)
    (gradient,) = torch.autograd.grad(value, alpha, allow_unused=True)
    gradient = torch.zeros_like(alpha) if gradient is None else gradient
    return value.detach().double().cpu(), gradient, (alpha + noise).detach().argmax(-1)


def _straight_through(
    mixture: Mixture, parameters: list[Tensor], alpha: Tensor, noise: Tensor, x: Tensor, y: Tensor, temperature: float
) -> Sampled:
    """The drawn candidates run; the others' gates get their gradients one at a time, keeping nothing for long.

    The gradient of the loss by the gate z of O is <L_t, O(X_s)> with source X_s and L_t = dL/dX of the target. With g
    the gradient by the weights and D the derivative in their direction g, Q = <g, g> and

        dQ/dz = 2 D <L_t, O(X_s)> = 2 <D L_t, O(X_s)> + 2 <J^T L_t, D X_s>,  J the Jacobian of O at X_s,

    as weights of what did not run are not in g. Two backward passes of the drawn path give D X and D L of all nodes.
    """
    picks = (alpha + noise).argmax(-1)
    hard, columns = one_hot(picks, alpha.shape[-1])
    gates = hard.to(x).requires_grad_()
    nodes: list[Tensor] = []
    logits = mixture(x, gates, columns, nodes=nodes)
    # the gradient of Q by what is added to dL/dX, here by what is added to L, is 2 D X, and by X it is 2 D dL/dX
    zeros = [torch.zeros_like(node, requires_grad=True) for node in nodes]
    loss = F.cross_entropy(logits, y) + sum((z * node).sum() for z, node in zip(zeros, nodes, strict=True))
    found = torch.autograd.grad(loss, [*parameters, *nodes], create_graph=True, allow_unused=True)
    of_nodes = [g.detach() for g in found[len(parameters) :]]
    value = _squared(found[: len(parameters)], loss)
    by_gates, *twice = torch.autograd.grad(value, [gates, *nodes, *zeros], materialize_grads=True)
    d_of_nodes, d_nodes = twice[: len(nodes)], twice[len(nodes) :]
    del logits, loss, found
    by_gates = by_gates.double().cpu()
    others = candidates_of(alpha.masked_fill(hard.bool(), -torch.inf))
    leaves = [node.detach().requires_grad_() for node in nodes]
    which, costs = [], []
    for kind, edge, column, source, target, out in mixture.outputs(leaves, others):
        # what candidates share is needed again
        (pulled,) = torch.autograd.grad(out, leaves[source], of_nodes[target], retain_graph=True)
        which.append((kind, edge, column))
        costs.append((d_of_nodes[target] * out.detach()).sum() + (pulled * d_nodes[source]).sum())
    if which:
        # read at once, because a GPU would wait for each
        found = torch.stack(costs).double().cpu()
        by_gates.index_put_(tuple(torch.tensor(which).T), found, accumulate=True)
    relaxed = relaxed_gates(alpha, noise, temperature=temperature)
    return value.detach().double().cpu(), softmax_gradient(relaxed, by_gates, temperature), picks


def solve(
    record: Record, *, mu: float = 2.0, constraint: Constraint = "quantile", nu: float | None = None, xi: float = 1.0
) -> NasiResult:
    """The closed-form solution of the first-order problem from what was sampled.

    Args:
        record: of the sampled architectures.
        mu, constraint, nu, xi: as in `NasiConfig`.

    Raises:
        FloatingPointError: no step was finite.
        ValueError: see `check_penalty`.
    """
    nu = check_penalty(mu, constraint, nu)
    finite = record.finite
    q, gradients = record.q[finite], record.gradients[finite]
    if not len(q):
        raise FloatingPointError(f"none of {len(record.q)} sampled architectures had a finite Q and gradient")
    limit = limits(q, constraint, nu)
    penal = gradients * slope(q, limit, mu)[:, None, None, None]
    delta = one_step(penal, xi=xi)
    return NasiResult(
        record.start + delta, delta, q, penalised(q, limit, mu), limit, penal.flatten(1).norm(dim=1),
        int((~finite).sum()), record,
    )  # fmt: skip


def limits(q: Tensor, constraint: Constraint, nu: float) -> Tensor:
    """(T,) nu of every step; see `NasiConfig.constraint`. The adaptive one of step t knows the Q before it."""
    if constraint == "fixed":
        return torch.full_like(q, nu)
    if constraint == "quantile":
        return torch.full_like(q, float(torch.quantile(q, nu)))
    before = torch.cat([q.new_tensor([nu]), q[:-1]])
    return before.cumsum(0) / torch.arange(1, len(q) + 1, dtype=q.dtype)


def search(
    mixture: Mixture,
    loader: Loader,
    cfg: NasiConfig = NasiConfig(),
    *,
    logits: Tensor | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> NasiResult:
    """One search: `sample`, then `solve`; arguments as there.

    Raises:
        ValueError: nothing is preferred, because no sampled architecture has a slope; and as `sample`.
        FloatingPointError: no step was finite.
    """
    record = sample(mixture, loader, cfg, logits=logits, device=device, progress=progress)
    return solve(record, mu=cfg.mu, constraint=cfg.constraint, nu=cfg.nu, xi=cfg.xi).check()


def _start(mixture: Mixture, logits: Tensor | None) -> Tensor:
    """alpha_0 as a new float64 tensor on the CPU, -inf where there is no candidate."""
    shape = mixture.allowed.shape
    if logits is not None and logits.shape != shape:
        raise ValueError(f"logits must be {tuple(shape)} (kinds, edges, ops), got {tuple(logits.shape)}")
    start = torch.zeros(shape, dtype=torch.float64) if logits is None else logits.detach().double().clone()
    return start.masked_fill(~mixture.allowed, -torch.inf)


def endless(loader: Loader, device: str | torch.device = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    """Batch after batch, epoch after epoch, of what `as_epochs` takes.

    Raises:
        TypeError: it does not take it.
        ValueError: an epoch has none.
    """
    epochs = as_epochs(loader)
    for epoch in itertools.count():
        count = 0
        for batch in epochs.epoch(epoch, device=device):
            count += 1
            yield batch
        if not count:
            raise ValueError(f"the loader has no batch in epoch {epoch}: give it more images, or a smaller batch")


def _disguised(x: Tensor, y: Tensor, cfg: NasiConfig, classes: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch with the labels and images that the search may see."""
    if cfg.labels == "random":
        y = random_labels(len(y), classes, seed=derive_seed(cfg.seed, _LABELS, step)).to(y.device)
    if cfg.images == "random":
        x = random_images(x.shape, seed=derive_seed(cfg.seed, _IMAGES, step)).to(x)
    return x, y


def random_labels(count: int, classes: int, *, seed: int) -> Tensor:
    """(count,) uniform labels."""
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def random_images(shape: Sequence[int], *, seed: int) -> Tensor:
    """Images of N(0, 1) in channels_last."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def random_arch(space: CellSpace, rng: np.random.Generator) -> Arch:
    """A uniform architecture, in which every output node is reached from an input by operations that are not None."""
    while True:
        arch = tuple(int(rng.choice(columns)) for _ in space.types for columns in space.candidates)
        if all(_connected(space, part) for part in space.parts(arch)):
            return arch


def _connected(space: CellSpace, part: Sequence[int]) -> bool:
    reached = set(range(space.cell.inputs))
    for edge, k in zip(space.cell.edges, part, strict=True):
        # edges are in the order of their targets, so a source is decided before it is asked for
        if edge.source in reached and space.ops[k] != NONE:
            reached.add(edge.target)
    return set(space.cell.outputs) <= reached
