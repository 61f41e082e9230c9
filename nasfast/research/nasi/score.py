"""NASI's score of an untrained network, and the exact quantities that it estimates.

NASI (arXiv 2109.00817) ranks architectures by the trace norm of their neural tangent kernel, sum_x ||J_x||_F^2 with J_x
the Jacobian of the logits of image x with respect to the weights. Q, the squared length of one batch's gradient of the
loss, estimates it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.config import nearest
from nasfast.seeds import derive_seed
from nasfast.spaces import ArchSpace
from nasfast.supernet import untrained


def squared_norms(values: Tensor, parameters: Sequence[Tensor], *, chunk: int = 64) -> Tensor:
    """(R,) squared lengths of the rows of d values / d parameters.

    Args:
        values: (R,) results that autograd can differentiate; their graph is kept.
        parameters: tensors to differentiate by; some may have no influence.
        chunk: how many rows are computed and held at once.
    """
    norms = []
    for start in range(0, len(values), chunk):
        rows = torch.zeros(min(chunk, len(values) - start), len(values), dtype=values.dtype, device=values.device)
        rows[:, start : start + len(rows)].fill_diagonal_(1)
        gradients = torch.autograd.grad(
            values, parameters, rows, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        parts = [
            p.new_zeros(len(rows), p.numel()) if g is None else g.flatten(1)
            for g, p in zip(gradients, parameters, strict=True)
        ]
        norms.append(torch.cat(parts, 1).square().sum(1))
    return torch.cat(norms)


def gradient_norm(loss: Tensor, parameters: Sequence[Tensor], *, differentiable: bool = False) -> Tensor:
    """Squared length of the gradient of a scalar. It is Q if the scalar is the mean loss of a batch.

    Args:
        loss: the scalar.
        parameters: tensors to differentiate by; some may have no influence.
        differentiable: keep the graph, so that the result can be differentiated again.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=differentiable, allow_unused=True)
    return squared_length(gradients, loss)


def squared_length(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Sum of the squares of all elements; None counts as 0, which has the type and device of `like`."""
    squares = [g.square().sum() for g in gradients if g is not None]
    return torch.stack(squares).sum() if squares else like.new_zeros(())


KINDS = ("q_batch", "q_sum", "trace_label", "trace_full")


def score(network: nn.Module, x: Tensor, y: Tensor, *, kind: str = "q_batch", chunk: int = 64) -> float:
    """The score of an untrained network on a batch.

    `q_batch`, which a search uses, is the squared norm of the mean loss's gradient. `q_sum` is the sum over images of
    the squared norms of their losses' gradients. `trace_label` is the root of the mean squared norm of the labelled
    logit's gradient. `trace_full` is the exact trace of the neural tangent kernel; it takes images times classes
    backward passes. Where a norm uses the statistics of the batch, an image's logits depend on the other images, and so
    does its row of the Jacobian. All scores see the same Jacobian.

    Args:
        network: images -> logits (N, classes); its parameters that require a gradient count.
        x: images (N, C, H, W).
        y: labels (N,) int64.
        kind: one of `KINDS`.
        chunk: how many backward passes are done at once.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown score {kind!r}; {nearest(kind, KINDS)}")
    parameters = [p for p in network.parameters() if p.requires_grad]
    logits = network(x)
    if kind == "q_batch":
        return float(gradient_norm(F.cross_entropy(logits, y), parameters))
    if kind == "q_sum":
        values = F.cross_entropy(logits, y, reduction="none")
    else:
        values = logits.flatten() if kind == "trace_full" else logits.gather(1, y[:, None])[:, 0]
    norms = squared_norms(values, parameters, chunk=chunk)
    return float(norms.mean().sqrt() if kind == "trace_label" else norms.sum())


def score_architecture(
    space: ArchSpace,
    arch: Sequence[int],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    seed: int = 0,
) -> float:
    """The mean of Q over batches, each with an initialisation of its own.

    Args:
        space, arch: as for `untrained`.
        batches: images and labels; the network moves to their device and data type.
        seed: seed of the initialisations.
    """
    scores = []
    for i, (x, y) in enumerate(batches):
        network = untrained(space, arch, seed=derive_seed(seed, i)).to(x.device, x.dtype)
        scores.append(score(network, x, y))
    return float(np.mean(scores))
