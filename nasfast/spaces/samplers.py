"""Samplers of paths for the training of a supernet. Each draws from one `random.Random`, and its whole state is JSON.

A path has one value per layer, like an Arch. With layer indicators, a normal layer may also take its
`indicator_choice`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from nasfast.spaces.arch import Arch
from nasfast.spaces.arch_space import LayerSpace
from nasfast.spaces.space import SearchSpace


class Sampler(ABC):
    """Draws the paths of each optimiser step.

    Args:
        space: the space of the paths.
        seed: seed of the sampler's own generator; two samplers with the same seed draw the same paths.
        layer_indicators: whether the layer-indicator path of a normal layer is a candidate of its own.

    Attributes:
        candidates: per layer, every value a path can take.
    """

    def __init__(self, space: LayerSpace, *, seed: int = 0, layer_indicators: bool = False) -> None:
        self.space = space
        self.layer_indicators = layer_indicators
        self._rng = random.Random(seed)
        self.candidates = [layer.legal if layer_indicators else layer.options for layer in space.layers]

    @property
    def paths_per_step(self) -> int:
        """Number of paths whose gradients one optimiser step accumulates."""
        return 1

    @abstractmethod
    def step(self) -> list[Arch]:
        """The paths of the next optimiser step, `paths_per_step` of them."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in types that JSON has; `load_state_dict` continues the exact sequence."""
        version, internal, gauss = self._rng.getstate()
        return {"kind": type(self).__name__, "rng": [version, list(internal), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: the state is of another kind of sampler.
        """
        if state["kind"] != type(self).__name__:
            raise ValueError(f"sampler state is of a {state['kind']}, this is a {type(self).__name__}")
        version, internal, gauss = state["rng"]
        self._rng.setstate((version, tuple(internal), gauss))


class UniformSampler(Sampler):
    """Every layer independent and uniform (Single Path One-Shot, section 3.3)."""

    def step(self) -> list[Arch]:
        return [tuple(self._rng.choice(values) for values in self.candidates)]


class FairSampler(Sampler):
    """Algorithm 1 of DI-NAS: fair without replacement.

    Each layer has a shuffled deck of its candidates, on normal layers with the layer indicator among them. A path takes
    one card from the deck of each layer, and an empty deck is filled and shuffled again. Within a layer the update
    counts of any two candidates never differ by more than 1. Decks of normal and reduction layers have different
    lengths, so they are intentionally shuffled at different steps.
    """

    def __init__(self, space: LayerSpace, *, seed: int = 0, layer_indicators: bool = True) -> None:
        super().__init__(space, seed=seed, layer_indicators=layer_indicators)
        self._decks: list[list[int]] = [[] for _ in self.candidates]

    def step(self) -> list[Arch]:
        paths = []
        for _ in range(self.paths_per_step):
            for deck, values in zip(self._decks, self.candidates, strict=True):
                if not deck:
                    deck.extend(values)
                    self._rng.shuffle(deck)
            paths.append(tuple(deck.pop() for deck in self._decks))
        return paths

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "decks": [list(deck) for deck in self._decks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if len(state["decks"]) != len(self._decks):
            raise ValueError(f"sampler state has {len(state['decks'])} decks, the space has {len(self._decks)} layers")
        self._decks = [list(deck) for deck in state["decks"]]


class StrictFairSampler(FairSampler):
    """Strict fairness (FairNAS, algorithm 1): M paths a step, gradients accumulated, every candidate exactly once.

    M is the largest number of candidates of a layer. A layer with fewer refills its deck within the step, so there the
    counts stay within 1 of each other rather than equal after each step.
    """

    def __init__(self, space: LayerSpace, *, seed: int = 0, layer_indicators: bool = False) -> None:
        super().__init__(space, seed=seed, layer_indicators=layer_indicators)

    @property
    def paths_per_step(self) -> int:
        return max(len(values) for values in self.candidates)


def mean_path(space: SearchSpace) -> Arch:
    """The fixed path that represents sampled paths when a step is measured.

    The layers take turns through the candidates, so that each is taken about equally often. Where the candidates of a
    layer are all pairs of kernels and expansions, both take turns on their own: k3 e3, k5 e6, k7 e3, k3 e6, ...
    """
    path = []
    for i, layer in enumerate(space.layers):
        kernels = sorted({block.kernel for block in layer.choices})
        expansions = sorted({block.expand for block in layer.choices})
        if len({block.kind for block in layer.choices}) == 1 and len(layer.choices) == len(kernels) * len(expansions):
            turn = (kernels[i % len(kernels)], expansions[i % len(expansions)])
            path.append([(block.kernel, block.expand) for block in layer.choices].index(turn))
        else:
            path.append(layer.options[i % len(layer.options)])
    return tuple(path)


SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": UniformSampler,
    "fair": FairSampler,
    "strict_fair": StrictFairSampler,
}
