"""How far the work of this process is: a stage tells it, and whoever runs the stage may listen. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], None]
"""Takes the name of a stage, how much of it is done, and its size."""

_listeners: list[Listener] = []


def tell(stage: str, done: int, total: int) -> None:
    """Say that `done` of `total` parts of a stage are done."""
    for listener in _listeners:
        listener(stage, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within this block, pass everything that stages of this process tell to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
