"""Runs the graph engine without CUDA graphs, on any device, with the same buffers, order and operators."""

from collections.abc import Callable, Sequence


class EagerCapture:
    """A capture for `nasfast.engine` that calls the functions again, where the real one replays CUDA graphs."""

    def pool(self) -> None:
        return None

    def capture(self, functions: Sequence[Callable[[], None]], pool: None) -> list[Callable[[], None]]:
        for function in functions:
            function()
        return list(functions)
