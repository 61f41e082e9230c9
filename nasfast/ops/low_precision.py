"""Copies of frozen weights in 16 bits, which operators would otherwise round again at every call."""

from __future__ import annotations

import torch
from torch import Tensor


class LowPrecisionWeights:
    """Copies of weights in one type, each made when an operator first asks for it and then kept where it is.

    Args:
        dtype: type of the copies.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # weight and copy by address and shape, because an operator gets another Python object for the same parameter
        self._copies: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}
        self._versions: list[int] = []  # of the weights, when their copies were made

    def get(self, weight: Tensor) -> Tensor:
        """The copy of a weight, with its shape and strides."""
        key = weight.data_ptr(), weight.shape
        if key not in self._copies:
            self._copies[key] = weight, weight.detach().to(self.dtype)
            self._versions.append(weight._version)
        return self._copies[key][1]

    def refresh(self) -> None:
        """Round weights again that have changed, as when a state dict was loaded; it waits for nothing."""
        versions = [weight._version for weight, _ in self._copies.values()]
        if versions == self._versions:
            return
        for (weight, copy), version, last in zip(self._copies.values(), versions, self._versions, strict=True):
            if version != last:
                copy.copy_(weight.detach())
        self._versions = versions
