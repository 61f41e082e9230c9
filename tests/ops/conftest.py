"""Fixtures of the operator tests: poisoned memory everywhere, and one run per backend."""

import pytest

from nasfast.ops import _native


@pytest.fixture(autouse=True)
def poison(poisoned_memory):
    """Every operator test runs with uninitialised memory full of NaN."""


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    """Each backend that serves CPU tensors; skipped with the loader's reason where it was not built."""
    if request.param == "cpu" and _native.extension is None:
        pytest.skip(_native.why_missing())
    return request.param
