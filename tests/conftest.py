"""Fixtures of the whole suite: fixed seeds, and uninitialised memory that shows."""

import os

import pytest
import torch

# before the kernels are imported: without a GPU they run under Triton's interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from interpreter import repair_bfloat16  # noqa: E402

from nasfast.ops import _native, _triton  # noqa: E402

if _triton.interpreted() and _triton.why_missing() is None:
    repair_bfloat16()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Fill every uninitialised tensor with NaN, those allocated in C++ included, so that unwritten elements show.

    The operators' results come from a pool of their own, which fills them itself.
    """
    pool = _native.extension
    if pool is not None:
        pool.poison_pool(True)
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)
    if pool is not None:
        pool.poison_pool(False)
