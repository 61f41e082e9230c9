"""The step of NASI beside other directions (arXiv 2109.00817, section 2.6): is Delta* the best first-order step?

Claimed: of all steps of length xi from alpha_0, the gradient of E[R] divided by its norm gains most. On three edges
with three operations each, all 27 architectures can be enumerated, so E[Q] and its gradient are exact; the estimates of
a search and the best point of norm 1 that gradient ascent finds stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.cells.space import Cell, CellSpace, Edge, nas_bench_201_space
from nasfast.research.nasi.config import Gates
from nasfast.research.nasi.search import Mixture, NasiConfig, sample, solve
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.studies.notebook import Notebook
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch

DIRECTIONS = 20_000
"""Random directions that the closed form is compared with."""
DIRECTIONS_STREAM = 14
"""Number of their random stream, see `nasfast.seeds`."""


def closed_form_table(x: Tensor, y: Tensor, steps: int, seed: int, notes: Notebook) -> None:
    """Enumerate the small space on a batch, and tell how good each direction is; `steps` is T of the searches."""
    space = small_space()
    mixture = CellMixture(space, seed=seed).double()
    archs, q = enumerate_space(mixture, space, x.double(), y)
    start = torch.zeros(mixture.allowed.shape, dtype=torch.float64)
    exact = slope(archs, q, start)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(seed, DIRECTIONS_STREAM))
    random = torch.from_numpy(rng.standard_normal((DIRECTIONS, exact.numel())))
    best = float((random @ exact.flatten() / random.norm(dim=1)).max()) / float(exact.norm())
    directions = {"closed form, exact gradient": step}
    for gates in get_args(Gates):
        search = NasiConfig(steps=steps, mu=0.0, seed=seed, gates=gates)
        delta = solve(sample(mixture, [(x.double(), y)], search), search).delta
        directions[f"{gates.replace('_', '-')}, T = {steps}"] = delta / delta.norm()
    directions["largest E[Q] of norm 1, ascent"] = ascend(archs, q, start)
    rows = []
    for name, direction in directions.items():
        place = archs.index(tuple(direction[0].argmax(-1).tolist()))
        cosine, expected = float((direction * step).sum()), float(expectation(archs, q, direction))
        rows.append((name, cosine, expected, int((q > q[place]).sum()) + 1))
    title = (
        f"one step from alpha_0 = 0, {len(q)} architectures: mean Q {float(q.mean()):.4g}, largest "
        f"{float(q.max()):.4g}; of {DIRECTIONS} random directions the best reaches {best:.3f} of the "
        "closed form's first-order gain"
    )
    columns = {"Delta": "", "cosine": ".3f", "E[Q] at Delta of norm 1": ".4g", "place of its argmax by Q": ""}
    notes.table(title, columns, rows)


def small_space() -> CellSpace:
    """Three edges with three operations each: few enough architectures to enumerate."""
    ops = ("skip_connect", "avg_pool_3x3", "conv_3x3")
    edges = tuple(Edge(i, j, ops) for i, j in ((0, 1), (0, 2), (1, 2)))
    return nas_bench_201_space(cells=1, channels=8, resolution=12).replace(
        name="three_edges", cell=Cell(1, 2, edges, (2,)), reductions=()
    )


def enumerate_space(mixture: Mixture, space: CellSpace, x: Tensor, y: Tensor) -> tuple[list[Arch], Tensor]:
    """All architectures of a space of one type of cell, and the Q of each on a batch, with the supernet's weights."""
    archs = list(product(*space.candidates))
    parameters = [p for p in mixture.parameters() if p.requires_grad]
    values = []
    for arch in archs:
        gates = F.one_hot(torch.tensor([arch]), len(space.ops)).to(x)
        grads = torch.autograd.grad(F.cross_entropy(mixture(x, gates), y), parameters, allow_unused=True)
        values.append(sum(float(g.square().sum()) for g in grads if g is not None))
    return archs, torch.tensor(values, dtype=torch.float64)


def expectation(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    """E[Q] of an architecture that is drawn with the logits alpha."""
    log_p = torch.log_softmax(alpha[0], -1)
    rows = torch.arange(log_p.shape[0])
    return (log_p[rows, torch.tensor(archs)].sum(1).exp() * q).sum()


def slope(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    """(kinds, edges, ops) gradient of E[Q] at alpha."""
    alpha = alpha.clone().requires_grad_()
    return torch.autograd.grad(expectation(archs, q, alpha), alpha)[0]


def ascend(archs: Sequence[Arch], q: Tensor, start: Tensor) -> Tensor:
    """The alpha of norm 1 at which E[Q] is largest, by projected gradient ascent."""
    alpha = start
    for _ in range(500):
        gradient = slope(archs, q, alpha)
        alpha = alpha + 0.1 * gradient / gradient.norm()
        alpha = alpha / alpha.norm().clamp(min=1)
    return alpha
