"""A space small enough to enumerate, and tables over any space."""

from __future__ import annotations

import itertools
import random

import pytest

from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import SKIP, Arch, Block, FixedLayer, SearchSpace, Stage

_CHOICES = tuple(Block("mbconv", kernel=k, expand=e) for k, e in ((3, 2), (3, 4), (5, 2)))


@pytest.fixture(scope="session")
def small_space() -> SearchSpace:
    """Three candidates on each of six layers, 729 architectures; layers 0 and 3 are reductions."""
    return SearchSpace(
        name="small",
        resolution=16,
        num_classes=5,
        stem=(FixedLayer(Block("conv", kernel=3), 4),),
        stages=(Stage(6, 3, 2, _CHOICES), Stage(10, 3, 2, _CHOICES)),
        head=(FixedLayer(Block("conv", kernel=1), 12),),
    )


@pytest.fixture(scope="session")
def all_archs(small_space) -> list[Arch]:
    return list(itertools.product(*(layer.options for layer in small_space.layers)))


@pytest.fixture(scope="session")
def make_table():
    """`make_table(space, seed)`; `levels` draws scores from so few values that most sums are ties."""

    def make(space: SearchSpace, seed: int, *, levels: int | None = None) -> IndicatorTable:
        rng = random.Random(seed)

        def draw() -> float:
            return rng.gauss(1.0, 0.2) if levels is None else rng.randrange(levels) / 10 + 0.1

        block = tuple(
            {choice: draw() for choice in layer.options if choice not in (layer.indicator_choice, SKIP)}
            for layer in space.layers
        )
        # a constant layer score keeps the products of few levels few
        layer = tuple(None if u.indicator_choice is None else (draw() if levels is None else 1.0) for u in space.layers)
        return IndicatorTable(space, block, layer)

    return make
