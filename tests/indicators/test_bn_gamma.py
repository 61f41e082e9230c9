"""The table read off a supernet: exact values from gammas set by hand, and the combined score of the two methods."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_space

from nasfast.indicators.bn_gamma import score
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.spaces import SKIP, Block, FixedLayer, SearchSpace, Stage
from nasfast.supernet import Supernet

CHOICES = (Block("identity"), Block("mbconv", 3, 2))
SPACES = {
    "mbconv": tiny_space(),
    "identity": SearchSpace("identity", 8, 3, (FixedLayer(Block("conv"), 6),), (Stage(6, 2, 2, CHOICES),), ()),
    "shuffle": SearchSpace(
        "shuffle",
        8,
        3,
        (FixedLayer(Block("conv"), 6),),
        (Stage(8, 2, 2, (Block("shuffle", 3), Block("shuffle_xception", 3))),),
        (),
        activation="relu",
    ),
}


def set_gamma(bn, *values: float) -> None:
    with torch.no_grad():
        bn.weight.copy_(torch.tensor(values * (bn.num_features // len(values))))


def test_mean_absolute_gamma_by_hand():
    """Signs are dropped, channels averaged; on normal layers the layer score is a factor of the combined score."""
    net = Supernet(tiny_space())
    for i, layer in enumerate(net.layers):
        for j, candidate in enumerate(layer.candidates):
            set_gamma(candidate.project.bn, (i + 1) * (j + 1), -(i + 1) * (j + 3))
            set_gamma(candidate.depthwise.bn, 100.0)
        if layer.layer_indicator is not None:
            set_gamma(layer.layer_indicator, 0.5, -0.25 * (i + 1))
    table = score(net, meta={"method": "dinas"})
    block = tuple({j: (i + 1) * (j + 2.0) for j in range(3)} for i in range(4))
    assert table.block == block
    assert table.layer == (None, 0.5, None, 0.75)
    assert table.meta == {"method": "dinas"}
    factors = (1, 0.5, 1, 0.75)
    assert table.scores == tuple({j: f * v for j, v in row.items()} for f, row in zip(factors, block, strict=True))
    assert table.score((0, 2, 1, 0)) == 2 + 0.5 * 8 + 9 + 0.75 * 8
    assert IndicatorTable.from_json(table.to_json()) == table


def test_the_identity_candidate_is_scored_by_the_layer_indicator():
    net = Supernet(SPACES["identity"])
    set_gamma(net.layers[0].candidates[0].block_indicator, 3.0)
    set_gamma(net.layers[0].candidates[1].project.bn, 2.0)
    set_gamma(net.layers[1].candidates[1].project.bn, 4.0)
    set_gamma(net.layers[1].layer_indicator, -0.5)
    table = score(net)
    assert table.block == ({0: 3.0, 1: 2.0}, {1: 4.0})
    assert table.layer == (None, 0.5)
    assert table.scores == ({0: 3.0, 1: 2.0}, {0: 0.5, 1: 2.0})


def test_shuffle_units_are_scored_by_the_last_batch_norm_of_the_main_branch():
    net = Supernet(SPACES["shuffle"])
    for layer in net.layers:
        for j, candidate in enumerate(layer.candidates):
            for module in candidate.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    set_gamma(module, 50.0)
            set_gamma(candidate.main[2 if j == 0 else 5].bn, 2.0 + j)
    assert score(net).block == ({0: 2.0, 1: 3.0},) * 2


def test_pinned_layers_have_no_score():
    space = tiny_space()
    pinned = space.replace(stages=(space.stages[0].replace(pinned=(1,)), space.stages[1]))
    table = score(Supernet(pinned))
    assert table.block[1] == {}
    assert table.layer[1] is None
    assert table.scores[1] == {SKIP: 0.0}


def test_a_diverged_supernet_is_refused():
    net = Supernet(tiny_space())
    set_gamma(net.layers[2].candidates[1].project.bn, math.nan)
    with pytest.raises(TableError, match=r"layer 2, choice 1 \(k5 e1\): score is nan"):
        score(net)
