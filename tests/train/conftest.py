"""Every test of training runs on one thread."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def threads(one_thread):
    """Runs are compared byte for byte."""
