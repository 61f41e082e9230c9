"""SIGTERM: noted, raised, passed on, and the handlers put back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from nasfast.cli.stages import time_limit
from nasfast.runtime.termination import Terminated, defer_sigterm, raise_on_sigterm


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def handler():
    """A handler that counts, to be found again after each test."""
    seen = []
    before = signal.signal(signal.SIGTERM, mine := lambda *_: seen.append(1))
    yield seen
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, before)


def test_it_is_noted_and_comes_again_afterwards(handler):
    with defer_sigterm() as stop:
        assert not stop.requested
        send()
        send()
        assert stop.requested
        assert handler == []
    assert handler == [1]


def test_it_comes_again_behind_an_error(handler):
    with pytest.raises(KeyError), defer_sigterm():
        send()
        raise KeyError
    assert handler == [1]
    with pytest.raises(Terminated) as error, raise_on_sigterm(), defer_sigterm():
        send()
        raise RuntimeError("the other rank is gone")
    assert error.value.reason == "stopped by SIGTERM (the other rank is gone)"
    assert handler == [1]


def test_it_raises_within_and_finally_blocks_run(handler):
    left = []
    with pytest.raises(Terminated) as error, raise_on_sigterm():
        try:
            send()
        finally:
            left.append(1)
    assert left == [1]
    assert error.value.code == 143
    assert handler == []


def test_interruptible_within_defer_sigterm(handler):
    with pytest.raises(Terminated), defer_sigterm() as stop:
        with stop.interruptible():
            send()
    assert stop.requested
    with pytest.raises(Terminated), defer_sigterm() as stop:
        send()
        with stop.interruptible():
            pytest.fail("it had come before")
    assert handler == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_drops_is_raised_at_the_end(handler):
    class Bad:
        def __del__(self) -> None:
            send()

    with pytest.raises(Terminated), raise_on_sigterm():
        Bad()


def test_other_threads_have_no_handlers():
    found = []

    def work() -> None:
        with defer_sigterm() as stop, raise_on_sigterm():
            found.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_the_end_of_the_time_does_not_hide_an_error(monkeypatch):
    with pytest.raises(Terminated) as stopped, raise_on_sigterm(), time_limit(1.0), defer_sigterm():
        later = time.monotonic() + 3600
        monkeypatch.setattr(time, "monotonic", lambda: later)
        send()
        raise OSError("the disk is full")
    assert stopped.value.reason == "--max_hours 1 is over (the disk is full)"
