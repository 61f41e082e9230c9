"""Straight-through gates by their definition: all candidates run, and autograd differentiates all of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.cells.gates import gumbel
from nasfast.research.nasi.score import gradient_norm
from nasfast.research.nasi.search import GATES_STREAM, Mixture
from nasfast.seeds import derive_seed


def straight_through(mixture: Mixture, alpha: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
    """One-hot gates with the gradient of the softmax."""
    alpha = alpha.masked_fill(~mixture.allowed, -torch.inf)
    relaxed = torch.softmax((alpha + noise) / temperature, -1)
    return F.one_hot(relaxed.argmax(-1), alpha.shape[-1]).to(relaxed) - relaxed.detach() + relaxed


def gradient_of_q(
    mixture: Mixture, x: Tensor, y: Tensor, *, step: int = 0, seed: int = 0, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Q at one step of a search whose logits are 0, and its gradient with respect to the logits."""
    noise = gumbel(mixture.allowed.shape, torch.Generator().manual_seed(derive_seed(seed, GATES_STREAM, step)))
    alpha = torch.zeros(mixture.allowed.shape, dtype=torch.float64, requires_grad=True)
    gates = straight_through(mixture, alpha, noise, temperature=temperature)
    q = gradient_norm(F.cross_entropy(mixture(x, gates.to(x)), y), list(mixture.parameters()), differentiable=True)
    (gradient,) = torch.autograd.grad(q, alpha)
    return q.detach(), gradient
