"""What a process logs once, because each stage of a run, or each call of an operator, would say it again. No torch."""

from __future__ import annotations

import logging

_logged: set[str] = set()


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log a message unless this process has logged the same one."""
    if message not in _logged:
        _logged.add(message)
        logger.log(level, "%s", message)


def forget_logged() -> None:
    """Let every message be logged once more, as in a new process; for tests."""
    _logged.clear()
