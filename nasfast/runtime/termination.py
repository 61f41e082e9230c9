"""SIGTERM, which preemptible machines send before they stop; a run obeys it where nothing is lost. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Terminated(SystemExit):
    """SIGTERM came, and the run has saved what it must.

    It is a SystemExit, so that `except Exception` does not catch it, and a program that does not handle it ends with
    status 143, like one that SIGTERM killed.

    Attributes:
        saved: what was saved, or an empty text.
        reason: why the run stops.
    """

    code: int

    def __init__(self, saved: str = "") -> None:
        super().__init__(128 + signal.SIGTERM)
        self.saved, self.reason = saved, "stopped by SIGTERM"


class StopRequest:
    """Records in `requested` whether SIGTERM came; it is never reset."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this block SIGTERM raises at once.

        Raises:
            Terminated: SIGTERM comes, or came before. Where Python drops the exception (in a hook at a fork, in
                `__del__`), the end of the block raises.
        """

        def note_and_raise(*_: Any) -> None:
            self.requested = True
            raise Terminated

        with _handled_by(note_and_raise):
            if self.requested:
                raise Terminated
            yield
            if self.requested:
                raise Terminated


@contextlib.contextmanager
def _handled_by(handler: Callable[..., None]) -> Iterator[None]:
    """Let a function handle SIGTERM for the length of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers only in the main thread
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None means that the handler was not set from Python
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def defer_sigterm() -> Iterator[StopRequest]:
    """Within this block, SIGTERM only sets `requested` of the StopRequest; only the main thread can do this.

    If the block ends without obeying it, the signal is raised again after the block. If the block ends with an error, a
    Terminated from that signal has the error's text in its reason.
    """
    request = StopRequest()

    def note(*_: Any) -> None:
        request.requested = True

    try:
        with _handled_by(note):
            yield request
    except Exception as error:
        # the error may come from another rank that obeyed the signal first
        if request.requested:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Terminated as stopped:
                stopped.reason += f" ({error})"
                raise
        raise
    if request.requested:
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Within this block, SIGTERM raises Terminated, so that `finally` blocks run."""
    with StopRequest().interruptible():
        yield


@contextlib.contextmanager
def stopped_at(deadline: float | None) -> Iterator[None]:
    """Send SIGTERM to this process at the deadline (`time.monotonic`), unless the block ends before; None is never."""
    if deadline is None:
        yield
        return
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
