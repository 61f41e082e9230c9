"""Launchers of the Triton kernels of cross_entropy and clipped_sgd."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from nasfast._triton import training
from nasfast.ops.arrivals import zeros
from nasfast.ops.reference import SgdUpdate
from nasfast.ops.triton.bn import on_device_of

# elements of the piece of a tensor that one program updates
PIECE = 2048
_WARPS = 4


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """outcome and gradient; see nasfast/ops/training.py."""
    n, classes = logits.shape
    logits, labels = logits.contiguous(), labels.contiguous()
    gradient = torch.empty_like(logits)
    rows, outcome = (torch.empty(size, dtype=torch.float32, device=logits.device) for size in (2 * n, 2))
    with on_device_of(logits):
        training.cross_entropy_kernel[(n,)](
            logits,
            labels,
            gradient,
            rows,
            zeros(1, logits.device),
            outcome,
            label_smoothing,
            n,
            C=classes,
            CLASSES=1 << (classes - 1).bit_length(),
            num_warps=_WARPS,
        )
    return outcome, gradient


def clipped_sgd(updates: Sequence[SgdUpdate], clip: float) -> Tensor:
    """Update parameters and momenta; returns the norm. See nasfast/ops/training.py."""
    device = updates[0].parameters[0].device
    tables = [_pieces(update) for update in updates]
    counts = [len(table) // 4 for table in tables]
    given = torch.tensor(list(itertools.chain(*tables)), dtype=torch.int64, pin_memory=device.type == "cuda")
    # from pinned memory, so that the host does not wait for the device
    table = torch.empty(len(given), dtype=torch.int64, device=device).copy_(given, non_blocking=True)
    count = sum(counts)
    rows, norm = (torch.empty(size, dtype=torch.float32, device=device) for size in (count, 1))
    with on_device_of(table):
        training.gradient_norm_kernel[(count,)](
            table, rows, zeros(1, device), norm, count, SIZE=PIECE, num_warps=_WARPS
        )
        for update, pieces, part in zip(updates, counts, table.split([4 * c for c in counts]), strict=True):
            training.sgd_kernel[(pieces,)](
                part,
                norm,
                clip,
                update.lr,
                update.momentum,
                update.decay,
                NESTEROV=update.nesterov,
                SIZE=PIECE,
                num_warps=_WARPS,
            )
    return norm[0]


def _pieces(update: SgdUpdate) -> list[int]:
    """The table of an update; see sgd_kernel."""
    table: list[int] = []
    for p, gradient, momentum in zip(update.parameters, update.gradients, update.momenta, strict=True):
        at, size = (p.data_ptr(), gradient.data_ptr(), momentum.data_ptr()), p.numel()
        if size <= PIECE:  # nearly all parameters, and this runs at every step
            table += (*at, size)
            continue
        for begin in range(0, size, PIECE):
            table += (*(address + p.element_size() * begin for address in at), min(PIECE, size - begin))
    return table
