"""The spaces of the package, small ones where networks are run."""

from __future__ import annotations

import pytest
from tiny import tiny_space

from nasfast.spaces import Block, FixedLayer, SearchSpace, Stage, nas_bench_macro

_SHUFFLE = (*(Block("shuffle", kernel=k) for k in (3, 5)), Block("shuffle_xception", kernel=3))


def _shuffle_space() -> SearchSpace:
    return SearchSpace(
        name="small_shuffle",
        resolution=16,
        num_classes=5,
        stem=(FixedLayer(Block("conv", 3), 6, stride=2),),
        stages=(Stage(12, 2, 2, _SHUFFLE), Stage(16, 2, 2, _SHUFFLE)),
        head=(FixedLayer(Block("conv", 1), 20),),
        activation="relu",
        classifier_bias=False,
    )


def _macro_space() -> SearchSpace:
    """The choices of NAS-Bench-Macro, identity among them."""
    stages = tuple(Stage(c, 2, 2, nas_bench_macro().stages[0].choices) for c in (8, 12))
    stem = (FixedLayer(Block("conv", 3), 6),)
    return nas_bench_macro(num_classes=4, resolution=12).replace(name="small_macro", stem=stem, stages=stages, head=())


SMALL_SPACES = {"mbconv": tiny_space(), "shuffle": _shuffle_space(), "macro": _macro_space()}


@pytest.fixture(params=sorted(SMALL_SPACES))
def small_space(request) -> SearchSpace:
    """One space per family of blocks, small enough to run."""
    return SMALL_SPACES[request.param]


@pytest.fixture
def shuffle_space() -> SearchSpace:
    return SMALL_SPACES["shuffle"]


@pytest.fixture
def macro_space() -> SearchSpace:
    return SMALL_SPACES["macro"]
