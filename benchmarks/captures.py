"""Runs the graph engine in other ways: without CUDA graphs, and with other launches for the same numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from nasfast.engine import graphs
from nasfast.ops.chain.static import StaticChain


class EagerCapture:
    """A capture for `nasfast.engine` that calls the functions again, where the real one replays CUDA graphs."""

    def pool(self) -> None:
        return None

    def capture(self, functions: Sequence[Callable[[], None]], pool: None) -> list[Callable[[], None]]:
        for function in functions:
            function()
        return list(functions)


@contextmanager
def reduced_by_launches() -> Iterator[None]:
    """A launch of its own sums up the gradients of a deferred BatchNorm, whose bits are those of the eager engine."""
    backward = StaticChain.backward

    def backward_without_sums(chain: StaticChain, grad: Tensor) -> None:
        deferred_input, chain.deferred_input = chain.deferred_input, None
        try:
            backward(chain, grad)
        finally:
            chain.deferred_input = deferred_input
        if deferred_input is not None and chain.dx is not None:
            deferred_input.norm.reduce(chain.dx)

    with patch.object(StaticChain, "backward", backward_without_sums):
        yield


@contextmanager
def nothing_deferred() -> Iterator[None]:
    """The last BatchNorm of each chain that is captured takes a launch of its own, and no next chain applies it."""

    def chain(*, deferred_norm: object, **given: Any) -> StaticChain:
        return StaticChain(**given)

    with patch.object(graphs, "StaticChain", chain):
        yield
