"""SIGTERM, the notice that preemptible machines give: acted on where nothing is lost by it. No torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Terminated(SystemExit):
    """SIGTERM came, and what was to be saved is saved.

    A SystemExit, so that `except Exception` does not swallow it and a program that knows nothing of it ends with
    status 143, as one killed by SIGTERM does.

    Attributes:
        message: what was saved and how to go on.
    """

    def __init__(self, message: str = "terminated") -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message


class StopRequest:
    """Whether SIGTERM came.

    Attributes:
        requested: it did; never taken back.
    """

    def __init__(self) -> None:
        self.requested = False

    def _note(self, *_: Any) -> None:
        self.requested = True

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, SIGTERM is not kept for later: it raises.

        Raises:
            Terminated: it comes, or had come before.
        """

        def note_and_raise(*_: Any) -> None:
            self.requested = True
            raise Terminated

        with _handled_by(note_and_raise):
            if self.requested:
                raise Terminated
            yield


@contextlib.contextmanager
def _handled_by(handler: Callable[..., None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has handlers
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None: it was not set from Python
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def noticed() -> Iterator[StopRequest]:
    """Within, SIGTERM only sets `requested` of the yielded StopRequest; in another thread than the main one, nothing.

    One that the block did not end by comes again behind it.
    """
    request = StopRequest()
    with _handled_by(request._note):
        yield request
    if request.requested:
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Within, SIGTERM raises Terminated, so that `finally` blocks run."""
    with StopRequest().at_once():
        yield
