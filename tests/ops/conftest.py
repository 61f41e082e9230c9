"""The emulated GPU."""

from collections.abc import Callable, Iterator

import pytest
from kernel_cases.cuda import set_emulation

from nasfast.ops.chain import plan as planning


@pytest.fixture
def emulation(monkeypatch) -> Iterator[Callable[..., None]]:
    """Sets the emulated GPU; it is the default one again after the test, and no plan is kept."""
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    planning._decide_once.cache_clear()
    yield set_emulation
    planning._decide_once.cache_clear()
    set_emulation()
