"""Both ways of computing a cell, the operators of nasfast.ops and plain PyTorch; and one space of every kind."""

import pytest

from nasfast.research.cells.space import (
    CellSpace,
    darts_space,
    minimal_cell,
    modified_cell,
    nas_bench_201_space,
    simplified_cell,
)

_S1 = CellSpace("s1", minimal_cell(), cells=1, channels=4, resolution=8, num_classes=3)
_DARTS = darts_space(cells=3, channels=4, num_classes=3, resolution=9)
_NAS_BENCH = nas_bench_201_space(cells=3, channels=4, num_classes=3, resolution=8)
_SPACES = {
    "s1": _S1,
    "two cells": _S1.replace(cells=2),
    "modified": _S1.replace(cell=modified_cell(), cells=2),
    "head": _S1.replace(cell=simplified_cell(), stem_multiplier=1, head=True),
    "reductions": _DARTS,
    "adjacent reductions": _S1.replace(cells=4, reductions=(0, 1, 3), resolution=17),
    "201": _NAS_BENCH,
    "201, convolutions": _NAS_BENCH.replace(reduce_by="conv", resolution=15),
    "conv_relu_norm": _S1.replace(order="conv_relu_norm"),
    "conv_norm_relu": _S1.replace(order="conv_norm_relu", classifier_bias=True),
    "layer norm": _S1.replace(norm="layer"),
    "instance norm, affine": _S1.replace(norm="instance", affine=True),
    "no pool norm, grey": _S1.replace(pool_norm=False, affine=True, in_channels=1),
}


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request) -> bool:
    return request.param


@pytest.fixture(params=_SPACES)
def space(request) -> CellSpace:
    return _SPACES[request.param]
