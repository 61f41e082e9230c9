"""The graph engine without graphs: its static buffers, its order and its operators, on any device."""

from collections.abc import Callable, Sequence


class EagerCapture:
    """A `nasfast.engine` capture that calls the functions again instead of replaying what they did."""

    def pool(self) -> None:
        return None

    def capture(self, functions: Sequence[Callable[[], None]], pool: None) -> list[Callable[[], None]]:
        return list(functions)
