"""Small spaces of the scores' tests."""

from __future__ import annotations

import pytest

from nasfast.spaces import Block, FixedLayer, SearchSpace, Stage, nas_bench_macro


@pytest.fixture
def macro_space() -> SearchSpace:
    """Two reductions and two normal layers with the choices of NAS-Bench-Macro, the identity among them."""
    stages = tuple(Stage(c, 2, 2, nas_bench_macro().stages[0].choices) for c in (8, 12))
    stem = (FixedLayer(Block("conv", 3), 6),)
    return nas_bench_macro(num_classes=4, resolution=12).replace(name="small_macro", stem=stem, stages=stages, head=())
