"""NASI in layer-wise spaces: the mixture of a layer's candidates, and the table that the search reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import batches, tiny_excited_space, tiny_space
from torch.nn import functional as F

from nasfast.indicators import IndicatorTable
from nasfast.research.nasi.search import NasiConfig, search
from nasfast.research.nasi.spaces import LayerMixture, chosen_arch, nasi_table
from nasfast.search import search_table
from nasfast.spaces import SKIP, Block, FixedLayer, SearchSpace, Stage
from nasfast.train.batches import as_epochs

IDENTITY = (Block("identity"), Block("mbconv", 3, 2))
SPACES = {
    "mbconv": tiny_space(),
    "excited": tiny_excited_space(),
    "identity": SearchSpace("identity", 8, 4, (FixedLayer(Block("conv"), 6),), (Stage(6, 2, 2, IDENTITY),), ()),
    "pinned": tiny_space(stages=(Stage(8, 3, 2, tiny_space().stages[0].choices, (1,)),)),
    "shuffle": SearchSpace(
        "shuffle",
        8,
        4,
        (FixedLayer(Block("conv"), 6),),
        (Stage(8, 2, 2, (Block("shuffle", 3), Block("shuffle_xception", 3))),),
        (),
        activation="relu",
    ),
}


def loader(space: SearchSpace):
    return as_epochs(batches(3, size=4, num_classes=space.num_classes, resolution=space.resolution))


@pytest.mark.parametrize(
    ("name", "gates"), [("mbconv", "straight_through"), ("identity", "soft"), ("pinned", "straight_through")]
)
def test_a_search_gives_a_table_that_search_takes(name, gates):
    space = SPACES[name]
    mixture = LayerMixture(space)
    before = [p.clone() for p in mixture.parameters()]
    found = search(mixture, loader(space), NasiConfig(steps=3, mu=0.0, gates=gates))
    assert found.skipped == 0 and float(found.delta.norm()) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, mixture.parameters(), strict=True))
    table = nasi_table(space, found, meta={"seed": 0})
    assert table.meta == {"method": "nasi", "seed": 0}
    assert IndicatorTable.from_json(table.to_json()) == table
    best = search_table(table, space, top_k=1)[0].arch
    assert best == chosen_arch(space, found)
    # the sum of scores is the sum of logits up to a constant
    rng = np.random.default_rng(0)
    archs = [best, *(tuple(int(rng.choice(layer.options)) for layer in space.layers) for _ in range(8))]
    assert len(set(archs)) > 1
    indices = [[layer.options.index(k) for layer, k in zip(space.layers, arch, strict=True)] for arch in archs]
    logits = [sum(float(found.logits[0, i, k]) for i, k in enumerate(row)) for row in indices]
    scores = [table.score(arch) for arch in archs]
    assert [s - scores[0] for s in scores] == pytest.approx([x - logits[0] for x in logits], abs=1e-12)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_hard_gates_are_the_path_of_the_supernet(space):
    mixture = LayerMixture(space)
    x, _ = batches(1, size=4, num_classes=4, resolution=space.resolution)[0]
    path = tuple(layer.options[-1] for layer in space.layers)
    picks = torch.tensor([[layer.options.index(k) for layer, k in zip(space.layers, path, strict=True)]])
    gates = F.one_hot(picks, mixture.allowed.shape[-1]).float()
    expected = mixture.net(x, path)
    torch.testing.assert_close(mixture(x, gates), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixture(x, gates, gates > 0), expected)
    assert mixture.allowed.sum() == sum(len(layer.options) for layer in space.layers)


def test_an_identity_scores_nothing_and_others_their_difference_to_it():
    space = SPACES["identity"]
    found = search(LayerMixture(space), loader(space), NasiConfig(steps=2, mu=0.0))
    table, row = nasi_table(space, found), found.logits[0, 1].tolist()
    assert set(table.block[1]) == {1} and table.block[1][1] == pytest.approx(row[1] - row[0])
    assert table.scores[1][0] == 0
    # the identity of a reduction layer is a convolution with a score of its own
    assert table.block[0] == pytest.approx(dict(enumerate(found.logits[0, 0].tolist())))


def test_a_result_of_another_space_is_refused():
    found = search(LayerMixture(SPACES["identity"]), loader(SPACES["identity"]), NasiConfig(steps=1))
    with pytest.raises(ValueError, match=r"logits must be \(1, 4, ...\) for 'tiny', got \(1, 2, 2\)"):
        nasi_table(tiny_space(), found)
    assert SKIP not in chosen_arch(SPACES["identity"], found)
