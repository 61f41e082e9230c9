"""Runs the graph engine in other ways: without CUDA graphs, and with other launches for the same numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from nasfast.ops.cuda.static import StaticChain


class EagerCapture:
    """A capture for `nasfast.engine` that calls the functions again, where the real one replays CUDA graphs."""

    def pool(self) -> None:
        return None

    def capture(self, functions: Sequence[Callable[[], None]], pool: None) -> list[Callable[[], None]]:
        for function in functions:
            function()
        return list(functions)


@contextmanager
def begun_by_launches() -> Iterator[None]:
    """No chain begins the backward of the chain before: a launch does, whose bits are those of the eager engine."""
    backward = StaticChain.backward

    def alone(chain: StaticChain, grad: Tensor) -> None:
        made_from, chain.made_from = chain.made_from, None
        try:
            backward(chain, grad)
        finally:
            chain.made_from = made_from
        if made_from is not None and chain.dx is not None:
            made_from.norm.begin_backward(chain.dx)

    with patch.object(StaticChain, "backward", alone):
        yield
