"""The registry of scores: each has a name, what it needs and what it gives.

Those of the core and of `nasfast.extensions` are registered on use.

There are two kinds of scores. An additive score gives a table of (layer, candidate), which the exact search takes. A
score of paths gives one number per architecture; `nasfast.indicators.distill` fits a table to it by least squares, or
the search by evolution calls it for each architecture. Larger is better for all scores.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nasfast import extensions
from nasfast.config import nearest
from nasfast.indicators.structure import BASELINES
from nasfast.settings import ScoreConfig

if TYPE_CHECKING:
    from nasfast.spaces import ArchSpace
    from nasfast.supernet import Supernet


class ScoreError(ValueError):
    """A space or model cannot have a score, or a score is not finite; the text says why and what to use instead."""


@dataclass(frozen=True)
class Score:
    """A registered score.

    Attributes:
        name: its name in settings and errors.
        function: `evidence -> IndicatorTable` for an additive score, `(evidence, arch) -> float` for a score of paths.
        additive: whether it is additive.
        trained: whether it needs the trained supernet; otherwise it takes the weights before training.
        images: whether it needs images.
        held_out: whether these must be images that the supernet was not trained on.
        networks: whether it needs no supernet, but single untrained networks of any space (`NetworkEvidence`).
        refusal: supernet -> why it cannot have this score, or None if it can.
    """

    name: str
    function: Callable[..., Any]
    additive: bool
    trained: bool
    images: bool
    held_out: bool
    networks: bool
    refusal: Callable[[Supernet], str | None]

    @property
    def untrained(self) -> bool:
        """Whether its table needs only the space: neither training nor images."""
        return self.additive and self.networks and not self.images


SCORES: dict[str, Score] = {}
"""The scores that are registered so far; `all_scores` registers the others."""

_MODULES = {
    **extensions.CORE_SCORES,
    **dict.fromkeys(BASELINES, "nasfast.indicators.scores"),
    **extensions.SCORES,
}
"""Name of a score -> the module that registers it."""


def register(
    name: str,
    *,
    additive: bool,
    trained: bool = True,
    images: bool = True,
    held_out: bool = False,
    networks: bool = False,
    refusal: Callable[[Supernet], str | None] = lambda net: None,
) -> Callable[[Callable], Callable]:
    """Decorator that makes a function a score; the arguments are the attributes of `Score`."""

    def decorate(function: Callable) -> Callable:
        if name in SCORES or _MODULES.get(name, function.__module__) != function.__module__:
            raise KeyError(f"a score {name!r} is registered already: choose another name")
        SCORES[name] = Score(name, function, additive, trained, images, held_out, networks, refusal)
        return function

    return decorate


def get_score(name: str) -> Score:
    """The score of a name; ScoreError if there is none."""
    check_score_name(name)
    if name in _MODULES:
        importlib.import_module(_MODULES[name])
    return SCORES[name]


def check_score_name(name: str) -> None:
    """ScoreError if there is no score of this name; none is imported."""
    if name not in (names := list_scores()):
        raise ScoreError(f"unknown score {name!r}; {nearest(name, names)}")


def configured_score(cfg: ScoreConfig) -> Score:
    """The score of resolved settings."""
    if cfg.name is None:
        raise ValueError("the name of the score is null: call resolved(method), which takes that of the method")
    return get_score(cfg.name)


def gives_table(cfg: ScoreConfig) -> bool:
    """Whether resolved settings make a table, which the exact search needs."""
    # the last one imports torch
    return cfg.table is not None or bool(cfg.distill) or configured_score(cfg).additive


def list_scores() -> list[str]:
    """The names that `get_score` takes; none is imported."""
    return sorted({*SCORES, *_MODULES})


def all_scores() -> dict[str, Score]:
    """All scores by name."""
    for module in dict.fromkeys(_MODULES.values()):
        importlib.import_module(module)
    return SCORES


def check_score(score: Score, net: Supernet) -> None:
    """Raise ScoreError for a score that a supernet cannot have."""
    why = score.refusal(net)
    if why is not None:
        names = ", ".join(sorted(available(net)))
        raise ScoreError(f"{net.space.name} has no score {score.name!r}: {why}. It can have {names}")


def check_network_score(score: Score, space: ArchSpace) -> None:
    """Raise ScoreError for a score that needs a supernet where there are only untrained networks."""
    if not score.networks:
        names = ", ".join(sorted(name for name, other in all_scores().items() if other.networks))
        raise ScoreError(
            f"the score {score.name!r} needs a supernet, and {space.name} has only single untrained networks here. "
            f"These can have {names}"
        )


def available(net: Supernet) -> list[str]:
    """The names of the scores that a supernet can have."""
    return [name for name, score in all_scores().items() if score.refusal(net) is None]
