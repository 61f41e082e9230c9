"""Tensors as kernels take them: their type under autocast, and where they begin."""

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; PyTorch has none for meta tensors, and raises if it is asked."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def storage_dtype(x: Tensor) -> torch.dtype:
    """The type in which a convolution of x computes: that of autocast where it is on, which leaves float64 as it is."""
    return torch.get_autocast_dtype(x.device.type) if x.dtype != torch.float64 and autocasts(x) else x.dtype


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it begins between two multiples of 16 bytes, as a slice of a larger one may.

    The kernels read 16 bytes at a time.
    """
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
