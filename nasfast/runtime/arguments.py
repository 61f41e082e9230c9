"""The types of arguments that users give to the main functions."""

from __future__ import annotations


def check_type(name: str, value: object, kind: type, *, advice: str) -> None:
    """Raise TypeError for an argument of another type than `kind`; `advice` says where such an object comes from."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}: {advice}")
