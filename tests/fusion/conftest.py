"""Fixtures of the tests of `fuse`: poisoned memory everywhere."""

import pytest


@pytest.fixture(autouse=True)
def poison(poisoned_memory):
    """Every test runs with uninitialised memory full of NaN."""
