"""Both ways of computing a cell: the operators of nasfast.ops, and plain PyTorch."""

import pytest

from nasfast import ops

_OPERATORS = ("mixed_bn", "depthwise_conv2d", "max_pool_3x3", "avg_pool_3x3")


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request) -> bool:
    if request.param and not all(hasattr(ops, name) for name in _OPERATORS):
        pytest.skip("the operators of cells do not exist")
    return request.param
