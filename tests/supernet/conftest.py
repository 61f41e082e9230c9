"""The spaces of the package, small ones where networks are run; registries of blocks for one test."""

from __future__ import annotations

import pytest
from tiny import tiny_excited_space, tiny_macro_space, tiny_space

from nasfast.spaces import Block, FixedLayer, SearchSpace, Stage
from nasfast.spaces import blocks as space_blocks
from nasfast.supernet import blocks

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


SMALL_SPACES = {
    "mbconv": tiny_space(),
    "shuffle": _shuffle_space(),
    "macro": tiny_macro_space(),
    "excited": tiny_excited_space(),
}


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


@pytest.fixture
def own_kinds(monkeypatch):
    """Registries that forget what a test adds."""
    monkeypatch.setattr(space_blocks, "_BLOCK_COSTS", dict(space_blocks._BLOCK_COSTS))
    monkeypatch.setattr(blocks, "_BLOCK_BUILDERS", dict(blocks._BLOCK_BUILDERS))
