"""The device that the tests of kernels, engines and measurements run on, and how to move tensors there.

Tests get it from one of the fixtures of conftest.py, which also give them the mark `gpu`:

- `device`: runs on the GPU where there is one, else on the CPU, where Triton's kernels run under its interpreter;
- `gpu`: needs a GPU and is skipped without one.

For all other tests there is no GPU, so every test that uses one has the mark.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from nasfast.ops import _triton

DEVICE = "cuda" if torch.cuda.is_available() and not _triton.interpreted() else "cpu"

Case = TypeVar("Case")


def sampled(cases: Sequence[Case], every: int = 2) -> list[Case]:
    """All cases on a GPU, and every second one, or fewer, under Triton's interpreter, where each takes a second."""
    return list(cases[:: 1 if DEVICE == "cuda" else every])


def on_device(tensor: Tensor) -> Tensor:
    """The tensor on DEVICE with its strides and what lies around it: `Tensor.to` would make a slice contiguous."""
    if DEVICE == "cpu":
        return tensor
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(DEVICE).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def no_gpu() -> Iterator[None]:
    """PyTorch says that there is no GPU, here and in processes that are started; devices called `auto` are the CPU."""
    with patch.object(torch.cuda, "is_available", lambda: False), patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""):
        yield
