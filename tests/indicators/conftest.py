"""Small spaces of the scores' tests."""

from __future__ import annotations

import pytest
from tiny import tiny_macro_space

from nasfast.spaces import SearchSpace


@pytest.fixture
def macro_space() -> SearchSpace:
    return tiny_macro_space()
