"""Fairness of the samplers at every prefix, and exact resumption."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nasfast.spaces import (
    SAMPLERS,
    FairSampler,
    StrictFairSampler,
    UniformSampler,
    digits_mini,
    mean_path,
    mobilenet_v2,
    nas_bench_macro,
    shufflenet_v2,
)

SPACES = {s.name: s for s in (digits_mini(), nas_bench_macro(), mobilenet_v2(variant="bnnas"))}
spaces = st.sampled_from(sorted(SPACES)).map(SPACES.get)
seeds = st.integers(0, 2**32)


def paths(sampler, steps):
    return [path for _ in range(steps) for path in sampler.step()]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(spaces, seeds, st.booleans())
def test_fair_counts_differ_by_at_most_one_at_every_prefix(space, seed, layer_indicators):
    sampler = FairSampler(space, seed=seed, layer_indicators=layer_indicators)
    counts = [dict.fromkeys(values, 0) for values in sampler.candidates]
    for path in paths(sampler, 40):
        space.check(path)
        for count, choice in zip(counts, path, strict=True):
            count[choice] += 1
            assert max(count.values()) - min(count.values()) <= 1


@pytest.mark.parametrize("layer_indicators", [False, True])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=seeds)
def test_strict_fair_takes_every_candidate_once_per_step(seed, layer_indicators):
    """With layer indicators, reduction layers have fewer candidates than others, and only stay fair."""
    sampler = StrictFairSampler(digits_mini(), seed=seed, layer_indicators=layer_indicators)
    assert sampler.paths_per_step == 6 + layer_indicators
    for _ in range(5):
        for values, layer in zip(sampler.candidates, zip(*sampler.step(), strict=True), strict=True):
            if len(values) == sampler.paths_per_step:
                assert sorted(layer) == sorted(values)


def test_uniform_is_uniform_and_independent():
    space = digits_mini()
    drawn = paths(UniformSampler(space, seed=0), 6000)
    for layer in zip(*drawn, strict=True):
        assert stats.chisquare(list(Counter(layer).values())).pvalue > 1e-4
    pairs = Counter((path[0], path[1]) for path in drawn)
    assert stats.chisquare([pairs[a, b] for a in range(6) for b in range(6)]).pvalue > 1e-4


def test_pinned_and_identity_layers():
    candidates = FairSampler(mobilenet_v2(variant="bnnas")).candidates
    assert candidates[1] == (-1,)
    assert candidates[2] == (0, 1, 2, 3, 4, 5, -1)
    # the identity candidate is the layer-indicator path; it is not offered twice
    assert all(values == (0, 1, 2) for values in FairSampler(nas_bench_macro()).candidates)


@pytest.mark.parametrize("kind", sorted(SAMPLERS))
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_resumes_exactly_through_json(kind, steps):
    space = mobilenet_v2()
    sampler = SAMPLERS[kind](space, seed=3)
    paths(sampler, steps)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = paths(sampler, 8)
    other = SAMPLERS[kind](space, seed=99)
    other.load_state_dict(state)
    assert paths(other, 8) == expected
    assert paths(SAMPLERS[kind](space, seed=99), 8) != expected


def test_state_of_another_sampler_is_refused():
    space = digits_mini()
    with pytest.raises(ValueError, match="UniformSampler.*FairSampler"):
        FairSampler(space).load_state_dict(UniformSampler(space).state_dict())
    with pytest.raises(ValueError, match="8 decks, the space has 6 layers"):
        FairSampler(space).load_state_dict(FairSampler(nas_bench_macro()).state_dict())


def test_the_mean_path_cycles_through_candidates():
    """Kernels and expansions each, where they are pairs; pinned layers stay."""
    path = mean_path(mobilenet_v2())
    assert path == (0, 3, 4, 1, 2, 5) * 3 + (0, 3)
    assert mobilenet_v2().describe(path)[:4] == ["k3 e3", "k5 e6", "k7 e3", "k3 e6"]
    assert mean_path(nas_bench_macro()) == (0, 1, 2, 0, 1, 2, 0, 1)
    assert mean_path(shufflenet_v2()) == (0, 1, 2, 3) * 5
    pinned = mobilenet_v2(variant="bnnas")
    assert [i for i, choice in enumerate(pinned.check(mean_path(pinned))) if choice == -1] == [1, 5, 6, 9]
