"""The step of the method beside the exact gradient, in a space small enough to enumerate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast import seeds
from nasfast.research.cells.space import Cell, CellSpace, Edge, nas_bench_201_space
from nasfast.research.nasi.search import Gates, Mixture, NasiConfig, sample, solve
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.studies.nasi.config import NasiQuickConfig
from nasfast.research.studies.nasi.measure import BATCH, Images
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch

DIRECTIONS = 20000
"""Random directions that the closed form is compared with."""


def small_space() -> CellSpace:
    """Three edges with three operations each: few enough architectures to enumerate."""
    ops = ("skip_connect", "avg_pool_3x3", "conv_3x3")
    edges = tuple(Edge(i, j, ops) for i, j in ((0, 1), (0, 2), (1, 2)))
    return nas_bench_201_space(cells=1, channels=8, resolution=12).replace(
        name="three_edges", cell=Cell(1, 2, edges, (2,)), reductions=()
    )


def enumerated(mixture: Mixture, space: CellSpace, x: Tensor, y: Tensor) -> tuple[list[Arch], Tensor]:
    """All architectures of a space of one type of cell, and the Q of each on a batch, with the supernet's weights."""
    archs = list(product(*space.candidates))
    parameters = [p for p in mixture.parameters() if p.requires_grad]
    values = []
    for arch in archs:
        gates = F.one_hot(torch.tensor([arch]), len(space.ops)).to(x)
        grads = torch.autograd.grad(F.cross_entropy(mixture(x, gates), y), parameters, allow_unused=True)
        values.append(sum(float(g.square().sum()) for g in grads if g is not None))
    return archs, torch.tensor(values, dtype=torch.float64)


def enumerated_gradient(archs: Sequence[Arch], q: Tensor, shape: Sequence[int]) -> Tensor:
    """(kinds, edges, ops) gradient of E[Q] at alpha = 0: sum_A p(A) Q(A) (1[A_e = k] - 1 / K), candidates alike."""
    hard = F.one_hot(torch.tensor(archs), shape[-1]).double()
    return ((hard - 1 / shape[-1]) * q[:, None, None]).mean(0)[None]


def expectation(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    """E[Q] of an architecture that is drawn with the logits alpha."""
    log_p = torch.log_softmax(alpha[0], -1)
    rows = torch.arange(log_p.shape[0])
    return (log_p[rows, torch.tensor(archs)].sum(1).exp() * q).sum()


def ascend(archs: Sequence[Arch], q: Tensor, shape: Sequence[int]) -> Tensor:
    """The alpha of norm 1 at which E[Q] is largest, by projected gradient ascent."""
    alpha = torch.zeros(tuple(shape), dtype=torch.float64)
    for _ in range(500):
        alpha.requires_grad_()
        (gradient,) = torch.autograd.grad(expectation(archs, q, alpha), alpha)
        alpha = alpha.detach() + 0.1 * gradient / gradient.norm()
        alpha = alpha / alpha.norm().clamp(min=1)
    return alpha


@dataclass(frozen=True)
class StepRow:
    """A direction from alpha_0 = 0: its cosine with the closed form, E[Q] there, the place of its argmax by Q."""

    name: str
    cosine: float
    expected_q: float
    place: int


@dataclass(frozen=True)
class ClosedForm:
    """The closed form beside other directions.

    Attributes:
        q: Q of all architectures.
        best_gain: gain of the best of `DIRECTIONS` random directions, over the first-order gain of the closed form.
        rows: the directions.
    """

    q: Tensor
    best_gain: float
    rows: list[StepRow]


def closed_form(cfg: NasiQuickConfig, train: Images) -> ClosedForm:
    """Compare the step of the method with what the enumeration of 27 architectures gives."""
    space = small_space()
    mixture = CellMixture(space, seed=cfg.seed).double()
    x, y = train[0][:BATCH].double(), train[1][:BATCH]
    archs, q = enumerated(mixture, space, x, y)
    exact = enumerated_gradient(archs, q, mixture.allowed.shape)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_DIRECTIONS))
    directions = torch.from_numpy(rng.standard_normal((DIRECTIONS, exact.numel())))
    best = float((directions @ exact.flatten() / directions.norm(dim=1)).max())
    place = {arch: int((q > q[i]).sum()) + 1 for i, arch in enumerate(archs)}

    def row(name: str, direction: Tensor) -> StepRow:
        chosen = tuple(direction[0].argmax(-1).tolist())
        cosine = float((direction * step).sum())
        return StepRow(name, cosine, float(expectation(archs, q, direction)), place[chosen])

    rows = [replace(row("closed form, exact gradient", step), cosine=1.0)]
    for gates in get_args(Gates):
        search = NasiConfig(steps=cfg.steps, mu=0.0, seed=cfg.seed, gates=gates)
        found = solve(sample(mixture, [(x, y)], search), mu=0.0).delta
        rows.append(row(f"{gates.replace('_', '-')}, T = {cfg.steps}", found / found.norm()))
    rows.append(row("largest E[Q] of norm 1, ascent", ascend(archs, q, exact.shape)))
    return ClosedForm(q, best / float(exact.norm()), rows)
