"""Seeds: how one seed of a run gives every random stream a seed of its own. No torch.

`derive_seed(seed, STREAM, ...)` is the seed of a stream, whose number is named in the module that draws it. Streams of
different programs may share a number, because no run mixes them. Every published figure depends on these numbers: never
change one, and give a new stream a new number.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits from a few integers; unlike `hash`, the same in every Python.

    Args:
        parts: plain integers: a seed, then a stream, then whatever tells its uses apart, such as a step.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
