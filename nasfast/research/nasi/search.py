"""NASI: an architecture chosen at initialisation (arXiv 2109.00817).

A search is one Monte Carlo pass over random architectures of an untrained supernet. It averages the gradients of a
penalised Q (`nasi.score`) with respect to architecture logits; no weight is trained. docs/nasi.md lists what
differs from the paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.research.cells.gates import gumbel, softmax_gradient
from nasfast.research.cells.search import endless
from nasfast.research.nasi.config import Constraint, NasiConfig
from nasfast.research.nasi.score import gradient_norm, squared_length
from nasfast.seeds import derive_seed
from nasfast.train.batches import to_learn_from

# random streams (`nasfast.seeds`), each followed by the step
GATES_STREAM, _LABELS, _IMAGES = 1, 2, 3
Output = tuple[tuple[int, int, int], int, int, Tensor]
"""What `Mixture.outputs` gives."""


class Mixture(nn.Module):
    """An untrained supernet whose candidates are mixed by gates; `spaces` has one for each kind of space.

    Every operator in it must have second derivatives.

    Args:
        allowed: (kinds, edges, ops) bool: whether there is such a candidate.
        num_classes: outputs of the classifier.
    """

    def __init__(self, net: nn.Module, allowed: Tensor, num_classes: int) -> None:
        super().__init__()
        self.net, self.allowed, self.num_classes = net, allowed, num_classes

    @property
    def weights(self) -> list[Tensor]:
        """The parameters that count: those that require a gradient."""
        return [p for p in self.parameters() if p.requires_grad]

    def forward(
        self, x: Tensor, gates: Tensor, runs: Tensor | None = None, *, nodes: list[Tensor] | None = None
    ) -> Tensor:
        """Logits (N, num_classes).

        Args:
            x: images.
            gates: (kinds, edges, ops) factors of the candidates' outputs.
            runs: (kinds, edges, ops) bool: the candidates that are computed; None for all.
            nodes: gets the values of all nodes.
        """
        raise NotImplementedError

    def outputs(self, nodes: Sequence[Tensor], which: Tensor) -> Iterator[Output]:
        """Compute the outputs of candidates, one at a time.

        Args:
            nodes: what a forward pass has put into its `nodes`.
            which: (kinds, edges, ops) bool: the candidates.

        Yields:
            (kind, edge, column) of a candidate, the indices in `nodes` of its source and its target, and its output.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Record:
    """Q and its gradients at the sampled architectures; the step for any mu and nu follows from them.

    Attributes:
        q: (T,) Q of each architecture; not finite where its evaluation failed.
        gradients: (T, kinds, edges, ops) gradients of Q with respect to the logits, float64.
        picks: (T, kinds, edges) the columns that were drawn.
        start: (kinds, edges, ops) alpha_0, -inf where there is no such candidate.
        seconds: how long it took by the clock.
        cpu_seconds: processor time of all threads, which other programs do not lengthen.
    """

    q: Tensor
    gradients: Tensor
    picks: Tensor
    start: Tensor
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class NasiResult:
    """The result of a search.

    Attributes:
        logits: (kinds, edges, ops) alpha* = alpha_0 + Delta*, -inf where there is no such candidate.
        delta: Delta*.
        q, r, nu: (counted steps,) Q, penalised Q and the limit of Q.
        norms: (counted steps,) norm of the gradient of R.
        skipped: how many steps were left out, because Q or its gradient was not finite.
        record: all steps.
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


def sample(
    mixture: Mixture,
    loader: object,
    cfg: NasiConfig = NasiConfig(),
    *,
    logits: Tensor | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Record:
    """Q and its gradient at T sampled architectures; no parameter changes.

    Args:
        mixture: a supernet on `device`.
        loader: gives a fresh batch for every step; a sized iterable such as a DataLoader or a list will do.
        cfg: how many architectures are sampled, and how gates are drawn.
        logits: (kinds, edges, ops) alpha_0; None means 0.
        device: where to compute.
        progress: called with the number of steps done.
    """
    start, cpu = time.perf_counter(), time.process_time()
    shape = mixture.allowed.shape
    if logits is not None and logits.shape != shape:
        raise ValueError(f"logits must be {tuple(shape)} (kinds, edges, ops), got {tuple(logits.shape)}")
    alpha = torch.zeros(shape, dtype=torch.float64) if logits is None else logits.detach().double()
    alpha = alpha.masked_fill(~mixture.allowed, -torch.inf)
    q, gradients, picks = [], [], []
    batches = endless(to_learn_from(loader), device)
    step = _soft if cfg.gates == "soft" else _straight_through
    for t in range(cfg.steps):
        x, y = next(batches)
        if cfg.labels == "random":
            y = random_labels(len(y), mixture.num_classes, seed=derive_seed(cfg.seed, _LABELS, t)).to(y.device)
        if cfg.images == "random":
            x = random_images(x.shape, seed=derive_seed(cfg.seed, _IMAGES, t)).to(x)
        noisy = alpha + gumbel(alpha.shape, torch.Generator().manual_seed(derive_seed(cfg.seed, GATES_STREAM, t)))
        value, gradient = step(mixture, noisy, x.to(mixture.weights[0].dtype), y, cfg.temperature)
        q.append(value.detach().double().cpu())
        gradients.append(gradient)
        picks.append(noisy.argmax(-1))
        if progress is not None:
            progress(t + 1)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return Record(torch.stack(q), torch.stack(gradients), torch.stack(picks), alpha, seconds, cpu_seconds)


def _soft(mixture: Mixture, noisy: Tensor, x: Tensor, y: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Q and its gradient by the logits, from all candidates; `noisy` are the logits with Gumbel noise."""
    noisy = noisy.clone().requires_grad_()
    gates = torch.softmax(noisy / temperature, -1)
    value = gradient_norm(F.cross_entropy(mixture(x, gates.to(x)), y), mixture.weights, differentiable=True)
    (gradient,) = torch.autograd.grad(value, noisy, materialize_grads=True)
    return value, gradient


