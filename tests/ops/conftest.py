"""Fixtures of the operator tests: poisoned memory everywhere."""

import pytest


@pytest.fixture(autouse=True)
def poison(poisoned_memory):
    """Every operator test runs with uninitialised memory full of NaN."""
