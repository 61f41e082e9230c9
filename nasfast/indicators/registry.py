"""The scores of architectures by name: what each needs, and what it gives. `nasfast.indicators.scores` has them all.

A score is of one of two kinds. An additive one gives a table of (layer, candidate), which the exact search takes. A
score of paths gives one number per architecture; `nasfast.indicators.distill` makes a table of it by least squares,
or the search by evolution asks for it architecture by architecture. Larger is better for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nasfast.config import nearest
from nasfast.indicators.evidence import Evidence, ScoreError
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import Arch

if TYPE_CHECKING:
    from nasfast.supernet import Supernet


TableScore = Callable[[Evidence], IndicatorTable]
PathScore = Callable[[Evidence, Arch], float]


@dataclass(frozen=True)
class Score:
    """A registered score.

    Attributes:
        name: by which settings and errors know it.
        function: `evidence -> IndicatorTable` of an additive score, `(evidence, arch) -> float` of one of paths.
        additive: which of the two.
        trained: whether it is of the trained supernet; otherwise it is of the weights before training.
        images: whether it looks at images.
        held_out: whether they must be images that the supernet was not trained on.
        refusal: supernet -> why it cannot have this score, or None.
    """

    name: str
    function: TableScore | PathScore
    additive: bool
    trained: bool
    images: bool
    held_out: bool
    refusal: Callable[[Supernet], str | None]

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


SCORES: dict[str, Score] = {}


def register(
    name: str,
    *,
    additive: bool,
    trained: bool = True,
    images: bool = True,
    held_out: bool = False,
    refusal: Callable[[Supernet], str | None] = lambda net: None,
) -> Callable[[Callable], Callable]:
    """Decorator that makes a function a score; the arguments are the attributes of `Score`.

    Raises:
        KeyError: the name is taken.
    """

    def decorate(function: Callable) -> Callable:
        if name in SCORES:
            raise KeyError(f"a score {name!r} is registered already: choose another name")
        SCORES[name] = Score(name, function, additive, trained, images, held_out, refusal)
        return function

    return decorate


def get_score(name: str) -> Score:
    """The score of a name.

    Raises:
        ScoreError: there is none; the nearest is named.
    """
    if name not in SCORES:
        raise ScoreError(f"unknown score {name!r}; {nearest(name, SCORES)}")
    return SCORES[name]


def check_score(score: Score, net: Supernet) -> None:
    """Refuse a score that a supernet cannot have.

    Raises:
        ScoreError: it cannot; the text lists those it can have.
    """
    why = score.refusal(net)
    if why is not None:
        raise ScoreError(f"{net.space.name} has no score {score.name!r}: {why}. It can have {_names(available(net))}")


def available(net: Supernet) -> list[str]:
    """Names of the scores that a supernet can have."""
    return [name for name, score in SCORES.items() if score.refusal(net) is None]


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