def _straight_through(
    mixture: Mixture, noisy: Tensor, x: Tensor, y: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `_soft`, in less memory: runs the drawn candidates, then computes the other gates' gradients one at a time.

    The gradient of the loss by the gate z of a candidate O is <L_t, O(X_s)>, with X_s the node it starts from and
    L_t = dL/dX of the node it ends in. With g the gradient by the weights and D the derivative in the direction g,
    Q = <g, g> and

        dQ/dz = 2 D <L_t, O(X_s)> = 2 <D L_t, O(X_s)> + 2 <J^T L_t, D X_s>,  J the Jacobian of O at X_s,

    because the weights of candidates that did not run are not in g. Two backward passes of the drawn path give D X and
    D L at all nodes.
    """
    weights, hard = mixture.weights, F.one_hot(noisy.argmax(-1), noisy.shape[-1])
    gates = hard.to(x).requires_grad_()
    nodes: list[Tensor] = []
    logits = mixture(x, gates, hard > 0, nodes=nodes)
    # the gradient of Q by a term added to dL/dX (here: by z in the loss) is 2 D X, and its gradient by X is 2 D dL/dX
    zeros = [torch.zeros_like(node, requires_grad=True) for node in nodes]
    loss = F.cross_entropy(logits, y) + sum((z * node).sum() for z, node in zip(zeros, nodes, strict=True))
    first = torch.autograd.grad(loss, [*weights, *nodes], create_graph=True, allow_unused=True)
    node_gradients = [g.detach() for g in first[len(weights) :]]
    value = squared_length(first[: len(weights)], loss)
    gate_gradients, *second = torch.autograd.grad(value, [gates, *nodes, *zeros], materialize_grads=True)
    d_gradients, d_nodes = second[: len(nodes)], second[len(nodes) :]
    # the graph is not needed any more, and its memory is
    del logits, loss, first
    gate_gradients = gate_gradients.double().cpu()
    idle = (noisy > -torch.inf) & (hard == 0)
    leaves = [node.detach().requires_grad_() for node in nodes]
    which, costs = [], []
    for candidate, source, target, out in mixture.outputs(leaves, idle):
        # the graph is kept, because candidates share parts of it
        (pulled,) = torch.autograd.grad(out, leaves[source], node_gradients[target], retain_graph=True)
        which.append(candidate)
        costs.append((d_gradients[target] * out.detach()).sum() + (pulled * d_nodes[source]).sum())
    if which:
        # all costs are read at once, because a GPU would have to wait for each
        gate_gradients.index_put_(tuple(torch.tensor(which).T), torch.stack(costs).double().cpu(), accumulate=True)
    return value, softmax_gradient(torch.softmax(noisy / temperature, -1), gate_gradients, temperature)


def solve(record: Record, cfg: NasiConfig = NasiConfig()) -> NasiResult:
    """The closed-form solution of the first-order problem, from the sampled architectures.

    Delta* = (xi / T) sum_t G_t / max(|G_1|, ..., |G_t|), G_t the gradient of R; it is never longer than xi.

    Args:
        record: the sampled architectures.
        cfg: its `mu`, `constraint`, `nu` and `xi`, which may differ from those of the sampling.

    Raises:
        FloatingPointError: no step was finite.
    """
    finite = record.q.isfinite() & record.gradients.flatten(1).isfinite().all(1)
    q, gradients = record.q[finite], record.gradients[finite]
    if not len(q):
        raise FloatingPointError(f"none of {len(record.q)} sampled architectures had a finite Q and gradient")
    limit = limits(q, cfg.constraint, cfg.limit)
    # the gradients of R = Q - mu max(0, Q - nu), where nu is a constant
    slopes = gradients * (1 - cfg.mu * (q > limit).to(q.dtype))[:, None, None, None]
    norms = slopes.flatten(1).norm(dim=1)
    largest = norms.cummax(0).values
    # until the first gradient that is not 0 there is nothing to divide
    scale = torch.where(largest > 0, 1 / largest.clamp(min=torch.finfo(largest.dtype).tiny), 0.0)
    delta = cfg.xi * torch.tensordot(scale, slopes, 1) / len(slopes)
    return NasiResult(
        logits=record.start + delta,
        delta=delta,
        q=q,
        r=q - cfg.mu * F.relu(q - limit),
        nu=limit,
        norms=norms,
        skipped=int((~finite).sum()),
        record=record,
    )


def limits(q: Tensor, constraint: Constraint, nu: float) -> Tensor:
    """(T,) nu of every step (`NasiConfig.constraint`). The adaptive limit depends on the Q of earlier steps."""
    if constraint == "fixed":
        return torch.full_like(q, nu)
    if constraint == "quantile":
        return torch.full_like(q, float(torch.quantile(q, nu)))
    earlier = torch.cat([q.new_tensor([nu]), q[:-1]])
    return earlier.cumsum(0) / torch.arange(1, len(q) + 1, dtype=q.dtype)


def search(
    mixture: Mixture,
    loader: object,
    cfg: NasiConfig = NasiConfig(),
    *,
    logits: Tensor | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> NasiResult:
    """One search: `sample`, then `solve`; the arguments are those of `sample`.

    Raises:
        ValueError: no candidate is preferred, because no sampled architecture has a slope; and as `sample`.
        FloatingPointError: no step was finite.
    """
    result = solve(sample(mixture, loader, cfg, logits=logits, device=device, progress=progress), cfg)
    if not result.delta.any():
        raise ValueError(
            f"no sampled architecture has a slope: {100 * result.above:.0f} % of {len(result.q)} lie above nu = "
            f"{float(result.nu[-1]):.3g} (Q from {float(result.q.min()):.3g} to {float(result.q.max()):.3g}); "
            "take a larger nu, another mu or more steps"
        )
    return result


def random_labels(count: int, classes: int, *, seed: int) -> Tensor:
    """(count,) uniform labels, int64."""
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def random_images(shape: Sequence[int], *, seed: int) -> Tensor:
    """Images of N(0, 1), float32, in channels_last."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)
