"""SIGTERM, the notice that preemptible machines give: acted on where nothing is lost by it. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
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
            Terminated: it comes, or had come before. Where Python swallows that (in a hook at a fork, in
                `__del__`), the signal is sent again, and at the latest the end of the block raises; SIGINT is sent
                again where a KeyboardInterrupt is swallowed.
        """

        def note_and_raise(*_: Any) -> None:
            self.requested = True
            raise Terminated

        with _handled_by(note_and_raise), _sent_again():
            if self.requested:
                raise Terminated
            yield
            if self.requested:
                raise Terminated


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
def _sent_again() -> Iterator[None]:
    """Within, a signal whose exception Python can only report, not raise, comes again a little later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, timers = sys.unraisablehook, []

    def hook(lost: Any) -> None:
        number = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(lost.exc_type)
        if number is None:
            before(lost)
            return
        # not from here, where it would be lost again
        timer = threading.Timer(0.01, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        if number == signal.SIGTERM:
            timers.append(timer)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:  # the end of the block raises instead
            timer.cancel()
            timer.join()


@contextlib.contextmanager
def noticed() -> Iterator[StopRequest]:
    """Within, SIGTERM only sets `requested` of the yielded StopRequest; in another thread than the main one, nothing.

    One that the block did not end by comes again behind it, also behind an error: a Terminated then tells that too.
    """
    request = StopRequest()
    try:
        with _handled_by(request._note):
            yield request
    except Exception as error:
        # another rank, which obeyed first, may be what the error is about
        if request.requested:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Terminated as stopped:
                stopped.message += f" ({error})"
                raise
        raise
    if request.requested:
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Within, SIGTERM raises Terminated, so that `finally` blocks run."""
    with StopRequest().at_once():
        yield
