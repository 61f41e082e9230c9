"""The types of arguments that users give to the main functions."""

from __future__ import annotations


def check_type(name: str, value: object, kind: type, *, advice: str) -> None:
    """Refuse an argument of another type.

    Args:
        name: the argument's name.
        value: what was given.
        kind: its type, or a base of it.
        advice: where such an object comes from.

    Raises:
        TypeError: `value` is of another type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}: {advice}")
