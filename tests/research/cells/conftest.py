"""Both ways of computing a cell: the operators of nasfast.ops, and plain PyTorch."""

import pytest


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request) -> bool:
    return request.param
