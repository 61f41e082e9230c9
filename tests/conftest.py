"""Fixtures of the whole suite: fixed seeds, and uninitialised memory that shows."""

import pytest
import torch

from nasfast.ops import _native


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
