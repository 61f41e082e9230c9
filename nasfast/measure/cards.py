"""GPUs by their published figures, and what a device can do per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nasfast.config import ConfigError, nearest


class Machine(NamedTuple):
    """The most that a device can do per second.

    Attributes:
        bytes: bytes copied, reads plus writes.
        matmul: FLOP of matrix products.
        vector: FLOP of plain vector arithmetic.
    """

    bytes: float
    matmul: float
    vector: float


@dataclass(frozen=True)
class Card:
    """Published figures of a GPU.

    Attributes:
        name: name of the GPU.
        bytes: bytes per second.
        bf16: FLOP per second of dense bf16.
        fp32: FLOP per second of fp32 without tf32.
    """

    name: str
    bytes: float
    bf16: float
    fp32: float

    def machine(self, dtype: str) -> Machine:
        """The ceilings of the GPU for `fp32` or `bf16`."""
        return Machine(self.bytes, self.bf16 if dtype == "bf16" else self.fp32, self.fp32)


CARDS = {
    "rtx3080": Card("NVIDIA GeForce RTX 3080", 760e9, 59.5e12, 29.8e12),
    "rtx3090": Card("NVIDIA GeForce RTX 3090", 936e9, 71e12, 35.6e12),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", 1008e9, 165.2e12, 82.6e12),
    "a100": Card("NVIDIA A100 80GB", 2039e9, 312e12, 19.5e12),
    "h100": Card("NVIDIA H100 SXM", 3350e9, 989e12, 67e12),
    "h200": Card("NVIDIA H200", 4800e9, 989e12, 67e12),
}
"""Figures of the manufacturer's data sheets (dense, tensor cores with fp32 sums for bf16, plain cores for fp32)."""


def get_card(name: str) -> Card:
    """A card by its key in CARDS.

    Raises:
        ConfigError: unknown card.
    """
    if name not in CARDS:
        raise ConfigError(f"unknown card {name!r}; {nearest(name, CARDS)}")
    return CARDS[name]
