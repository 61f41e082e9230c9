"""Launchers of the Triton kernels of cross_entropy and clipped_sgd."""

from __future__ import annotations

import itertools
import struct
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
    # packed, because torch.tensor takes longer for a list, and this runs at every step
    packed = struct.pack(f"{4 * sum(counts)}q", *itertools.chain.from_iterable(tables))
    given = torch.frombuffer(bytearray(packed), dtype=torch.int64)
    # from pinned memory, so that the host does not wait for the device
    given = given.pin_memory() if device.type == "cuda" else given
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
    addresses = [list(map(Tensor.data_ptr, part)) for part in (update.parameters, update.gradients, update.momenta)]
    sizes = list(map(Tensor.numel, update.parameters))
    if max(sizes) <= PIECE:  # nearly always, and this runs at every step
        table = [0] * (4 * len(sizes))
        for i, column in enumerate((*addresses, sizes)):
            table[i::4] = column
        return table
    table = []
    for *firsts, size in zip(*addresses, sizes, strict=True):
        for begin in range(0, size, PIECE):
            table += (*(first + torch.float32.itemsize * begin for first in firsts), min(PIECE, size - begin))
    return table
